"""Parallel sampling: choice i is the request of one with seed choice_seed(seed, i), whatever else goes on."""

from __future__ import annotations

import dataclasses

import pytest

from specserve.core.messages import ChoiceFinishedEvent, DeltaEvent, FinishedEvent, ProgressEvent, StartedEvent
from specserve.core.sampling import choice_seed
from tests.fakes.engines import SIZE, VOCABULARY, answer, command, make_rig, several
from tests.fakes.executor import hash_model
from tests.fakes.vocab import EOS

V = VOCABULARY
PROMPT = tuple(V.split("some prompt"))
SEED = 77
TEXTS = ["hello world", "hello there", "日本語", "abcab"]


def alone(index, model=None, **params):
    """The choice as a request of one, undisturbed."""
    params = {"max_tokens": 12, **params, "n": 1, "seed": choice_seed(SEED, index)}
    return answer(make_rig(model).run(command("a", PROMPT, **params))["a"])


def check(events, n, model=None, **params):
    """Compare every choice of a request with its request of one."""
    got = several(events)
    assert isinstance(got.end, FinishedEvent), got.end
    assert list(got.choices) == list(range(n)) if n > 1 else not got.choices or list(got.choices) == [0]
    tokens, reasons = 0, set()
    for i, choice in got.choices.items():
        one = alone(i, model, **params)
        assert (choice.token_ids, choice.text, choice.logprobs) == (one.token_ids, one.text, one.logprobs)
        if n > 1:
            assert choice.end == ChoiceFinishedEvent("a", i, one.reason, choice_seed(SEED, i))
        tokens += one.end.usage.completion_tokens
        reasons.add(one.reason)
    usage = got.end.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), tokens)
    assert usage.drafted == usage.accepted + usage.rejected
    assert got.end.finish_reason == ("length" if "length" in reasons else "stop")
    assert got.end.seed == got.started.seed == SEED
    return got


def choices(n, **params):
    return command("a", PROMPT, **{"max_tokens": 12, "seed": SEED, "n": n, **params})


def prompt_rows(rig):
    """Positions of the prompt that were computed, over all plans."""
    size = len(PROMPT)
    rows = [r for plan in rig.executor.plans for r in plan.requests if r.request_id[0] == "a"]
    return sum(min(r.start + len(r.token_ids), size) - min(r.start, size) for r in rows)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("drafts", "wrong"), [(0, 0), (4, 0), (4, 3)])
def test_every_choice_is_its_request_of_one(n, temperature, drafts, wrong):
    params = {"temperature": temperature, "logprobs": 2}
    rig = make_rig(drafts=drafts, wrong=wrong)
    got = check(rig.run(choices(n, **params))["a"], n, **params)
    assert (got.end.usage.drafted > 0) == (drafts > 0)
    if temperature and n > 1:
        assert len({tuple(c.token_ids) for c in got.choices.values()}) == n
    # The prompt is computed once; only its last token again, as each choice samples its first one there.
    assert prompt_rows(rig) == len(PROMPT) + n - 1


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("stop", ["a", ["e", "ab", "hello"], "日"])
def test_stop_texts(drafts, stop):
    ended = set()
    ids = (*V.split("abcdefghijklmnopqr"), V.id("hello"), V.id("abc"), V.id("日本"))
    for temperature in (0.0, 1.0):
        params = {"stop": stop, "temperature": temperature, "allowed_token_ids": ids, "max_tokens": 6, "logprobs": 0}
        got = check(make_rig(drafts=drafts, wrong=5).run(choices(5, **params))["a"], 5, **params)
        ended |= {c.reason for c in got.choices.values()}
    assert ended == {"stop", "length"}


@pytest.mark.parametrize("drafts", [0, 4])
def test_choices_that_end_at_different_steps(drafts):
    ends = hash_model(SIZE)

    def model(context, seed):
        scores = ends(context, seed)
        scores[EOS] += 0.8 * (scores[5] < 0.2)
        return scores

    params = {"temperature": 1.0, "max_tokens": 15}
    rig = make_rig(model, drafts=drafts)
    rig.engine.handle(choices(6, **params))
    events = []
    at = {}
    while rig.engine.has_work:
        for event in rig.step():
            events.append(event)
            if isinstance(event, ChoiceFinishedEvent):
                at[event.index] = len(rig.executor.plans)
    got = check(events, 6, model, **params)
    assert {c.reason for c in got.choices.values()} == {"stop", "length"}
    assert len(set(at.values())) > 1, "each ends as it ends, not with the last"


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guided_choices_share_one_compilation_and_no_state(drafts, temperature):
    params = {"guided": {"choice": TEXTS}, "temperature": temperature, "max_tokens": 30}
    rig = make_rig(drafts=drafts, wrong=4)
    rig.engine.handle(choices(5, **params))
    events, most = [], 0
    while rig.engine.has_work:
        events += rig.step()
        lives = [live for live in rig.engine._live.values() if live.matcher is not None]
        assert len({id(live.matcher) for live in lives}) == len(lives)
        for live in lives:
            assert live.matcher._text == b"".join(map(V.token_bytes, live.request.output_token_ids))
        most = max(most, len(lives))
    got = check(events, 5, **params)
    assert all(c.text in TEXTS for c in got.choices.values())
    assert rig.compiler.compiled == 1
    assert most == 5
    rig.check_baseline()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("guided", [None, {"choice": ["日本語日本語", "hello there, hello"]}])
