"""Soak: random requests on a tiny Llama with real kernels, grammars, drafts and swapping; nothing drifts or differs.

Every answer must be the one that the same request gets alone, on an engine that is never short of anything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specserve.cluster.build import build_engine
from specserve.core.config import EngineConfig
from specserve.core.messages import (
    AbortCommand,
    ChoiceFinishedEvent,
    DeltaEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
)
from specserve.core.sampling import SamplingParams
from specserve.engine.engine import Engine
from tests.fakes.tiny import tiny_llama_folder

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog looks at the fox.",
    "Once upon a time there was a small house in the middle of the forest.",
    '{"name": "Alice", "age": 30, "tags": ["one", "two", "three"]}',
    "for number in range(100): print(number)",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDES: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    {"json_schema": SCHEMA},
    {"regex": "[a-f]{2,9}[0-9]"},
    {"choice": ["north", "south", "east", "west"]},
)
MODEL_LEN = 160


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return tiny_llama_folder(root / "target", seed=1), tiny_llama_folder(root / "draft", seed=2, layers=1)


def build(folders: tuple[Path, Path], **options: Any) -> Engine:
    values = {"model": str(folders[0]), "dtype": "float32", "max_model_len": MODEL_LEN, "speculation": None, **options}
    return build_engine(EngineConfig.from_dict(values))


def params_of(rng: random.Random) -> SamplingParams:
    """Anything at all that a request may ask for, n, best_of, beams and grammars often."""
    values: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": rng.randrange(2**64)}
    values["guided"] = rng.choice(GUIDES)
    values["logprobs"] = rng.choice([None, None, 0, 3])
    kind = rng.choice(["one", "one", "n", "best_of", "beams"])
    if kind == "beams":
        values["beam_width"] = rng.randint(2, 5)
        values["n"] = rng.randint(1, values["beam_width"])
        values["length_penalty"] = rng.choice([0.0, 1.0, 2.0])
        values["early_stopping"] = rng.choice([True, False, "never"])
        values["speculation"] = rng.choice([None, True])
    else:
        values["temperature"] = rng.choice([0.0, 0.7, 1.3])
        values["top_p"] = rng.choice([1.0, 0.9])
        if kind != "one":
            values["n"] = rng.randint(1, 4)
        if kind == "best_of":
            values["best_of"] = values["n"] + rng.randint(0, 3)
    if rng.random() < 0.2:
        values["repetition_penalty"] = 1.2
    if values["guided"] is None and rng.random() < 0.3:
        values["stop"] = rng.choice(["e", "th", " a"])
    return SamplingParams(**values)


def command_of(engine: Engine, rng: random.Random, name: str) -> GenerateCommand:
    tokenizer: Any = engine.vocabulary
    ids = tokenizer.encode(rng.choice(TEXTS) + " " + rng.choice(TEXTS))[: rng.randint(1, 90)]
    return GenerateCommand(name, tuple(ids), params_of(rng), namespace=rng.choice("ab"), priority=rng.choice([0, 0, 1]))


def told(events: Sequence[Event]) -> Any:
    """What an owner sees, whatever the pace: for each choice ids, text and log probabilities, and the ends."""
    choices: dict[int, list[Any]] = {}
    ends: list[Any] = []
    for event in events:
        if isinstance(event, DeltaEvent):
            choice = choices.setdefault(event.index, [(), "", ()])
            choice[0] += event.token_ids
            choice[1] += event.text
            choice[2] += event.logprobs
        elif isinstance(event, ChoiceFinishedEvent):
            ends.append((event.index, event.finish_reason, event.seed, event.score))
        elif isinstance(event, FinishedEvent):
            ends.append((event.finish_reason, event.usage.completion_tokens, event.seed))
        elif isinstance(event, FailedEvent):
            ends.append((event.code, event.message))
    return choices, sorted(ends, key=repr)


def alone(engine: Engine, command: GenerateCommand) -> Any:
    engine.handle(command)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return told(events)


def soak(folders: tuple[Path, Path], count: int, kinds: int, seed: int, preemption: str) -> dict[str, float]:
    """`count` requests of `kinds` different ones; returns the counters of the disturbed engine."""
    rng = random.Random(seed)
    calm = build(folders, kv_memory="16MiB", swap_memory=0)
    commands = [command_of(calm, rng, f"k{i}") for i in range(kinds)]
    expected = [alone(calm, command) for command in commands]
    assert calm.kv.baseline()
    calm.close()
    engine = build(
        folders,
        kv_memory=rng.choice(["400KiB", "600KiB"]),
        swap_memory=rng.choice(["100KiB", "1MiB"]),
        preemption=preemption,
        block_size=rng.choice([4, 16]),
        max_batched_tokens=rng.choice([24, 128]),
        max_running=rng.choice([8, 32]),
        speculation={"methods": ["suffix", "draft_model"], "model": str(folders[1]), "num_speculative_tokens": 4},
    )
    alive: dict[str, int] = {}
    events: dict[str, list[Event]] = {}
    cancelled: set[str] = set()
    sent = 0
    while sent < count or alive:
        for _ in range(rng.randrange(3)):
            if sent < count and len(alive) < 40:
                kind = rng.randrange(kinds)
                alive[f"r{sent}"] = kind
                c = commands[kind]
                engine.handle(GenerateCommand(f"r{sent}", c.prompt_token_ids, c.params, c.namespace, c.priority))
                sent += 1
        if alive and rng.random() < 0.04:
            name = rng.choice(sorted(alive))
            cancelled.add(name)
            engine.handle(AbortCommand(name))
        running = engine.scheduler.running
        if running and rng.random() < 0.1:
            engine.scheduler.preempt(rng.choice(running))
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
            if isinstance(event, (FinishedEvent, FailedEvent)):
                kind = alive.pop(event.request_id)
                found = events.pop(event.request_id)
                if event.request_id not in cancelled or getattr(event, "finish_reason", "") != "cancelled":
                    assert told(found) == expected[kind], commands[kind].params
        engine.scheduler.check()
    assert not events
    assert engine.kv.baseline(), "both pools and both host pools end at their baseline"
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.host_kv_blocks_used) == (0, 0, 0)
    engine.close()
    return stats.counters


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_trap_d7_short_soak(folders: tuple[Path, Path], preemption: str) -> None:
    counters = soak(folders, 80, 40, 0, preemption)
    assert counters["num_preemptions_total"] > 0
    assert (counters["num_swapped_total"] > 0) == (preemption == "swap")


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_trap_d7_soak_of_2000_requests(folders: tuple[Path, Path], preemption: str) -> None:
    counters = soak(folders, 2000, 200, len(preemption), preemption)
    assert counters["num_preemptions_total"] > 0
