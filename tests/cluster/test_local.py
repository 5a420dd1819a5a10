import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from specserve.cluster.local import NO_LEGAL_TOKEN, LocalExecutor
from specserve.core.plan import BlockCopy, BlockSwap, NewRequest, StepPlan
from specserve.core.protocols import DraftRows
from specserve.core.sampling import SamplingParams
from specserve.core.tree import TokenTree
from specserve.worker.runner import ModelRunner
from tests.fakes.drive import EOS, Drive
from tests.fakes.local_steps import VOCAB, ask, executor, new, run
from tests.fakes.tiny_model import TinyModel


def test_chunks_without_logits_emit_nothing():
    ex, _ = executor()
    plan = StepPlan(1, (ask("a", [1, 2], logits=0), ask("b", [4], blocks=(2,))), (new("a", [1, 2, 3]), new("b", [4])))
    result = run(ex, plan)
    assert result.step == 1
    assert [len(o.token_ids) for o in result.outputs] == [0, 1]
    assert result.timings.keys() == {"forward", "sample"}


def test_a_tree_with_branches_is_refused():
    ex, _ = executor()
    tree = dataclasses.replace(TokenTree.chain((1, 2), "suffix"), first_child=(-1, -1), next_sibling=(1, -1))
    tree.check()
    scheduled = ask("a", [4, 1, 2])._replace(draft=tree, num_logits=3)
    with pytest.raises(NotImplementedError, match="branches"):
        ex.forward(StepPlan(1, (scheduled,), (new("a", [4]),)))


def test_a_request_without_a_legal_token_fails_alone():
    ex, _ = executor()
    impossible = new("a", [5], allowed_token_ids=(3,), banned_token_ids=(3,))
    plan = StepPlan(1, (ask("a", [5]), ask("b", [6], blocks=(2,))), (impossible, new("b", [6])))
    failed, fine = run(ex, plan).outputs
    assert failed.error
    assert failed.token_ids == ()
    assert fine.error is None
    alone, _ = executor()
    expected = run(alone, StepPlan(1, (ask("b", [6], blocks=(2,)),), (new("b", [6]),)))
    assert fine.token_ids == expected.outputs[0].token_ids


def test_a_failing_row_behind_the_draft_does_not_fail_what_came_before():
    ex, _ = executor()
    first = run(ex, StepPlan(1, (ask("a", [5]),), (new("a", [5]),))).outputs[0].token_ids[0]
    ex, _ = executor()
    masks = {"a": torch.tensor([[-1, -1], [0, 0]], dtype=torch.int32).numpy()}
    guided = new("a", [5], guided={"regex": "x*"})
    result = run(ex, StepPlan(1, (ask("a", [5], draft=(first,)),), (guided,)), masks).outputs[0]
    assert (result.token_ids, result.num_accepted, result.error) == ((first,), 0, None)


