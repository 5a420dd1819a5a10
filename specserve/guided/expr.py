"""Expressions: what every guided request is lowered to, before it is written in a backend's own syntax.

A grammar is a mapping of rule names to expressions over Unicode code points. Regular expressions, JSON Schemas and
choices all become such expressions, so that a backend needs to understand one thing only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Sorted, disjoint, inclusive intervals of code points.
Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
# Surrogates are no characters: they have no UTF-8 form, so no text that a model can emit holds one.
UNIVERSE: Ranges = ((0, 0xD7FF), (0xE000, LAST))


@dataclass(frozen=True, slots=True)
class Lit:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Class:
    """One character out of `ranges`."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """All of `items`, in order; the empty text for none."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of `items`; nothing at all (not even the empty text) for none."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`item`, from `low` to `high` times (None: without limit)."""

    item: Expr
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """The rule of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of the text (regular expressions only)."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the text (regular expressions only)."""


Expr = Lit | Class | Seq | Alt | Repeat | Ref | Begin | End

EMPTY = Seq(())
NEVER = Alt(())


def seq(*items: Expr) -> Expr:
    """A sequence, flattened; NEVER if a part is NEVER."""
    flat: list[Expr] = []
    for item in items:
        if item == NEVER:
            return NEVER
        if isinstance(item, Seq):
            flat.extend(item.items)
        else:
            flat.append(item)
    merged: list[Expr] = []
    for item in flat:
        if isinstance(item, Lit) and merged and isinstance(merged[-1], Lit):
            merged[-1] = Lit(merged[-1].text + item.text)
        else:
            merged.append(item)
    return merged[0] if len(merged) == 1 else Seq(tuple(merged))


def alt(items: Iterable[Expr]) -> Expr:
    """A choice, flattened, without repeated or impossible branches; single characters become one class."""
    flat: dict[Expr, None] = {}
    for item in items:
        for part in item.items if isinstance(item, Alt) else (item,):
            flat[part] = None
    single = [part for part in flat if isinstance(part, Class) or (isinstance(part, Lit) and len(part.text) == 1)]
    if len(single) > 1:
        pairs = [pair for part in single for pair in (part.ranges if isinstance(part, Class) else chars(part.text))]
        rest = [part for part in flat if part not in set(single)]
        flat = dict.fromkeys([Class(ranges_of(pairs)), *rest])
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def opt(item: Expr) -> Expr:
    """`item` or the empty text."""
    return EMPTY if item in (NEVER, EMPTY) else Repeat(item, 0, 1)


def repeat(item: Expr, low: int, high: int | None) -> Expr:
    """`item` from `low` to `high` times, simplified."""
    if high is not None and high < low:
        return NEVER
    if high == 0 or item == EMPTY:
        return EMPTY
    if item == NEVER:
        return EMPTY if low == 0 else NEVER
    return item if low == high == 1 else Repeat(item, low, high)


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted and merged intervals."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def chars(text: str) -> Ranges:
    """The characters of `text` as a set."""
    return ranges_of((ord(c), ord(c)) for c in text)


def invert(ranges: Ranges) -> Ranges:
    """All characters that are not in `ranges`."""
    out: list[tuple[int, int]] = []
    position = 0
    for low, high in ranges:
        if low > position:
            out.append((position, low - 1))
        position = high + 1
    if position <= LAST:
        out.append((position, LAST))
    return common(tuple(out), UNIVERSE)


def common(a: Ranges, b: Ranges) -> Ranges:
    """Characters in both sets."""
    out: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            out.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


ANY = Class(UNIVERSE)
DIGIT = Class(((0x30, 0x39),))
