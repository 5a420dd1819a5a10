"""Tiny random models of the Llama family on disk, in Hugging Face format, with a real byte-level BPE tokenizer.

Deterministic: the same arguments give the same bytes on every machine. Made without transformers, so a test that
only needs the files pays milliseconds.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_ID = 2
MIN_VOCAB = len(SPECIAL) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = """
The quick brown fox jumps over the lazy dog, and the dog looks at the fox. What is the capital of France?
The weather in the city is fine today; the rain will come later this week. Write a short story about a ship at sea.
There are many ways to write a program, and most of them are wrong. She said that they would come home in the evening.
{"name": "Alice", "age": 30, "tags": ["one", "two", "three"], "address": {"street": "Main Street", "number": 12}}
{"type": "object", "properties": {"name": {"type": "string"}, "value": {"type": "number"}}, "required": ["name"]}
def add(first, second): return first + second
for number in range(100): print(number, "is a number", number * number)
SELECT name, value FROM table WHERE value > 10 AND name = 'something' ORDER BY value;
Once upon a time there was a small house in the middle of the forest where nobody had ever lived before.
The answer to the question is simple: numbers are either even or odd, and two is the only even prime number.
""".strip().splitlines()


@functools.cache
def _trained(size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def tiny_tokenizer_folder(path: Path, *, size: int = 512, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write tokenizer files of at most `size` ids (fewer where the corpus gives no more merges, about 600)."""
    assert size >= MIN_VOCAB, f"a byte-level vocabulary needs at least {MIN_VOCAB} ids"
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(_trained(size), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def tiny_llama_folder(
    path: Path,
    *,
    seed: int = 0,
    vocab_size: int = 512,
    tokenizer_size: int | None = None,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    model_type: str = "llama",
    tied: bool = False,
    max_position: int = 2048,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write a random model of the Llama family and return its folder.

    Args:
        vocab_size: width of the logits; padded beyond the tokenizer if `tokenizer_size` is smaller.
        tokenizer_size: ids of the tokenizer; None for `vocab_size`. Equal sizes give equal tokenizers.
        model_type: "llama", "mistral", "qwen2" (q/k/v biases) or "qwen3" (q/k norms).
        tied: share the embedding with the head.
    """
    tiny_tokenizer_folder(path, size=tokenizer_size or vocab_size, chat_template=chat_template)
    config = {
        "architectures": [
            {
                "llama": "LlamaForCausalLM",
                "mistral": "MistralForCausalLM",
                "qwen2": "Qwen2ForCausalLM",
                "qwen3": "Qwen3ForCausalLM",
            }[model_type]
        ],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
        "sliding_window": None,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": [EOS_ID, 0]}
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    save_file(_weights(seed, config), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _weights(seed: int, config: dict) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, dim = config["hidden_size"], config["head_dim"]
    wide, q, kv = config["intermediate_size"], config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    kind = config["model_type"]

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    weights = {"model.embed_tokens.weight": noise(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, cols in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ):
            weights[f"{at}{name}.weight"] = noise(rows, cols)
            if kind == "qwen2" and name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                weights[f"{at}{name}.bias"] = noise(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = 1 + noise(hidden)
        if kind == "qwen3":
            weights[f"{at}self_attn.q_norm.weight"] = 1 + noise(dim)
            weights[f"{at}self_attn.k_norm.weight"] = 1 + noise(dim)
    weights["model.norm.weight"] = 1 + noise(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = noise(config["vocab_size"], hidden)
    return weights