class TestMoves:
    def test_a_plan_of_moves_alone(self):
        ex, runner = executor()
        cache = runner.cache
        cache.key[0][3] = 7.0
        cache.key[0][4] = 9.0
        swap_out, swap_in = (BlockSwap(3, 0),), (BlockSwap(5, 0),)
        copies = (BlockCopy(4, 3), BlockCopy(4, 6, "draft"))
        result = run(ex, StepPlan(1, (), swap_out=swap_out, swap_in=swap_in, copies=copies))
        assert (cache.key[0][5] == 7.0).all(), "swapped in what was swapped out"
        assert (cache.key[0][3] == 9.0).all()
        assert (cache.key[0][6] == 1e3).all(), "another pool's copy is not ours"
        assert result.outputs == ()
        assert result.timings["swap"] > 0
        assert "swap" not in run(ex, StepPlan(2, (), copies=copies)).timings

    def test_both_pools_are_moved_before_the_forward(self):
        target, draft = TinyModel(), TinyModel()
        runners = [
            ModelRunner(target, target.cache(8, 4), num_host_blocks=1),
            ModelRunner(draft, draft.cache(8, 4), pool="draft", num_host_blocks=1),
        ]
        ex = LocalExecutor(*runners, vocab_size=VOCAB, eos_ids=[EOS])
        expected = run(executor()[0], StepPlan(1, (ask("a", [5, 6, 7, 8, 9]),), (new("a", [5, 6, 7, 8, 9]),)))
        run(ex, StepPlan(1, (ask("a", [5, 6, 7, 8], logits=0),), (new("a", [5, 6, 7, 8, 9]),)))
        ex.draft([DraftRows("a", (5, 6, 7, 8), 0, [2], False)])
        saved = runners[1].cache.storage[:, :, 2].clone()
        run(ex, StepPlan(2, (), swap_out=(BlockSwap(0, 0), BlockSwap(2, 0, "draft"))))
        for runner in runners:
            runner.cache.storage.fill_(1e3)
        back = (BlockSwap(4, 0), BlockSwap(6, 0, "draft"))
        result = run(ex, StepPlan(3, (ask("a", [9], start=4, blocks=(4, 7)),), swap_in=back))
        assert result.outputs == expected.outputs
        assert torch.equal(runners[1].cache.storage[:, :, 6], saved)

    def test_memory_is_taken_for_the_caches_of_both_models(self, monkeypatch):
        target, draft = TinyModel(), TinyModel()
        runners = [ModelRunner(target, target.cache(8, 4)), ModelRunner(draft, draft.cache(8, 4), pool="draft")]
        taken = []
        monkeypatch.setattr("specserve.cluster.local.populate", taken.append)
        LocalExecutor(*runners, vocab_size=VOCAB, eos_ids=[EOS]).populate()
        assert [memory.ctypes.data for memory in taken] == [r.cache.storage.data_ptr() for r in runners]

    def test_what_a_swap_takes_is_measured_on_both_models(self):
        ex, runner = executor()
        before = runner.cache.storage.clone()
        assert 0 < ex.measure_swap() < math.inf
        assert torch.equal(runner.cache.storage, before)
        runner.measure_swap = lambda: 2.0
        assert ex.measure_swap() == 2.0
        draft = ModelRunner(TinyModel(), TinyModel().cache(8, 4), pool="draft", num_host_blocks=1)
        draft.measure_swap = lambda: 0.5
        assert LocalExecutor(runner, draft, vocab_size=VOCAB).measure_swap() == 2.5


def test_a_guided_request_is_never_sampled_without_its_mask():
    ex, _ = executor()
    ex.forward(StepPlan(1, (plan := ask("a", [5]),), (new("a", [5], guided={"regex": "a"}),)))
    with pytest.raises(ValueError, match="mask"):
        ex.sample(StepPlan(1, (plan,)), {})


def test_states_end_with_removed():
    ex, _ = executor()
    run(ex, StepPlan(1, (ask("a", [5]),), (new("a", [5], presence_penalty=1.0),)))
    run(ex, StepPlan(2, (), removed=("a",)))
    with pytest.raises(KeyError):
        run(ex, StepPlan(3, (ask("a", [6], start=1),)))
    ex.close()
    ex.close()


def test_draft_rows_that_are_not_sampled_give_no_token():
    target, draft = TinyModel(), TinyModel()
    ex = LocalExecutor(
        ModelRunner(target, target.cache(8, 4)), ModelRunner(draft, draft.cache(8, 4), pool="draft"), vocab_size=VOCAB
    )
    ex.forward(StepPlan(1, (ask("a", [5]),), (new("a", [5]), new("b", [6], temperature=0.8))))
    rows = [DraftRows("a", (5, 6), 0, [0], False), DraftRows("b", (6,), 0, [1], True)]
    (nothing, sampled) = ex.draft(rows)
    assert nothing == (-1, 0.0)
    assert 0 <= sampled[0] < VOCAB
    assert 0 < sampled[1] <= 1
    ex.copy([BlockCopy(1, 2, "draft")])
    assert torch.equal(ex._draft.cache.key[0][1], ex._draft.cache.key[0][2])


