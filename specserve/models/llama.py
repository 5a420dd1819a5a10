"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM) as one definition over flattened tokens [n]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from specserve.kernels.cpu import ops as cpu_ops
from specserve.kernels.kv_layout import name_of
from specserve.models.batch import BatchTensors, ForwardBatch
from specserve.models.config import ModelConfig
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache
from specserve.models.layers import Layer, Weights, build_layer
from specserve.models.numerics import LinearFactory
from specserve.models.rotary import RotaryTable


class LlamaFamily:
    """Rows in, logits out. With numerics="invariant" a row's bits depend on its own sequence alone.

    Args:
        config: the model's numbers.
        weights: tensors by their transformers names ("model.layers.0.self_attn.q_proj.weight").
        numerics: "invariant" or "fast".
        dtype: float32 or bfloat16, of weights, activations and KV; the residual stream is float32. None keeps the
            embedding's own.
        ops: module with the ops (specserve.kernels.reference or specserve.kernels.cpu.ops).

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the configuration says.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        numerics: str = "invariant",
        *,
        dtype: torch.dtype | None = None,
        name: str = "",
        ops: Any = cpu_ops,
    ) -> None:
        dtype = dtype or weights["model.embed_tokens.weight"].dtype
        self.config = config
        self.info: ModelInfo = config.info(name_of(dtype), name)
        self._ops = ops
        self._rotary = RotaryTable(config.inv_freq, config.rope_scale)
        with torch.no_grad():
            named = Weights(weights, dtype)
            linear = LinearFactory(numerics, native=ops is cpu_ops)
            table = (config.vocab_size, config.hidden_size)
            self._embed = named.get("model.embed_tokens.weight", table)
            self._layers = [build_layer(config, named, i, linear) for i in range(config.num_layers)]
            self._norm = named.get("model.norm.weight", (config.hidden_size,))
            head = self._embed if config.tie_word_embeddings else named.get("lm_head.weight", table)
            self._head = linear.make(head, wide=True)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Store K and V of all rows; return the logits of `batch.logit_rows`, float32 [m, vocab_size]."""
        if batch.num_rows == 0:
            return torch.empty(0, self.info.vocab_size)
        self._rotary.ensure(max(start + count for _, count, _, start in batch.segments))
        eps, ops, tensors = self.config.rms_norm_eps, self._ops, batch.tensors()
        rotary = torch.from_numpy(self._rotary.cos), torch.from_numpy(self._rotary.sin)
        residual = F.embedding(tensors.token_ids, self._embed).float()
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        after = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for index, layer in enumerate(self._layers):
            attended = self._attend(layer, x, tensors, rotary, cache.key[index], cache.value[index])
            x = ops.add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps)
            x = ops.add_rms_norm(layer.down(ops.silu_mul(layer.gate_up(x))), residual, after[index], eps)
        if tensors.logit_rows.numel() == 0:
            return torch.empty(0, self.info.vocab_size)
        return self._head(x[tensors.logit_rows]).float()

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,
        batch: BatchTensors,
        rotary: tuple[torch.Tensor, torch.Tensor],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Self-attention's heads [n, num_heads * head_dim], before the output projection."""
        c = self.config
        qkv = layer.qkv(x)
        self._ops.rope_store(
            qkv,
            c.num_heads,
            c.num_kv_heads,
            *rotary,
            batch.positions,
            key,
            value,
            batch.slots,
            layer.q_norm,
            layer.k_norm,
            c.rms_norm_eps,
        )
        q = qkv.view(qkv.shape[0], -1, c.head_dim)[:, : c.num_heads]
        return self._ops.paged_attention(  # type: ignore[no-any-return]
            q,
            key,
            value,
            batch.block_tables,
            batch.row_sequence,
            batch.positions,
            c.head_dim**-0.5,
            layer.window,
        )
