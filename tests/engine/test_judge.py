from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.core.errors import SpecserveError
from specserve.core.plan import TokenLogprobs
from specserve.core.sampling import SamplingParams
from specserve.engine.judge import Judge
from tests.fakes.grammar import ChoiceMatcher
from tests.fakes.vocab import EMOJI, EOS, SPECIAL, ToyVocabulary

V = ToyVocabulary()
EOS_IDS = frozenset({EOS})


def run(tokens, blocks=None, budget=1000, matcher=None, **params):
    """Judge in blocks of the given sizes: (ids, text, logprobs, reason, counted)."""
    judge = Judge(SamplingParams(**params), V.token_bytes, EOS_IDS, budget, matcher)
    ids, text, logprobs, reason, counted = [], "", [], None, 0
    at = 0
    for size in blocks or [len(tokens)]:
        block = tokens[at : at + size]
        at += size
        entries = [TokenLogprobs(t, -float(at)) for t in block]
        verdict = judge.judge(block, entries)
        release = verdict.release
        assert len(release.token_ids) == len(release.logprobs)
        ids += release.token_ids
        text += release.text
        logprobs += [entry.token_id for entry in release.logprobs]
        counted += verdict.num_tokens
        reason = verdict.finish_reason
        if reason:
            break
    assert logprobs == ids
    assert counted == judge.num_tokens
    return ids, text, reason, counted


def words(*texts):
    return [V.id(t) for t in texts]


def test_trap_a13_stop_text_completed_at_token_2_of_8():
    tokens = words("hello", "ST", "OP") + V.split("never")
    assert run(tokens, stop="STOP") == (words("hello"), "hello", "stop", 3)


def test_stop_text_in_the_middle_of_a_token_keeps_the_token_and_cuts_the_text():
    assert run(words("hello", " world"), stop="lo w") == (words("hello"), "hel", "stop", 2)
    assert run(words("hello", " world"), stop="or") == (words("hello", " world"), "hello w", "stop", 2)


@pytest.mark.parametrize(
    ("stop_at", "budget", "reason", "text"),
    [(3, 5, "stop", "ab"), (6, 5, "length", "abxyz"), (5, 5, "stop", "abxy")],
)
def test_trap_a14_stop_inside_and_outside_of_the_budget(stop_at, budget, reason, text):
    letters = "abxyzw"
    tokens = V.split(letters[: stop_at - 1] + "!" + letters)
    got = run(tokens, budget=budget, stop="!")
    assert got[1:3] == (text, reason)
    assert got[3] == min(stop_at, budget)


def test_trap_a16_end_token_in_the_middle_of_a_block():
    tokens = [*words("hello"), EOS, *words(" world")]
    assert run(tokens) == ([*words("hello"), EOS], "hello", "stop", 2)


def test_end_token_flushes_a_partial_stop_and_drops_an_incomplete_character():
    tokens = [*V.split("aST"), EOS]
    assert run(tokens, [1, 1, 1, 1], stop="STOP") == (tokens, "aST", "stop", 4)
    tokens = [*words("hello"), V.id("é".encode() + "ü".encode()[:1]), EOS]
    assert run(tokens) == (tokens, "helloé", "stop", 3)


def test_trap_e1_cut_by_the_budget_in_mid_character():
    tokens = [V.id(EMOJI[:2]), V.id(EMOJI[2:5]), V.id(EMOJI[5:])]
    ids, text, reason, _ = run(tokens, [1, 1, 1], budget=2)
    assert (ids, text, reason) == (tokens[:2], EMOJI[:4].decode(), "length")
    assert run(tokens, [1, 1, 1])[1] == EMOJI.decode()


def test_trap_e3_only_possible_prefixes_are_withheld():
    judge = Judge(SamplingParams(stop=["STOP", "!!"]), V.token_bytes, EOS_IDS, 100)
    shown = [judge.judge([token]).release for token in V.split("aSTb!c")]
    assert [r.text for r in shown] == ["a", "", "", "STb", "", "!c"]
    assert [len(r.token_ids) for r in shown] == [1, 0, 0, 3, 0, 2]