class TestBeams:
    def test_a_beam_is_not_sampled(self):
        ex, _ = executor()
        output = run(ex, StepPlan(1, (ask("a", [5, 6], draft=(7, 8)),), (new("a", [5, 6], beam_width=3),))).outputs[0]
        assert (output.token_ids, output.num_drafted, output.num_accepted) == ((), 2, 0)
        assert (output.logprobs, output.error) == ((), None)
        assert [c.token_id for c in output.candidates] == [-1] * 3
        for j, entry in enumerate(output.candidates):
            alone, _ = executor()
            tokens = (5, 6, 7, 8)[: 2 + j]
            same = run(alone, StepPlan(1, (ask("a", tokens),), (new("a", tokens, beam_width=3),))).outputs[0]
            assert same.candidates == (entry,), "a row is what it is without a draft"

    @pytest.mark.parametrize("penalty", [1.0, 1.5, 0.6])
    def test_candidates_are_those_of_transformers(self, penalty):
        """log_softmax of the model's own logits, then its processor for the penalty."""
        ex, runner = executor()
        seen = []
        forward = runner.forward
        runner.forward = lambda *args: seen.append(forward(*args)) or seen[-1]
        tokens, draft = (5, 6, 7, 5, 9, 11), (12, 5)
        added = NewRequest("a", tokens, 3, SamplingParams(beam_width=16, repetition_penalty=penalty), 3)
        output = run(ex, StepPlan(1, (ask("a", tokens, draft=draft),), (added,))).outputs[0]
        for j, (row, entry) in enumerate(zip(seen[0], output.candidates, strict=True)):
            history = torch.tensor([(*tokens, *draft[:j])])
            scores = RepetitionPenaltyLogitsProcessor(penalty)(history, torch.log_softmax(row[None], -1))[0]
            best, ids = torch.topk(scores, 17)
            assert entry.top_ids == tuple(ids.tolist())
            assert entry.top_logprobs == pytest.approx(best.tolist(), abs=1e-5)

    def test_its_state_stays_until_the_engine_adds_it_again(self):
        params = {"beam_width": 2, "frequency_penalty": 1.0}
        ex, _ = executor()
        first = run(ex, StepPlan(1, (ask("a", [5], draft=(6,)),), (new("a", [5], **params),))).outputs[0]
        again = run(ex, StepPlan(2, (ask("a", [5], draft=(6,)),))).outputs[0]
        assert again.candidates == first.candidates
        added = NewRequest("a", (5, 6), 1, SamplingParams(**params), 3)
        told = run(ex, StepPlan(3, (ask("a", [6], start=1),), (added,))).outputs[0]
        assert told.candidates == first.candidates[1:]

    @pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "frequency_penalty": 0.4, "logprobs": 2}])
    def test_rows_of_a_beam_beside_others_change_nothing_for_either(self, params):
        beam = {"beam_width": 4, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}}
        jobs = {"a": ((5, 6), params), "b": ((7, 8), beam), "c": ((9,), params), "d": ((4, 4), {"beam_width": 2})}

        def step(*names):
            ex, _ = executor()
            rows = [ask(name, jobs[name][0], blocks=("abcd".index(name),), draft=(3,)) for name in names]
            added = [new(name, jobs[name][0], **jobs[name][1]) for name in names]
            return {o.request_id: o for o in run(ex, StepPlan(1, tuple(rows), tuple(added))).outputs}

        together = step("a", "b", "c", "d")
        assert list(together) == ["a", "b", "c", "d"]
        for name in jobs:
            assert step(name)[name] == together[name], "bit for bit"
        assert [bool(o.candidates) for o in together.values()] == [False, True, False, True]

    def test_a_beam_without_a_legal_token_fails_alone(self):
        ex, _ = executor()
        impossible = new("a", [5], beam_width=2, allowed_token_ids=(3,), banned_token_ids=(3,))
        plan = StepPlan(1, (ask("a", [5]), ask("b", [6], blocks=(2,))), (impossible, new("b", [6], beam_width=2)))
        failed, fine = run(ex, plan).outputs
        assert (failed.error, failed.candidates) == (NO_LEGAL_TOKEN, ())
        assert (fine.error, len(fine.candidates)) == (None, 1)

    def test_a_dead_row_behind_the_draft_is_no_error(self):
        ex, _ = executor()
        masks = {"a": np.array([[-1, -1], [0, 0]], dtype=np.int32)}
        plan = StepPlan(1, (ask("a", [5], draft=(6,)),), (new("a", [5], beam_width=2),))
        output = run(ex, plan, masks).outputs[0]
        assert output.error is None
        assert [len(c.top_ids) for c in output.candidates] == [3, 0]

    def test_a_guided_beam_needs_its_mask(self):
        ex, _ = executor()
        ex.forward(StepPlan(1, (plan := ask("a", [5]),), (new("a", [5], beam_width=2, guided={"regex": "a"}),)))
        with pytest.raises(ValueError, match="mask"):
            ex.sample(StepPlan(1, (plan,)), {})

    def test_a_chunk_inside_the_prompt_gives_nothing(self):
        ex, _ = executor()
        output = run(ex, StepPlan(1, (ask("a", [5], logits=0),), (new("a", [5, 6], beam_width=2),))).outputs[0]
        assert (output.candidates, output.token_ids, output.error) == ((), (), None)

    def test_drafts_for_a_beam_are_greedy(self):
        draft = TinyModel(seed=4)
        ex = LocalExecutor(
            ModelRunner(TinyModel(), TinyModel().cache(8, 4)),
            ModelRunner(draft, draft.cache(8, 4), pool="draft"),
            vocab_size=VOCAB,
        )
        names = {"a": {"beam_width": 3, "presence_penalty": 0.5}, "b": {"presence_penalty": 0.5}}
        added = tuple(new(name, [5, 6], **params) for name, params in names.items())
        ex.forward(StepPlan(1, tuple(ask(n, [5, 6], blocks=(i,)) for i, n in enumerate(names)), added))
        beam, greedy = ex.draft([DraftRows(n, (5, 6), 0, [i], True) for i, n in enumerate(names)])
        assert beam == greedy
        assert beam[1] == 1.0


