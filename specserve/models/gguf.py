"""GGUF file -> transformers configuration, ModelConfig and weights under transformers' names."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import quants

from specserve.core.errors import ModelLoadError
from specserve.core.imports import TRANSFORMERS
from specserve.kernels.cpu.packing import Kind
from specserve.kernels.lazy import num_threads
from specserve.models.config import ModelConfig
from specserve.models.gguf_file import GGUFFile, GGUFTensor
from specserve.models.packed_cache import Source
from specserve.models.quantize import Rows

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

Progress = Callable[[int, int, str], None]

# GGUF architecture -> transformers configuration class. Mistral and SmolLM files say llama.
CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
# llama.cpp stores these with the rotary halves of each head interleaved.
PERMUTED = {"llama"}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn"}
# Of what is packed as it is, or is a float; all other types are dequantised.
_KINDS = {
    Type.F32: Kind.F32,
    Type.F16: Kind.F32,
    Type.BF16: Kind.BF16,
    Type.Q8_0: Kind.Q8,
    Type.Q4_0: Kind.Q4_0,
    Type.Q4_1: Kind.Q4_1,
}
# One piece of work of a thread, in elements: small enough to stay in cache, large enough for numpy's overhead.
_CHUNK = 1 << 20


def gguf_config(file: GGUFFile) -> Any:
    """The transformers configuration that the file's metadata describes.

    Raises:
        ModelLoadError: an architecture or feature that is not supported, named; or metadata that is missing.
    """
    values = _config_values(file)
    # Imported here: it takes longer than a packed model to load.
    with TRANSFORMERS:
        import transformers

        kind = getattr(transformers, CONFIGS[file.architecture])
    return kind(**values)


def _config_values(file: GGUFFile) -> dict[str, Any]:
    kind = file.architecture
    if kind not in CONFIGS:
        raise ModelLoadError(
            f"model: {file.path.name} has the architecture {kind!r}; GGUF files of {', '.join(sorted(CONFIGS))} are "
            "supported (use the model's Hugging Face folder instead)",
            param="model",
        )
    _refuse_what_is_missing(file)
    heads = _integer(file, "attention.head_count")
    hidden = _integer(file, "embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    values: dict[str, Any] = {
        "num_hidden_layers": _integer(file, "block_count"),
        "hidden_size": hidden,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": _integer(file, "attention.key_length", hidden // heads),
        "max_position_embeddings": _integer(file, "context_length"),
        "rms_norm_eps": _get(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file),
        "vocab_size": embedding.shape[0] if embedding else _integer(file, "vocab_size"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if kind != "qwen2":  # Qwen2 always has these biases and its configuration no such field
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return values


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """ModelConfig of the file, with Llama 3's frequency factors where it carries them. Errors as for gguf_config."""
    values = _config_values(file)
    if values["rope_parameters"]["rope_type"] == "default":
        # Without transformers' configuration, which takes longer to import than a packed model to load.
        config = ModelConfig.from_hf(SimpleNamespace(model_type=file.architecture, hidden_act="silu", **values))
    else:
        config = ModelConfig.from_hf(gguf_config(file))
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is None:
        return config
    scale = _dequantise(file, factors, torch.float32).numpy()
    frequencies = np.array(config.inv_freq, dtype=np.float32) / scale
    return replace(config, inv_freq=tuple(frequencies.tolist()))


def gguf_weights(file: GGUFFile, dtype: torch.dtype, progress: Progress | None = None) -> dict[str, torch.Tensor]:
    """All tensors under transformers' names, dequantised to `dtype` on all of torch's threads.

    Raises:
        ModelLoadError: a tensor that the architecture does not have, or a type that gguf cannot dequantise.
    """
    wanted = [t for t in file.tensors.values() if t.name != _ROPE_FACTORS]
    names = {t.name: hf_name(file, t.name) for t in wanted}
    total, done = sum(t.num_bytes for t in wanted), 0
    weights: dict[str, torch.Tensor] = {}
    with ThreadPoolExecutor(num_threads()) as pool:
        made = pool.map(lambda t: _dequantise(file, t, dtype), wanted)
        for tensor, weight in zip(wanted, made, strict=True):
            weights[names[tensor.name]] = weight
            done += tensor.num_bytes
            if progress is not None:
                progress(done, total, "weights")
    return weights


