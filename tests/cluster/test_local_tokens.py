"""Steps whose tokens need no groups: the largest logits', and those drawn from packed options alone."""

import struct

import numpy as np
import pytest

from specserve.core.plan import StepPlan
from specserve.kernels.cpu.native import library
from specserve.kernels.cpu.sample import ROW, UNDECIDED, pack_options, sample_rows
from specserve.worker import sampler
from specserve.worker.sampler import sample
from tests.fakes.local_steps import ask, executor, new, run
from tests.fakes.tiny_model import TinyModel


class TestBest:
    """Steps whose rows are all plain ask the model for tokens, not for logits."""

    def tokens(self, monkeypatch, *others):
        """(tokens of request a beside others, whether the logits were asked for)."""
        ex, runner = executor()
        asked = []
        forward = runner.forward
        monkeypatch.setattr(runner, "forward", lambda *a: asked.append(1) or forward(*a))
        rest = [(ask(n.request_id, [6, 7], blocks=(3 + i,)), n) for i, n in enumerate(others)]
        plan = StepPlan(1, (ask("a", [5]), *(r for r, _ in rest)), (new("a", [5]), *(n for _, n in rest)))
        masks = {n.request_id: np.full((1, 2), -1, dtype=np.int32) for n in others if n.params.guided}
        return run(ex, plan, masks).outputs[0].token_ids, bool(asked)

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.5},
            {"logprobs": 0},
            {"beam_width": 2},
            {"min_tokens": 2},
            {"presence_penalty": 1.0},
            {"logit_bias": {3: 1.0}},
            {"banned_token_ids": (3,)},
            {"guided": {"regex": "x*"}},
        ],
    )
    def test_one_row_that_is_not_plain_needs_the_logits(self, monkeypatch, options):
        alone, asked = self.tokens(monkeypatch)
        assert not asked
        assert self.tokens(monkeypatch, new("b", [6, 7]), new("c", [6, 7])) == (alone, False)
        assert self.tokens(monkeypatch, new("b", [6, 7]), new("c", [6, 7], **options)) == (alone, True)

    def test_min_tokens_are_forgotten_once_they_are_there(self, monkeypatch):
        assert self.tokens(monkeypatch, new("b", [6, 7], num_prompt=1, min_tokens=1))[1] is False

    def test_a_mask_that_comes_too_late_is_refused(self):
        ex, _ = executor()
        mask = np.full((1, 2), -1, dtype=np.int32)
        with pytest.raises(ValueError, match="not guided"):
            run(ex, StepPlan(1, (ask("a", [5]),), (new("a", [5]),)), {"a": mask})


class TestDraw:
    """Steps whose rows need nothing but their options and logits skip the groups."""

    def outputs(self, monkeypatch, *, groups):
        ex, _ = executor()
        if groups:
            monkeypatch.setattr(type(ex._states), "all_packed", False)
        requests = [
            new("a", [5], temperature=0.8, top_p=0.9),
            new("b", [6, 7], temperature=1.2, banned_token_ids=(3,)),
            new("c", [9]),
            new("d", [8, 8], logit_bias={4: 2.0}, temperature=0.5),
        ]
        asked = [
            ask("a", [5], draft=(2, 3)),
            ask("b", [6, 7], blocks=(2,), logits=0),
            ask("c", [9], blocks=(3,), draft=(1,)),
            ask("d", [8, 8], blocks=(4,)),
        ]
        calls = []
        monkeypatch.setattr("specserve.cluster.local.sample", lambda *a, **k: calls.append(1) or sample(*a, **k))
        return run(ex, StepPlan(1, tuple(asked), tuple(requests))).outputs, bool(calls)

    def test_what_they_give_is_the_same(self, monkeypatch):
        found, sampled = self.outputs(monkeypatch, groups=False)
        expected, _ = self.outputs(monkeypatch, groups=True)
        assert found == expected
        assert [bool(o.token_ids) for o in found] == [True, False, True, True]
        assert sampled is (library() is None)

    def test_a_row_that_torch_must_decide_goes_there(self, monkeypatch):
        monkeypatch.setattr(sampler, "sample_rows", lambda parts, count, vocab: [UNDECIDED] * count)
        found, sampled = self.outputs(monkeypatch, groups=False)
        monkeypatch.undo()
        assert sampled
        assert found == self.outputs(monkeypatch, groups=True)[0]

    @pytest.mark.parametrize("undecided", [False, True])
    @pytest.mark.skipif(library() is None, reason="no native kernels here")
    def test_a_model_may_draw_in_its_forward(self, monkeypatch, undecided):
        expected, _ = self.outputs(monkeypatch, groups=False)
        calls = []

        def forward_draw(self, batch, cache, vocab_size, rows):
            logits = self.forward(batch, cache)
            size, stride = ROW.size + len(pack_options(0, 0.0)), logits.stride(0) * logits.element_size()
            fields = [(i, rows[i * size : (i + 1) * size]) for i in range(len(logits))]
            placed = [struct.pack("=Q", logits.data_ptr() + i * stride) + row[8:] for i, row in fields]
            calls.append(len(placed))
            tokens = sample_rows(placed, len(placed), vocab_size)
            return ([UNDECIDED, *tokens[1:]] if undecided else tokens), logits

        monkeypatch.setattr(TinyModel, "forward_draw", forward_draw, raising=False)
        found, sampled = self.outputs(monkeypatch, groups=False)
        assert found == expected
        assert (calls, sampled) == ([6], False)

    @pytest.mark.parametrize(
        "options", [{"logprobs": 0}, {"beam_width": 2}, {"min_tokens": 2}, {"presence_penalty": 1.0}]
    )
    def test_one_request_that_asks_for_more_needs_the_groups(self, options):
        ex, _ = executor()
        ex.forward(StepPlan(1, (ask("a", [5]),), (new("a", [5], temperature=1.0), new("b", [6], **options))))
        assert not ex._states.all_packed
        ex.forward(StepPlan(2, (), (), ("b",)))
        assert ex._states.all_packed
