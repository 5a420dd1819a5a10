"""A tiny folder in Hugging Face format, written as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from safetensors.numpy import load_file

_LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_gguf(
    folder: Path,
    path: Path,
    kind: Kind = Kind.F32,
    *,
    pre: str = "gpt-2",
    padding: int = 0,
    extra: dict[str, Any] | None = None,
    leave_out: str = "",
) -> Path:
    """Write `folder` (of tiny_llama_folder) to `path`.

    Args:
        kind: of matrices; vectors stay float32.
        padding: [PADn] tokens of the unused type after the vocabulary.
        extra: further metadata, name -> whole number, number or text.
        leave_out: a tensor, under its GGUF name, that is not written.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(name, value)
    _add_tokenizer(writer, folder, pre, padding)
    for name, weight in load_file(folder / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        target = f"{_gguf_stem(stem)}.{suffix}"
        if target == leave_out:
            continue
        if arch == "llama" and ("q_proj" in stem or "k_proj" in stem):
            heads = config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            weight = _interleave(weight, heads)
        use = kind if weight.ndim > 1 else Kind.F32
        writer.add_tensor(target, quants.quantize(np.ascontiguousarray(weight), use), raw_dtype=use)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_stem(stem: str) -> str:
    if stem in _TOP:
        return _TOP[stem]
    _, _, layer, leaf = stem.split(".", 3)
    return f"blk.{layer}.{_LEAVES[leaf]}"


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str, padding: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = [text for text, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])]
    special = {each["id"] for each in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    tokens += [f"[PAD{len(kinds) + i}]" for i in range(padding)]
    kinds += [gguf.TokenType.UNUSED] * padding
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])
