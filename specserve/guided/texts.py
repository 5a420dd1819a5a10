"""String constraints as expressions of JSON text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from specserve.guided import automaton
from specserve.guided.automaton import Dfa, TooComplexError
from specserve.guided.document import refuse
from specserve.guided.expr import ANY, EMPTY, Alt, Class, Expr, Lit, Repeat, Seq, common, repeat, seq
from specserve.guided.flat import Flat, Pattern
from specserve.guided.formats import expression
from specserve.guided.jsontext import RAW, encode, free_char
from specserve.guided.regex import RegexError, parse, search

# Below this many characters a lower bound is written out, so that escapes stay possible.
SHORT = 16


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
        except RegexError:
            return None
    else:
        return None
    assert found is not None
    least, most = sizes(found)
    if isinstance(found, Repeat) and isinstance(found.item, Class) and common(found.item.ranges, RAW):
        return encode(_tightened(found, low, high))
    fits = least >= low and (high is None or (most is not None and most <= high))
    return encode(found) if fits else None


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
        if flat.min_length or flat.max_length is not None:
            parts.append(automaton.of_length(flat.min_length, flat.max_length))
        return automaton.intersect_all(parts) if parts else automaton.build(repeat(ANY, 0, None))
    except TooComplexError as error:
        raise refuse(where, f"together with the other constraints on this text it {error}") from None


def empty_text(flat: Flat) -> bool:
    """Whether no text at all satisfies the flat."""
    return string_dfa(flat).empty


__all__ = ["EMPTY", "direct", "pattern_dfa", "plain", "sizes", "string_dfa"]
