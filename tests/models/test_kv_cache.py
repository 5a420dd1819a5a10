"""The paged cache's memory."""

from __future__ import annotations

import torch

from specserve.models.kv_cache import PagedKVCache


def test_shapes_and_bytes():
    cache = PagedKVCache(3, 5, 4, 2, 8, torch.bfloat16)
    assert len(cache.key) == len(cache.value) == 3
    assert all(t.shape == (5, 4, 2, 8) and t.is_contiguous() for t in (*cache.key, *cache.value))
    total = sum(t.numel() * t.element_size() for t in (*cache.key, *cache.value))
    assert total == 5 * PagedKVCache.bytes_per_block(3, 4, 2, 8, torch.bfloat16)
    assert all(bool((t == 0).all()) for t in (*cache.key, *cache.value))


def test_copy_blocks_copies_every_layer_in_order():
    cache = PagedKVCache(2, 4, 4, 2, 8, torch.float32)
    for tensor in (*cache.key, *cache.value):
        tensor.copy_(torch.randn_like(tensor))
    before = [t.clone() for t in (*cache.key, *cache.value)]
    cache.copy_blocks([(0, 1), (1, 3)])
    for tensor, old in zip((*cache.key, *cache.value), before, strict=True):
        assert torch.equal(tensor, old[[0, 0, 2, 0]])