class TestLogprobs:
    PROMPT = (5, 6, 7, 5, 6, 7, 5, 6)

    def answers(self, methods=(), draft=None, **params):
        work = {"r": (self.PROMPT, SamplingParams(max_tokens=24, seed=9, **params))}
        return Drive(methods=methods, draft=draft).run(work)["r"]

    @pytest.mark.parametrize("mode", ["raw", "processed"])
    @pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.4}])
    def test_trap_a9_one_right_entry_for_each_emitted_token(self, mode, options):
        options = {"logprobs": 3, "logprobs_mode": mode, **options}
        plain = self.answers(**options)
        for methods, draft in ((("suffix",), None), (("draft_model",), TinyModel())):
            drafted = self.answers(methods, draft, **options)
            assert drafted.accepted > 0
            assert drafted.token_ids == plain.token_ids
            assert drafted.logprobs == plain.logprobs, "bit for bit"
        assert [e.token_id for e in plain.logprobs] == plain.token_ids
        for entry in plain.logprobs:
            assert len(entry.top_ids) == 3
            assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
            if entry.token_id in entry.top_ids:
                assert entry.logprob == entry.top_logprobs[entry.top_ids.index(entry.token_id)]

    def test_raw_is_before_and_processed_after_the_options(self):
        options = {"logprobs": 2, "allowed_token_ids": (4, 9), "max_tokens": 1}
        work = {"r": (self.PROMPT, SamplingParams(logprobs_mode="raw", **options))}
        raw = Drive().run(work)["r"].logprobs[0]
        work = {"r": (self.PROMPT, SamplingParams(logprobs_mode="processed", **options))}
        processed = Drive().run(work)["r"].logprobs[0]
        assert set(processed.top_ids) == {4, 9}
        assert processed.logprob > raw.logprob
        assert sum(torch.tensor(processed.top_logprobs).exp()) == pytest.approx(1, abs=1e-5)
