"""Draft models for pairs with the demo model: same vocabulary, random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from specserve.models.loader import load_tokenizer

HIDDEN, LAYERS, HEADS = 64, 1, 2


def random_draft_folder(path: Path, *, seed: int = 0, vocab_size: int = 49152) -> Path:
    """A Hugging Face folder with the demo model's tokenizer and one random layer."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer("demo")
    tokenizer.hf.save_pretrained(path)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": random(vocab_size, HIDDEN), "lm_head.weight": random(vocab_size, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{name}.self_attn.{part}.weight"] = random(HIDDEN, HIDDEN)
        weights[f"{name}.mlp.gate_proj.weight"] = random(2 * HIDDEN, HIDDEN)
        weights[f"{name}.mlp.up_proj.weight"] = random(2 * HIDDEN, HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
        weights[f"{name}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{name}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
