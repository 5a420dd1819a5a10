"""Numbers between bounds: exactly those, as texts."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.guided.automaton import build
from specserve.guided.intervals import Bounds, decimals, integers, whole_range

_BOUNDS = st.decimals(min_value=-120, max_value=120, places=2)


@settings(max_examples=200, deadline=None)
@given(st.integers(-1200, 1200), st.integers(-1200, 1200))
def test_integers(a: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    dfa = build(integers(low, high))
    for x in {low - 1, low, low + 1, high - 1, high, high + 1, 0, 1, -1, 9, 10, 99, 100, 1000, -10, -100, (a + b) // 2}:
        assert dfa.accepts(str(x)) == (low <= x <= high), x
    for text in ("", "-", "00", "01", "-0", "+1", "1.0"):
        assert not dfa.accepts(text)


@settings(max_examples=300, deadline=None)
@given(
    st.none() | _BOUNDS, st.none() | _BOUNDS, st.booleans(), st.booleans(), st.lists(_BOUNDS, min_size=3, max_size=12)
)
def test_decimals(
    low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool, points: list[Decimal]
) -> None:
    bounds = Bounds(
        None if low is None else Fraction(low), None if high is None else Fraction(high), low_open, high_open
    )
    dfa = build(decimals(bounds))
    near = [d + e for d in (low, high) if d is not None for e in (Decimal(0), Decimal("0.001"), Decimal("-0.001"))]
    for point in {*points, *near, Decimal(0), Decimal(1), Decimal(-1), Decimal("0.5"), Decimal(100)}:
        text = format(point, "f") if point else "0"
        for form in {text, text.rstrip("0").rstrip(".") if "." in text else text}:
            if form not in ("-0", ""):
                assert dfa.accepts(form) == bounds.holds(Fraction(point)), form


@pytest.mark.parametrize("edges", ["0 0.5", "1 1", "2.5 2.75", "0.05 0.1", "-0.5 0", "0.9 1.1", "-1 1", "3 3.001"])
@pytest.mark.parametrize("low_open", [True, False])
@pytest.mark.parametrize("high_open", [True, False])
def test_bounds_close_together(edges: str, low_open: bool, high_open: bool) -> None:
    low, high = map(Fraction, edges.split())
    bounds = Bounds(low, high, low_open, high_open)
    dfa = build(decimals(bounds))
    near = [
        "0",
        "0.0",
        "0.1",
        "0.05",
        "0.5",
        "0.49",
        "1",
        "1.0",
        "1.00",
        "2.5",
        "2.50",
        "2.6",
        "2.75",
        "3",
        "3.0005",
        "3.001",
    ]
    for text in [
        *near,
        "-0.1",
        "-0.5",
        "-0.51",
        "-1",
        "-1.0",
        "0.9",
        "0.95",
        "1.1",
        "1.05",
        "1.2",
        "0.001",
        "0.0500001",
    ]:
        assert dfa.accepts(text) == bounds.holds(Fraction(text)), text


def test_whole_range() -> None:
    assert whole_range(Bounds(Fraction(1, 2), Fraction(7, 2))) == (1, 3)
    assert whole_range(Bounds(Fraction(1), Fraction(3), True, True)) == (2, 2)
    assert whole_range(Bounds(Fraction(-7, 2), Fraction(-1, 2))) == (-3, -1)
    assert whole_range(Bounds())[1] == 10**18 - 1
