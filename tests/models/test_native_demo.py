"""The demo model on the native forward, in the sizes that it really has: a row's bits depend on its sequence alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specserve.kernels.cpu.native import library
from specserve.models.loader import load_model
from specserve.models.native import NativeLlama
from tests.fakes.paging import Paged, make_batch
from tests.fakes.prompts import prompts
from tests.models.native_models import same_bits

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library")

PROMPT, SHARED = 90, 48


@pytest.fixture(scope="module", params=["auto", "none", "q8"])
def demo(request: pytest.FixtureRequest) -> tuple[NativeLlama, list[int]]:
    """The model, and a prompt."""
    loaded = load_model("demo", dtype="bfloat16", numerics="invariant", quantization=request.param)
    assert isinstance(loaded.model, NativeLlama)
    ids = loaded.tokenizer.encode(" ".join(prompts(20)))[:PROMPT]
    assert len(ids) == PROMPT
    return loaded.model, ids


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_trap_d13_chunks_and_layouts_change_no_bit(demo: tuple[NativeLlama, list[int]]) -> None:
    llama, ids = demo
    whole = Paged(llama, num_blocks=8).logits(ids)
    assert whole.isfinite().all()
    assert same_bits(Paged(llama, num_blocks=4, block_size=64, seed=1).logits(ids, 7), whole)
    torch.set_num_threads(1)
    assert same_bits(Paged(llama, num_blocks=8, seed=2).logits(ids, 40), whole)


def test_row_counts_change_no_bit(demo: tuple[NativeLlama, list[int]]) -> None:
    """Rows of 64 sequences that share their first blocks, alone and beside others."""
    llama, ids = demo
    paged = Paged(llama, num_blocks=80)
    shared = paged.blocks(SHARED)
    paged.forward([(ids[:SHARED], 0, shared)], "last")
    rows = [([ids[SHARED + row % 4]], SHARED, shared + paged.blocks(1)) for row in range(64)]
    alone = torch.cat([paged.forward([row]) for row in rows[:4]])
    for count in (33, 64):
        assert same_bits(paged.forward(rows[:count]), alone.repeat(16, 1)[:count])
    greatest = alone.repeat(16, 1).argmax(1)
    assert llama.forward_best(make_batch(rows, 16), paged.cache) == greatest.tolist()
