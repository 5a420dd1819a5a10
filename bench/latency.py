"""Latency under load: decoders while a long prompt arrives, and prompts that share a prefix.

1. While 8 requests decode greedily, a prompt of 4,000 tokens arrives. Gaps between a decoder's deltas before it, and
   until its first token; by how the prompt is cut into chunks. Without drafts, and with the default ones.
2. 32 requests, one after another, with different questions after a prefix of 1,024 tokens that is new to the cache.
   Time to first token of the first and of the later ones.

Demo model, everything else as it is by default. Times are taken where the engine hands its events over.
"""

from __future__ import annotations

import argparse
import itertools
import math
import queue
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import Row, finish, row
from bench.prompts import mixed

DECODERS = 8
LONG_PROMPT = 4000
WARM, MEASURED = 8, 48  # deltas of each decoder before the baseline, and of the baseline
PREFIX, ASKED, AT_ONCE = 1024, 32, 8
MAX_RATIO_GAPS, MAX_RATIO_FIRST = 2.5, 0.15
DEFAULT, DRAFTS = "default", "default, suffix drafts"
SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {"speculation": None},
    "chunking off": {"speculation": None, "target_itl_ms": 0, "max_batched_tokens": 8192},
    "chunks of 512": {"speculation": None, "target_itl_ms": 0, "max_batched_tokens": 512},
    DRAFTS: {},
}


class Timed:
    """An engine in a thread; when each of its events was handed over."""

    def __init__(self, options: dict[str, Any]) -> None:
        from specserve.cluster.build import build_served_engine
        from specserve.core.config import EngineConfig
        from specserve.engine.thread import EngineThread

        config = EngineConfig.from_dict({"model": "demo", "kv_memory": "512MiB", **options})
        self._engine = EngineThread(lambda: build_served_engine(config))
        self._events: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self.times: dict[str, list[float]] = {}  # request -> of its deltas
        self._open: set[str] = set()
        self._engine.start(self._deliver)

    def _deliver(self, events: Sequence[Any]) -> None:
        now = time.perf_counter()
        for event in events:
            self._events.put((now, event))

    def send(self, prompt: Sequence[int], tokens: int) -> str:
        """Start a greedy request for so many tokens; its id."""
        from specserve.core.messages import GenerateCommand
        from specserve.core.sampling import SamplingParams

        name = f"r{next(self._numbers)}"
        self.times[name] = []
        self._open.add(name)
        self._engine.send(GenerateCommand(name, tuple(prompt), SamplingParams(max_tokens=tokens, ignore_eos=True)))
        return name

    def wait(self, done: Callable[[], bool]) -> None:
        """Take events until `done`."""
        from specserve.core.messages import TERMINAL, DeltaEvent, FailedEvent

        while not done():
            now, event = self._events.get()
            if isinstance(event, FailedEvent):
                raise SystemExit(f"a request failed: {event.message}")
            if isinstance(event, DeltaEvent):
                self.times[event.request_id].append(now)
            elif isinstance(event, TERMINAL):
                self._open.discard(event.request_id)

    def ended(self, name: str) -> bool:
        """It has all its tokens."""
        return name not in self._open

    def end(self, names: Sequence[str]) -> None:
        """Abort what still runs of these."""
        from specserve.core.messages import AbortCommand

        for name in names:
            self._engine.send(AbortCommand(name))
        self.wait(lambda: not self._open.intersection(names))

    def close(self) -> None:
        self._engine.close()


class Texts:
    """Token ids to build prompts from, none of which begins as an earlier one did."""

    def __init__(self) -> None:
        from specserve.models.loader import load_tokenizer

        self._tokenizer = load_tokenizer("demo")
        self._numbers = itertools.count(1)
        self._body: list[int] = []
        while len(self._body) < LONG_PROMPT:
            self._body += self._tokenizer.encode("\n\n".join(mixed(64)))

    def prompt(self, tokens: int) -> list[int]:
        number = next(self._numbers)
        start = self._tokenizer.encode(f"Document {number}. ")
        at = number * 37 % LONG_PROMPT
        return (start + self._body[at:] + self._body)[:tokens]

    def question(self, number: int) -> list[int]:
        return list(self._tokenizer.encode(f"\n\nQuestion {number}: what is said of the number {number * number}?"))

    def decoders(self) -> list[list[int]]:
        number = next(self._numbers)
        ask = "Tell me a very long story about traveller {} who crosses country number {} on foot."
        chats = [[{"role": "user", "content": ask.format(i, number)}] for i in range(DECODERS)]
        return [list(self._tokenizer.encode_chat(chat)) for chat in chats]


