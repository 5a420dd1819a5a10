"""DraftModelDrafter on real pools and tiny models: catching up, contexts, budgets."""

import random

from specserve.core.sampling import SamplingParams
from tests.fakes.drive import Drive
from tests.fakes.tiny_model import TinyModel


def prompt(n, seed=1):
    return random.Random(seed).choices(range(1, 48), k=n)


def job(n=10, max_tokens=20, **params):
    return {"r": (prompt(n), SamplingParams(max_tokens=max_tokens, seed=4, ignore_eos=True, **params))}


def tokens(answers):
    return {name: a.token_ids for name, a in answers.items()}


def drive(draft=None, k=4, **options):
    return Drive(methods=("draft_model",), draft=draft or TinyModel(), k=k, **options)


class Switch:
    """A controller that drafts in some steps only."""

    def __init__(self, pattern, k=4):
        self.pattern = pattern
        self.k = k
        self.at = 0

    def budgets(self, requests):
        self.at += 1
        return [self.k * self.pattern[self.at % len(self.pattern)]] * len(requests)

    def observe(self, *args):
        pass

    def forget(self, request_id):
        pass


def test_trap_f9_off_then_on_again_catches_up():
    for pattern in ([0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 1, 1], [1, 0]):
        engine = drive(controller=Switch(pattern))
        answer = engine.run(job(max_tokens=60))["r"]
        assert answer.token_ids == tokens(Drive().run(job(max_tokens=60)))["r"]
        assert answer.accepted == answer.drafted > 0, "its cache was right each time"


def test_catch_up_is_bounded_and_drafts_wait_for_it():
    engine = drive(catch_up=8)
    lengths = []

    def watch(plan):
        lengths.append([len(r.draft) for r in plan.requests if r.num_logits])

    engine.on_step = watch
    answer = engine.run(job(30))["r"]
    assert answer.accepted == answer.drafted > 0
    drafted = [x[0] for x in lengths]
    # 31 known tokens, then one more each step: 8 rows a step, the first draft comes in the fifth
    assert drafted[:5] == [0, 0, 0, 0, 0]
    assert drafted[5] == 4


def test_catch_up_rows_are_shared_by_the_requests():
    rows = []
    draft = TinyModel()
    original = draft.forward
    draft.forward = lambda batch, cache: (rows.append(batch.num_rows), original(batch, cache))[1]
    work = {f"r{i}": (prompt(20, i), SamplingParams(max_tokens=30, seed=i, ignore_eos=True)) for i in range(4)}
    engine = drive(draft, catch_up=16)
    assert tokens(engine.run(work)) == tokens(Drive().run(work))
    assert max(rows) <= 16


def test_trap_a18_a_draft_with_a_shorter_context_stops_there():
    draft = TinyModel(max_position=20)  # asserts its positions
    engine = drive(draft)
    seen = []

    def watch(plan):
        seen.extend((r.start, len(r.draft)) for r in plan.requests if r.num_logits)

    engine.on_step = watch
    answer = engine.run(job(10, 40))["r"]
    assert answer.token_ids == tokens(Drive().run(job(10, 40)))["r"]
    assert answer.accepted == answer.drafted > 0
    assert all(n == 0 for start, n in seen if start >= 20)
    assert engine.draft.rows <= 20 + 4


def test_trap_a18_near_the_end_of_the_targets_context():
    target = TinyModel(max_position=32)
    work = job(29, 3)
    answer = Drive(target, methods=("draft_model",), draft=TinyModel(), k=5, max_model_len=32).run(work)["r"]
    assert answer.token_ids == tokens(Drive().run(work))["r"]
    assert len(answer.token_ids) == 3


def test_trap_f10_a_request_that_says_no_costs_the_draft_model_nothing():
    draft = TinyModel()
    answer = drive(draft).run(job(speculation=False))["r"]
    assert draft.forwards == 0
    assert answer.drafted == 0


def test_a_cap_bounds_each_draft():
    engine = drive()
    longest = []
    engine.on_step = lambda plan: longest.extend(len(r.draft) for r in plan.requests)
    engine.run(job(speculation={"num_speculative_tokens": 2}))
    assert max(longest) == 2


def test_each_forward_of_the_draft_is_shared_by_all_requests():
    draft = TinyModel()
    work = {f"r{i}": (prompt(8, i), SamplingParams(max_tokens=21, seed=i, ignore_eos=True)) for i in range(5)}
    answers = drive(draft, k=4).run(work)
    assert all(a.steps == 5 for a in answers.values())
    assert draft.forwards == 4 * 4
    assert draft.rows <= 5 * (8 + 21), "what was accepted is not computed again"


def test_nothing_is_drafted_past_an_end_token():
    stops = frozenset(range(1, 48, 3))
    drafts = []
    for seed in range(12):
        engine = drive()
        engine.on_step = lambda plan: drafts.extend(r.draft.tokens for r in plan.requests if r.draft)
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, stop_token_ids=tuple(stops), ignore_eos=True)
        engine.run({"r": (prompt(8), params)})
    assert all(not stops.intersection(tokens[:-1]) for tokens in drafts)
    assert any(tokens[-1] in stops for tokens in drafts)


def test_prefix_hits_on_both_pools():
    engine = drive()
    first = tokens(engine.run(job(30)))
    rows = engine.draft.rows
    assert tokens(engine.run(job(30))) == first
    assert engine.draft.rows - rows < 40, "the draft's cache has the prompt too"
