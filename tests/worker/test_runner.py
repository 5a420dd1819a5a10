"""ModelRunner's moves: swaps to a bounded host memory and back, and copies."""

import math
import sys
from pathlib import Path

import pytest
import torch

from specserve.core.plan import BlockCopy, BlockSwap, ScheduledRequest, StepPlan
from specserve.models.kv_cache import PagedKVCache
from specserve.worker import runner as module
from specserve.worker.host import HostBlocks
from specserve.worker.runner import ModelRunner
from tests.fakes.tiny_model import TinyModel

PAGE = 4096


def random_cache(layers=3, blocks=8):
    cache = PagedKVCache(layers, blocks, 4, 2, 8, torch.float32)
    cache.storage.normal_(generator=torch.Generator().manual_seed(3))
    return cache


def make(num_host_blocks=4, pool="target", **options):
    return ModelRunner(TinyModel(), random_cache(**options), pool=pool, num_host_blocks=num_host_blocks)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class TestHostBlocks:
    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_memory_is_taken_as_it_is_used(self):
        cache = random_cache(blocks=64)
        before = resident()
        block = cache.storage.nbytes // 64
        host = HostBlocks(cache, 2**30 // block)
        assert host.storage.nbytes > 2**30 - block
        assert resident() - before < 2**26
        host.swap_out([(i, i * 1000) for i in range(8)])
        assert resident() - before < 2**26
        host.close()
        host.close()
        assert host.num_blocks == 0

    def test_a_slot_keeps_what_it_holds(self):
        cache = random_cache()
        host = HostBlocks(cache, 2)
        saved = cache.storage[:, :, 5].clone()
        host.swap_out([(5, 1)])
        cache.storage.zero_()
        host.swap_in([(0, 1)])
        host.swap_in([(7, 1)])
        assert torch.equal(cache.storage[:, :, 0], saved)
        assert torch.equal(cache.storage[:, :, 7], saved)
        assert not cache.storage[:, :, 1:7].any()


class TestMoves:
    def test_out_then_in_then_copies(self):
        runner = make()
        old = runner.cache.storage.clone()
        out, back = (BlockSwap(3, 0), BlockSwap(1, 2)), (BlockSwap(1, 0), BlockSwap(5, 2))
        seconds = runner.move(StepPlan(1, (), swap_out=out, swap_in=back, copies=(BlockCopy(1, 3), BlockCopy(3, 6))))
        assert seconds > 0
        # 1 is given up and taken by what 3 held, which then is copied over 3 and from there to 6.
        assert torch.equal(runner.cache.storage, old[:, :, [0, 3, 2, 3, 4, 1, 3, 7]])

    def test_only_moves_of_its_own_pool(self):
        runner = make(pool="draft")
        old = runner.cache.storage.clone()
        swaps = (BlockSwap(0, 3), BlockSwap(1, 3, "draft"), BlockSwap(5, 3))
        plan = StepPlan(1, (), swap_out=swaps, copies=(BlockCopy(2, 3), BlockCopy(2, 4, "draft")))
        runner.move(plan)
        runner.move(StepPlan(2, (), swap_in=(BlockSwap(7, 3, "draft"),)))
        assert torch.equal(runner.cache.storage, old[:, :, [0, 1, 2, 3, 2, 5, 6, 1]])

    def test_no_swaps_take_no_time(self):
        assert make().move(StepPlan(1, (), copies=(BlockCopy(0, 1),))) == 0.0

    def test_host_memory_is_bounded(self):
        runner = make(num_host_blocks=2)
        runner.move(StepPlan(1, (), swap_out=(BlockSwap(0, 1),)))
        with pytest.raises(IndexError):
            runner.move(StepPlan(2, (), swap_out=(BlockSwap(0, 2),)))
        with pytest.raises(IndexError):
            make(num_host_blocks=0).move(StepPlan(1, (), swap_out=(BlockSwap(0, 0),)))


class TestMeasure:
    def test_caches_and_slots_stay_as_they_were(self):
        runner = make()
        runner.host.storage.normal_()
        before = runner.cache.storage.clone(), runner.host.storage.clone()
        assert 0 < runner.measure_swap() < math.inf
        assert torch.equal(runner.cache.storage, before[0])
        assert torch.equal(runner.host.storage, before[1])

    def test_a_few_blocks_are_moved_however_many_there_are(self, monkeypatch):
        runner = make(blocks=64)
        block = runner.cache.storage.nbytes // 64
        moved = []

        class Counted(HostBlocks):
            def swap_out(self, pairs):
                moved.append(len(pairs))
                super().swap_out(pairs)

        monkeypatch.setattr(module, "HostBlocks", Counted)
        monkeypatch.setattr(module, "MEASURED_BYTES", 5 * block)
        runner.measure_swap()
        assert set(moved) == {5}
        moved.clear()
        monkeypatch.setattr(module, "MEASURED_BYTES", 1)
        runner.measure_swap()
        assert set(moved) == {1}

    def test_without_host_memory_a_swap_is_out_of_reach(self):
        assert make(num_host_blocks=0).measure_swap() == math.inf


class BestModel(TinyModel):
    """Has the method that gives tokens without logits."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked = []

    def forward_best(self, batch, cache, vocab_size):
        self.asked.append(vocab_size)
        return self.forward(batch, cache)[:, :vocab_size].argmax(-1).tolist()


class TestBest:
    @pytest.mark.parametrize("kind", [TinyModel, BestModel])
    def test_tokens_are_the_argmax_below_the_padding(self, kind):
        model = kind(vocab=48, width=56)
        items = [ScheduledRequest("a", 0, (5, 6, 7), 0, [1], 2), ScheduledRequest("b", 0, (8,), 0, [2], 1)]
        runner = ModelRunner(model, model.cache(8, 4))
        logits = ModelRunner(TinyModel(vocab=48, width=56), model.cache(8, 4)).forward(items, [2, 1])
        assert runner.best(items, [2, 1], 48) == logits[:, :48].argmax(-1).tolist()
        assert getattr(model, "asked", [48]) == [48]

    def test_a_row_that_is_not_finite_gives_no_token(self):
        model = TinyModel()
        model.output[:] = float("nan")
        assert ModelRunner(model, model.cache(8, 4)).best([ScheduledRequest("a", 0, (5,), 0, [1], 1)], [1], 48) == [-1]

    def test_no_logits_are_no_tokens(self):
        model = TinyModel()
        assert ModelRunner(model, model.cache(8, 4)).best([ScheduledRequest("a", 0, (5,), 0, [1], 0)], [0], 48) == []
