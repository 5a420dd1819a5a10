"""Tiny random models of the Llama family: transformers' own, and ours with the same weights."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaFamily

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
ODD = {
    "hidden_size": 576,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 331,
    "max_position_embeddings": 512,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 512,
}


def transformers_model(kind: str, seed: int = 0, **config: object) -> torch.nn.Module:
    """float32, eager attention, weights spread widely enough that every term of the forward shows in the logits."""
    config_class, model_class = CLASSES[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**config, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(torch.randn_like(weight) * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                weight.copy_(torch.randn_like(weight) * (0.8 if "embed" in name else weight.shape[1] ** -0.5))
    return model


def ours(model: torch.nn.Module, dtype: torch.dtype = torch.float32, **options: object) -> LlamaFamily:
    return LlamaFamily(ModelConfig.from_hf(model.config), model.state_dict(), dtype=dtype, **options)
