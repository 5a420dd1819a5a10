"""The paged cache's memory."""

from __future__ import annotations

import torch

from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache


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
