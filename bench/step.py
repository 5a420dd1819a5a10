"""What a step spends outside the model's forward: scheduling, layout, masks, sampling, detokenising, events.

An engine in this process runs requests of one kind at a time; a step's figure is its time from one forward's end to the
next one's beginning, which is what the model waits for. The demo model by default; --stub replaces its forward by fixed
logits, so that nothing but the rest of the step runs. Goals are for plain greedy requests and for T > 0 with top-p.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.common import Row, finish

GOALS = {1: 350.0, 32: 1200.0}  # microseconds, median
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "temperature": {"temperature": 0.8},
    "guided": {"guided": {"regex": "[a-z ]{4000}"}},
    "guided, top-p": {"guided": {"regex": "[a-z ]{4000}"}, "temperature": 0.8, "top_p": 0.9},
}
WITH_GOAL = ("greedy", "top-p")
WARM = 10  # steps


class Timed:
    """A model; when its forwards began and ended. With `stub` it computes nothing."""

    def __init__(self, model: Any, stub: bool) -> None:
        self.info = model.info
        self.began: list[float] = []
        self.ended: list[float] = []
        self._model = model
        self._stub = stub
        self._logits: dict[int, Any] = {}
        if hasattr(model, "forward_best"):
            self.forward_best = self._forward_best
        if hasattr(model, "forward_draw"):
            self.forward_draw = self._forward_draw

    def forward(self, batch: Any, cache: Any) -> Any:
        return self._run(lambda: self._fixed(batch) if self._stub else self._model.forward(batch, cache))

    def _forward_best(self, batch: Any, cache: Any, vocab_size: int) -> Any:
        def run() -> Any:
            if self._stub:
                return [7] * batch.logit_rows.numel()
            return self._model.forward_best(batch, cache, vocab_size)

        return self._run(run)

    def _forward_draw(self, batch: Any, cache: Any, vocab_size: int, rows: bytes) -> Any:
        def run() -> Any:
            if self._stub:
                return [7] * batch.logit_rows.numel(), self._fixed(batch)
            return self._model.forward_draw(batch, cache, vocab_size, rows)

        return self._run(run)

    def _run(self, forward: Callable[[], Any]) -> Any:
        self.began.append(time.perf_counter())
        result = forward()
        self.ended.append(time.perf_counter())
        return result

    def _fixed(self, batch: Any) -> Any:
        """Logits of which a few stand out, as a model's do."""
        import torch

        count = batch.logit_rows.numel()
        if count not in self._logits:
            random = torch.Generator().manual_seed(count)
            logits = torch.randn(count, self.info.vocab_size, generator=random) * 2
            logits[:, torch.randperm(self.info.vocab_size, generator=random)[:40]] += 9.0
            self._logits[count] = logits
        return self._logits[count]


class Load:
    """An engine, and requests of one kind that never end."""

    def __init__(self, stub: bool) -> None:
        from specserve.cluster.build import build_served_engine
        from specserve.core.config import EngineConfig
        from specserve.engine import heap

        options = {"model": "demo", "kv_memory": "512MiB", "speculation": None}
        self.engine = build_served_engine(EngineConfig.from_dict(options))
        runner = self.engine.executor._target  # type: ignore[attr-defined]  # the seam where forwards can be timed
        self.model = runner.model = Timed(runner.model, stub)
        self._numbers = itertools.count()
        heap.freeze()  # as an engine process does
        heap.collapse()
        self.engine.executor.populate()

    def measure(self, options: dict[str, Any], width: int, steps: int) -> list[float]:
        """Seconds between the forwards of so many steps with `width` decoding requests."""
        from specserve.core.messages import AbortCommand, GenerateCommand
        from specserve.core.sampling import SamplingParams

        names = [f"r{next(self._numbers)}" for _ in range(width)]
        for i, name in enumerate(names):
            prompt = tuple(range(100 + i, 164 + 2 * i))
            params = SamplingParams(max_tokens=2000, ignore_eos=True, seed=i, **options)
            self.engine.handle(GenerateCommand(name, prompt, params))
        scheduler = self.engine.scheduler
        while len(scheduler.running) < width or any(r.num_output_tokens < WARM for r in scheduler.running):
            time.sleep(self.engine.pause() or 0.0)
            self.engine.step()
        self.model.began.clear()
        self.model.ended.clear()
        for _ in range(steps + 1):
            self.engine.step()
        assert len(scheduler.running) == width, "nobody ended"
        gaps = [b - e for e, b in zip(self.model.ended, self.model.began[1:], strict=False)]
        for name in names:
            self.engine.handle(AbortCommand(name))
        self.engine.step()
        return gaps


def rows_of(kind: str, width: int, repeats: list[list[float]]) -> list[Row]:
    """Median with its spread over repeats, and the 90th and 99th percentile of all steps, in microseconds."""
    medians = [statistics.median(gaps) * 1e6 for gaps in repeats]
    value = statistics.median(medians)
    goal = GOALS.get(width) if kind in WITH_GOAL else None
    spread = (max(medians) - min(medians)) / 2 / value
    name = f"{kind}, {width} running"
    cuts = statistics.quantiles([gap * 1e6 for gaps in repeats for gap in gaps], n=100)
    return [
        Row(name, value, "us", goal=goal, ok=None if goal is None else value <= goal, spread=spread),
        Row(f"{name}, 90th percentile", cuts[89], "us"),
        Row(f"{name}, 99th percentile", cuts[98], "us"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stub", action="store_true", help="fixed logits instead of the model's forward")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    arguments = parser.parse_args()
    load = Load(arguments.stub)
    cases = [(kind, width) for kind in arguments.kinds for width in arguments.widths]
    found: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
    with Progress() as progress:
        task = progress.add_task("", total=arguments.repeats * len(cases))
        for _ in range(arguments.repeats):
            for kind, width in cases:
                progress.update(task, advance=1, description=f"{kind}, {width} running")
                found[kind, width].append(load.measure(KINDS[kind], width, arguments.steps))
    load.engine.close()
    rows = [row for (kind, width), repeats in found.items() for row in rows_of(kind, width, repeats)]
    return finish("step_stub" if arguments.stub else "step", rows, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
