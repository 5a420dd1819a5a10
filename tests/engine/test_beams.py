"""Beam search in the engine: the reference's answers, whatever drafts, blocks, preemption and neighbours do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    FinishedEvent,
    ProgressEvent,
    StartedEvent,
)
from tests.engine.test_beam_search import EARLY, PENALTIES, Found, Rules, reference, same
from tests.fakes.engines import SIZE, VOCABULARY, answer, command, make_rig, several
from tests.fakes.executor import hash_model, log_softmax, peaked_model
from tests.fakes.vocab import EOS

V = VOCABULARY
PROMPT = tuple(V.split("prompt"))
IDS = (EOS, *V.split("abcde"))


def scaled(sharpness, seed=0):
    """Scores that differ more than those of `hash_model`."""
    base = hash_model(SIZE)
    return lambda context, _: base((*context, seed), None) * sharpness


def expected(model, prompt=PROMPT, *, width, max_tokens, length_penalty=1.0, early_stopping=False, **params):
    """The reference's answer for a request, within the ids of IDS (or of a grammar)."""
    texts, stops = params.get("choices"), params.get("stop", ())
    fewest = params.get("min_tokens", 0)
    legal_ids = range(SIZE) if texts else IDS

    def text(tokens):
        return b"".join(map(V.token_bytes, tokens))

    def legal(tokens, token):
        if texts is None:
            return token != EOS or len(tokens) >= fewest
        if token == EOS:
            return text(tokens) in texts
        return bool(V.token_bytes(token)) and any(t.startswith(text((*tokens, token))) for t in texts)

    def rows(tokens):
        scores = log_softmax(model((*prompt, *tokens), None))
        values = np.full(SIZE, -np.inf)
        for token in legal_ids:
            if legal(tokens, token):
                values[token] = scores[token]
        return values

    def ends(tokens):
        if tokens[-1] == EOS:
            return "stop"
        if len(tokens) >= fewest and any(text(tokens).endswith(stop.encode()) for stop in stops):
            return "stop"
        if texts and text(tokens) in texts and not any(t != text(tokens) and t.startswith(text(tokens)) for t in texts):
            return "stop"
        return None

    def answer(tokens):
        whole = text(tokens)
        cut = [len(stop) for stop in stops if len(tokens) >= fewest and whole.endswith(stop.encode())]
        end = len(whole) - max(cut, default=-1)
        return whole[:end], tuple(t for i, t in enumerate(tokens) if len(text(tokens[:i])) < end)

    rules = Rules(width, max_tokens, length_penalty, early_stopping, ends, limit=width + 1, answer=answer)
    return reference(rows, rules)


def beams(name="a", prompt=PROMPT, *, width=3, n=None, **params):
    if "guided" not in params:
        params.setdefault("allowed_token_ids", IDS)
    return command(name, prompt, beam_width=width, n=n or width, **params)


def found(events, *, cut=False):
    """(score, tokens, reason) of each choice of a request's events, in order."""
    got = several(events)
    assert isinstance(got.end, FinishedEvent), got.end
    assert list(got.choices) == list(range(len(got.choices)))
    for choice in got.choices.values():
        whole = b"".join(map(V.token_bytes, choice.token_ids)).decode(errors="ignore")
        assert whole.startswith(choice.text) if cut else whole == choice.text
    return [Found(c.end.score, tuple(c.token_ids), c.end.finish_reason) for c in got.choices.values()]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([2.0, 8.0, 20.0]),
    st.integers(2, 5),
    st.integers(1, 5),
    PENALTIES,
    EARLY,
    st.integers(1, 4),
    st.sampled_from([(0, 0), (3, 0), (3, 2)]),
)
def test_the_engine_equals_the_reference(seed, sharp, width, max_tokens, penalty, early, block_size, drafting):
    model = scaled(sharp, seed)
    params = {"width": width, "max_tokens": max_tokens, "length_penalty": penalty, "early_stopping": early}
    drafts, wrong = drafting
    rig = make_rig(model, drafts=drafts, wrong=wrong, block_size=block_size)
    events = rig.run(beams(**params, speculation=bool(drafts)))["a"]
    same(found(events), expected(model, **params))


PEAKED = peaked_model(SIZE, flat=len(PROMPT) + 1, banned=[i for i in range(SIZE) if i not in IDS or i == EOS])
LONG = {"width": 3, "max_tokens": 14}


