from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specserve.engine.stops import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(end, length) of the stop that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [len(s) for s in stops if text[:end].endswith(s)]
        if found:
            return end, max(found)
    return None


@given(st.text("abc", max_size=40), STOPS)
def test_finds_what_a_naive_search_finds(text, stops):
    matcher = StopMatcher(stops)
    expected = first_match(text, stops)
    for end, char in enumerate(text, 1):
        length = matcher.feed(char)
        if length:
            assert (end, length) == expected
            return
    assert expected is None


@given(st.text("abc", max_size=40), STOPS)
def test_trap_e3_withholds_exactly_the_longest_possible_prefix(text, stops):
    matcher = StopMatcher(stops)
    for end, char in enumerate(text, 1):
        matcher.feed(char)
        seen = text[:end]
        prefixes = [n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])]
        assert matcher.withheld == max(prefixes, default=0)


def test_without_stops_nothing_is_withheld():
    matcher = StopMatcher(())
    assert not matcher
    assert matcher.feed("a") == 0
    assert matcher.withheld == 0


@given(st.text("abc", max_size=20), st.text("abc", max_size=20), st.text("abc", max_size=20), STOPS)
def test_a_fork_goes_on_by_itself(before, one, other, stops):
    def found(matcher, text):
        return [(matcher.feed(char), matcher.withheld) for char in text]

    matcher = StopMatcher(stops)
    found(matcher, before)
    fork = matcher.fork()
    assert bool(fork)
    both = found(fork, one), found(matcher, other)
    for text, got in zip((one, other), both, strict=True):
        alone = StopMatcher(stops)
        found(alone, before)
        assert found(alone, text) == got