def test_stop_token_ids_and_ignored_end_tokens():
    judge = Judge(SamplingParams(ignore_eos=True), V.token_bytes, frozenset({V.id("}")}), 100)
    verdict = judge.judge([EOS, *words("hello", "}", " world")])
    assert verdict.finish_reason == "stop"
    assert (verdict.release.text, verdict.num_tokens) == ("hello", 3)


def test_min_tokens_puts_stop_texts_off():
    tokens = V.split("a!b!c")
    assert run(tokens, stop="!", min_tokens=3)[1:] == ("a!b", "stop", 4)
    assert run(tokens, stop="!", min_tokens=2)[1:] == ("a", "stop", 2)


def test_special_tokens_have_no_text():
    assert run([SPECIAL, *words("hello")])[:2] == ([SPECIAL, *words("hello")], "hello")


def test_trap_b9_nothing_follows_the_end_of_the_grammar():
    matcher = ChoiceMatcher((b"ab", b"abc"), V)
    # "ab" may become "abc": not complete yet.
    assert run([*words("ab"), *V.split("cx")], matcher=matcher) == ([*words("ab"), *V.split("c")], "abc", "stop", 2)
    matcher = ChoiceMatcher((b"ab", b"abc"), V)
    assert run([*words("ab"), EOS, 5], matcher=matcher) == ([*words("ab"), EOS], "ab", "stop", 2)


def test_trap_c27_grammar_cut_by_the_budget():
    matcher = ChoiceMatcher((b"abcab",), V)
    assert run(V.split("abcab"), budget=3, matcher=matcher)[1:3] == ("abc", "length")
    matcher = ChoiceMatcher((b"abc",), V)
    assert run(V.split("abc"), budget=3, matcher=matcher)[1:3] == ("abc", "stop")


def test_a_token_that_the_grammar_refuses_is_an_error():
    judge = Judge(SamplingParams(), V.token_bytes, EOS_IDS, 10, ChoiceMatcher((b"ab",), V))
    with pytest.raises(SpecserveError, match="refuses"):
        judge.judge(words("hello"))


def test_flush_gives_what_was_held_back():
    judge = Judge(SamplingParams(stop="STOP"), V.token_bytes, EOS_IDS, 10)
    assert judge.judge(words("ST")).release.token_ids == ()
    assert judge.flush().text == "ST"
    assert judge.flush().token_ids == ()


TOKENS = st.lists(st.sampled_from([EOS, SPECIAL, *range(80, 110), *range(190, 250), *range(258, V.vocab_size)]))
STOPS = st.one_of(st.none(), st.lists(st.text("abcdelo SOPT\n", min_size=1, max_size=4), min_size=1, max_size=3))


@given(TOKENS, STOPS, st.integers(1, 30), st.integers(0, 5), st.lists(st.integers(1, 5)))
def test_trap_a15_any_blocks_give_what_single_tokens_give(tokens, stops, budget, min_tokens, blocks):
    params = {"stop": stops, "min_tokens": min_tokens, "budget": budget}
    single = run(tokens, [1] * len(tokens), **params)
    several = run(tokens, [*blocks, len(tokens)], **params)
    if single[2] is not None:
        assert several == single
    else:
        # Still held back at the same place, however the tokens came.
        assert several[:2] == single[:2]
    ids, text, reason, counted = single
    assert tokens[: len(ids)] == ids
    assert counted <= budget
    whole = b"".join(map(V.token_bytes, tokens[:counted])).decode(errors="replace")
    assert whole.startswith(text)
    if reason == "stop" and counted and tokens[counted - 1] != EOS:
        assert any(whole[len(text) :].startswith(stop) for stop in stops)
        assert len(ids) <= counted
    elif reason is not None:
        assert ids == tokens[:counted]