def test_preemption_in_a_tiny_pool(mode, drafts, prefix_cache, guided):
    params = {"temperature": 1.0, "logprobs": 1, "max_tokens": 16, "guided": guided}
    rig = make_rig(drafts=drafts, wrong=5, blocks=10, block_size=3, host=40, preemption=mode, prefix_cache=prefix_cache)
    check(rig.run(choices(6, **params))["a"], 6, **params)
    counters = rig.engine.stats().counters
    assert counters["num_preemptions_total"] > 0
    assert (counters["num_swapped_total"] > 0) == (mode == "swap")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("host", [3, 40])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_forced_preemption_at_any_step(mode, host, every):
    params = {"temperature": 1.0, "logprobs": 1}
    rig = make_rig(drafts=3, wrong=4, block_size=3, host=host, preemption=mode, max_batched_tokens=9)
    rig.engine.handle(choices(5, **params))
    events = []
    for step in range(500):
        if not rig.engine.has_work:
            break
        events += rig.step()
        running = rig.engine.scheduler.running
        if step % (every + 1) == 0 and running:
            rig.engine.scheduler.preempt(running[step % len(running)])
            rig.engine.scheduler.check()
    check(events, 5, **params)
    rig.run(command("last", PROMPT, max_tokens=1))  # runs the moves of the last preemption
    assert rig.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("max_running", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_fewer_places_than_choices(max_running, prefix_cache):
    params = {"temperature": 1.0}
    rig = make_rig(max_running=max_running, prefix_cache=prefix_cache, drafts=2)
    check(rig.run(choices(6, **params), command("b", max_tokens=3))["a"], 6, **params)
    assert max(len(p.requests) for p in rig.executor.plans) == max_running
    if max_running > 1:
        assert prompt_rows(rig) <= len(PROMPT) + 6 - 1, "others fork the one that runs"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_warm_and_cold(prefix_cache):
    params = {"temperature": 1.0, "logprobs": 1}
    rig = make_rig(prefix_cache=prefix_cache)
    cold = check(rig.run(choices(4, **params))["a"], 4, **params)
    assert cold.end.usage.cached_tokens == cold.started.cached_tokens == 0
    warm = check(rig.run(choices(4, **params))["a"], 4, **params)
    assert warm.end.usage.cached_tokens == warm.started.cached_tokens == (8 if prefix_cache else 0)


def test_chunked_prompt_progress_is_told_once():
    rig = make_rig(max_batched_tokens=5)
    params = {"temperature": 1.0, "max_tokens": 4}
    events = rig.run(choices(3, **params))["a"]
    check(events, 3, **params)
    size = len(PROMPT)
    assert [(e.computed, e.total) for e in events if isinstance(e, ProgressEvent)] == [(5, size), (10, size)]


def test_choices_stream_side_by_side():
    rig = make_rig()
    rig.engine.handle(choices(3, temperature=1.0, allowed_token_ids=V.split("abcdef")))
    order = []
    while rig.engine.has_work:
        order += [e.index for e in rig.step() if isinstance(e, DeltaEvent)]
    assert order[:7] == [0, 0, 1, 2, 0, 1, 2]


def test_speculation_is_reported_for_each_choice():
    rig = make_rig(drafts=3, wrong=4)
    events = rig.run(choices(3, temperature=1.0, report_speculation=True))["a"]
    steps = [(e.index, step) for e in events if isinstance(e, DeltaEvent) for step in e.speculation]
    usage = check(events, 3, temperature=1.0).end.usage
    assert {index for index, _ in steps} == {0, 1, 2}
    assert sum(len(step.token_ids) for _, step in steps) == usage.drafted
    assert sum(step.num_accepted for _, step in steps) == usage.accepted
    assert usage.by_source == {"oracle": (usage.drafted, usage.accepted)}
    counters = rig.engine.stats().counters
    assert counters['spec_decode_num_draft_tokens_total{source="oracle"}'] == usage.drafted
    assert counters["generation_tokens_total"] == usage.completion_tokens
    assert counters["prompt_tokens_total"] == len(PROMPT)
    assert counters["prefix_cache_queries_total"] == len(PROMPT), "forks are no queries"


def test_a_seed_is_drawn_once_and_replays_every_choice():
    got = several(make_rig().run(command("a", PROMPT, n=3, temperature=1.0, max_tokens=6))["a"])
    seeds = [c.end.seed for c in got.choices.values()]
    assert seeds == [choice_seed(got.started.seed, i) for i in range(3)]
    for choice in got.choices.values():
        again = command("b", PROMPT, temperature=1.0, max_tokens=6, seed=choice.end.seed)
        assert answer(make_rig().run(again)["b"]).token_ids == choice.token_ids


def test_trap_a22_neighbours_of_a_request_of_four_keep_their_drafts():
    names = [f"n{i}" for i in range(4)]
    calm = make_rig(drafts=4).run(*(command(n, f"hi{n}", max_tokens=20) for n in names))
    rig = make_rig(drafts=4)
    events = rig.run(choices(4, temperature=1.0, max_tokens=20), *(command(n, f"hi{n}", max_tokens=20) for n in names))
    check(events["a"], 4, temperature=1.0, max_tokens=20)
    assert events["a"][-1].usage.accepted > 0
    for name in names:
        assert answer(events[name]).token_ids == answer(calm[name]).token_ids
        assert events[name][-1].usage == calm[name][-1].usage
    planned = {r.request_id for plan in rig.executor.plans for r in plan.requests if r.draft}
    assert planned == {*names, "a#0", "a#1", "a#2", "a#3"}


def ranked(n, best_of, **params):
    """What best_of must give: (request of one, mean log probability), best first."""
    ones = [alone(i, logprobs=0, **params) for i in range(best_of)]
    scores = [sum(p.token.logprob for p in one.logprobs) / len(one.logprobs) for one in ones]
    return [(i, ones[i], scores[i]) for i in sorted(range(best_of), key=lambda i: -scores[i])[:n]], ones


@pytest.mark.parametrize(("n", "best_of"), [(1, 5), (3, 5), (2, 8), (4, 4)])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_best_of_gives_the_best_by_mean_log_probability(n, best_of, logprobs, drafts):
    params = {"temperature": 1.0}
    rig = make_rig(drafts=drafts, wrong=4, max_running=5)
    events = rig.run(choices(n, best_of=best_of, logprobs=logprobs, **params))["a"]
    if n == best_of:
        check(events, n, logprobs=logprobs, **params)
        return
    got = several(events)
    best, ones = ranked(n, best_of, **params)
    assert list(got.choices) == list(range(n))
    for choice, (index, one, score) in zip(got.choices.values(), best, strict=True):
        assert (choice.text, choice.token_ids) == (one.text, one.token_ids)
        assert choice.end.score == pytest.approx(score)
        assert (choice.end.finish_reason, choice.end.seed) == (one.reason, choice_seed(SEED, index))
        shown = alone(index, logprobs=logprobs, **params).logprobs
        assert choice.logprobs == shown
    usage = got.end.usage
    assert usage.completion_tokens == sum(one.end.usage.completion_tokens for one in ones), "all count"
    assert usage.prompt_tokens == len(PROMPT)
    first = next(i for i, e in enumerate(events) if isinstance(e, DeltaEvent))
    assert not any(isinstance(e, StartedEvent) for e in events[first:])


def test_best_of_shows_nothing_before_the_end():
    rig = make_rig()
    rig.engine.handle(choices(2, best_of=4, temperature=1.0))
    last: list = []
    while rig.engine.has_work:
        assert not any(isinstance(e, DeltaEvent | ChoiceFinishedEvent) for e in last)
        last = rig.step()
    kinds = [type(e) for e in last if not isinstance(e, DeltaEvent)]
    assert kinds == [ChoiceFinishedEvent, ChoiceFinishedEvent, FinishedEvent]


def test_of_equal_choices_the_first_is_best():
    got = several(make_rig().run(choices(2, best_of=4, temperature=0.0))["a"])
    assert [c.end.seed for c in got.choices.values()] == [choice_seed(SEED, 0), choice_seed(SEED, 1)]
    assert len({c.end.score for c in got.choices.values()}) == 1


def test_best_of_with_stop_texts_scores_what_is_shown():
    """The tokens of a matched stop text are not shown, and their log probabilities are not."""
    params = {"temperature": 1.0, "stop": ["a", "b"], "allowed_token_ids": V.split("abcdef"), "max_tokens": 8}
    got = several(make_rig().run(choices(2, best_of=5, **params))["a"])
    best, _ = ranked_shown(2, 5, **params)
    assert [c.text for c in got.choices.values()] == [one.text for one in best]


def ranked_shown(n, best_of, **params):
    ones = [alone(i, logprobs=0, **params) for i in range(best_of)]
    scores = [sum(p.token.logprob for p in one.logprobs) / len(one.logprobs) if one.logprobs else -1e9 for one in ones]
    order = sorted(range(best_of), key=lambda i: -scores[i])[:n]
    return [ones[i] for i in order], scores


def test_best_of_is_preempted_as_others_are():
    rig = make_rig(blocks=8, block_size=3, host=40, preemption="swap", drafts=3, wrong=4)
    got = several(rig.run(choices(2, best_of=5, temperature=1.0))["a"])
    best, _ = ranked(2, 5, temperature=1.0)
    assert [c.token_ids for c in got.choices.values()] == [one.token_ids for _, one, _ in best]
    assert rig.engine.scheduler.num_preemptions > 0


def test_reports_are_hidden_with_best_of_unless_asked_for():
    rig = make_rig(drafts=3)
    events = rig.run(choices(1, best_of=3, temperature=1.0))["a"]
    assert not any(e.logprobs or e.speculation for e in events if isinstance(e, DeltaEvent))
    assert dataclasses.replace(events[-1].usage).drafted > 0
