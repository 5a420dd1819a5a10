"""Output tokens a second at 1, 8 and 32 concurrent requests, ours in turn with transformers' generate.

Demo model, bfloat16, every request of mixed prompt length gives the same number of tokens (end tokens are ignored on
both sides), so that static batches waste nothing on unequal lengths: the comparison that is kindest to the baseline.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress

from bench.baseline import Baseline
from bench.common import Row, finish, row
from bench.prompts import mixed

MODES = ("invariant", "fast")


def ours(numerics: str, speculation: dict[str, Any] | None) -> tuple[Any, Callable[[list[list[int]], int], float]]:
    """(engine, run): `run(prompts, tokens)` gives the seconds that all the prompts took, submitted at once."""
    from specserve import LLM, SamplingParams

    llm = LLM(
        "demo", dtype="bfloat16", quantization="none", numerics=numerics, speculation=speculation, prefix_cache=False
    )

    def run(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        results = llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
        seconds = time.perf_counter() - start
        assert all(len(r.token_ids) == tokens for r in results)
        return seconds

    return llm, run


def measure(arguments: argparse.Namespace, progress: Progress) -> list[Row]:
    """Every engine in turn, `repeats` times, at each concurrency."""
    from specserve.models.demo import fetch_demo
    from specserve.models.loader import load_tokenizer

    tokenizer = load_tokenizer("demo")
    engines = {f"specserve {mode}": ours(mode, None) for mode in MODES}
    engines["specserve invariant, suffix drafts"] = ours("invariant", {"methods": ["suffix"]})
    runs = {name: run for name, (_, run) in engines.items()}
    baseline = Baseline(fetch_demo()) if arguments.compare == "transformers" else None
    if baseline is not None:
        runs["transformers generate"] = baseline.run
    task = progress.add_task("serve", total=len(arguments.concurrency) * (arguments.repeats + 1) * len(runs))
    rows: list[Row] = []
    for width in arguments.concurrency:
        prompts = [tokenizer.encode_chat([{"role": "user", "content": t}])[:256] for t in mixed(width)]
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(arguments.repeats + 1):
            for name, run in runs.items():
                progress.update(task, advance=1, description=f"{name}, {width} concurrent")
                seconds = run(prompts, arguments.tokens)
                if repeat:  # the first round warms up
                    rates[name].append(width * arguments.tokens / seconds)
        base = rates.get("transformers generate")
        rows += [
            row(f"{name}, {width} concurrent", values, "tokens/s", baseline=base, goal_ratio=goal(name, width))
            for name, values in rates.items()
        ]
    for llm, _ in engines.values():
        llm.close()
    if baseline is not None:
        baseline.close()
    return rows


def goal(name: str, width: int) -> float | None:
    """At 32 concurrent requests the default numerics must be ahead of the baseline."""
    return 1.0 if width == 32 and name == "specserve invariant" else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", choices=["transformers"], default=None)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    arguments = parser.parse_args()
    with Progress() as progress:
        rows = measure(arguments, progress)
    return finish("serve", rows, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
