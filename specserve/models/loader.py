"""Load a model by its name: the one way from "demo", a folder, a GGUF file or a hub name to something that runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from specserve.core.config import DTYPES, QUANTIZATION
from specserve.core.errors import ModelLoadError
from specserve.core.imports import TRANSFORMERS
from specserve.kernels.cpu.native import library
from specserve.kernels.kv_layout import dtype_of
from specserve.models.batch import ForwardBatch
from specserve.models.checkpoint import check_shapes, family_shapes, fit_weights
from specserve.models.config import ModelConfig, unsupported
from specserve.models.gguf import GGUFTensors, gguf_model_config, gguf_weights
from specserve.models.gguf_file import GGUFFile
from specserve.models.gguf_tokenizer import gguf_tokenizer
from specserve.models.hf_folder import FolderTensors, folder_config, folder_weights
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache
from specserve.models.native import NativeLlama
from specserve.models.packed_build import Tensors, fill, plan
from specserve.models.packed_cache import cached
from specserve.models.packing import PackedModel, assemble
from specserve.models.source import ModelSource, resolve
from specserve.models.tokenizer import Tokenizer, folder_tokenizer

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int, str], None]
_HEAD = "lm_head.weight"
_log = logging.getLogger(__name__)


class Model(Protocol):
    """Rows in, logits out: LlamaFamily, NativeLlama or TransformersModel."""

    @property
    def info(self) -> ModelInfo: ...

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and its tokenizer. `info.weights` says what its linear layers run on."""

    model: Model
    tokenizer: Tokenizer
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is loaded; see load_model."""

    dtype: str
    numerics: str
    quantization: str
    progress: Progress | None

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)


def load_model(
    name: str, *, dtype: str, numerics: str, quantization: str = "auto", progress: Progress | None = None
) -> LoadedModel:
    """Load a model with its tokenizer.

    Args:
        name: "demo", a folder in Hugging Face format, a GGUF file, or a hub name "org/name[@revision]".
        dtype: "float32" or "bfloat16", of activations and KV, and of weights that are not quantised.
        numerics: "invariant" or "fast".
        quantization: "auto", "none", "q8" or "q4"; see EngineConfig. What runs is in the result's `info.weights`.
        progress: called with (bytes done, bytes in all, what).

    Raises:
        ModelLoadError: what is wrong, where, and what to do about it.
    """
    if dtype not in DTYPES:
        raise ModelLoadError(f"model: dtype {dtype!r} is not one of {', '.join(DTYPES)}", param="dtype")
    if quantization not in QUANTIZATION:
        known = ", ".join(QUANTIZATION)
        raise ModelLoadError(f"quantization: {quantization!r} is not one of {known}", param="quantization")
    options = Options(dtype, numerics, quantization, progress)
    source = resolve(name, progress=progress)
    loaded = _load_gguf(source, options) if source.kind == "gguf" else _load_folder(source, options)
    _log.info("%s: weights %s, activations and KV %s", name, loaded.info.weights, dtype)
    return loaded


def packed_model(
    config: ModelConfig, tensors: Tensors, dtype: str, quantization: str, progress: Progress | None = None
) -> PackedModel | None:
    """The model for the native forward, from the cache where it is there; None where the kernels do not take it.

    Args:
        dtype: "bfloat16" or "float32", of what is not quantised.
        quantization: "auto", "none", "q8" or "q4".
    """
    layout = plan(config, tensors, quantization, dtype)
    if layout is None:
        return None
    variant = f"{quantization} torch.{dtype}"  # as files are named
    memory = cached(tensors.source(), variant, layout, lambda: fill(config, tensors, layout, progress), progress)
    return assemble(config, layout, memory)


def load_tokenizer(name: str, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of a model, without its weights where it comes from the hub. Errors as for load_model."""
    source = resolve(name, weights=False, progress=progress)
    if source.kind == "gguf":
        return gguf_tokenizer(GGUFFile(source.path), name)
    return folder_tokenizer(source.path, name)


