from __future__ import annotations

import pytest

from specserve.core.messages import DeltaEvent, FailedEvent, ProgressEvent, QueuedEvent, StartedEvent
from specserve.core.plan import StepResult
from specserve.sched.policy import WaitingQueue
from tests.fakes.engines import SIZE, VOCABULARY, answer, command, make_rig
from tests.fakes.executor import script_model
from tests.fakes.vocab import EOS

V = VOCABULARY
HI = tuple(V.encode("hi"))


def scripted(text_or_ids):
    script = V.split(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    return script_model(SIZE, {HI: script})


def one(rig, **params):
    return answer(rig.run(command("a", HI, **params))["a"])


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("wrong", [0, 3, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trap_a1_drafts_never_change_the_tokens(drafts, wrong, temperature):
    plain = one(make_rig(), max_tokens=40, temperature=temperature, seed=7)
    rig = make_rig(drafts=drafts, wrong=wrong)
    got = one(rig, max_tokens=40, temperature=temperature, seed=7)
    assert got.token_ids == plain.token_ids
    assert len(got.token_ids) == 40
    usage = got.end.usage
    assert usage.drafted == usage.accepted + usage.rejected
    if drafts:
        assert usage.drafted > 0
        assert (usage.rejected == 0) == (wrong == 0)
        assert usage.by_source == {"oracle": (usage.drafted, usage.accepted)}


def test_seed_is_drawn_reported_and_replays():
    first, second = (one(make_rig(), temperature=1.0, max_tokens=12) for _ in range(2))
    assert first.seed == first.end.seed != second.seed
    assert first.token_ids != second.token_ids
    assert one(make_rig(), temperature=1.0, max_tokens=12, seed=first.seed).token_ids == first.token_ids


@pytest.mark.parametrize("drafts", [0, 8])
def test_trap_a13_stop_text_inside_accepted_drafts(drafts):
    got = one(make_rig(scripted("abSTOPdef"), drafts=drafts), stop="STOP", max_tokens=30)
    assert (got.text, got.reason, got.token_ids) == ("ab", "stop", V.split("ab"))
    usage = got.end.usage
    assert usage.completion_tokens == 6
    assert usage.accepted <= 6
    assert usage.rejected == 0, "what was drafted behind the stop text counts for nothing"


@pytest.mark.parametrize("drafts", [0, 8])
@pytest.mark.parametrize(("text", "reason", "shown"), [("ab!def", "stop", "ab"), ("abcde!", "length", "abcde")])
def test_trap_a14_stop_text_and_budget(drafts, text, reason, shown):
    got = one(make_rig(scripted(text), drafts=drafts), stop="!", max_tokens=5)
    assert (got.text, got.reason) == (shown, reason)


@pytest.mark.parametrize("drafts", [0, 8])
def test_trap_a15_stop_text_with_logprobs(drafts):
    got = one(make_rig(scripted("abSTOPdef"), drafts=drafts), stop="STOP", max_tokens=30, logprobs=2)
    assert [p.token.token_id for p in got.logprobs] == got.token_ids == V.split("ab")
    assert [p.token.text for p in got.logprobs] == ["a", "b"]
    assert all(len(p.top) == 2 and p.top[0].token_id == p.token.token_id for p in got.logprobs)


@pytest.mark.parametrize("drafts", [0, 2, 8])
def test_trap_a16_end_token_inside_accepted_drafts(drafts):
    rig = make_rig(script_model(SIZE, {HI: [*V.split("abc"), EOS, *V.split("xyz")]}), drafts=drafts)
    got = one(rig, max_tokens=30)
    assert (got.text, got.reason, got.token_ids) == ("abc", "stop", [*V.split("abc"), EOS])
    usage = got.end.usage
    assert usage.completion_tokens == 4
    assert usage.accepted <= 4
    assert usage.rejected == 0, "what was drafted behind the end counts for nothing"


def test_drafts_end_at_an_end_token_and_at_the_budget():
    rig = make_rig(script_model(SIZE, {HI: V.split("abc")}), drafts=8)
    one(rig, max_tokens=30)
    drafts = [r.draft.tokens for plan in rig.executor.plans for r in plan.requests if r.draft]
    assert drafts == [(*V.split("bc"), EOS)]
    rig = make_rig(scripted("abcdefgh"), drafts=8)
    one(rig, max_tokens=4)
    drafts = [r.draft.tokens for plan in rig.executor.plans for r in plan.requests if r.draft]
    assert drafts == [tuple(V.split("bc"))], "the last of the budget is the target's own token"
    assert rig.drafter.budgets == [2]


def test_trap_a18_context_limit():
    rig = make_rig(max_model_len=10, drafts=5)
    got = answer(rig.run(command("a", V.split("1234567"), max_tokens=None))["a"])
    assert (got.reason, len(got.token_ids)) == ("length", 3)
    got = answer(rig.run(command("b", V.split("1234567"), max_tokens=50))["b"])
    assert (got.reason, len(got.token_ids)) == ("length", 3)


def test_without_max_tokens_the_pool_limits_the_answer():
    rig = make_rig(blocks=5, block_size=4, max_model_len=1000)
    got = one(rig, max_tokens=None)
    assert got.reason == "length"
    assert len(got.token_ids) == 18


@pytest.mark.parametrize("drafts", [0, 6])
def test_trap_a11_min_tokens_counts_tokens_not_steps(drafts):
    rig = make_rig(script_model(SIZE, {HI: []}), drafts=drafts)
    got = one(rig, min_tokens=8, max_tokens=20)
    assert len(got.token_ids) == 9
    assert got.token_ids[-1] == EOS


def test_trap_e1_split_characters():
    script = [*V.split("日本語👩‍👧"), *V.split("é")[:1]]
    rig = make_rig(script_model(SIZE, {HI: script}), drafts=3)
    events = rig.run(command("a", HI, max_tokens=len(script)))["a"]
    assert all("�" not in e.text for e in events if isinstance(e, DeltaEvent))
    got = answer(events)
    assert (got.text, got.reason, got.token_ids) == ("日本語👩‍👧", "length", script)


def test_trap_e3_partial_stop_is_flushed_at_the_end():
    got = one(make_rig(scripted("abSTO")), stop="STOP", max_tokens=30)
    assert (got.text, got.reason) == ("abSTO", "stop")
    got = one(make_rig(scripted("abSTOP")), stop="STOP", max_tokens=5)
    assert (got.text, got.reason) == ("abSTO", "length")


def test_progress_of_a_long_prompt_and_cached_tokens():
    rig = make_rig(max_batched_tokens=8)
    prompt = V.split("a prompt of some more tokens")
    events = rig.run(command("a", prompt, max_tokens=2))["a"]
    progress = [(e.computed, e.total) for e in events if isinstance(e, ProgressEvent)]
    assert progress == [(8, 28), (16, 28), (24, 28)]
    assert answer(events).end.usage.cached_tokens == 0
    again = rig.run(command("b", prompt, max_tokens=2))["b"]
    usage = answer(again).end.usage
    assert usage.cached_tokens == 24
    assert [e.cached_tokens for e in again if isinstance(e, StartedEvent)] == [24]
    assert rig.engine.stats().counters["prefix_cache_hits_total"] == 24


def test_speculation_report():
    rig = make_rig(drafts=4, wrong=5)
    events = rig.run(command("a", HI, max_tokens=20, report_speculation=True))["a"]
    steps = [step for e in events if isinstance(e, DeltaEvent) for step in e.speculation]
    usage = answer(events).end.usage
    assert sum(len(s.token_ids) for s in steps) == usage.drafted
    assert sum(s.num_accepted for s in steps) == usage.accepted
    assert all(len(s.texts) == len(s.sources) == len(s.token_ids) for s in steps)
    plain = rig.run(command("b", HI, max_tokens=20))["b"]
    assert all(not e.speculation for e in plain if isinstance(e, DeltaEvent))


def test_trap_g6_counters_agree_with_the_usage():
    rig = make_rig(drafts=4, wrong=7)
    usages = [answer(e).end.usage for e in rig.run(*(command(str(i), HI, max_tokens=25) for i in range(3))).values()]
    counters = rig.engine.stats().counters
    drafted = sum(u.drafted for u in usages)
    assert counters['spec_decode_num_draft_tokens_total{source="oracle"}'] == drafted
    accepted = [v for k, v in counters.items() if k.startswith("spec_decode_num_accepted_tokens_per_pos_total")]
    assert sum(accepted) == sum(u.accepted for u in usages)
    assert counters['spec_decode_num_accepted_tokens_total{source="oracle"}'] == sum(accepted)
    assert counters["generation_tokens_total"] == 75
    assert counters['request_success_total{finished_reason="length"}'] == 3


def test_trap_f10_a_request_without_drafts_never_reaches_the_drafter():
    rig = make_rig(drafts=4)
    off = command("off", HI, max_tokens=10, speculation=False)
    capped = command("capped", HI, max_tokens=10, speculation={"num_speculative_tokens": 1})
    events = rig.run(off, capped, command("on", HI, max_tokens=10))
    assert set(rig.drafter.asked) == {"capped", "on"}
    assert answer(events["off"]).end.usage.drafted == 0
    assert len({tuple(answer(e).token_ids) for e in events.values()}) == 1
    longest = {}
    for plan in rig.executor.plans:
        for r in plan.requests:
            longest[r.request_id] = max(longest.get(r.request_id, 0), len(r.draft))
    assert longest == {"off": 0, "capped": 1, "on": 4}
    assert sorted(rig.drafter.forgotten) == ["capped", "off", "on"]


def test_a_drafter_that_fails_costs_drafts_only():
    rig = make_rig(drafts=4)
    rig.drafter.fail_next = ValueError("broken")
    got = one(rig, max_tokens=12)
    assert got.token_ids == one(make_rig(), max_tokens=12).token_ids
    assert rig.engine.stats().counters["drafter_faults_total"] == 1


def test_controller_budgets_are_kept_and_it_sees_cut_results():
    class Halves:
        def __init__(self):
            self.seen, self.forgotten = [], []

        def budgets(self, requests):
            return [i % 2 * 3 for i, _ in enumerate(requests)]

        def observe(self, plan, result, seconds):
            assert isinstance(result, StepResult)
            self.seen += [len(o.token_ids) for o in result.outputs]

        def forget(self, request_id):
            self.forgotten.append(request_id)

    rig = make_rig(drafts=5)
    controller = Halves()
    rig.engine._drafting._controller = controller
    events = rig.run(command("a", HI, max_tokens=9), command("b", HI, max_tokens=9))
    assert answer(events["a"]).end.usage.drafted == 0
    assert answer(events["b"]).end.usage.drafted > 0
    assert sum(controller.seen) == 18
    assert sorted(controller.forgotten) == ["a", "b"]


def test_trap_d2_watchdog_shows_a_stall(monkeypatch):
    rig = make_rig()
    rig.engine.handle(command("a", HI, max_tokens=4))
    with monkeypatch.context() as patch:
        patch.setattr(WaitingQueue, "admit", lambda queue, attempt: None)
        assert rig.step() == [QueuedEvent("a")]
        assert rig.engine.stats().counters["engine_stalled"] == 1
        assert rig.engine.pause() > 0, "the loop must not spin"
    assert answer(rig.run()["a"]).reason == "length"
    assert rig.engine.stats().counters["engine_stalled"] == 0


def test_queued_event_comes_once_and_only_where_a_request_waits():
    rig = make_rig(max_batched_tokens=2)
    events = rig.run(*(command(str(i), [5], max_tokens=15) for i in range(3)))
    assert not any(isinstance(e, QueuedEvent) for e in events["0"])
    assert [type(e) for e in events["2"]].count(QueuedEvent) <= 1
    assert any(isinstance(e, QueuedEvent) for e in events["2"])


def test_trap_b10_preemption_drops_drafts_and_changes_nothing():
    calm = {n: answer(make_rig().run(command(n, f"hi{n}", max_tokens=14))[n]).token_ids for n in "abc"}
    rig = make_rig(blocks=10, block_size=4, drafts=4, wrong=5)
    events = rig.run(*(command(n, f"hi{n}", max_tokens=14) for n in "abc"))
    assert {n: answer(e).token_ids for n, e in events.items()} == calm
    assert rig.engine.stats().counters["num_preemptions_total"] > 0
    assert len(rig.drafter.forgotten) > 3, "the drafter is told of preemptions too"
    assert all(sum(isinstance(e, StartedEvent) for e in got) == 1 for got in events.values())


@pytest.mark.parametrize("fails", [False, True])
def test_a_plan_may_hold_moves_alone(fails, monkeypatch):
    calm = one(make_rig(), max_tokens=12).token_ids
    rig = make_rig(host=20, preemption="swap", drafts=2, prefix_cache=False)
    rig.engine.handle(command("a", HI, max_tokens=12))
    events = [e for _ in range(3) for e in rig.step()]
    rig.engine.scheduler.preempt(rig.engine.scheduler.running[0])
    with monkeypatch.context() as patch:
        patch.setattr(WaitingQueue, "admit", lambda queue, attempt: None)
        rig.executor.fail_next = RuntimeError("gone") if fails else None
        assert rig.step() == [], "nobody is at fault: it is computed again"
    plan = rig.executor.plans[-1]
    assert plan.swap_out
    assert not plan.requests
    assert answer([*events, *rig.run()["a"]]).token_ids == calm
    assert any(p.swap_in for p in rig.executor.plans) == (not fails)


def test_failed_event_is_typed_for_a_pool_that_can_never_hold_it():
    rig = make_rig(blocks=4, block_size=4, max_model_len=1000)
    (failed,) = rig.run(command("a", HI, max_tokens=100))["a"]
    assert isinstance(failed, FailedEvent)
    assert failed.code == "kv_capacity_exceeded"
    assert failed.status == 400