def shape(plan):
    return {r.request_id: len(r.draft) for r in plan.requests}


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("wrong", [0, 3, 5])
def test_drafts_that_hold_save_steps_and_change_nothing(block_size, wrong):
    right = expected(PEAKED, **LONG)
    plain = make_rig(PEAKED, block_size=block_size)
    same(found(plain.run(beams(**LONG))["a"]), right)
    rig = make_rig(PEAKED, drafts=4, wrong=wrong, block_size=block_size)
    events = rig.run(beams(**LONG, speculation=True))["a"]
    same(found(events), right)
    usage = events[-1].usage
    assert usage.drafted == usage.accepted + usage.rejected
    assert usage.by_source == {"oracle": (usage.drafted, usage.accepted)}
    assert usage.accepted > 0, "every beam went along its draft"
    assert len(rig.executor.plans) < len(plain.executor.plans)
    counters = rig.engine.stats().counters
    assert counters['spec_decode_num_draft_tokens_total{source="oracle"}'] == usage.drafted
    assert counters['spec_decode_num_accepted_tokens_total{source="oracle"}'] == usage.accepted


def test_drafts_of_beams_that_end_are_counted():
    rig = make_rig(scaled(8.0), drafts=3, wrong=4)
    usage = rig.run(beams(width=4, max_tokens=10, early_stopping="never", speculation=True))["a"][-1].usage
    planned = sum(len(r.draft) for plan in rig.executor.plans for r in plan.requests)
    assert usage.drafted == planned > 0
    counters = rig.engine.stats().counters
    assert counters['spec_decode_num_draft_tokens_total{source="oracle"}'] == planned


def test_a_beam_with_two_continuations_takes_no_other_ones_place():
    """Both best continuations are the first beam's, and the second is also what the second beam drafted."""
    a, b, c, d = V.split("abcd")
    after = {(): {a: 0.9, b: 0.05}, (a,): {c: 0.6, d: 0.39}, (b,): {d: 0.99}}

    def model(context, _):
        found = np.full(SIZE, -30.0)
        found[list(IDS)] = -9.0
        likely = after.get(context[len(PROMPT) :], {IDS[1 + len(context) % 5]: 0.98})
        for token, p in likely.items():
            found[token] = np.log(p)
        return found

    job = {"width": 2, "max_tokens": 6}
    rig = make_rig(model, drafts=3)
    got = found(rig.run(beams(**job, speculation=True))["a"])
    same(got, expected(model, **job))
    assert {f.tokens[:2] for f in got} == {(a, c), (a, d)}


def test_beams_are_drafted_for_only_where_asked():
    rig = make_rig(PEAKED, drafts=4)
    events = rig.run(beams("no", **LONG), beams("cap", **LONG, speculation={"num_speculative_tokens": 2}))
    assert events["no"][-1].usage.drafted == 0
    assert events["cap"][-1].usage.drafted > 0
    longest = {name: max(shape(p).get(name, 0) for p in rig.executor.plans) for name in ("no#0", "cap#0")}
    assert longest == {"no#0": 0, "cap#0": 2}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_in_a_tiny_pool_changes_nothing(mode, drafts, prefix_cache):
    jobs = {
        name: {"width": width, "max_tokens": 12, "prompt": tuple(V.split(f"prompt {name}"))}
        for name, width in (("a", 2), ("b", 3), ("c", 2))
    }
    rig = make_rig(
        PEAKED, drafts=drafts, wrong=4, blocks=13, block_size=4, host=32, preemption=mode, prefix_cache=prefix_cache
    )
    events = rig.run(*(beams(name, **job, speculation=bool(drafts)) for name, job in jobs.items()))
    for name, job in jobs.items():
        same(found(events[name]), expected(PEAKED, **job))
    counters = rig.engine.stats().counters
    assert counters["num_preemptions_total"] > 0
    assert (counters["num_swapped_total"] > 0) == (mode == "swap")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_forced_preemption_at_any_step_changes_nothing(mode, drafts, every):
    model = scaled(8.0)
    job = {"width": 4, "max_tokens": 8, "length_penalty": 0.5, "early_stopping": "never"}
    rig = make_rig(model, drafts=drafts, wrong=3, block_size=2, host=64, preemption=mode, max_batched_tokens=6)
    rig.engine.handle(beams(**job, speculation=bool(drafts)))
    events = []
    for step in range(600):
        if not rig.engine.has_work:
            break
        events += rig.step()
        running = rig.engine.scheduler.running
        if step % (every + 3) == 0 and running:
            rig.engine.scheduler.preempt(running[step % len(running)])
            rig.engine.scheduler.check()
    rig.check_baseline()
    same(found(events), expected(model, **job))


