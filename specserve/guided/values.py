"""Whether one value satisfies a goal: used to keep only those values of an enum that the other keywords allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specserve.guided.expand import Expander, item_goal, member_goal
from specserve.guided.flat import Flat, Goal, canonical, kind_of
from specserve.guided.intervals import exact
from specserve.guided.texts import pattern_dfa, string_dfa


def satisfies(expander: Expander, goal: Goal, value: Any) -> bool:
    """Whether `value` satisfies every literal of `goal`."""
    return any(holds(expander, flat, value) for flat in expander.expand(goal).get(kind_of(value), ()))


def holds(expander: Expander, flat: Flat, value: Any) -> bool:
    """Whether `value`, of the flat's kind, satisfies the flat."""
    if flat.values is not None and not any(canonical(value) == canonical(v) for v in flat.values):
        return False
    if any(canonical(value) == canonical(v) for v, _ in flat.excluded):
        return False
    return within(expander, replace(flat, values=None, excluded=()), value)


def allowed_values(expander: Expander, flat: Flat) -> list[Any]:
    """Those of a flat's values that its other constraints allow."""
    gone = {canonical(v) for v, _ in flat.excluded}
    rest = replace(flat, values=None, excluded=())
    found = []
    for value in flat.values or ():
        expander.tick()
        if canonical(value) not in gone and within(expander, rest, value):
            found.append(value)
    return found


def within(expander: Expander, flat: Flat, value: Any) -> bool:
    """Whether `value` satisfies a flat that lists no values."""
    if flat == Flat(flat.kind):
        return True
    if flat.kind == "number":
        return _number(flat, value)
    if flat.kind == "string":
        return string_dfa(flat).accepts(value)
    if flat.kind == "array":
        return _array(expander, flat, value)
    return flat.kind != "object" or _object(expander, flat, value)


def _number(flat: Flat, value: int | float) -> bool:
    x = exact(value)
    whole = x.denominator == 1
    return (
        flat.bounds.holds(x)
        and (whole or not flat.whole)
        and all((x / divisor).denominator == 1 for divisor, _ in flat.multiples)
    )


def _array(expander: Expander, flat: Flat, value: list[Any]) -> bool:
    if len(value) < flat.min_items or (flat.max_items is not None and len(value) > flat.max_items):
        return False
    if flat.unique and len({canonical(v) for v in value}) < len(value):
        return False
    if not all(satisfies(expander, item_goal(flat, i), item) for i, item in enumerate(value)):
        return False
    return all(sum(satisfies(expander, frozenset([c.literal]), item) for item in value) >= c.low for c in flat.contains)


def matched_patterns(flat: Flat, name: str) -> frozenset[str]:
    """Texts of the patternProperties that a property name matches in any reading."""
    patterns = [pattern for layer in flat.members for pattern, _ in layer.patterns]
    return frozenset(
        p.text for p in patterns if pattern_dfa(p).accepts(name) or pattern_dfa(p, wide=True).accepts(name)
    )


def _object(expander: Expander, flat: Flat, value: dict[str, Any]) -> bool:
    if len(value) < flat.min_members or (flat.max_members is not None and len(value) > flat.max_members):
        return False
    if any(name not in value for name in flat.required):
        return False
    names: Goal = frozenset(flat.names)
    return all(
        satisfies(expander, member_goal(flat, name, matched_patterns(flat, name)), item)
        and (not names or satisfies(expander, names, name))
        for name, item in value.items()
    )
