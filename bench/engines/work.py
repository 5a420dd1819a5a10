"""The five workloads, their prompts, and what specserve is to reach against the better of its peers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.prompts import mixed

PRECISIONS = ("bf16", "q8", "q4")
SHORTEST, LONGEST = 32, 256  # of a prompt, where they differ
PREFIX, QUESTION = 1024, 24
MOST_TEXTS = 480


@dataclass(frozen=True, slots=True)
class Work:
    """`count` prompts, `width` of them at a time, of which each gives `out` tokens.

    Attributes:
        lengths: shortest and longest prompt in tokens, a common prefix not counted.
        prefix: tokens that all prompts begin with.
        counted: "decode" (tokens after the first), "output" or "prompt" tokens a second.
        goals: least ratio to the better peer, by precision.
    """

    number: int
    name: str
    count: int
    width: int
    lengths: tuple[int, int]
    out: int
    counted: str
    goals: tuple[float, float, float]
    prefix: int = 0

    def goal(self, precision: str) -> float:
        return self.goals[PRECISIONS.index(precision)]


WORKS = (
    Work(1, "1 stream, 64 in, 128 out: decode", 1, 1, (64, 64), 128, "decode", (1.2, 1.5, 1.5)),
    Work(2, "8 concurrent, 32..256 in, 64 out", 64, 8, (SHORTEST, LONGEST), 64, "output", (1.1, 1.5, 1.5)),
    Work(3, "32 concurrent, 32..256 in, 64 out", 64, 32, (SHORTEST, LONGEST), 64, "output", (1.05, 1.3, 1.3)),
    Work(4, "prompt of 2,048: prefill", 1, 1, (2048, 2048), 1, "prompt", (0.95, 1.3, 1.3)),
    Work(
        5, "8 concurrent, shared prefix of 1,024, 32 out", 32, 8, (QUESTION, QUESTION), 32, "output", (2, 2, 2), PREFIX
    ),
)


class Texts:
    """Prompts cut from real text. Every round has its own, so that no cache of prefixes knows them already.

    Args:
        body: token ids of the text; repeated where it is too short.
    """

    def __init__(self, body: Sequence[int]) -> None:
        if not body:
            raise ValueError("there is no text to cut prompts from")
        self._body = list(body)

    @classmethod
    def of_demo(cls) -> Texts:
        from specserve.models.loader import load_tokenizer

        return cls(load_tokenizer("demo").encode("\n\n".join(mixed(MOST_TEXTS))))

    def prompts(self, work: Work, round_: int) -> list[list[int]]:
        """The prompts of one round; the same ones each time."""
        dice = random.Random(f"{work.number} {round_}")
        prefix = self._cut(dice, work.prefix)
        return [prefix + self._cut(dice, dice.randint(*work.lengths)) for _ in range(work.count)]

    def _cut(self, dice: random.Random, length: int) -> list[int]:
        start = dice.randrange(len(self._body))
        piece = self._body[start : start + length]
        while len(piece) < length:
            piece += self._body[: length - len(piece)]
        return piece


def command(work: Work, prompts: Sequence[Sequence[int]]) -> dict[str, object]:
    """What a child is asked; see bench.engines.child."""
    do = "decode" if work.counted == "decode" else "serve"
    return {"do": do, "prompts": prompts, "out": work.out, "width": work.width}


def rate(work: Work, prompts: Sequence[Sequence[int]], answer: dict[str, float]) -> float:
    """Tokens a second, of those that the work counts."""
    if work.counted == "decode":
        tokens = work.out - answer["early"]  # those that were there when the clock started
    elif work.counted == "output":
        tokens = len(prompts) * work.out
    else:
        tokens = sum(len(prompt) for prompt in prompts)
    return tokens / answer["seconds"]