def model_context(name: str) -> int:
    """Positions that a model supports, from its configuration alone. Errors as for load_model."""
    source = resolve(name, weights=False)
    if source.kind == "gguf":
        return gguf_model_config(GGUFFile(source.path)).max_position
    return int(folder_config(source.path).max_position_embeddings)


def _load_gguf(source: ModelSource, options: Options) -> LoadedModel:
    file = GGUFFile(source.path)
    config = gguf_model_config(file)

    def read() -> dict[str, torch.Tensor]:
        return gguf_weights(file, options.torch_dtype, options.progress)

    library()  # before two threads share the interpreter lock, for which each small read of it would wait
    with ThreadPoolExecutor(1, "tokenizer") as pool:  # beside the weights, which are read outside the interpreter lock
        tokenizer = pool.submit(gguf_tokenizer, file, source.name)
        return _family(source.name, config, GGUFTensors(file), read, tokenizer.result, options)


def _load_folder(source: ModelSource, options: Options) -> LoadedModel:
    hf_config: Any = folder_config(source.path)
    tokenizer = folder_tokenizer(source.path, source.name)
    reason = unsupported(hf_config)
    if reason is not None:
        # Imported here: transformers' models take longer to import than a model of the family takes to load.
        with TRANSFORMERS:
            from specserve.models.hf import TransformersModel

        _log.info("%s: %s; running it through transformers in %s", source.name, reason, options.dtype)
        model = TransformersModel.from_folder(
            source.path, options.torch_dtype, options.numerics, source.name, options.progress
        )
        return _loaded(model, tokenizer, options.dtype)
    config = ModelConfig.from_hf(hf_config)

    def read() -> dict[str, torch.Tensor]:
        return folder_weights(source.path, options.torch_dtype, options.progress)

    return _family(source.name, config, FolderTensors(source.path), read, lambda: tokenizer, options)


def _family(
    name: str,
    config: ModelConfig,
    tensors: Tensors,
    read: Callable[[], dict[str, torch.Tensor]],
    tokenizer: Callable[[], Tokenizer],
    options: Options,
) -> LoadedModel:
    """On the native forward where it takes the model; else in torch, on weights that `read` gives in options.dtype."""
    # A checkpoint of a model with tied embeddings may carry its head all the same.
    shapes = family_shapes(config)
    check_shapes(tensors.shapes, shapes, optional=(_HEAD,))
    reason = torch_serves(config, options.dtype)
    packed = None
    if reason is None:
        packed = packed_model(config, tensors, options.dtype, options.quantization, options.progress)
    if packed is not None:
        return _loaded(NativeLlama(packed, numerics=options.numerics, name=name), tokenizer(), packed.kinds)
    if options.dtype == "bfloat16":
        why = reason or "it does not take the shape of one of its matrices"
        _log.warning("%s: not on the native forward (%s); torch runs it, slower, with weights in bfloat16", name, why)
    # Imported here, as torch is.
    from specserve.models.llama import LlamaFamily

    weights = fit_weights(read(), shapes, optional=(_HEAD,))
    model = LlamaFamily(config, weights, options.numerics, name=name)
    return _loaded(model, tokenizer(), model.info.weights)


def torch_serves(config: ModelConfig, dtype: str) -> str | None:
    """Why such a model runs in torch; None where the native forward takes it."""
    if dtype != "bfloat16":
        return f"it computes in bfloat16, not {dtype}"
    if library() is None:
        return "there are no native kernels here"
    return NativeLlama.refuses(config)


def _loaded(model: Model, tokenizer: Tokenizer, weights: str) -> LoadedModel:
    info = replace(model.info, weights=weights)
    return LoadedModel(model, _fitting(tokenizer, info), info)


def _fitting(tokenizer: Tokenizer, info: ModelInfo) -> Tokenizer:
    if tokenizer.vocab_size > info.vocab_size:
        raise ModelLoadError(
            f"model: {info.name} has logits for {info.vocab_size} tokens and a tokenizer of {tokenizer.vocab_size}; "
            "the tokenizer is of another model",
            param="model",
        )
    return tokenizer
