"""Decimal texts of the numbers between two bounds."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from specserve.guided.expr import DIGIT, EMPTY, NEVER, Class, Expr, Lit, alt, opt, repeat, seq
from specserve.guided.jsontext import FRACTION_DIGITS, INTEGER_DIGITS

MAX_BOUND_DIGITS = 40


@dataclass(frozen=True, slots=True)
class Bounds:
    """low <= x <= high, or < where open; None is without bound."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False

    @property
    def free(self) -> bool:
        return self.low is None and self.high is None

    @property
    def empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def meet(self, other: Bounds) -> Bounds:
        """Numbers inside both."""
        low, low_open = _tighter(self.low, self.low_open, other.low, other.low_open, above=True)
        high, high_open = _tighter(self.high, self.high_open, other.high, other.high_open, above=False)
        return Bounds(low, high, low_open, high_open)

    def holds(self, x: Fraction) -> bool:
        over = self.low is None or x > self.low or (x == self.low and not self.low_open)
        return over and (self.high is None or x < self.high or (x == self.high and not self.high_open))


UNBOUNDED = Bounds()


def _tighter(
    a: Fraction | None, a_open: bool, b: Fraction | None, b_open: bool, *, above: bool
) -> tuple[Fraction | None, bool]:
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if (a > b) == above else (b, b_open)


def exact(number: int | float) -> Fraction:
    """The decimal that a JSON number's text stands for."""
    return Fraction(Decimal(repr(number)) if isinstance(number, float) else number)


