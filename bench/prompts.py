"""Prompts of mixed length: Spec-Bench's questions where they are at hand, else texts of our own."""

from __future__ import annotations

import json
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "spec_bench.jsonl"
OWN = (
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle. Describe the sea, the light and the "
    "letter, and end with a question that the reader has to answer alone.",
    "List five ways to save water at home, one a line.",
    "Translate to French: The train leaves at seven in the morning from the second platform of the old station.",
    "What is the difference between a list and a tuple in Python? Give one example of each and say when to use which.",
    "Summarise: A well kept library beats code of one's own, even where the library is slower, since its faults were "
    "found by others. What a product exists for is the exception: there its makers must know every line themselves.",
)


def mixed(count: int) -> list[str]:
    """`count` prompts; the same ones each time."""
    if SHARED.exists():
        with SHARED.open(encoding="utf-8") as lines:
            texts = [json.loads(line)["turns"][0] for line in lines]
        texts = sorted(texts[:: max(1, len(texts) // max(count, 64))], key=lambda t: hash_of(t))
    else:
        texts = list(OWN)
    return [texts[i % len(texts)] for i in range(count)]


def hash_of(text: str) -> int:
    """A fixed order that mixes categories and lengths."""
    return sum((i + 1) * ord(c) for i, c in enumerate(text)) % 10007
