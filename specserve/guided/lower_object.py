"""Object constraints as expressions of JSON text.

Declared properties come in their declared order, then those that only patterns or additionalProperties allow. A name
of the second kind is never one of the first, so no property can be written twice with another meaning.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from specserve.guided import automaton
from specserve.guided.automaton import Dfa, TooComplexError
from specserve.guided.document import refuse
from specserve.guided.expand import member_goal
from specserve.guided.expr import EMPTY, NEVER, Expr, Lit, alt, opt, repeat, seq
from specserve.guided.flat import NOTHING, Flat, Pattern
from specserve.guided.jsontext import quoted, string
from specserve.guided.texts import pattern_dfa, string_dfa
from specserve.guided.values import matched_patterns, satisfies

if TYPE_CHECKING:
    from specserve.guided.lower import Lowering

MAX_PATTERNS = 5
MAX_COUNTED = 2_000


def members(lowering: Lowering, flat: Flat) -> Expr:
    """The JSON objects that a flat allows."""
    style = lowering.style
    declared = list(dict.fromkeys([n for layer in flat.members for n, _ in layer.named] + list(flat.required)))
    entries: list[tuple[Expr, bool]] = []
    for name in declared:
        entry = _entry(lowering, flat, name)
        if entry != NEVER or name in flat.required:
            entries.append((entry, name in flat.required))
    extra = _extra(lowering, flat, declared)
    most, least = flat.max_members, flat.min_members
    needed = sum(is_needed for _, is_needed in entries)
    if least > needed or (most is not None and (extra != NEVER or most < len(entries))):
        inside = _counted(lowering, flat, entries, extra)
    else:
        inside = _ordered(lowering, entries, extra)
    return seq(Lit("{"), style.pad, inside, Lit("}"))


def _entry(lowering: Lowering, flat: Flat, name: str) -> Expr:
    goal = member_goal(flat, name, matched_patterns(flat, name))
    if NOTHING in goal or not _name_allowed(lowering, flat, name):
        return NEVER
    if not lowering.expander.expand(goal):
        return NEVER
    return seq(string(name), lowering.style.colon, lowering.goal(goal))


def _name_allowed(lowering: Lowering, flat: Flat, name: str) -> bool:
    return not flat.names or satisfies(lowering.expander, frozenset(flat.names), name)


def _ordered(lowering: Lowering, entries: list[tuple[Expr, bool]], extra: Expr) -> Expr:
    """Entries in order, separated by commas; `following` is what may come once one entry is written."""
    style = lowering.style
    more = repeat(seq(style.comma, extra), 0, None)
    following: Expr = seq(more, style.pad)
    # nothing written yet: an extra entry may be the first, or the object stays empty
    starting: Expr = alt([seq(extra, following), EMPTY])
    for entry, is_needed in reversed(entries):
        first = seq(entry, following)
        starting = first if is_needed else alt([first, starting])
        after = seq(style.comma, entry)
        following = lowering.define(lowering.fresh("o"), seq(after if is_needed else opt(after), following))
    return starting


def _counted(lowering: Lowering, flat: Flat, entries: list[tuple[Expr, bool]], extra: Expr) -> Expr:
    """As `_ordered`, with the number of entries kept within minProperties and maxProperties.

    A grammar cannot tell whether two extra names differ, so at most one of them counts for minProperties.
    """
    style, low, high = lowering.style, flat.min_members, flat.max_members
    if extra != NEVER and low > len(entries) + 1:
        raise refuse("", f"minProperties {low} needs more distinct names than the schema declares; not supported")
    top = max(low, high or 0)
    if (len(entries) + 2) * (top + 2) > MAX_COUNTED:
        raise refuse("", f"minProperties or maxProperties {top} is too large")
    known: dict[tuple[int, int], Expr] = {}

    def more(count: int) -> Expr:
        """Extra entries only, from `count` entries on; each state's name is its count."""
        if high is None:
            tail = seq(repeat(seq(style.comma, extra), 0, None), style.pad)
            head = seq(style.comma if count else EMPTY, extra, tail)
            done = tail if count else EMPTY
            return done if count >= low else head if count + 1 >= low else NEVER
        body: Expr = style.pad
        for n in range(high - 1, count - 1, -1):
            body = seq(style.comma if n else EMPTY, extra, body)
            # only the first of them counts for the lower bound
            body = alt([body, style.pad if n else EMPTY]) if n > count or n >= low else body
        if max(count, min(high, count + 1) if extra != NEVER else count) < low:
            return NEVER
        return body

    def state(i: int, count: int) -> Expr:
        if high is not None and count > high:
            return NEVER
        if i == len(entries):
            return more(count)
        if (i, count) not in known:
            entry, is_needed = entries[i]
            with_it = seq(style.comma if count else EMPTY, entry, state(i + 1, min(count + 1, cap)))
            body = with_it if is_needed else alt([with_it, state(i + 1, count)])
            known[i, count] = lowering.define(lowering.fresh("c"), body)
        return known[i, count]

    # without an upper bound counts above the lower one need not be told apart
    cap = 10**9 if high is not None else max(low, 1)
    return state(0, 0)


def _extra(lowering: Lowering, flat: Flat, declared: list[str]) -> Expr:
    """One entry whose name is not declared: for each set of patterns that a name can match, names and values."""
    patterns = list({p.text: p for layer in flat.members for p, _ in layer.patterns}.values())
    if len(patterns) > MAX_PATTERNS:
        raise refuse(patterns[-1].pointer, f"more than {MAX_PATTERNS} patterns for one object are not supported")
    branches = []
    for choice in product((True, False), repeat=len(patterns)):
        matched = frozenset(p.text for p, yes in zip(patterns, choice, strict=True) if yes)
        goal = member_goal(flat, "\0undeclared", matched)
        if NOTHING in goal or not lowering.expander.expand(goal):
            continue
        names = _names(lowering, flat, declared, list(zip(patterns, choice, strict=True)))
        key = lowering.automaton(names)
        if key != NEVER:
            branches.append(seq(quoted(key), lowering.style.colon, lowering.goal(goal)))
    return alt(branches)


def _names(lowering: Lowering, flat: Flat, declared: list[str], patterns: list[tuple[Pattern, bool]]) -> Dfa:
    parts = []
    for pattern, yes in patterns:
        parts.append(pattern_dfa(pattern) if yes else automaton.complement(pattern_dfa(pattern, wide=True)))
    if declared:
        parts.append(automaton.complement(automaton.literals(declared)))
    where = patterns[0][0].pointer if patterns else ""
    try:
        if not flat.names:
            return automaton.intersect_all(parts) if parts else string_dfa(Flat("string"))
        # names of several shapes: the union is the complement of the common part of the complements
        shapes = lowering.expander.expand(frozenset(flat.names)).get("string", [])
        options = [string_dfa(shape, parts) for shape in shapes]
        if len(options) <= 1:
            return options[0] if options else automaton.literals([])
        return automaton.complement(automaton.intersect_all(automaton.complement(option) for option in options))
    except TooComplexError as error:
        raise refuse(where, f"the property names {error}") from None
