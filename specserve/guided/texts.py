"""String constraints as expressions of JSON text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from specserve.guided import automaton
from specserve.guided.automaton import Dfa, TooComplexError
from specserve.guided.document import refuse
from specserve.guided.expr import ANY, Alt, Class, Expr, Lit, Repeat, Seq, common, repeat, seq
from specserve.guided.flat import Flat, Pattern
from specserve.guided.formats import expression
from specserve.guided.jsontext import RAW, encode, free_char
from specserve.guided.regex import RegexError, counted_groups, parse, search, small

# Below this many characters a lower bound is written out, so that escapes stay possible.
SHORT = 16
# From this maxLength on, a pattern's loops may share the characters out instead of counting them exactly.
LONG = 64


@lru_cache(maxsize=512)
def _pattern_dfa(text: str, wide: bool) -> Dfa:
    anything = repeat(ANY, 0, None)
    return automaton.build(seq(anything, parse(text, wide=wide), anything))


@lru_cache(maxsize=64)
def _format_dfa(name: str) -> Dfa:
    found = expression(name)
    assert found is not None
    return automaton.build(found)


def pattern_dfa(pattern: Pattern, *, wide: bool = False) -> Dfa:
    """Texts that hold a match.

    Raises:
        GrammarError: the pattern is malformed, unsupported or too complex.
    """
    try:
        return _pattern_dfa(pattern.text, wide)
    except (RegexError, TooComplexError) as error:
        raise refuse(pattern.pointer, f"the regular expression {error}") from None


def sizes(expr: Expr) -> tuple[int, int | None]:
    """Shortest and longest text of `expr`."""
    if isinstance(expr, Lit):
        return len(expr.text), len(expr.text)
    if isinstance(expr, Class):
        return 1, 1
    if isinstance(expr, Repeat):
        low, high = sizes(expr.item)
        return low * expr.low, None if high is None or expr.high is None else high * expr.high
    if isinstance(expr, (Seq, Alt)) and expr.items:
        pairs = [sizes(item) for item in expr.items]
        lows, highs = [low for low, _ in pairs], [high for _, high in pairs]
        whole = [high for high in highs if high is not None]
        bounded = len(whole) == len(highs)
        if isinstance(expr, Seq):
            return sum(lows), sum(whole) if bounded else None
        return min(lows), max(whole) if bounded else None
    return 0, 0


def plain(low: int, high: int | None) -> Expr:
    """The inside of a string of `low` to `high` characters.

    With an upper bound it holds no escapes: the backend counts plain classes in constant time only.
    """
    if high is not None:
        return repeat(Class(RAW), low, high)
    if low <= SHORT:
        return seq(*[free_char()] * low, repeat(free_char(), 0, None))
    return seq(repeat(Class(RAW), low, low), repeat(free_char(), 0, None))


def direct(flat: Flat) -> Expr | None:
    """The inside of the string where one expression says all of it; None where an automaton is needed."""
    low, high = flat.min_length, flat.max_length
    if flat.excluded:
        return None
    if not flat.patterns and not flat.formats:
        return plain(low, high)
    if len(flat.patterns) + len(flat.formats) > 1:
        return None
    if flat.formats:
        found = expression(flat.formats[0][0])
    elif flat.patterns[0].positive:
        try:
            found = search(parse(flat.patterns[0].text))
            if counted_groups(found) > 1 and small(found) is not None:
                return None
        except RegexError:
            return None
    else:
        return None
    assert found is not None
    least, most = sizes(found)
    if isinstance(found, Repeat) and isinstance(found.item, Class) and common(found.item.ranges, RAW):
        return encode(_tightened(found, low, high))
    if high is not None and (most is None or most > high) and high >= LONG:
        found = _shared_out(found, least, high)
        most = None if found is None else sizes(found)[1]
    fits = found is not None and least >= low and (high is None or (most is not None and most <= high))
    return encode(found) if fits and found is not None else None


def _shared_out(expr: Expr, least: int, high: int) -> Expr | None:
    """A sequence whose unlimited loops share the characters that a generous maxLength leaves, in equal parts.

    It allows fewer texts than the standard does, never more; the exact automaton would have a state for each length.
    """
    if not isinstance(expr, Seq):
        return None
    loops = [i for i, item in enumerate(expr.items) if isinstance(item, Repeat) and item.high is None]
    if not loops or any(sizes(item)[1] is None for i, item in enumerate(expr.items) if i not in loops):
        return None
    slack = sum((sizes(item)[1] or 0) - sizes(item)[0] for i, item in enumerate(expr.items) if i not in loops)
    share = (high - least - slack) // len(loops)
    items = list(expr.items)
    for i in loops:
        item = items[i]
        assert isinstance(item, Repeat)
        if not isinstance(item.item, Class) or share < 1:
            return None
        items[i] = repeat(item.item, item.low, item.low + share)
    return seq(*items)


def _tightened(expr: Repeat, low: int, high: int | None) -> Expr:
    most = expr.high if high is None else high if expr.high is None else min(high, expr.high)
    return repeat(expr.item, max(low, expr.low), most)


def string_dfa(flat: Flat, extra: Iterable[Dfa] = ()) -> Dfa:
    """The texts that a string flat allows.

    Raises:
        GrammarError: a pattern is at fault, or all of it together is too complex.
    """
    parts = list(extra)
    if flat.values is not None:
        parts.append(automaton.literals(v for v in flat.values))
    for pattern in flat.patterns:
        dfa = pattern_dfa(pattern, wide=not pattern.positive)
        parts.append(dfa if pattern.positive else automaton.complement(dfa))
    parts.extend(_format_dfa(name) for name, _ in flat.formats)
    if flat.excluded:
        parts.append(automaton.complement(automaton.literals(v for v, _ in flat.excluded)))
    where = flat.patterns[0].pointer if flat.patterns else flat.formats[0][1] if flat.formats else ""
    try:
        whole = automaton.intersect_all(parts) if parts else automaton.build(repeat(ANY, 0, None))
        longest = max(flat.min_length, flat.max_length or 0)
        if not longest and flat.max_length is None:
            return whole
        if longest * len(whole.edges) > automaton.MAX_STATES * 2:
            raise TooComplexError(f"needs more than {automaton.MAX_STATES} states")
        return automaton.intersect(whole, automaton.of_length(flat.min_length, flat.max_length))
    except TooComplexError as error:
        raise refuse(where, f"together with the other constraints on this text it {error}") from None
