from __future__ import annotations

import pytest

from tests.fakes.engines import SIZE, VOCABULARY, answer, command, make_rig
from tests.fakes.executor import script_model
from tests.fakes.vocab import EOS

V = VOCABULARY
CHOICES = ["hello world", "hello there", "日本語"]


@pytest.mark.parametrize("drafts", [0, 2, 6])
@pytest.mark.parametrize("seed", range(4))
def test_trap_b1_b2_output_is_always_legal_and_drafts_change_nothing(drafts, seed):
    params = {"guided": {"choice": CHOICES}, "temperature": 1.0, "seed": seed, "max_tokens": 60}
    plain = answer(make_rig().run(command("a", **params))["a"])
    rig = make_rig(drafts=drafts, wrong=3)
    got = answer(rig.run(command("a", **params))["a"])
    assert got.token_ids == plain.token_ids
    assert got.text in CHOICES
    assert got.reason == "stop"


@pytest.mark.parametrize("drafts", [0, 4])
def test_trap_b8_b9_one_value_ends_at_the_end_of_the_grammar(drafts):
    rig = make_rig(drafts=drafts)
    got = answer(rig.run(command("a", guided={"choice": ["abab"]}, max_tokens=50))["a"])
    assert (got.text, got.reason) == ("abab", "stop")
    assert got.end.usage.completion_tokens == len(got.token_ids)
    assert b"".join(map(V.token_bytes, got.token_ids)) == b"abab"


def test_drafts_are_cut_at_the_first_token_that_the_grammar_refuses():
    # The oracle ignores the grammar: whatever it drafts that is illegal must not reach the plan.
    rig = make_rig(drafts=6)
    rig.run(command("a", guided={"choice": CHOICES}, max_tokens=50))
    for plan in rig.executor.plans:
        for r in plan.requests:
            if r.draft:
                known = b"".join(map(V.token_bytes, r.token_ids))
                assert any(known.decode(errors="ignore") in choice for choice in CHOICES)


def test_the_end_token_ends_where_the_grammar_allows_it():
    rig = make_rig()
    params = {"guided": {"choice": ["ab", "abab"]}, "logit_bias": {EOS: 50.0}, "max_tokens": 50}
    got = answer(rig.run(command("a", **params))["a"])
    assert (got.text, got.token_ids[-1], got.reason) == ("ab", EOS, "stop")


@pytest.mark.parametrize("drafts", [0, 4])
def test_trap_c27_cut_by_max_tokens_is_length(drafts):
    rig = make_rig(drafts=drafts)
    got = answer(rig.run(command("a", guided={"choice": ["日本語日本語日本語"]}, max_tokens=3))["a"])
    assert got.reason == "length"
    assert "日本語日本語日本語".startswith(got.text)


@pytest.mark.parametrize("drafts", [0, 4])
def test_trap_b20_guided_and_plain_requests_in_one_batch(drafts):
    plain = answer(make_rig().run(command("p", "xyz", max_tokens=20))["p"]).token_ids
    guided = answer(make_rig().run(command("g", guided={"choice": CHOICES}))["g"]).token_ids
    rig = make_rig(drafts=drafts, wrong=4)
    events = rig.run(
        command("g1", guided={"choice": CHOICES}),
        command("p1", "xyz", max_tokens=20),
        command("g2", guided={"choice": CHOICES}),
        command("p2", "xyz", max_tokens=20, speculation=False),
    )
    got = {name: answer(e).token_ids for name, e in events.items()}
    assert got == {"g1": guided, "g2": guided, "p1": plain, "p2": plain}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("wrong", [0, 5])
def test_trap_b10_preempted_guided_requests(mode, wrong):
    """Drafts that are pending are dropped, matchers hold the committed tokens only, and nothing else comes."""
    texts = ["日本語日本語日本語", "hello there, hello there!"]
    model = script_model(SIZE, {tuple(V.encode(f"hi{n}")): V.split(t) for n, t in zip("ab", texts, strict=True)})

    def commands():
        return [command(n, f"hi{n}", guided={"choice": texts}, max_tokens=28) for n in "ab"]

    calm = {c.request_id: answer(make_rig(model).run(c)[c.request_id]) for c in commands()}
    rig = make_rig(model, blocks=8, block_size=4, drafts=4, wrong=wrong, host=40, preemption=mode)
    scheduler = rig.engine.scheduler
    pending, real = {}, scheduler.schedule

    def schedule():
        drafts = {r.request_id: r.draft for r in scheduler.running}
        plan = real()
        for request in scheduler.waiting:
            if request.request_id in drafts:
                pending[request.request_id] = len(drafts[request.request_id])
                assert not request.draft
                assert request.request_id not in {r.request_id for r in plan.requests}
        return plan

    scheduler.schedule = schedule
    events = {"a": [], "b": []}
    for c in commands():
        rig.engine.handle(c)
    while rig.engine.has_work:
        for event in rig.step():
            events[event.request_id].append(event)
        for live in rig.engine._live.values():
            if live.matcher is not None:
                assert live.matcher._text == b"".join(map(V.token_bytes, live.request.output_token_ids))
    rig.check_baseline()
    assert any(pending.values()), "a request gave way while its draft was pending"
    assert (scheduler.num_swapped > 0) == (mode == "swap")
    for name, alone in calm.items():
        got = answer(events[name])
        assert got.text in texts
        assert (got.token_ids, got.text, got.reason) == (alone.token_ids, alone.text, alone.reason)
        usage = got.end.usage
        assert usage.drafted == usage.accepted + usage.rejected
    planned = [(r.request_id, len(r.draft)) for plan in rig.executor.plans for r in plan.requests]
    for name in "ab":
        drafted = sum(n for request_id, n in planned if request_id == name)
        assert events[name][-1].usage.drafted <= drafted, "what was dropped counts for nothing"


def test_compilation_order_does_not_hold_up_plain_requests():
    rig = make_rig()
    rig.compiler.gate.clear()
    rig.engine.handle(command("g", guided={"choice": ["ab"]}))
    rig.engine.handle(command("p", max_tokens=4))
    seen = []
    for _ in range(6):
        seen += rig.engine.step()
    assert answer([e for e in seen if e.request_id == "p"]).reason == "length"
    rig.compiler.gate.set()
    assert rig.run()["g"]
