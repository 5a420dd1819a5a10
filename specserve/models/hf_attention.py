"""transformers' attention interface on the paged KV cache: what any transformers model calls instead of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from specserve.core.errors import ModelLoadError
from specserve.kernels.cpu import ops
from specserve.kernels.kv_layout import store_rows
from specserve.models.batch import BatchTensors
from specserve.models.kv_cache import PagedKVCache

NAME = "specserve_paged"
# What attention functions may be given that changes nothing here: positions are known, dropout is of training.
_HARMLESS = {
    "position_ids", "cache_position", "output_attentions", "use_cache", "is_causal", "return_dict", "layer_idx",
    "past_key_values", "deterministic", "logits_to_keep", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "position_embeddings", "output_hidden_states", "output_router_logits",
}  # fmt: skip


@dataclass(slots=True)
class Layer:
    """One call of attention in a forward, as the probe saw it. `window` is 0 for all positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int


@dataclass(slots=True)
class _Step:
    """The forward that runs in this thread. Without a cache it is the probe, which records the layers."""

    batch: BatchTensors | None = None
    cache: PagedKVCache | None = None
    layers: list[Layer] = field(default_factory=list)
    calls: int = 0


_STEP: ContextVar[_Step] = ContextVar("specserve_step")


@contextmanager
def paged_step(batch: BatchTensors, cache: PagedKVCache) -> Iterator[None]:
    """Attention calls inside read and write `cache`; the n-th call of a forward is layer n."""
    token = _STEP.set(_Step(batch, cache))
    try:
        yield
    finally:
        _STEP.reset(token)


@contextmanager
def probing() -> Iterator[list[Layer]]:
    """Attention calls inside are recorded, and answered with zeros.

    Raises:
        ModelLoadError: from a call that asks for what paged attention does not do.
    """
    step = _Step()
    token = _STEP.set(step)
    try:
        yield step.layers
    finally:
        _STEP.reset(token)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, n, dim], key and value [1, kv heads, n, dim] -> [1, n, heads, dim]."""
    step = _STEP.get()
    n, dim = query.shape[2], query.shape[3]
    window = int(options.get("sliding_window") or 0)
    if step.batch is None or step.cache is None:
        _refuse_unsupported(module, query, key, value, attention_mask, options)
        step.layers.append(Layer(query.shape[1], key.shape[1], dim, window))
        return torch.zeros_like(query).transpose(1, 2), None
    batch, layer = step.batch, step.calls
    step.calls += 1
    key_cache, value_cache = step.cache.key[layer], step.cache.value[layer]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        store_rows(cache, batch.slots, rows[0].transpose(0, 1))
    out = ops.paged_attention(
        query[0].transpose(0, 1).to(query.dtype if key_cache.dtype == torch.int8 else key_cache.dtype).contiguous(),
        key_cache,
        value_cache,
        batch.block_tables,
        batch.row_sequence,
        batch.positions,
        dim**-0.5 if scaling is None else float(scaling),
        window,
    )
    return out.view(1, n, -1, dim).to(query.dtype), None


def _refuse_unsupported(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    reason = None
    others = sorted(
        name for name, value in options.items() if value is not None and name not in {*_HARMLESS, "sliding_window"}
    )
    if mask is not None:
        reason = "adds a mask or a bias of its own to the scores (such as ALiBi)"
    elif getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        reason = "does not attend causally"
    elif key.shape != value.shape or query.shape[3] != key.shape[3]:
        reason = "has keys and values of different sizes"
    elif query.shape[1] % key.shape[1]:
        reason = "has a number of heads that is no multiple of its KV heads"
    elif others:
        reason = f"needs more than queries, keys, values and a scale: {', '.join(others)}"
    if reason:
        raise ModelLoadError(
            f"model: attention of {type(module).__name__} {reason}, which is not supported", param="model"
        )


AttentionInterface.register(NAME, _attention)
