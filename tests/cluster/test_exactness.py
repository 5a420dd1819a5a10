"""Drafts never change which tokens come: each drafter, K and option against the same engine without drafts."""

import random

import pytest

from specserve.core.sampling import SamplingParams
from tests.fakes.drive import EOS, Drive, PatternMatcher
from tests.fakes.tiny_model import TinyModel

VOCAB = 48
OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "greedy_penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.1},
    "bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 9: -100}, "banned_token_ids": (11,)},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "top": {"temperature": 1.0, "top_k": 10, "top_p": 0.9},
    "min_tokens": {"temperature": 0.8, "logit_bias": {EOS: 6.0}, "min_tokens": 8},
    "allowed": {"temperature": 0.8, "allowed_token_ids": tuple(range(1, 40, 2)), "ignore_eos": True},
}
METHODS = [("suffix",), ("draft_model",), ("suffix", "draft_model")]


def jobs(options, count=3, max_tokens=20):
    rng = random.Random(5)
    result = {}
    for i in range(count):
        word = rng.choices(range(1, VOCAB), k=rng.randint(2, 6))
        prompt = word * rng.randint(1, 3) + rng.choices(range(1, VOCAB), k=rng.randint(0, 5)) + word[:2]
        result[f"r{i}"] = (prompt, SamplingParams(max_tokens=max_tokens, seed=40 + i, **options))
    return result


def matchers():
    return {"r0": PatternMatcher([range(1, 20), range(10, 40)], 9), "r2": PatternMatcher([[7], [8], range(1, 48)], 30)}


def ids(answers):
    return {name: a.token_ids for name, a in answers.items()}


def drive(methods, k=4, draft=None, **options):
    if "draft_model" in methods and draft is None:
        draft = near_model()
    return Drive(methods=methods, k=k, draft=draft if "draft_model" in methods else None, **options)


def near_model():
    """Agrees with the target often, not always."""
    model, other = TinyModel(), TinyModel(seed=3)
    model.output = model.output + 0.15 * other.output
    return model


