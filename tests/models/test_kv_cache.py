"""The paged cache's memory."""

from __future__ import annotations

import torch

from specserve.kernels import kv_layout
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache


def test_int8_blocks_are_copied_with_their_scales():
    cache = PagedKVCache(2, 4, 4, 2, 8, torch.int8)
    assert all(t.shape == (4, 2, 4 * (8 + 4)) for t in (*cache.key, *cache.value))
    rows = torch.randn(3, 2, 8)
    kv_layout.store_rows(cache.value[1], torch.tensor([4, 5, 7]), rows)
    cache.copy_blocks([(1, 3)])
    copied = kv_layout.load_rows(cache.value[1], torch.tensor([3]), torch.tensor([0, 1, 3]), 8)
    assert (copied - rows).abs().max().item() < 0.02 * rows.abs().max().item()


def test_shapes_and_bytes():
    cache = PagedKVCache(3, 5, 4, 2, 8, torch.bfloat16)
    assert len(cache.key) == len(cache.value) == 3
    assert all(t.shape == (5, 2, 4, 8) and t.is_contiguous() for t in (*cache.key, *cache.value))
    info = ModelInfo(
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=16,
        vocab_size=32,
        max_position=64,
        dtype=torch.bfloat16,
        name="",
    )
    total = sum(t.numel() * t.element_size() for t in (*cache.key, *cache.value))
    assert total == 5 * info.kv_bytes_per_block(4)
    assert all(bool((t == 0).all()) for t in (*cache.key, *cache.value))


def test_copy_blocks_copies_every_layer_in_order():
    cache = PagedKVCache(2, 4, 4, 2, 8, torch.float32)
    for tensor in (*cache.key, *cache.value):
        tensor.copy_(torch.randn_like(tensor))
    before = [t.clone() for t in (*cache.key, *cache.value)]
    cache.copy_blocks([(0, 1), (1, 3)])
    for tensor, old in zip((*cache.key, *cache.value), before, strict=True):
        assert torch.equal(tensor, old[[0, 0, 2, 0]])