class GGUFTensors:
    """The file's tensors under transformers' names, as packed_build.Tensors.

    Raises:
        ModelLoadError: a tensor that the architecture does not have; when it is read, a type that cannot be.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tensors = {hf_name(file, t.name): t for t in file.tensors.values() if t.name != _ROPE_FACTORS}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def source(self) -> Source:
        """What a packed model of them is made from."""
        return Source.of(self._file.path, [self._file.path], [self._file.header()])

    def kind(self, name: str) -> Kind | None:
        return _KINDS.get(self._tensors[name].kind)

    def rows(self, name: str) -> Rows:
        tensor = self._tensors[name]
        kind = _KINDS.get(tensor.kind)
        if kind is None:
            return Rows.of(_dequantise(self._file, tensor, torch.float32))
        data = torch.from_numpy(np.array(_in_order(self._file, tensor)))
        if tensor.kind == Type.F16:
            return Rows.of(data.view(torch.float16))
        return Rows(kind, tensor.shape[-1], data)

    def vector(self, name: str) -> torch.Tensor:
        return _dequantise(self._file, self._tensors[name], torch.float32)


def hf_name(file: GGUFFile, name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found:
        layer, leaf, suffix = found.groups()
        if layer is None and leaf in _NAMES:
            return f"{_NAMES[leaf]}.{suffix}"
        if layer is not None and leaf in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}.{suffix}"
    raise ModelLoadError(
        f"model: {file.path.name} has the tensor {name}, which architecture {file.architecture!r} does not have",
        param="model",
    )


def _dequantise(file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    data = _in_order(file, tensor)
    out = torch.empty(tensor.shape, dtype=dtype)
    rows = out.view(-1, tensor.shape[-1])
    step = max(1, _CHUNK // tensor.shape[-1])
    try:
        for first in range(0, rows.shape[0], step):
            part = quants.dequantize(np.ascontiguousarray(data[first : first + step]), tensor.kind)
            if not part.flags.writeable:  # float32: a view of the mapped file, which torch warns about
                part = part.copy()
            rows[first : first + step] = torch.from_numpy(part)
    except NotImplementedError:
        raise ModelLoadError(
            f"model: tensor {tensor.name} of {file.path.name} has the type {tensor.kind.name}, which is not supported",
            param="model",
        ) from None
    return out


def _in_order(file: GGUFFile, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes as file.data gives them, its rows in transformers' order."""
    data = file.data(tensor)
    heads = _permuted_heads(file, tensor.name)
    if not heads:
        return data
    # Rows are whole blocks, and a bias is floats, so they may change places as they are.
    return data.reshape(heads, -1, 2, tensor.num_bytes // tensor.shape[0]).swapaxes(1, 2).reshape(data.shape)


def _permuted_heads(file: GGUFFile, name: str) -> int:
    if file.architecture not in PERMUTED:
        return 0
    if ".attn_q." in name:
        return _integer(file, "attention.head_count")
    if ".attn_k." in name:
        return _integer(file, "attention.head_count_kv", _integer(file, "attention.head_count"))
    return 0


def _refuse_what_is_missing(file: GGUFFile) -> None:
    reason = None
    if file.metadata.get("split.count", 1) > 1:
        reason = "is one part of a split model; join the parts first (llama-gguf-split --merge)"
    elif _get(file, "expert_count", 0):
        reason = "is a mixture of experts, which is not supported"
    elif _get(file, "attention.sliding_window", 0):
        reason = "uses sliding-window attention, which is not supported from GGUF files"
    elif _get(file, "rope.scaling.type", "none") not in _ROPE_TYPES:
        reason = f"uses rope scaling {_get(file, 'rope.scaling.type')!r}, which is not supported"
    if reason:
        raise ModelLoadError(f"model: {file.path.name} {reason}", param="model")


def _rope_parameters(file: GGUFFile) -> dict[str, Any]:
    kind = _ROPE_TYPES[_get(file, "rope.scaling.type", "none")]
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": _get(file, "rope.freq_base", 10000.0)}
    if kind != "default":
        rope["factor"] = _get(file, "rope.scaling.factor")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = _integer(file, "rope.scaling.original_context_length")
    return rope


def _get(file: GGUFFile, key: str, default: Any = None) -> Any:
    value = file.metadata.get(f"{file.architecture}.{key}", default)
    if value is None:
        raise ModelLoadError(f"model: {file.path.name} lacks the metadata {file.architecture}.{key}", param="model")
    return value


def _integer(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = _get(file, key, default)
    if isinstance(value, list) and len(set(value)) == 1:  # some writers give one number a layer
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(
            f"model: {file.path.name}: {file.architecture}.{key} is not one positive number", param="model"
        )
    return value
