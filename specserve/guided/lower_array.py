"""Array constraints as expressions of JSON text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve.guided.document import refuse
from specserve.guided.expand import item_goal
from specserve.guided.expr import EMPTY, NEVER, Expr, Lit, alt, repeat, seq
from specserve.guided.flat import Flat, Goal

if TYPE_CHECKING:
    from specserve.guided.lower import Lowering

MAX_COUNT = 2_000


def array(lowering: Lowering, flat: Flat) -> Expr:
    """The JSON arrays that a flat allows."""
    if flat.unique and (flat.max_items is None or flat.max_items > 1):
        raise refuse(flat.unique, "is not supported (a grammar cannot compare items)")
    style = lowering.style
    inside = _with_contains(lowering, flat) if flat.contains else _counted(lowering, flat)
    return seq(Lit("["), style.pad, inside, Lit("]"))


def _counted(lowering: Lowering, flat: Flat) -> Expr:
    """Items by position, then any number of further ones, within minItems and maxItems."""
    style = lowering.style
    fixed = max((len(layer.first) for layer in flat.items), default=0)
    high = flat.max_items
    fixed = min(fixed, high) if high is not None else fixed
    if max(flat.min_items, high or 0, fixed) > MAX_COUNT:
        raise refuse("", f"minItems, maxItems and prefixItems above {MAX_COUNT} are not supported")
    last = lowering.goal(_further(flat, fixed)) if high is None or high > fixed else NEVER
    end = style.pad
    # tail: what follows after `fixed` items (or more) were written
    if high is None:
        extra = max(0, flat.min_items - fixed)
        more = seq(repeat(seq(style.comma, last), extra, None), end)
        first_more = seq(last, repeat(seq(style.comma, last), max(0, extra - 1), None), end)
    else:
        low, top = max(0, flat.min_items - fixed), high - fixed
        more = _chain(lowering, seq(style.comma, last), low, top, end)
        first_more = (
            seq(last, _chain(lowering, seq(style.comma, last), max(0, low - 1), top - 1, end)) if top else NEVER
        )
    if not fixed:
        return alt([first_more, EMPTY]) if flat.min_items == 0 else first_more
    for i in range(fixed - 1, -1, -1):
        item = lowering.goal(item_goal(flat, i))
        more = seq(style.comma if i else EMPTY, item, more)
        if i >= flat.min_items:
            more = alt([more, end if i else EMPTY])
        more = lowering.define(lowering.fresh("a"), more)
    return more


def _further(flat: Flat, fixed: int) -> Goal:
    longest = max((len(layer.first) for layer in flat.items), default=0)
    return item_goal(flat, max(fixed, longest))


def _chain(lowering: Lowering, item: Expr, low: int, high: int, end: Expr) -> Expr:
    """`item` from `low` to `high` times, then `end`: a rule for each count, so that the matcher never has to guess."""
    if item == NEVER or high <= 0:
        return end if low <= 0 else NEVER
    body: Expr = end
    for count in range(high - 1, -1, -1):
        body = seq(item, body)
        if count >= low:
            body = alt([body, end])
        body = lowering.define(lowering.fresh("n"), body)
    return body


def _with_contains(lowering: Lowering, flat: Flat) -> Expr:
    """At least n matching items among any: item* (match item*){n}."""
    found, style = flat.contains[0], lowering.style
    if len(flat.contains) > 1:
        raise refuse(flat.contains[1].pointer, "is supported only once in an array")
    if flat.max_items is not None or flat.min_items > found.low or any(layer.first for layer in flat.items):
        raise refuse(found.pointer, "is not supported together with maxItems, minItems or prefixItems")
    goal = item_goal(flat, 0)
    item = lowering.goal(goal)
    match = lowering.goal(goal | {found.literal})
    more = repeat(seq(style.comma, item), 0, None)
    first = seq(repeat(seq(item, style.comma), 0, None), match)
    rest = seq(*[seq(more, style.comma, match)] * (found.low - 1))
    return seq(first, rest, more, style.pad)