def test_chunked_prompts():
    prompt = tuple(V.split("a prompt of some more tokens"))
    rig = make_rig(PEAKED, max_batched_tokens=8)
    events = rig.run(beams(prompt=prompt, **LONG))["a"]
    same(found(events), expected(PEAKED, prompt, **LONG))
    assert [(e.computed, e.total) for e in events if isinstance(e, ProgressEvent)] == [(8, 28), (16, 28), (24, 28)]
    rows = [r for plan in rig.executor.plans for r in plan.requests]
    prompt_rows = sum(min(r.start + len(r.token_ids), 28) - min(r.start, 28) for r in rows)
    assert prompt_rows == 28, "the prompt is computed once"


def test_warm_and_cold():
    rig = make_rig(PEAKED)
    cold = found(rig.run(beams(**LONG))["a"])
    events = rig.run(beams("b", **LONG))["b"]
    assert found(events) == cold
    assert events[-1].usage.cached_tokens == 4
    assert [e.cached_tokens for e in events if isinstance(e, StartedEvent)] == [4]


def test_only_the_n_best_are_returned_and_usage_counts_them():
    events = make_rig(PEAKED).run(beams(**LONG, n=2), beams("b", **LONG))
    two, all_three = found(events["a"]), found(events["b"])
    assert two == all_three[:2]
    for name, got in (("a", two), ("b", all_three)):
        usage = events[name][-1].usage
        assert usage.completion_tokens == sum(len(f.tokens) for f in got)
        assert usage.prompt_tokens == len(PROMPT)
        assert events[name][-1].finish_reason == ("length" if any(f.reason == "length" for f in got) else "stop")


def test_logprobs_are_those_of_the_chosen_tokens():
    events = make_rig(PEAKED).run(beams(**LONG, logprobs=2), beams("b", **LONG, logprobs=0), beams("c", **LONG))
    for name, count in (("a", 2), ("b", 0)):
        for choice in several(events[name]).choices.values():
            assert [p.token.token_id for p in choice.logprobs] == choice.token_ids
            total = sum(p.token.logprob for p in choice.logprobs)
            assert total / len(choice.token_ids) == pytest.approx(choice.end.score)
            context = list(PROMPT)
            for p in choice.logprobs:
                scores = log_softmax(PEAKED(tuple(context), None))
                assert p.token.logprob == pytest.approx(scores[p.token.token_id])
                best = sorted(IDS, key=lambda i: -scores[i])[:count]
                assert [t.token_id for t in p.top] == best
                context.append(p.token.token_id)
    assert not any(c.logprobs for c in several(events["c"]).choices.values())


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("fewest", [0, 3])
@pytest.mark.parametrize("stops", [("ab",), ("c", "da"), ("e",)])
def test_stop_texts_and_min_tokens(drafts, fewest, stops):
    for seed in range(6):
        model = scaled(6.0, seed)
        job = {"width": 3, "max_tokens": 6, "stop": stops, "min_tokens": fewest}
        rig = make_rig(model, drafts=drafts, wrong=4)
        events = rig.run(beams(**{**job, "stop": list(stops)}, speculation=bool(drafts)))["a"]
        right = expected(model, **job)
        got = several(events)
        assert [c.end.score for c in got.choices.values()] == pytest.approx([f.score for f in right])
        for choice, best in zip(got.choices.values(), right, strict=True):
            whole = b"".join(map(V.token_bytes, best.tokens)).decode()
            cut = [stop for stop in stops if len(best.tokens) >= fewest and whole.endswith(stop)]
            assert choice.text == (whole[: -max(map(len, cut))] if cut else whole)
            assert choice.reason == best.reason
            assert tuple(choice.token_ids) == best.tokens[: len(choice.token_ids)]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "texts",
    [
        ["hello world", "hello there", "hello", "abcab", "日本語"],
        ["ab"],  # fewer legal continuations than beams
        ["a", "b"],
        ["abc", "abcabc"],  # one may end where the other goes on
    ],
)
@pytest.mark.parametrize("width", [2, 4])
def test_trap_b1_b2_every_beam_is_legal(drafts, texts, width):
    model = scaled(8.0)
    choices = tuple(t.encode() for t in texts)
    for max_tokens in (20, 3):
        job = {"width": width, "max_tokens": max_tokens, "length_penalty": 0.7}
        rig = make_rig(model, drafts=drafts, wrong=5, block_size=2, blocks=64)
        events = rig.run(beams(**job, n=width, guided={"choice": texts}, speculation=bool(drafts)))["a"]
        got = found(events)
        same(got, expected(model, **job, choices=choices))
        assert rig.compiler.compiled == 1
        for hypothesis in got:
            text = b"".join(map(V.token_bytes, hypothesis.tokens))
            legal = text in choices if hypothesis.reason == "stop" else any(c.startswith(text) for c in choices)
            assert legal