@pytest.fixture(scope="module")
def plain():
    """Tokens without drafts, by option."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = ids(Drive().run(jobs(OPTIONS[name])))
        return known[name]

    return get


class TestExactness:
    @pytest.mark.parametrize("methods", METHODS, ids="+".join)
    @pytest.mark.parametrize("name", OPTIONS)
    def test_options(self, plain, name, methods):
        answers = drive(methods).run(jobs(OPTIONS[name]))
        assert ids(answers) == plain(name)

    @pytest.mark.parametrize("k", range(1, 9))
    @pytest.mark.parametrize("methods", METHODS, ids="+".join)
    def test_trap_a1_every_k(self, plain, methods, k):
        for name in ("greedy", "sampled"):
            assert ids(drive(methods, k).run(jobs(OPTIONS[name]))) == plain(name)

    @pytest.mark.parametrize("methods", METHODS, ids="+".join)
    def test_trap_b2_grammars(self, methods):
        for options in ({"temperature": 0.8}, {}, {"temperature": 1.0, "frequency_penalty": 1.0, "min_tokens": 12}):
            expected = Drive().run(jobs(options), matchers())
            answers = drive(methods).run(jobs(options), matchers())
            assert ids(answers) == ids(expected)
            assert sum(a.illegal for a in answers.values()) == 0, "no node is spent on an illegal token"
            assert len(expected["r0"].token_ids) == 10
            assert expected["r0"].token_ids[-1] == EOS
            assert sum(a.drafted for a in answers.values()) > 0

    @pytest.mark.parametrize("penalty", [-2.0, 2.0])
    def test_trap_a10_frequency_penalty(self, penalty):
        options = {"frequency_penalty": penalty}
        expected = ids(Drive().run(jobs(options)))
        for methods in METHODS:
            assert ids(drive(methods, 6).run(jobs(options))) == expected

    def test_trap_a4_deterministic_drafts_leave_the_sample_unchanged(self):
        options = {"temperature": 1.0}
        answers = drive(("suffix",), 5, lookup=(1, 4)).run(jobs(options, max_tokens=60))
        assert ids(answers) == ids(Drive().run(jobs(options, max_tokens=60)))
        assert sum(a.drafted - a.accepted for a in answers.values()) > 0
        assert sum(a.accepted for a in answers.values()) > 0

    def test_trap_a24_a_drafters_settings_never_change_the_output(self, plain):
        for lookup in ((1, 1), (2, 2), (2, 8), (4, 16)):
            assert ids(drive(("suffix",), lookup=lookup).run(jobs(OPTIONS["sampled"]))) == plain("sampled")

    @pytest.mark.parametrize("chunk", [16, 17, 40])
    def test_trap_a2_chunks_change_nothing(self, plain, chunk):
        for methods in METHODS:
            assert ids(drive(methods, chunk=chunk).run(jobs(OPTIONS["sampled"]))) == plain("sampled")

    @pytest.mark.parametrize("methods", METHODS, ids="+".join)
    def test_trap_a5_neighbours_warm_cache_and_preemption_change_nothing(self, methods):
        work = jobs({"temperature": 0.8}, 6, 24)
        expected = {name: ids(Drive().run({name: job}))[name] for name, job in work.items()}
        engine = drive(methods)
        assert ids(engine.run(work, stagger=3)) == expected
        assert ids(engine.run(work)) == expected, "on a warm prefix cache"
        tight = drive(methods, blocks=24, max_model_len=90)
        assert ids(tight.run(work)) == expected
        assert tight.scheduler.num_preemptions > 0

    def test_a_small_draft_pool_costs_drafts_only(self, plain):
        answers = drive(("draft_model",), draft_blocks=8).run(jobs(OPTIONS["sampled"]))
        assert ids(answers) == plain("sampled")

    def test_trap_a16_an_end_token_inside_a_draft_ends_there(self):
        work = {"r": ([5, 6, EOS, 7, 5, 6], SamplingParams(max_tokens=30, logit_bias={EOS: 100.0}))}
        engine = drive(("suffix",))
        answer = engine.run(work)["r"]
        assert answer.token_ids == [EOS]
        work = {"r": ([5, 6, EOS, 7, 5, 6], SamplingParams(max_tokens=6, logit_bias={EOS: 100.0}, ignore_eos=True))}
        assert drive(("suffix",)).run(work)["r"].token_ids == [EOS] * 6


class TestAgreement:
    @pytest.mark.parametrize("name", OPTIONS)
    def test_a_draft_equal_to_the_target_is_always_accepted(self, name):
        answers = drive(("draft_model",), 5, draft=TinyModel()).run(jobs(OPTIONS[name]))
        for answer in answers.values():
            assert answer.accepted == answer.drafted > 0

    def test_trap_a11_equal_draft_with_min_tokens_and_penalties(self):
        options = {"min_tokens": 8, "frequency_penalty": 0.7, "logit_bias": {EOS: 50.0}}
        answers = drive(("draft_model",), 5, draft=TinyModel()).run(jobs(options))
        for answer in answers.values():
            assert len(answer.token_ids) == 9
            assert answer.token_ids[-1] == EOS
            assert answer.accepted == answer.drafted

    def test_equal_draft_under_a_grammar(self):
        answers = drive(("draft_model",), 5, draft=TinyModel()).run(jobs({"temperature": 0.8}), matchers())
        for answer in answers.values():
            assert answer.accepted == answer.drafted > 0

    def test_equal_draft_takes_few_steps(self):
        answer = drive(("draft_model",), 4, draft=TinyModel()).run(jobs({"temperature": 0.8}, 1, 41))["r0"]
        assert len(answer.token_ids) == 41
        assert answer.steps == 1 + 8

    def test_a_random_draft_is_hardly_ever_accepted(self):
        for options in ({}, {"temperature": 0.8}):
            answers = drive(("draft_model",), 4, draft=TinyModel(seed=77)).run(jobs(options, max_tokens=40))
            drafted, accepted = (sum(getattr(a, f) for a in answers.values()) for f in ("drafted", "accepted"))
            assert drafted > 100
            assert accepted < 0.2 * drafted
            assert ids(answers) == ids(Drive().run(jobs(options, max_tokens=40)))

    def test_trap_f1_padded_widths_may_differ(self, plain):
        target, draft = TinyModel(width=64), TinyModel(width=56)
        # the same weights where the ids have a meaning
        for model in (target, draft):
            model.embedding[:VOCAB], model.mixing, model.output[:VOCAB] = _weights()
        for name in ("greedy", "sampled"):
            answers = Drive(target, methods=("draft_model",), draft=draft).run(jobs(OPTIONS[name]))
            assert ids(answers) == plain(name)
            assert all(a.accepted == a.drafted > 0 for a in answers.values())


def _weights():
    model = TinyModel()
    return model.embedding, model.mixing, model.output
