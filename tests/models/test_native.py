"""The native forward: every row's logits are the same bits whatever is computed beside it, and however it is cut up."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest
import torch

from specserve.kernels.cpu import native
from tests.fakes.paging import Paged
from tests.models.native_models import KINDS, SHAPES, model, same_bits, tokens

pytestmark = pytest.mark.usefixtures("every_library")

LENGTHS = (1, 2, 5, 31, 33, 64, 70, 90, 300)
# All kinds in the shape that has most of everything, all shapes with all kinds at once.
MODELS = [*(("odd", kind) for kind in KINDS), *((shape, "mixed") for shape in SHAPES if shape != "odd")]
IDS = [f"{shape}-{kind}" for shape, kind in MODELS]
CUTS = [(1, 64), *((chunk, block_size) for chunk in (7, 16, 256) for block_size in (16, 64))]
CUT_MODELS = [(*made, *cut) for made in MODELS for cut in (CUTS if made[0] == "odd" else CUTS[:1] + CUTS[-1:])]
COUNTS, FEW_COUNTS = [*range(1, 65), 256], [2, 3, 8, 16, 17, 31, 32, 33, 64, 256]
VOCABULARY = {shape: config.vocab_size for shape, config in SHAPES.items()}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _alone(isa: str | None, shape: str, kind: str, seed: int) -> torch.Tensor:
    paged = Paged(model(shape, kind), num_blocks=24)
    return paged.logits(tokens(LENGTHS[seed], VOCABULARY[shape], seed), chunk=1)


def alone(shape: str, kind: str, seed: int) -> torch.Tensor:
    """Logits of every position of one sequence that is computed a row at a time, and nothing beside it."""
    return _alone(native.isa(), shape, kind, seed)


@pytest.mark.parametrize(("shape", "kind", "chunk", "block_size"), CUT_MODELS)
def test_trap_d13_chunks_and_layouts_change_no_bit(shape: str, kind: str, chunk: int, block_size: int) -> None:
    for seed in (4, 7) if chunk == 1 else (4, 7, 8):
        paged = Paged(model(shape, kind), num_blocks=24, block_size=block_size, seed=chunk)
        found = paged.logits(tokens(LENGTHS[seed], VOCABULARY[shape], seed), chunk)
        assert same_bits(found, alone(shape, kind, seed))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("shape", "kind"), MODELS, ids=IDS)
def test_neighbours_and_order_change_no_bit(shape: str, kind: str, threads: int) -> None:
    """All sequences advance together, at random speeds, in a random order in every step."""
    chance = random.Random(threads)
    paged = Paged(model(shape, kind), num_blocks=60, seed=threads)
    sequences = [tokens(n, VOCABULARY[shape], seed) for seed, n in enumerate(LENGTHS)]
    blocks, done = [paged.blocks(n) for n in LENGTHS], [0] * len(LENGTHS)
    torch.set_num_threads(threads)
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        live = [i for i in range(len(LENGTHS)) if done[i] < LENGTHS[i]]
        chosen = chance.sample(live, chance.randint(1, len(live)))
        counts = [min(chance.choice([1, 1, 4, 40]), LENGTHS[i] - done[i]) for i in chosen]
        chunks = [
            (sequences[i][done[i] : done[i] + c], done[i], blocks[i]) for i, c in zip(chosen, counts, strict=True)
        ]
        parts = paged.forward(chunks).split(counts)
        for i, count, part in zip(chosen, counts, parts, strict=True):
            assert same_bits(part, alone(shape, kind, i)[done[i] : done[i] + count])
            done[i] += count


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("shape", "kind"), MODELS, ids=IDS)
def test_row_counts_change_no_bit(shape: str, kind: str, threads: int) -> None:
    """Decode steps of 1 to 64 rows, and of 256, in any order: a row has the same bits in each."""
    paged = Paged(model(shape, kind), num_blocks=256, seed=threads)
    prompts = [tokens(9, VOCABULARY[shape], seed) for seed in range(8)]
    expected = torch.stack([paged.logits(prompt, chunk=1)[8] for prompt in prompts])
    paged = Paged(model(shape, kind), num_blocks=256, seed=threads)
    rows = [([prompts[row % 8][8]], 8, paged.blocks(9)) for row in range(256)]
    paged.forward([(prompts[row % 8][:8], 0, blocks) for row, (_, _, blocks) in enumerate(rows)], "last")
    torch.set_num_threads(threads)
    for count in COUNTS if (threads, shape) == (1, "odd") else FEW_COUNTS:
        order = random.Random(count).sample(range(256), count)
        assert same_bits(paged.forward([rows[row] for row in order]), expected[[row % 8 for row in order]])


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("shape", "kind"), MODELS, ids=IDS)
def test_a_shared_prefix_changes_no_bit(shape: str, kind: str, block_size: int) -> None:
    """A sequence that goes on from another one's blocks, beside it and without it."""
    paged = Paged(model(shape, kind), num_blocks=40, block_size=block_size)
    ids = tokens(300, VOCABULARY[shape], 8)
    first = paged.blocks(300)
    paged.forward([(ids[:128], 0, first)])
    warm = first[: 128 // block_size] + paged.blocks(300 - 128)
    for begin, end in ((128, 129), (129, 150), (150, 300)):
        parts = paged.forward([(ids[begin:end], begin, first), (ids[begin:end], begin, warm)]).split(end - begin)
        for part in parts:
            assert same_bits(part, alone(shape, kind, 8)[begin:end])


@pytest.mark.parametrize(("shape", "kind"), MODELS, ids=IDS)
def test_what_blocks_held_before_changes_no_bit(shape: str, kind: str) -> None:
    paged = Paged(model(shape, kind), num_blocks=24)
    paged.cache.storage.fill_(float("nan"))
    assert same_bits(paged.logits(tokens(90, VOCABULARY[shape], 7), 16), alone(shape, kind, 7))