def test_every_beam_has_a_matcher_of_its_own():
    rig = make_rig(scaled(8.0))
    rig.engine.handle(beams(width=4, max_tokens=20, guided={"choice": ["hello world", "abcabcabc", "日本語日本語"]}))
    seen = set()
    while rig.engine.has_work:
        rig.step()
        lives = list(rig.engine._live.values())
        matchers = [live.matcher for live in lives if live.matcher is not None]
        assert len({id(m) for m in matchers}) == len(matchers)
        for live in lives:
            if live.matcher is not None:
                assert live.matcher._text == b"".join(map(V.token_bytes, live.request.output_token_ids))
        seen.add(len(matchers))
    assert max(seen) > 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("drafts", [0, 4])
def test_guided_beams_that_are_preempted(mode, drafts):
    texts = ["hello world, hello", "abcabcabc abc", "日本語日本語"]
    model = scaled(6.0)
    jobs = {n: {"width": 3, "max_tokens": 14, "prompt": tuple(V.split(f"p {n}"))} for n in "abc"}
    rig = make_rig(model, drafts=drafts, wrong=5, blocks=20, block_size=3, host=64, preemption=mode)
    events = rig.run(*(beams(n, **job, guided={"choice": texts}, speculation=bool(drafts)) for n, job in jobs.items()))
    for name, job in jobs.items():
        same(found(events[name]), expected(model, **job, choices=tuple(t.encode() for t in texts)))
    assert rig.engine.stats().counters["num_preemptions_total"] > 0


def test_trap_a22_neighbours_of_a_beam_request_keep_their_drafts():
    names = [f"n{i}" for i in range(4)]
    alone = make_rig(PEAKED, drafts=4)
    calm = alone.run(*(command(n, f"hi{n}", max_tokens=20) for n in names))
    rig = make_rig(PEAKED, drafts=4)
    events = rig.run(beams("b", **LONG), *(command(n, f"hi{n}", max_tokens=20) for n in names))
    same(found(events["b"]), expected(PEAKED, **LONG))
    for name in names:
        assert answer(events[name]).token_ids == answer(calm[name]).token_ids
        assert events[name][-1].usage.accepted == calm[name][-1].usage.accepted > 0


def test_penalties_know_each_beams_own_history():
    """The fake's sampling states check what they are told; the scores count it."""
    params = {"width": 3, "max_tokens": 10, "frequency_penalty": 0.4}
    plain = found(make_rig(PEAKED).run(beams(**params))["a"])
    assert plain != found(make_rig(PEAKED).run(beams(**LONG))["a"])
    for drafts in (2, 4):
        rig = make_rig(PEAKED, drafts=drafts, block_size=2)
        assert found(rig.run(beams(**params, speculation=True))["a"]) == plain


def test_all_hypotheses_come_whole_at_the_end():
    rig = make_rig(PEAKED)
    rig.engine.handle(beams(**LONG))
    last: list = []
    while rig.engine.has_work:
        assert not any(isinstance(e, DeltaEvent | ChoiceFinishedEvent) for e in last)
        last = rig.step()
    assert [type(e) for e in last] == [DeltaEvent, ChoiceFinishedEvent] * 3 + [FinishedEvent]


def test_a_search_keeps_room_for_its_beams():
    alone = make_rig(PEAKED)
    alone.run(beams(**LONG))
    rig = make_rig(PEAKED, max_running=4)
    events = rig.run(beams(**LONG), *(command(n, f"hi{n}", max_tokens=9) for n in "bcd"))
    same(found(events["a"]), expected(PEAKED, **LONG))
    steps = [plan for plan in rig.executor.plans if any(name[0] == "a" for name in shape(plan))]
    assert len(steps) == len(alone.executor.plans), "no beam waits for another request"
    assert max(len(plan.requests) for plan in rig.executor.plans) == 4
    assert all(answer(events[n]).reason == "length" for n in "bcd")


def test_a_width_of_one_is_greedy():
    greedy = answer(make_rig(PEAKED).run(command("a", PROMPT, max_tokens=9))["a"])
    got = answer(make_rig(PEAKED).run(command("a", PROMPT, max_tokens=9, beam_width=1))["a"])
    assert got.token_ids == greedy.token_ids


def test_a_search_that_could_never_run_is_refused_with_numbers():
    (wide,) = make_rig(PEAKED, max_running=3).run(beams(width=4, max_tokens=5))["a"]
    assert (wide.code, wide.param, wide.status) == ("kv_capacity_exceeded", "beam_width", 400)
    (large,) = make_rig(PEAKED, blocks=16).run(beams(width=4, max_tokens=20))["a"]
    assert (large.code, large.param, large.status) == ("kv_capacity_exceeded", "beam_width", 400)