def beside_decoders(engine: Timed, texts: Texts) -> tuple[float, float, float]:
    """(median gap before, 99th percentile of the gaps while the prompt is computed, its time to first token), ms."""
    decoders = [engine.send(prompt, 4000) for prompt in texts.decoders()]
    prompt = texts.prompt(LONG_PROMPT)
    engine.wait(lambda: all(len(engine.times[name]) > WARM + MEASURED for name in decoders))
    sent = time.perf_counter()
    name = engine.send(prompt, 1)
    engine.wait(lambda: bool(engine.times[name]))
    first = engine.times[name][0]
    # All deltas of a step are handed over at once, but the decoders' may come after the prompt's.
    engine.wait(lambda: all(engine.ended(decoder) or engine.times[decoder][-1] >= first for decoder in decoders))
    engine.end([*decoders, name])
    gaps = [gap for decoder in decoders for gap in itertools.pairwise(engine.times[decoder][WARM:])]
    before = [b - a for a, b in gaps if b <= sent]
    during = [b - a for a, b in gaps if a < first and b > sent]
    return 1e3 * statistics.median(before), 1e3 * percentile(during, 0.99), 1e3 * (first - sent)


def after_prefix(engine: Timed, texts: Texts, at_once: int) -> list[float]:
    """Times to first token in ms of ASKED requests with one prefix; those after the first `at_once` at a time."""
    prefix = texts.prompt(PREFIX)
    numbers = range(ASKED)
    seconds = []
    for wave in [numbers[:1], *(numbers[i : i + at_once] for i in range(1, ASKED, at_once))]:
        began = {}
        for number in wave:
            prompt = prefix + texts.question(number)
            began[engine.send(prompt, 1)] = time.perf_counter()
        names = list(began)
        engine.wait(lambda names=names: all(engine.times[name] for name in names))  # type: ignore[misc]
        engine.end(names)
        seconds += [engine.times[name][0] - start for name, start in began.items()]
    return [1e3 * s for s in seconds]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not under so large a share of them."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def measure_gaps(repeats: int, texts: Texts, progress: Progress) -> list[Row]:
    """Every setting in turn, `repeats` times."""
    task = progress.add_task("decoders", total=len(SETTINGS) * (repeats + 1))
    engines: dict[str, Timed] = {}
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SETTINGS}
    for repeat in range(repeats + 1):
        for name, options in SETTINGS.items():
            progress.update(task, advance=1, description=f"{name}: {LONG_PROMPT} tokens beside {DECODERS} decoders")
            engine = engines.get(name) or engines.setdefault(name, Timed(options))
            found = beside_decoders(engine, texts)
            if repeat:  # the first round warms up
                figures[name].append(found)
    for engine in engines.values():
        engine.close()
    rows = []
    whole = [first for _, _, first in figures["chunking off"]]
    for name, found in figures.items():
        before, during, first = ([f[i] for f in found] for i in range(3))
        goal = MAX_RATIO_GAPS if name == DEFAULT else None
        rows += [
            row(f"{name}: median gap before the prompt", before, "ms"),
            row(f"{name}: p99 gap while it is computed", during, "ms", baseline=before, goal_at_most=goal),
            row(f"{name}: time to its first token", first, "ms", baseline=None if first == whole else whole),
        ]
    return rows


def measure_prefix(repeats: int, texts: Texts, progress: Progress) -> list[Row]:
    task = progress.add_task("prefix", total=2 * (repeats + 1))
    engine = Timed({})
    found: dict[int, list[list[float]]] = {1: [], AT_ONCE: []}
    for repeat in range(repeats + 1):
        for at_once, times in found.items():
            progress.update(task, advance=1, description=f"a prefix of {PREFIX} tokens, {at_once} at once")
            seconds = after_prefix(engine, texts, at_once)
            if repeat:
                times.append(seconds)
    engine.close()
    first, together_first = ([times[0] for times in found[n]] for n in (1, AT_ONCE))
    later = [times[1:] for times in found[1]]
    together = [times[1:] for times in found[AT_ONCE]]
    medians, slow = [statistics.median(t) for t in later], [percentile(t, 0.95) for t in later]
    at_once = f"shared prefix: time to first token, later, {AT_ONCE} at once"
    return [
        row("shared prefix: time to first token, first request", first, "ms"),
        row(
            "shared prefix: time to first token, later, median",
            medians,
            "ms",
            baseline=first,
            goal_at_most=MAX_RATIO_FIRST,
        ),
        row("shared prefix: time to first token, later, p95", slow, "ms", baseline=first),
        row(f"{at_once}, median", [statistics.median(t) for t in together], "ms", baseline=together_first),
        row(f"{at_once}, p95", [percentile(t, 0.95) for t in together], "ms", baseline=together_first),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    arguments = parser.parse_args()
    texts = Texts()
    with Progress() as progress:
        rows = measure_gaps(arguments.repeats, texts, progress)
        rows += measure_prefix(arguments.repeats, texts, progress)
    return finish("latency", rows, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
