from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.core.protocols import DraftContext
from specserve.core.request import Request
from specserve.core.sampling import SamplingParams
from specserve.spec.suffix import SuffixDrafter, SuffixIndex
from tests.fakes.drive import PatternMatcher


def request(tokens, name="r", **params):
    return Request(name, list(tokens), SamplingParams(**params))


def draft(tokens, budget=4, shortest=2, longest=8, matcher=None, **params):
    drafter = SuffixDrafter(shortest, longest, eos_ids=[0])
    return drafter.propose([DraftContext(request(tokens, **params), budget, matcher)])[0].tokens


def test_the_continuation_of_the_last_match():
    assert draft([1, 2, 3, 4, 9, 1, 2]) == (3, 4, 9, 1)
    assert draft([1, 2, 3, 1, 2, 7, 8, 6, 1, 2]) == (7, 8, 6, 1), "the most recent one"
    assert draft([5, 1, 2, 3, 6, 1, 2, 4, 7, 5, 1, 2]) == (3, 6, 1, 2), "the longest suffix first"


def test_no_match():
    assert draft([1, 2, 3, 4]) == ()
    assert draft([1]) == ()
    assert draft([4, 1, 5, 1], shortest=2) == ()
    assert draft([4, 1, 5, 1], shortest=1) == (5, 1, 5, 1)


def test_periods_go_on():
    assert draft([1, 2, 1, 2], budget=5) == (1, 2, 1, 2, 1)
    assert draft([3, 3, 3], budget=3) == (3, 3, 3)


def test_nothing_is_drafted_past_an_end_token():
    assert draft([1, 2, 0, 4, 1, 2]) == (0,)
    assert draft([1, 2, 0, 4, 1, 2], ignore_eos=True) == (0, 4, 1, 2)
    assert draft([1, 2, 3, 4, 1, 2], stop_token_ids=(3,)) == (3,)


def test_trap_b2_cut_at_the_first_token_the_grammar_refuses():
    matcher = PatternMatcher([[3], [4], [5]], 9)
    assert draft([1, 2, 3, 4, 9, 1, 2], matcher=matcher) == (3, 4)
    assert matcher.accepted == []


def test_a_shorter_suffix_is_tried_where_the_longest_is_illegal():
    matcher = PatternMatcher([[4]], 9)
    assert draft([5, 1, 2, 3, 6, 1, 2, 4, 7, 5, 1, 2], budget=1, matcher=matcher) == (4,)


def test_forget_and_reuse_of_an_id():
    drafter = SuffixDrafter(2, 4)
    drafter.propose([DraftContext(request([1, 2, 3, 1, 2]), 2)])
    drafter.forget("r")
    drafter.forget("unknown")
    assert drafter.propose([DraftContext(request([7, 8, 9, 7, 8]), 2)])[0].tokens == (9, 7)
    shorter = drafter.propose([DraftContext(request([4, 5, 4, 5][:3]), 2)])[0]
    assert shorter.tokens == (), "an id that came back with less text starts anew"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=12))
def test_the_incremental_index_equals_a_search(tokens, cuts):
    index = SuffixIndex(2, 5)
    at = 0
    for step in [*cuts, len(tokens)]:
        at = min(at + step, len(tokens))
        index.extend(tokens[:at])
    expected = []
    for n in range(min(5, len(tokens)), 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]]
        if ends and ends[-1] not in expected:
            expected.append(ends[-1])
    assert index.continuations(tokens) == expected
