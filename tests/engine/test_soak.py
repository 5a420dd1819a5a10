"""Everything at once on the fake executor: whatever is cancelled, preempted or fails, the others' answers stay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specserve.core.messages import AbortCommand, Event, FailedEvent, FinishedEvent, GenerateCommand
from tests.fakes.engines import SIZE, VOCABULARY, answer, command, make_rig, several
from tests.fakes.executor import Model, hash_model
from tests.fakes.vocab import EOS

V = VOCABULARY
IDS = (EOS, *V.split("abcdefgh"))
GRAMMARS = [["hello world", "hello there", "abcab"], ["日本語日本語", "abababab"], ["a", "b"]]
LETTERS = ["".join(t) for t in itertools.product("abcdefgh", repeat=3)]


def model() -> Model:
    """Letters, now and then the end; behind a few tokens one letter is much likelier than others, so drafts hold."""
    base = hash_model(SIZE, banned=[i for i in range(SIZE) if i not in IDS])

    def scores(context: tuple[int, ...], seed: int | None) -> np.ndarray:
        found = base(context, seed)
        found[EOS] -= 0.15
        if len(context) % 16 > 2:
            found[found.argmax()] += 12.0
        return found

    return scores


MODEL = model()


def draw(rng: random.Random, name: str) -> GenerateCommand:
    """A random request."""
    prompt = V.split(rng.choice(["", "shared text ", "shared text of some "]) + f"prompt {rng.randrange(40)}")
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": rng.randrange(2**64)}
    if rng.random() < 0.35:
        width = rng.randint(2, 4)
        params |= {
            "beam_width": width,
            "n": rng.randint(1, width),
            "length_penalty": rng.choice([0.0, 1.0, 1.5]),
            "early_stopping": rng.choice([True, False, "never"]),
            "speculation": rng.random() < 0.5,
        }
    else:
        n = rng.choice([1, 1, 2, 3, 5])
        params |= {"temperature": rng.choice([0.0, 1.0]), "n": n}
        if rng.random() < 0.2:
            params["best_of"] = n + rng.randint(0, 2)
    if rng.random() < 0.4:
        params["guided"] = {"choice": rng.choice([*GRAMMARS, LETTERS])}
    else:
        params["allowed_token_ids"] = IDS
        params["stop"] = rng.choice([None, None, ["ab", "h"]])
        params["frequency_penalty"] = rng.choice([0.0, 0.0, 0.5])
    if rng.random() < 0.3:
        params["logprobs"] = rng.randint(0, 2)
    return command(name, prompt, **params)


def told(events: list[Event]) -> Any:
    """What the owner was told: choices and end, without what drafts and the cache change."""
    if len(events) == 1 and isinstance(events[0], FailedEvent):
        return events[0].code, events[0].message
    got = several(events)
    end = got.end
    if isinstance(end, FailedEvent):
        return end.code, end.message
    shown = [(i, c.text, c.token_ids, c.logprobs, c.end) for i, c in got.choices.items()]
    return end.finish_reason, end.seed, end.usage.prompt_tokens, end.usage.completion_tokens, shown


def partly(events: list[Event], whole: list[Event], stops: Sequence[str]) -> None:
    """What was shown before a request was cut short is the beginning of what it would have been.

    But for what was held back as the beginning of a stop text: cut short it is shown, completed it is not.
    """
    got, calm = several(events), several(whole)
    for index, choice in got.choices.items():
        full = calm.choices[index]
        same = full.token_ids[: len(choice.token_ids)] == choice.token_ids
        if not (same or full.text.startswith(choice.text)):
            assert full.end is not None
            assert full.end.finish_reason == "stop"
            held = choice.text.removeprefix(full.text)
            assert any(full.text + held == choice.text and held == stop[: len(held)] != stop for stop in stops)
        if choice.end is not None:
            assert (choice.text, choice.token_ids, choice.end) == (full.text, full.token_ids, full.end)


@dataclass
class Soak:
    """Random requests on one rig.

    Attributes:
        cut: ids that were cancelled, or may have been in a step that failed.
    """

    seed: int
    total: int
    rig: Any
    events: dict[str, list[Event]] = field(default_factory=dict)
    commands: dict[str, GenerateCommand] = field(default_factory=dict)
    alive: list[str] = field(default_factory=list)
    failures: int = 0

    def run(self) -> None:
        rng = random.Random(self.seed)
        engine = self.rig.engine
        while len(self.commands) < self.total or engine.has_work:
            while len(self.commands) < self.total and len(self.alive) < 8 and rng.random() < 0.6:
                name = f"r{len(self.commands)}"
                self.commands[name] = draw(rng, name)
                self.alive.append(name)
                self.events[name] = []
                engine.handle(self.commands[name])
            self._disturb(rng)
            for event in self.rig.step():
                self.events[event.request_id].append(event)
                if isinstance(event, FinishedEvent | FailedEvent):
                    self.alive.remove(event.request_id)
            engine.kv.check()

    def _disturb(self, rng: random.Random) -> None:
        engine = self.rig.engine
        if self.alive and rng.random() < 0.05:
            engine.handle(AbortCommand(rng.choice(self.alive)))
        if rng.random() < 0.2 and engine.scheduler.running:
            modes = ["swap", "recompute"]
            engine.scheduler.preemption.mode = rng.choice(modes)
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
            engine.scheduler.check()
        if rng.random() < 0.01:
            self.failures += 1
            self.rig.executor.fail_next = RuntimeError("gone")
            self.rig.executor.fail_in = rng.choice(["forward", "sample"])


def soak(seed: int, total: int, **options: Any) -> dict[str, int]:
    """Run, compare with undisturbed runs, and count what happened."""
    rig = make_rig(MODEL, max_waiting=10_000, max_batched_tokens=24, **options)
    run = Soak(seed, total, rig)
    run.run()
    rig.executor.fail_next = None
    rig.run(command("last", "hi", max_tokens=1))  # runs the moves of a last preemption
    assert rig.engine.kv.baseline()
    assert rig.engine.kv.host.num_used == 0
    counts = {"cancelled": 0, "failed": 0, "whole": 0}
    calm = make_rig(MODEL, blocks=512)
    for name, asked in run.commands.items():
        whole = calm.run(asked)[name]
        got = run.events[name]
        end = got[-1]
        if isinstance(end, FinishedEvent) and end.finish_reason == "cancelled":
            counts["cancelled"] += 1
        elif isinstance(end, FailedEvent) and end.code == "server_error":
            counts["failed"] += 1
        else:
            counts["whole"] += 1
            assert told(got) == told(whole), name
            continue
        partly(got, whole, asked.params.stops)
    counts |= {"swapped": rig.engine.scheduler.num_swapped, "preempted": rig.engine.scheduler.num_preemptions}
    return counts


OPTIONS = [
    {"blocks": 48, "block_size": 3, "host": 30, "drafts": 4, "wrong": 7},
    {"blocks": 70, "block_size": 2, "host": 200, "drafts": 3, "wrong": 0, "prefix_cache": False},
    {"blocks": 130, "block_size": 1, "host": 40, "drafts": 0, "max_running": 6},
    {"blocks": 38, "block_size": 4, "host": 60, "drafts": 6, "wrong": 4, "max_running": 12},
]


@pytest.mark.parametrize("part", range(4))
def test_soak(part):
    counts = soak(part, 50, **OPTIONS[part])
    assert counts["whole"] >= 20
    assert counts["preempted"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_long_soak(part):
    counts = soak(100 + part, 500, **OPTIONS[part])
    assert counts["whole"] >= 250
    assert counts["cancelled"] > 10
    assert counts["failed"] > 10
    assert counts["preempted"] > counts["swapped"] > 0


def test_a_request_in_a_soak_is_what_it_is_alone():
    """The comparison can fail: another seed gives another answer."""
    rig = make_rig(MODEL, blocks=512)
    one = command("a", "prompt", temperature=1.0, seed=1, max_tokens=8)
    two = command("b", "prompt", temperature=1.0, seed=2, max_tokens=8)
    events = rig.run(one, two)
    assert told(events["a"]) != told(events["b"])
    assert answer(events["a"]).reason
