"""Load a model by its name: the one way from "demo", a folder, a GGUF file or a hub name to something that runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specserve.core.errors import ModelLoadError
from specserve.models.checkpoint import family_shapes, fit_weights
from specserve.models.config import ModelConfig, unsupported
from specserve.models.gguf import gguf_model_config, gguf_weights
from specserve.models.gguf_file import GGUFFile
from specserve.models.gguf_tokenizer import gguf_tokenizer
from specserve.models.hf import TransformersModel
from specserve.models.hf_folder import folder_config, folder_weights
from specserve.models.info import ModelInfo
from specserve.models.llama import LlamaFamily
from specserve.models.source import ModelSource, resolve
from specserve.models.tokenizer import Tokenizer, folder_tokenizer

Progress = Callable[[int, int, str], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEAD = "lm_head.weight"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and its tokenizer."""

    model: LlamaFamily | TransformersModel
    tokenizer: Tokenizer
    info: ModelInfo


def load_model(name: str, *, dtype: str, numerics: str, progress: Progress | None = None) -> LoadedModel:
    """Load a model with its tokenizer.

    Args:
        name: "demo", a folder in Hugging Face format, a GGUF file, or a hub name "org/name[@revision]".
        dtype: "float32" or "bfloat16", of weights, activations and KV.
        numerics: "invariant" or "fast".
        progress: called with (bytes done, bytes in all, what).

    Raises:
        ModelLoadError: what is wrong, where, and what to do about it.
    """
    if dtype not in DTYPES:
        raise ModelLoadError(f"model: dtype {dtype!r} is not one of {', '.join(DTYPES)}", param="dtype")
    source = resolve(name, progress=progress)
    if source.kind == "gguf":
        return _load_gguf(source, DTYPES[dtype], numerics, progress)
    return _load_folder(source, DTYPES[dtype], numerics, progress)


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


def _load_gguf(source: ModelSource, dtype: torch.dtype, numerics: str, progress: Progress | None) -> LoadedModel:
    file = GGUFFile(source.path)
    config = gguf_model_config(file)
    tokenizer = gguf_tokenizer(file, source.name)
    return _family(source.name, config, gguf_weights(file, dtype, progress), tokenizer, dtype, numerics)


def _load_folder(source: ModelSource, dtype: torch.dtype, numerics: str, progress: Progress | None) -> LoadedModel:
    hf_config: Any = folder_config(source.path)
    tokenizer = folder_tokenizer(source.path, source.name)
    reason = unsupported(hf_config)
    if reason is not None:
        _log.info("%s: %s; running it through transformers", source.name, reason)
        model = TransformersModel.from_folder(source.path, dtype, numerics, source.name, progress)
        return LoadedModel(model, _fitting(tokenizer, model.info), model.info)
    config = ModelConfig.from_hf(hf_config)
    return _family(source.name, config, folder_weights(source.path, dtype, progress), tokenizer, dtype, numerics)


def _family(
    name: str,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    numerics: str,
) -> LoadedModel:
    # A checkpoint of a model with tied embeddings may carry its head all the same.
    weights = fit_weights(weights, family_shapes(config), optional=(_HEAD,))
    model = LlamaFamily(config, weights, numerics, name=name)
    return LoadedModel(model, _fitting(tokenizer, model.info), model.info)


def _fitting(tokenizer: Tokenizer, info: ModelInfo) -> Tokenizer:
    if tokenizer.vocab_size > info.vocab_size:
        raise ModelLoadError(
            f"model: {info.name} has logits for {info.vocab_size} tokens and a tokenizer of {tokenizer.vocab_size}; "
            "the tokenizer is of another model",
            param="model",
        )
    return tokenizer
