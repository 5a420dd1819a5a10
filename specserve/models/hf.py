"""TransformersModel: any causal model of transformers on the paged KV cache, through its attention interface.

Slower than LlamaFamily and for everything that it does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specserve.core.errors import ModelLoadError
from specserve.kernels.kv_layout import name_of
from specserve.models.batch import ForwardBatch
from specserve.models.checkpoint import some
from specserve.models.hf_attention import NAME, Layer, paged_step, probing
from specserve.models.hf_invariant import RowwiseMath, make_invariant
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache

Progress = Callable[[int, int, str], None]
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class TransformersModel:
    """A transformers causal model whose attention is paged.

    Args:
        model: loaded with the attention implementation `hf_attention.NAME`, in eval mode.
        numerics: "invariant" makes every linear layer independent of the number of rows, or "fast".

    Raises:
        ModelLoadError: its attention, positions or layers do something that cannot be kept right, named.
    """

    def __init__(self, model: Any, numerics: str, name: str = "") -> None:
        self._model = model.eval().requires_grad_(False)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise ModelLoadError(
                f"model: {type(model).__name__} takes no position_ids; it is not supported", param="model"
            )
        self._keeps_rows = "logits_to_keep" in parameters
        layers = self._probe()
        _refuse_hidden_windows(model.config.get_text_config(), layers)
        self._invariant = numerics == "invariant"
        if self._invariant:
            make_invariant(model)
        config = model.config.get_text_config()
        self.windows = tuple(layer.window for layer in layers)
        self.info = ModelInfo(
            num_layers=len(layers),
            num_heads=layers[0].num_heads,
            num_kv_heads=layers[0].num_kv_heads,
            head_dim=layers[0].head_dim,
            hidden_size=config.hidden_size,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            max_position=_max_position(config),
            dtype=name_of(model.dtype),
            name=name,
        )

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: torch.dtype, numerics: str, name: str = "", progress: Progress | None = None
    ) -> TransformersModel:
        """Load a folder in Hugging Face format; weights from safetensors only, and no code from the folder."""
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if progress is not None:
            progress(0, size, "weights")
        try:
            with _quiet():
                model, found = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    attn_implementation=NAME,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except Exception as error:  # transformers raises nearly anything for what it cannot load
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelLoadError(f"model: transformers cannot load {folder}: {reason}", param="model") from None
        missing = sorted(found["missing_keys"])
        wrong = sorted(str(entry[0]) for entry in found["mismatched_keys"])
        if missing or wrong:
            problems = [f"lacks {some(missing)}"] if missing else []
            problems += [f"has a wrong shape for {some(wrong)}"] if wrong else []
            raise ModelLoadError(f"model: the checkpoint in {folder} {' and '.join(problems)}", param="model")
        if progress is not None:
            progress(size, size, "weights")
        return cls(model, numerics, name)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Logits float32 [m, vocab_size] of the batch's logit rows; every row's K and V is stored in `cache`."""
        tensors = batch.tensors()
        with paged_step(tensors, cache), RowwiseMath() if self._invariant else nullcontext():
            logits = self._run(tensors.token_ids, tensors.positions, tensors.logit_rows)
        return logits.float()

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        logits: torch.Tensor = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **keep
        ).logits[0]
        return logits if self._keeps_rows else logits[rows]

    @torch.inference_mode()
    def _probe(self) -> list[Layer]:
        zero = torch.zeros(1, dtype=torch.int64)
        with probing() as layers:
            try:
                self._run(zero, zero, zero)
            except ModelLoadError:
                raise
            except Exception as error:
                raise ModelLoadError(
                    f"model: {type(self._model).__name__} does not run over flattened tokens: {error}", param="model"
                ) from None
        shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        if len(shapes) != 1:
            reason = "has layers of different shapes" if shapes else "does not use transformers' attention interface"
            raise ModelLoadError(f"model: {type(self._model).__name__} {reason}; it is not supported", param="model")
        wanted = getattr(self._model.config.get_text_config(), "num_hidden_layers", len(layers))
        if wanted != len(layers):
            raise ModelLoadError(
                f"model: {type(self._model).__name__} has {wanted} layers of which {len(layers)} attend; models that "
                "keep another state (recurrent, linear attention) are not supported",
                param="model",
            )
        return layers


def _refuse_hidden_windows(config: Any, layers: list[Layer]) -> None:
    """A window that the configuration promises and the attention call does not carry is in a mask that is not made."""
    kinds = getattr(config, "layer_types", None) or []
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(f"model: layers of the kind {', '.join(unknown)} are not supported", param="model")
    for i, layer in enumerate(layers):
        promised = kinds[i] == "sliding_attention" if i < len(kinds) else False
        if promised and not layer.window:
            raise ModelLoadError(
                f"model: layer {i} of {config.model_type} has a sliding window that is not passed to its attention; it "
                "is not supported",
                param="model",
            )


def _max_position(config: Any) -> int:
    """Positions within which the rotary frequencies are the same for every length of the sequence."""
    found = next((getattr(config, key) for key in _POSITIONS if isinstance(getattr(config, key, None), int)), None)
    if found is None:
        raise ModelLoadError(
            f"model: the configuration of {config.model_type} does not say how many positions it supports",
            param="model",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        found = min(found, int(rope.get("original_max_position_embeddings") or found))
    return int(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars, which would tear ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
