"""Flat constraints: what one alternative of a schema asks of values of one JSON type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from specserve.guided.intervals import UNBOUNDED, Bounds

KINDS = ("null", "boolean", "number", "string", "array", "object")

# A subschema by pointer, or its negation; a goal is a set of them, all of which hold.
Literal = tuple[str, bool]
Goal = frozenset[Literal]
ANYTHING: Goal = frozenset()
# Stands for the schema `false`; no pointer begins with an exclamation mark.
NOTHING: Literal = ("!", True)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression that a text must (or must not) match somewhere."""

    text: str
    positive: bool
    pointer: str


@dataclass(frozen=True, slots=True)
class Members:
    """Property rules of one schema object: `rest` is for names that neither `named` nor `patterns` covers."""

    named: tuple[tuple[str, Literal], ...] = ()
    patterns: tuple[tuple[Pattern, Literal], ...] = ()
    rest: Literal | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """Item rules of one schema object: the first items, and all after them."""

    first: tuple[Literal, ...] = ()
    rest: Literal | None = None


@dataclass(frozen=True, slots=True)
class Contains:
    """At least `low` items satisfy `literal`."""

    literal: Literal
    low: int
    pointer: str


@dataclass(frozen=True, slots=True)
class Flat:
    """A conjunction of constraints on one kind of value.

    Attributes:
        values: the only values allowed (by `canonical`), or None.
        excluded: (value that is not allowed, pointer of its keyword).
        whole: the number is an integer.
        multiples: (divisor, pointer of its keyword).
        unique: pointer of uniqueItems, or None.
    """

    kind: str
    values: tuple[Any, ...] | None = None
    excluded: tuple[tuple[Any, str], ...] = ()
    bounds: Bounds = UNBOUNDED
    whole: bool = False
    multiples: tuple[tuple[int, str], ...] = ()
    patterns: tuple[Pattern, ...] = ()
    formats: tuple[tuple[str, str], ...] = ()
    min_length: int = 0
    max_length: int | None = None
    items: tuple[Items, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: str | None = None
    members: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    min_members: int = 0
    max_members: int | None = None
    names: tuple[Literal, ...] = ()


def _union(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    return a + tuple(x for x in b if x not in a)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _most(a: int, b: int) -> int:
    return max(a, b)


def _values(a: tuple[Any, ...] | None, b: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if a is None or b is None:
        return b if a is None else a
    keys = {canonical(x) for x in b}
    return tuple(x for x in a if canonical(x) in keys)


def _first(a: Any, b: Any) -> Any:
    return a


def _any(a: Any, b: Any) -> Any:
    return a or b


_MEET: dict[str, Callable[[Any, Any], Any]] = {
    "kind": _first,
    "values": _values,
    "bounds": Bounds.meet,
    "whole": _any,
    "unique": _any,
    **dict.fromkeys(("min_length", "min_items", "min_members"), _most),
    **dict.fromkeys(("max_length", "max_items", "max_members"), _least),
}
_FIELDS = tuple(f.name for f in fields(Flat))
_DEFAULTS = Flat("null")


def meet(a: Flat, b: Flat) -> Flat:
    """Both constraints at once."""
    changes = {}
    for name in _FIELDS[1:]:
        x, y = getattr(a, name), getattr(b, name)
        if y != getattr(_DEFAULTS, name) and x != y:
            rule: Callable[[Any, Any], Any] = _MEET.get(name, _union)
            changes[name] = rule(x, y)
    return replace(a, **changes) if changes else a


def kind_of(value: Any) -> str:
    """The JSON type of a Python value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def canonical(value: Any) -> str:
    """A text that two values share exactly if JSON Schema calls them equal (1 and 1.0 are, 1 and true are not)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return repr(value)
