"""The parts of one Llama-family layer: weights merged and prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specserve.core.errors import ModelLoadError
from specserve.models.config import ModelConfig
from specserve.models.numerics import Linear, LinearFactory


@dataclass(slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        qkv: hidden -> [q | k | v]; output: heads -> hidden; gate_up: hidden -> [gate | up]; down: -> hidden.
        input_norm, mlp_norm: RMSNorm weights [hidden]; q_norm, k_norm: [head_dim] or None.
        window: positions a row sees, 0 for all.
    """

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int


class Weights:
    """A checkpoint's tensors by their transformers names, converted to one dtype. A missing one is a typed error."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"model: the checkpoint has no tensor {name}", param="model")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"model: tensor {name} has shape {tuple(tensor.shape)}, the configuration says {shape}", param="model"
            )
        return tensor.detach().to(self._dtype).contiguous()

    def merged(self, prefix: str, names: tuple[str, ...], rows: tuple[int, ...], width: int) -> torch.Tensor:
        """Weights [sum(rows), width] of several projections of the same input."""
        parts = [self.get(f"{prefix}.{n}.weight", (r, width)) for n, r in zip(names, rows, strict=True)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def bias(self, present: bool, prefix: str, names: tuple[str, ...], rows: tuple[int, ...]) -> torch.Tensor | None:
        if not present:
            return None
        return torch.cat([self.get(f"{prefix}.{n}.bias", (r,)) for n, r in zip(names, rows, strict=True)])


def build_layer(config: ModelConfig, weights: Weights, index: int, linear: LinearFactory) -> Layer:
    """Layer `index` from tensors named as in transformers."""
    name, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def projection(part: str, names: tuple[str, ...], rows: tuple[int, ...], width: int, bias: bool) -> Linear:
        prefix = f"{name}.{part}"
        return linear.make(weights.merged(prefix, names, rows, width), weights.bias(bias, prefix, names, rows))

    def norm(part: str, width: int) -> torch.Tensor:
        return weights.get(f"{name}.{part}.weight", (width,))

    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=projection("self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        output=projection("self_attn", ("o_proj",), (hidden,), q, config.output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=projection("mlp", ("gate_proj", "up_proj"), (inner, inner), hidden, config.mlp_bias),
        down=projection("mlp", ("down_proj",), (hidden,), inner, config.mlp_bias),
        window=config.windows[index],
    )
