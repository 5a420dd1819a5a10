from __future__ import annotations

import pytest

from tests.fakes.engines import VOCABULARY, answer, command, make_rig
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


def test_trap_b10_preempted_guided_requests():
    def commands():
        return [
            command(n, f"hi{n}", guided={"choice": ["日本語日本語", "hello there, hello"]}, max_tokens=30)
            for n in "abc"
        ]

    calm = {c.request_id: answer(make_rig().run(c)[c.request_id]).token_ids for c in commands()}
    rig = make_rig(blocks=9, block_size=4, drafts=4, wrong=5)
    for c in commands():
        rig.engine.handle(c)
    events = rig.run()
    assert {n: answer(e).token_ids for n, e in events.items()} == calm


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
