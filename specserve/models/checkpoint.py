"""Whether a checkpoint's tensors are those that a model takes. What is missing or too much is named."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from specserve.core.errors import ModelLoadError
from specserve.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

_NAMES_SHOWN = 5
# Buffers that old checkpoints saved; they are computed.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


def fit_weights(
    weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], *, optional: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The weights that a model of these parameter shapes takes. Arguments and errors as for check_shapes."""
    check_shapes({name: tuple(weight.shape) for name, weight in weights.items()}, shapes, optional=optional)
    return {name: weights[name] for name in shapes}


def check_shapes(
    found: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], *, optional: Collection[str] = ()
) -> None:
    """Whether a checkpoint has what a model of these parameter shapes takes.

    Args:
        found: the checkpoint's tensors, name -> shape.
        shapes: parameter name -> shape.
        optional: names that the checkpoint may have in vain (the head of a model with tied embeddings).

    Raises:
        ModelLoadError: names what is missing, what is unexpected, and the first tensor of a wrong shape.
    """
    missing = sorted(set(shapes) - set(found))
    extra = sorted(name for name in set(found) - set(shapes) - set(optional) if not name.endswith(_COMPUTED))
    problems = [f"lacks {some(missing)}"] if missing else []
    problems += [f"has {some(extra)}, which this architecture does not have"] if extra else []
    if problems:
        raise ModelLoadError(f"model: the checkpoint {' and '.join(problems)}", param="model")
    for name, shape in shapes.items():
        if found[name] != tuple(shape):
            raise ModelLoadError(
                f"model: tensor {name} has the shape {found[name]}, not {tuple(shape)} as configured", param="model"
            )


def some(names: list[str]) -> str:
    """The first few of some names, and how many there are beyond."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def family_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a member of the Llama family; no head where it is the embedding."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", wide, hidden, config.mlp_bias),
        ("mlp.up_proj", wide, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, wide, config.mlp_bias),
    )
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if config.qk_norm:
        norms += [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        for name, rows, columns, bias in linear:
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}{name}.bias"] = (rows,)
        for name, size in norms:
            shapes[f"{at}{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