def whole_range(bounds: Bounds) -> tuple[int, int]:
    """The least and the greatest whole number inside, cut to INTEGER_DIGITS digits."""
    most = 10**INTEGER_DIGITS - 1
    low, high = -most, most
    if bounds.low is not None:
        floor = bounds.low.numerator // bounds.low.denominator
        low = max(low, floor + 1 if bounds.low_open or floor != bounds.low else floor)
    if bounds.high is not None:
        ceiling = -(-bounds.high.numerator // bounds.high.denominator)
        high = min(high, ceiling - 1 if bounds.high_open or ceiling != bounds.high else ceiling)
    return low, high


def integers(low: int, high: int) -> Expr:
    """Whole numbers from `low` to `high`, without leading zeros and without -0."""
    branches = []
    if low < 0 and low <= high:
        branches.append(seq(Lit("-"), _naturals(max(1, -high), -low)))
    if high >= 0 and low <= high:
        branches.append(_naturals(max(0, low), high))
    return alt(branches)


def _naturals(low: int, high: int) -> Expr:
    if low > high:
        return NEVER
    branches: list[Expr] = []
    full: list[int] = []  # lengths whose whole range is inside
    for size in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = min(high, 10**size - 1)
        if size > 1 and first == 10 ** (size - 1) and last == 10**size - 1:
            full.append(size)
        else:
            branches.append(_between(str(first), str(last)))
    if full:
        branches.append(seq(_digits(1, 9), repeat(DIGIT, full[0] - 1, full[-1] - 1)))
    return alt(branches)


def _digits(low: int, high: int) -> Expr:
    return Class(((0x30 + low, 0x30 + high),)) if low <= high else NEVER


def _between(low: str, high: str) -> Expr:
    """Digit texts from `low` to `high`, both of one length."""
    n = len(low)
    if not n:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(DIGIT, n, n)
    a, b = int(low[0]), int(high[0])
    if a == b:
        return seq(Lit(low[0]), _between(low[1:], high[1:]))
    return alt(
        [
            seq(Lit(low[0]), _between(low[1:], "9" * (n - 1))),
            seq(_digits(a + 1, b - 1), repeat(DIGIT, n - 1, n - 1)),
            seq(Lit(high[0]), _between("0" * (n - 1), high[1:])),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Tail:
    """Texts of fraction digits (missing ones count as 0): whether none at all is right, and the non-empty ones."""

    nullable: bool
    some: Expr

    def after(self, digit: int) -> Expr:
        return seq(Lit(str(digit)), alt([self.some, EMPTY]) if self.nullable else self.some)


_ZERO = Lit("0")


def _free(size: int) -> _Tail:
    return _Tail(True, repeat(DIGIT, 1, size) if size > 0 else NEVER)


def _rest(size: int) -> Expr:
    return repeat(DIGIT, 0, max(0, size - 1))


def _from(low: str, is_open: bool, size: int) -> _Tail:
    """Fractions of at least (more than) 0.low with about `size` digits."""
    if not low:
        if not is_open:
            return _free(size)
        zeros = repeat(_ZERO, 0, max(0, size - 1))
        return _Tail(False, seq(zeros, _digits(1, 9), _rest(size)) if size > 0 else NEVER)
    digit = int(low[0])
    tail = _from(low[1:], is_open, size - 1)
    return _Tail(False, alt([seq(_digits(digit + 1, 9), _rest(size)), tail.after(digit)]))


def _upto(high: str, is_open: bool, size: int) -> _Tail:
    """Fractions of at most (less than) 0.high."""
    if not high:
        return _Tail(not is_open, NEVER if is_open or size <= 0 else repeat(_ZERO, 1, size))
    digit = int(high[0])
    tail = _upto(high[1:], is_open, size - 1)
    return _Tail(True, alt([seq(_digits(0, digit - 1), _rest(size)), tail.after(digit)]))


def _inside(low: str, low_open: bool, high: str, high_open: bool, size: int) -> _Tail:
    nullable = not low and not low_open and (bool(high) or not high_open)
    if not low and not high:
        return _Tail(nullable, repeat(_ZERO, 1, size) if nullable and size > 0 else NEVER)
    a, b = int(low[:1] or 0), int(high[:1] or 0)
    if a > b:
        return _Tail(False, NEVER)
    if a == b:
        return _Tail(nullable, _inside(low[1:], low_open, high[1:], high_open, size - 1).after(a))
    return _Tail(
        nullable,
        alt(
            [
                _from(low[1:], low_open, size - 1).after(a),
                seq(_digits(a + 1, b - 1), _rest(size)),
                _upto(high[1:], high_open, size - 1).after(b),
            ]
        ),
    )


def _split(x: Fraction) -> tuple[int, str]:
    """Whole part and fraction digits of a decimal >= 0."""
    whole = x.numerator // x.denominator
    rest = x - whole
    digits = ""
    while rest and len(digits) <= MAX_BOUND_DIGITS:
        rest *= 10
        digits += str(rest.numerator // rest.denominator)
        rest -= rest.numerator // rest.denominator
    if rest:
        raise ValueError("a bound with so many digits is not supported")
    return whole, digits


def decimals(bounds: Bounds) -> Expr:
    """Numbers inside the bounds, in positional notation.

    Raises:
        ValueError: a bound has too many digits.
    """
    zero = Fraction(0)
    branches = []
    if bounds.high is None or bounds.high >= 0:
        low, low_open = _tighter(bounds.low, bounds.low_open, zero, False, above=True)
        branches.append(_magnitudes(low or zero, low_open, bounds.high, bounds.high_open))
    if bounds.low is None or bounds.low < 0:
        flipped = None if bounds.low is None else -bounds.low
        high = None if bounds.high is None else -bounds.high
        low, low_open = _tighter(high, bounds.high_open, zero, True, above=True)
        branches.append(seq(Lit("-"), _magnitudes(low or zero, low_open, flipped, bounds.low_open)))
    return alt(branches)


def _magnitudes(low: Fraction, low_open: bool, high: Fraction | None, high_open: bool) -> Expr:
    # A double tells 15 digits apart: fewer digits keep x < bound true after the text was read as a double.
    tightest = len(str(int(low if high is None else high)))
    if high is None:
        high, high_open = Fraction(10**INTEGER_DIGITS), True
    if low > high or (low == high and (low_open or high_open)):
        return NEVER
    a, fa = _split(low)
    b, fb = _split(high)
    size = min(FRACTION_DIGITS, max(1, 15 - tightest, len(fa) + 1, len(fb) + 1))

    def number(whole: Expr, tail: _Tail) -> Expr:
        dotted = seq(Lit("."), tail.some)
        return seq(whole, opt(dotted) if tail.nullable else dotted)

    if a == b:
        return number(Lit(str(a)), _inside(fa, low_open, fb, high_open, size))
    return alt(
        [
            number(Lit(str(a)), _from(fa, low_open, size)),
            number(_naturals(a + 1, b - 1), _free(size)),
            number(Lit(str(b)), _upto(fb, high_open, size)),
        ]
    )
