"""How values are written as JSON text: separators, strings, numbers.

The grammar fixes one way to write each value where it can: fixed separators instead of free whitespace (small models
otherwise emit blanks for ever), a bounded number of digits, and escapes only where JSON needs them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from specserve.guided.expr import (
    DIGIT,
    EMPTY,
    NEVER,
    Alt,
    Class,
    Expr,
    Lit,
    Ranges,
    Ref,
    Repeat,
    Seq,
    alt,
    chars,
    common,
    invert,
    opt,
    ranges_of,
    repeat,
    seq,
)

# Digits of a whole number (every 18-digit number fits 64 bits), of a fraction and of an exponent.
INTEGER_DIGITS = 18
FRACTION_DIGITS = 17
EXPONENT_DIGITS = 2
# Blanks in one place under the "flexible" style.
MAX_BLANKS = 16

# Characters that a JSON string holds as they are.
RAW = invert(ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))
_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_HEX = Class(chars("0123456789abcdefABCDEF"))


@dataclass(frozen=True, slots=True)
class Style:
    """What stands between tokens.

    Attributes:
        comma, colon: separators with their blanks.
        pad: blanks inside brackets.
    """

    comma: Expr
    colon: Expr
    pad: Expr


def style_of(name: str) -> Style | None:
    """ "spaced" (", " and ": ", the default), "compact" or "flexible" (at most 16 blanks in one place)."""
    if name == "spaced":
        return Style(Lit(", "), Lit(": "), EMPTY)
    if name == "compact":
        return Style(Lit(","), Lit(":"), EMPTY)
    if name == "flexible":
        blanks = repeat(Class(chars(" \n\t\r")), 0, MAX_BLANKS)
        return Style(seq(blanks, Lit(","), blanks), seq(blanks, Lit(":"), blanks), blanks)
    return None


def encode_class(ranges: Ranges) -> Expr:
    """One character out of `ranges` inside a JSON string; control characters without a short escape are left out."""
    branches: list[Expr] = []
    raw = common(ranges, RAW)
    if raw:
        branches.append(Class(raw))
    escaped = "".join(short for char, short in _ESCAPES.items() if common(ranges, chars(char)))
    if escaped:
        branches.append(seq(Lit("\\"), Class(chars(escaped))))
    return alt(branches)


def encode(expr: Expr) -> Expr:
    """`expr` over characters, as the inside of a JSON string.

    Long bounded repeats of one class hold no escapes: the backend matches plain classes in constant time only.
    """
    if isinstance(expr, Class):
        return encode_class(expr.ranges)
    if isinstance(expr, Lit):
        return seq(*(encode_class(chars(char)) for char in expr.text))
    if isinstance(expr, Seq):
        return seq(*(encode(item) for item in expr.items))
    if isinstance(expr, Alt):
        return alt([encode(item) for item in expr.items])
    if isinstance(expr, Repeat):
        raw = common(expr.item.ranges, RAW) if isinstance(expr.item, Class) else ()
        if raw and expr.high is not None and expr.high > 1:
            return repeat(Class(raw), expr.low, expr.high)
        return repeat(encode(expr.item), expr.low, expr.high)
    raise TypeError(f"{type(expr).__name__} cannot stand inside a JSON string")


def free_char() -> Expr:
    """One character of an unconstrained string, in any form that every JSON parser reads as one."""
    code = alt(
        [
            seq(Class(chars("0123456789abcefABCEF")), repeat(_HEX, 3, 3)),
            seq(Class(chars("dD")), Class(chars("01234567")), repeat(_HEX, 2, 2)),
        ]
    )
    return alt([Class(RAW), seq(Lit("\\"), alt([Class(chars('"\\/bfnrt')), seq(Lit("u"), code)]))])


def quoted(inside: Expr) -> Expr:
    """A JSON string with this inside."""
    return seq(Lit('"'), inside, Lit('"'))


def string(text: str) -> Expr:
    """The JSON string of `text`."""
    return Lit(json.dumps(text, ensure_ascii=False))


def integer() -> Expr:
    """Any whole number of at most INTEGER_DIGITS digits."""
    return alt([Lit("0"), seq(opt(Lit("-")), Class(chars("123456789")), repeat(DIGIT, 0, INTEGER_DIGITS - 1))])


def number() -> Expr:
    """Any number, its digits bounded."""
    whole = alt([Lit("0"), seq(Class(chars("123456789")), repeat(DIGIT, 0, INTEGER_DIGITS - 1))])
    fraction = seq(Lit("."), repeat(DIGIT, 1, FRACTION_DIGITS))
    exponent = seq(Class(chars("eE")), opt(Class(chars("+-"))), repeat(DIGIT, 1, EXPONENT_DIGITS))
    return seq(opt(Lit("-")), whole, opt(fraction), opt(exponent))


def value(data: object, style: Style) -> Expr:
    """One JSON value, its keys in their order."""
    if isinstance(data, dict):
        items = [seq(string(key), style.colon, value(item, style)) for key, item in data.items()]
        return bracketed("{", items, "}", style)
    if isinstance(data, list):
        return bracketed("[", [value(item, style) for item in data], "]", style)
    if isinstance(data, str):
        return string(data)
    return Lit(json.dumps(data))


def bracketed(start: str, items: list[Expr], end: str, style: Style) -> Expr:
    """Items between brackets, separated by commas."""
    if NEVER in items:
        return NEVER
    joined = [part for item in items for part in (style.comma, item)][1:]
    return seq(Lit(start), style.pad, *joined, *((style.pad,) if items else ()), Lit(end))


def _list_of(item: Expr, style: Style) -> Expr:
    return opt(seq(item, repeat(seq(style.comma, item), 0, None), style.pad))


def any_value_rules(style: Style) -> dict[str, Expr]:
    """Rules "any", "any_object", "any_array", "any_string" for unconstrained JSON."""
    member = seq(Ref("any_string"), style.colon, Ref("any"))
    return {
        "any": alt(
            [Ref("any_object"), Ref("any_array"), Ref("any_string"), number(), Lit("true"), Lit("false"), Lit("null")]
        ),
        "any_object": seq(Lit("{"), style.pad, _list_of(member, style), Lit("}")),
        "any_array": seq(Lit("["), style.pad, _list_of(Ref("any"), style), Lit("]")),
        "any_string": quoted(repeat(free_char(), 0, None)),
    }