def outcome(judge, tokens):
    """Everything that judging token by token shows, and whether the grammar refused one."""
    shown = []
    for token in tokens:
        try:
            verdict = judge.judge([token], [TokenLogprobs(token, -1.0)])
        except SpecserveError:
            return [*shown, "refused"]
        shown.append(verdict)
        if verdict.finish_reason:
            return shown
    return [*shown, judge.flush()]


@given(TOKENS, TOKENS, TOKENS, STOPS, st.integers(20, 60), st.integers(0, 5))
def test_a_fork_goes_on_by_itself(before, one, other, stops, budget, min_tokens):
    def begun():
        judge = Judge(SamplingParams(stop=stops, min_tokens=min_tokens), V.token_bytes, EOS_IDS, budget)
        ended = any(judge.judge([token], [TokenLogprobs(token, -1.0)]).finish_reason for token in before)
        return None if ended else judge

    judge = begun()
    if judge is None:
        return
    fork = judge.fork()
    assert outcome(fork, one) == outcome(begun(), one)
    assert outcome(judge, other) == outcome(begun(), other), "the fork changed nothing"


@pytest.mark.parametrize("first", ["fork", "judge"])
def test_a_fork_shares_no_held_text(first):
    """Half a stop text and half a character are held back by both, and each ends its own way."""
    judge = Judge(SamplingParams(stop="STOP"), V.token_bytes, EOS_IDS, 100)
    half = V.id(EMOJI[:2])
    assert judge.judge([*words("hello", "ST")]).release.text == "hello"
    forks = {"fork": judge.fork(), "judge": judge}
    one, other = forks.pop(first), forks.popitem()[1]
    verdict = one.judge(V.split("x"))
    assert (verdict.release.text, verdict.release.token_ids) == ("STx", (*words("ST"), *V.split("x")))
    verdict = other.judge(words("OP"))
    assert (verdict.release.text, verdict.release.token_ids, verdict.finish_reason) == ("", (), "stop")
    assert one.judge([half]).release.text == ""
    copy = one.fork()
    assert copy.judge(V.split("y")).release.text == "\ufffdy"
    assert one.judge([V.id(EMOJI[2:5]), V.id(EMOJI[5:])]).release.text == EMOJI.decode()


def test_a_fork_has_a_grammar_state_of_its_own():
    judge = Judge(SamplingParams(), V.token_bytes, EOS_IDS, 100, ChoiceMatcher((b"abx", b"aby"), V))
    judge.judge(V.split("ab"))
    fork = judge.fork()
    assert fork.judge(V.split("x")).finish_reason == "stop"
    assert judge.num_tokens == 2
    assert judge.judge(V.split("y")).finish_reason == "stop"


@given(TOKENS, st.sampled_from([EOS, SPECIAL, *range(97, 110), *range(258, V.vocab_size)]), STOPS, st.integers(20, 60))
def test_end_by_says_what_judging_would_and_changes_nothing(before, token, stops, budget):
    for matcher in (None, ChoiceMatcher((b"ab", b"abc", b"hello world"), V)):
        judge = Judge(SamplingParams(stop=stops, min_tokens=2), V.token_bytes, EOS_IDS, budget, matcher)
        for each in before:
            if matcher is not None and not matcher._legal(each):
                continue
            if judge.judge([each]).finish_reason:
                return
        if matcher is not None and not matcher._legal(token):
            continue
        expected = judge.fork().judge([token])
        assert judge.end_by(token) == expected.finish_reason
        assert judge.judge([token]) == expected


@pytest.mark.parametrize("budget", [1, 2])
def test_end_by_knows_the_budget(budget):
    judge = Judge(SamplingParams(), V.token_bytes, EOS_IDS, budget)
    assert judge.end_by(V.id("ab")) == ("length" if budget == 1 else None)
    assert judge.end_by(EOS) == "stop"
