import dataclasses

import pytest
import torch

from specserve.cluster.local import LocalExecutor
from specserve.core.plan import BlockCopy, BlockSwap, NewRequest, ScheduledRequest, StepPlan
from specserve.core.protocols import DraftRows
from specserve.core.sampling import SamplingParams
from specserve.core.tree import TokenTree
from specserve.worker.runner import ModelRunner
from tests.fakes.drive import EOS, Drive
from tests.fakes.tiny_model import TinyModel

VOCAB = 48


def executor(**options):
    model = TinyModel()
    runner = ModelRunner(model, model.cache(8, 4))
    return LocalExecutor(runner, vocab_size=VOCAB, eos_ids=[EOS], **options), runner


def new(name, tokens, **params):
    return NewRequest(name, tuple(tokens), len(tokens), SamplingParams(**params), 3)


def run(ex, plan, masks=None):
    ex.forward(plan)
    return ex.sample(plan, masks or {})


def ask(name, tokens, start=0, blocks=(0, 1), logits=1, draft=()):
    rows = (*tokens, *draft)
    return ScheduledRequest(name, 0, rows, start, list(blocks), logits + len(draft), TokenTree.chain(draft, "suffix"))


def test_chunks_without_logits_emit_nothing():
    ex, _ = executor()
    plan = StepPlan(1, (ask("a", [1, 2], logits=0), ask("b", [4], blocks=(2,))), (new("a", [1, 2, 3]), new("b", [4])))
    result = run(ex, plan)
    assert result.step == 1
    assert [len(o.token_ids) for o in result.outputs] == [0, 1]
    assert {"forward", "sample"} <= result.timings.keys()


def test_a_tree_with_branches_is_refused():
    ex, _ = executor()
    tree = dataclasses.replace(TokenTree.chain((1, 2), "suffix"), first_child=(-1, -1), next_sibling=(1, -1))
    tree.check()
    scheduled = dataclasses.replace(ask("a", [4, 1, 2]), draft=tree, num_logits=3)
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
    result = run(ex, StepPlan(1, (ask("a", [5], draft=(first,)),), (new("a", [5]),)), masks).outputs[0]
    assert (result.token_ids, result.num_accepted, result.error) == ((first,), 0, None)


def test_copies_and_swaps_run_before_the_forward():
    ex, runner = executor()
    cache = runner.cache
    cache.key[0][3] = 7.0
    cache.key[0][4] = 9.0
    swap_out, swap_in = (BlockSwap(3, 0),), (BlockSwap(5, 0),)
    copies = (BlockCopy(4, 3), BlockCopy(4, 6, "draft"))
    ex.forward(StepPlan(1, (), swap_out=swap_out, swap_in=swap_in, copies=copies))
    assert (cache.key[0][5] == 7.0).all(), "swapped in what was swapped out"
    assert (cache.key[0][3] == 9.0).all()
    assert (cache.key[0][6] == 1e3).all(), "another pool's copy is not ours"


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
