"""Rows of a draft tree have the bits that they would have as a chain of their ancestors; on every kind of cache."""

from __future__ import annotations

import pytest
import torch

from specserve.kernels import kv_layout, reference
from specserve.kernels.cpu import ops

pytestmark = pytest.mark.usefixtures("native_variants")
HEADS, KV_HEADS, DIM = 6, 2, 64
# Parent of each node, -1 for the committed context: two roots, branches of different depths, one long chain.
PARENTS = [-1, -1, 0, 0, 1, 2, 2, 5, 7, 8, 9, 10, 3, 12, 4, 14]
DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.int8)]


def ancestors(parents: list[int], node: int) -> list[int]:
    """A node's path from its root, itself included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def masks_of(paths: list[list[int]], words: int) -> torch.Tensor:
    masks = torch.zeros(len(paths), words, dtype=torch.int64)
    for row, path in enumerate(paths):
        for node in path:
            bit = 1 << (node % 64)
            masks[row, node // 64] |= bit - (1 << 64) if bit >= 1 << 63 else bit
    return masks


class Sequence:
    """Keys, values and queries of one sequence by what they are of: context tokens, then the nodes of a tree."""

    def __init__(self, context: int, nodes: int, dtype: torch.dtype, cache: torch.dtype, block: int) -> None:
        random = torch.Generator().manual_seed(context)
        self.context, self.dtype, self.cache, self.block = context, dtype, cache, block
        self.kv = torch.randn(2, context + nodes, KV_HEADS, DIM, generator=random).to(dtype)
        self.q = torch.randn(nodes, HEADS, DIM, generator=random).to(dtype)
        self.order = torch.randperm(-(-(context + nodes) // block) + 1, generator=random)

    def stored(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Caches with those tokens at positions 0, 1, ..., and the table."""
        blocks = -(-len(tokens) // self.block)
        table = self.order[:blocks]
        at = torch.arange(len(tokens))
        slots = table[at // self.block] * self.block + at % self.block
        shape = kv_layout.layer_shape(len(self.order), KV_HEADS, self.block, DIM, self.cache)
        caches = torch.zeros(2, *shape, dtype=self.cache)
        for cache, rows in zip(caches, self.kv, strict=True):
            kv_layout.store_rows(cache, slots, rows[tokens])
        return caches[0], caches[1], table.int()[None]


def tree_rows(op, s: Sequence, parents: list[int], window: int = 0, rows: slice = slice(None)) -> torch.Tensor:
    paths = [ancestors(parents, node) for node in range(len(parents))]
    key, value, table = s.stored(list(range(s.context + len(parents))))
    n = len(parents[rows])
    positions = torch.tensor([s.context + len(path) - 1 for path in paths])[rows]
    tree = torch.full((n,), s.context, dtype=torch.int32), masks_of(paths, -(-len(parents) // 64))[rows].contiguous()
    sequence = torch.zeros(n, dtype=torch.int32)
    return op(s.q[rows], key, value, table, sequence, positions, DIM**-0.5, window, tree=tree)


def chain_row(op, s: Sequence, parents: list[int], node: int, window: int = 0) -> torch.Tensor:
    path = ancestors(parents, node)
    key, value, table = s.stored([*range(s.context), *(s.context + other for other in path)])
    position = torch.tensor([s.context + len(path) - 1])
    one = torch.zeros(1, dtype=torch.int32)
    return op(s.q[node : node + 1], key, value, table, one, position, DIM**-0.5, window)[0]


@pytest.mark.parametrize("op", [ops.paged_attention, reference.paged_attention], ids=["native", "reference"])
@pytest.mark.parametrize(("dtype", "cache"), DTYPES)
@pytest.mark.parametrize("context", [0, 1, 60, 64, 129, 508])
def test_bits_of_the_chain(op, dtype: torch.dtype, cache: torch.dtype, context: int) -> None:
    s = Sequence(context, len(PARENTS), dtype, cache, 16)
    found = tree_rows(op, s, PARENTS)
    for node in range(len(PARENTS)):
        assert torch.equal(found[node], chain_row(op, s, PARENTS, node)), node


@pytest.mark.parametrize(("dtype", "cache"), DTYPES)
def test_a_tree_of_many_words_with_a_window_on_odd_blocks(dtype: torch.dtype, cache: torch.dtype) -> None:
    parents = [node - 1 if node % 5 else node - 5 if node >= 5 else -1 for node in range(140)]
    s = Sequence(75, len(parents), dtype, cache, 4)
    found = tree_rows(ops.paged_attention, s, parents, window=90)
    for node in (0, 4, 63, 64, 128, 139):
        assert torch.equal(found[node], chain_row(ops.paged_attention, s, parents, node, window=90)), node


def test_a_chain_is_a_tree_and_splits_change_no_bit() -> None:
    chain = list(range(-1, 20))
    s = Sequence(120, len(chain), torch.bfloat16, torch.bfloat16, 16)
    whole = tree_rows(ops.paged_attention, s, chain)
    assert torch.equal(whole, torch.stack([chain_row(ops.paged_attention, s, chain, node) for node in range(21)]))
    parts = [tree_rows(ops.paged_attention, s, chain, rows=slice(i, i + 4)) for i in range(0, 21, 4)]
    assert torch.equal(torch.cat(parts), whole)


def test_rows_without_a_bit_are_causal() -> None:
    s = Sequence(200, 1, torch.bfloat16, torch.bfloat16, 16)
    key, value, table = s.stored(list(range(201)))
    positions, rows = torch.arange(40, 201), torch.zeros(161, dtype=torch.int32)
    q = torch.randn(161, HEADS, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    args = (q, key, value, table, rows, positions, DIM**-0.5, 0)
    tree = torch.zeros(161, dtype=torch.int32), torch.zeros(161, 1, dtype=torch.int64)
    for op in (ops.paged_attention, reference.paged_attention):
        assert torch.equal(op(*args, tree=tree), op(*args))


def test_a_tree_beside_other_rows() -> None:
    """Several sequences in one step: two trees and a chunk."""
    trees = [Sequence(context, len(PARENTS), torch.bfloat16, torch.bfloat16, 16) for context in (70, 70)]
    trees[1].q = trees[1].q.flip(0)
    alone = [tree_rows(ops.paged_attention, s, PARENTS) for s in trees]
    paths = [ancestors(PARENTS, node) for node in range(len(PARENTS))]
    stored = [s.stored(list(range(70 + len(PARENTS)))) for s in trees]
    blocks = stored[0][0].shape[0]
    key, value = (torch.cat([stored[0][i], stored[1][i]]) for i in range(2))
    tables = torch.cat([stored[0][2], stored[1][2] + blocks])
    sequence = torch.arange(3).repeat_interleave(len(PARENTS)).clamp(max=1).int()
    at = torch.tensor([70 + len(path) - 1 for path in paths])
    positions = torch.cat([at, at, torch.arange(20, 20 + len(PARENTS))])
    masks = masks_of(paths, 1)
    tree = torch.full((len(positions),), 70, dtype=torch.int32), torch.cat([masks, masks, torch.zeros_like(masks)])
    q = torch.cat([trees[0].q, trees[1].q, trees[0].q])
    found = ops.paged_attention(q, key, value, tables, sequence, positions, DIM**-0.5, tree=tree)
    assert torch.equal(found[: len(PARENTS)], alone[0])
    assert torch.equal(found[len(PARENTS) : 2 * len(PARENTS)], alone[1])
    rest = slice(2 * len(PARENTS), None)
    plain = ops.paged_attention(q[rest], key, value, tables, sequence[rest], positions[rest], DIM**-0.5)
    assert torch.equal(found[rest], plain)
