"""Rows beside the paper's figures."""

import pytest

from bench.policies.report import Report


def test_a_range_is_met_by_what_lies_within():
    report = Report()
    for value in (1.0, 2.0, 3.0):
        report.add(f"v{value}", value, "x", (1.7, 2.7))
    assert [r.ratio for r in report.rows] == pytest.approx([1 / 1.7, 1.0, 3 / 2.7])
    assert [r.ok for r in report.rows] == [None] * 3, "a deviation is no failure"


def test_a_goal_is_judged_by_the_median():
    report = Report()
    report.add("share", [95.0, 97.0, 98.0], "%", 96.3, goal=96.3)
    report.add("share", [95.0, 96.0, 98.0], "%", 96.3, goal=96.3)
    assert [r.ok for r in report.rows] == [True, False]
    assert report.rows[0].spread == pytest.approx(1.5 / 97)


def test_an_ordering_holds_only_in_that_order():
    report = Report()
    values = {"a": 4.0, "b": 2.0, "c": 1.0}
    report.ordering("x", values, ["a", "b", "c"])
    report.ordering("x", values, ["b", "a", "c"])
    report.ordering("x", {**values, "b": 4.0}, ["a", "b", "c"])
    assert [r.ok for r in report.rows] == [True, False, False]
    assert report.rows[0].value == 2.0
