"""ModelConfig: the numbers that define one member of the Llama family, read from a transformers configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.core.errors import ModelLoadError
from specserve.core.imports import TRANSFORMERS
from specserve.models.info import ModelInfo

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
# Those whose frequencies do not depend on the length of the sequence.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One member of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM).

    Attributes:
        max_position: positions that the model supports.
        inv_freq: rotary frequencies after scaling, float32 values, head_dim / 2 of them.
        rope_scale: factor on cos and sin (YaRN's attention factor; 1.0 otherwise).
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: RMSNorm over head_dim on q and k before the rotation (Qwen3).
        windows: for each layer the number of positions a row sees, itself included; 0 for all.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    inv_freq: tuple[float, ...]
    rope_scale: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """From a transformers configuration; raises ModelLoadError with the reason where the family lacks something."""
        reason = unsupported(config)
        if reason is not None:
            raise ModelLoadError(f"model: {reason}", param="model")
        kind = config.model_type
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        inv_freq, rope_scale = _rope(config, head_dim)
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_position=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            inv_freq=inv_freq,
            rope_scale=rope_scale,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=kind == "qwen2" or attention_bias,
            output_bias=kind in ("llama", "qwen3") and attention_bias,
            mlp_bias=kind == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            windows=_windows(config),
        )

    def info(self, dtype: str, name: str, weights: str = "") -> ModelInfo:
        """What others may know; `weights` is the dtype where it is not given."""
        return ModelInfo(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position=self.max_position,
            dtype=dtype,
            name=name,
            weights=weights or dtype,
        )


def unsupported(config: Any) -> str | None:
    """Why LlamaFamily cannot run this transformers configuration, or None when it can."""
    kind = getattr(config, "model_type", None)
    if kind not in FAMILY:
        return f"architecture {kind!r} is not one of {', '.join(FAMILY)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    rope = _rope_parameters(config)
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        return f"rope scaling {rope['rope_type']!r} is not one of {', '.join(STATIC_ROPE)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "rotation of a part of each head is not supported"
    if config.num_attention_heads % (config.num_key_value_heads or config.num_attention_heads):
        return "the number of heads is not a multiple of the number of KV heads"
    return None


def _rope_parameters(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _rope(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    rope = _rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        # Each operation rounded to float32, as in transformers' own, whose powers may be off by an ulp.
        exponent = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
        powers = np.power(rope.get("rope_theta", 10000.0), exponent.astype(np.float64)).astype(np.float32)
        return tuple((np.float32(1.0) / powers).tolist()), 1.0
    # Imported here: it takes longer than a packed model to load.
    with TRANSFORMERS:
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.float().tolist()), float(scale)


def _windows(config: Any) -> tuple[int, ...]:
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    # Mistral has one window for all layers; Llama has none.
    return (int(window) if config.model_type == "mistral" else 0,) * int(layers)
