"""Prompts for end-to-end tests: Spec-Bench's where the shared inputs are, with a small set of our own otherwise."""

from __future__ import annotations

from tests.fakes.data import ROOT, shared_lines

OWN = (
    "Explain why the sky is blue.",
    "List the numbers from one to thirty in words.",
    "Repeat after me: red green blue red green blue red green blue.",
    "Write a limerick about a cat who learned to code.",
    "Translate to French: the cat sat on the mat, and the dog sat on the cat.",
    'Fill in this JSON and repeat it three times: {"name": "Ada", "born": 1815, "job": "mathematician"}',
    "What is 17 times 23? Think step by step.",
    "Name three rivers in Europe and say through which countries they flow.",
)


def spec_bench_prompts(count: int) -> list[str]:
    """First turns, spread over the categories. Skips where the shared inputs are absent."""
    rows = shared_lines("spec_bench.jsonl")
    return [rows[i * len(rows) // count]["turns"][0] for i in range(count)]


def prompts(count: int) -> list[str]:
    """Shared prompts if they are here, our own otherwise; never skips."""
    if (ROOT.parent / "shared" / "data" / "spec_bench.jsonl").exists():
        return spec_bench_prompts(count)
    return [OWN[i % len(OWN)] for i in range(count)]


def chat(text: str) -> list[dict[str, str]]:
    """One user message."""
    return [{"role": "user", "content": text}]
