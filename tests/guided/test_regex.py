"""Regular expressions and automata against Python's own engine."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.guided import automaton
from specserve.guided.automaton import TooComplexError, build, complement, intersect, literals
from specserve.guided.expr import ANY, UNIVERSE, chars, common, invert, repeat, seq
from specserve.guided.regex import RegexError, full, parse, search

_ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", "[a-c1]", r"\.", "x?", "(?:ab)"])
_PATTERNS = st.recursive(
    _ATOMS,
    lambda p: st.one_of(
        st.builds(lambda x, y: x + y, p, p),
        st.builds(lambda x, y: f"({x}|{y})", p, p),
        st.builds(lambda x, q: f"(?:{x}){q}", p, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?"])),
    ),
    max_leaves=6,
)
_TEXTS = st.text(alphabet="abc1. x", max_size=6)


@settings(max_examples=300, deadline=None)
@given(_PATTERNS, st.booleans(), st.booleans(), st.lists(_TEXTS, max_size=6))
def test_search_and_full_agree_with_python(pattern: str, begins: bool, ends: bool, texts: list[str]) -> None:
    anchored = ("^" if begins else "") + f"(?:{pattern})" + (r"$" if ends else "")
    found = build(search(parse(anchored)))
    whole = build(full(parse(pattern)))
    other = complement(found)
    for text in texts:
        matches = re.search(anchored, text) is not None
        assert found.accepts(text) == matches
        assert other.accepts(text) != matches
        assert whole.accepts(text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["a^b", "(^a|b)c", "a$b", "x(^|y)z", "(a|$)", "^^a$$", "(^a$|^b)"])
def test_anchors_anywhere_in_an_automaton(pattern: str) -> None:
    anything = repeat(ANY, 0, None)
    dfa = build(seq(anything, parse(pattern), anything))
    for text in ("", "a", "b", "ab", "bc", "ac", "xyz", "xz", "xc", "bcx"):
        assert dfa.accepts(text) == (re.search(pattern, text) is not None), text


def test_intersection_and_literals() -> None:
    a = build(full(parse("[ab]+")))
    b = build(full(parse(".{2,3}")))
    both = intersect(a, b)
    assert [t for t in ("a", "ab", "aba", "abab", "abc") if both.accepts(t)] == ["ab", "aba"]
    assert literals(["a", "", "ab"]).accepts("")
    assert intersect(a, literals(["x"])).empty


def test_wide_and_narrow_readings() -> None:
    narrow, wide = build(parse(r"\d")), build(parse(r"\d", wide=True))
    assert not narrow.accepts("٣")
    assert wide.accepts("٣")
    assert not build(parse(r"\D")).accepts("٣")
    assert build(parse(r"[^\D]", wide=True)).accepts("٣")
    assert not build(parse(r"[^\D]")).accepts("٣")
    assert not build(parse(".")).accepts("\u2028")
    assert build(parse(".", wide=True)).accepts("\u2028")


@pytest.mark.parametrize(
    "pattern", ["(?=a)", r"\1", r"\b", "(?<n>a)\\k<n>", "[", "a{2,1}", "[]", r"\u12", r"\q", "a++"]
)
def test_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        parse(pattern)


def test_limits() -> None:
    with pytest.raises(RegexError, match="nest"):
        parse("(" * 10_000)
    with pytest.raises(RegexError, match="long"):
        parse("a" * 100_000)
    with pytest.raises(TooComplexError):
        build(parse("(a|b)*a(a|b){14}"))
    with pytest.raises(TooComplexError):
        build(parse("((a{99}){99}){99}"))


def test_sets_of_characters() -> None:
    assert invert(invert(chars("az"))) == chars("az")
    assert common(chars("abc"), chars("bcd")) == chars("bc")
    assert common(UNIVERSE, invert(invert(chars("q")))) == chars("q")


def test_rules_of_an_automaton_name_each_state_once() -> None:
    rules = automaton.to_rules(build(full(parse("(ab)*c"))), "s", lambda ranges: seq())
    assert set(rules) == {"s_0", "s_1", "s_2"}
