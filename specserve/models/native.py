"""NativeLlama: the Llama family on the native forward, one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char_p, c_int64, c_void_p, cast
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specserve.core.errors import ModelLoadError
from specserve.kernels.cpu.forward import PANEL, Forward, Shape, Step, pointer, refusal
from specserve.kernels.cpu.memory import empty
from specserve.kernels.cpu.packing import Kind
from specserve.kernels.kv_layout import ITEM_BYTES
from specserve.kernels.lazy import num_threads
from specserve.models.batch import ForwardBatch
from specserve.models.config import ModelConfig
from specserve.models.info import ModelInfo
from specserve.models.kv_cache import PagedKVCache
from specserve.models.packing import PackedModel
from specserve.models.rotary import RotaryTable

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

Logits = npt.NDArray[np.float32]


@dataclass(slots=True)
class Partial:
    """A forward that is not from token ids to all logits; what drafters over the target's features need.

    Attributes:
        first_layer, last_layer: layers [first_layer, last_layer) are run; None: to the end. A forward that stops before
            the end gives no logits.
        hidden: float32 [n, hidden_size] to begin with in place of the embedding; the residual stream ahead of
            first_layer.
        keep_layers: layers after which hidden states are wanted.
        keep_rows: int64 rows of them; None for all.
        vocabulary: int64 ids whose logits are wanted, in this order; None for all.
    """

    first_layer: int = 0
    last_layer: int | None = None
    hidden: torch.Tensor | None = None
    keep_layers: Sequence[int] = ()
    keep_rows: torch.Tensor | None = None
    vocabulary: torch.Tensor | None = None


@dataclass(slots=True)
class PartialResult:
    """float32: logits [m, ids], hidden [n, hidden_size] after the last layer run, kept [layers, rows, hidden_size]."""

    logits: torch.Tensor
    hidden: torch.Tensor
    kept: torch.Tensor


@dataclass(slots=True)
class _Kept:
    """A batch that comes again, and its step, good as long as cache and rotary table are these."""

    batch: ForwardBatch
    cache: PagedKVCache
    cos: npt.NDArray[np.float32]
    step: Step


class NativeLlama:
    """Rows in, logits out; a row's bits depend on its own sequence alone, whatever `numerics` says.

    Args:
        packed: the weights, bfloat16 or quantised. Activations and KV are bfloat16, the residual stream float32.

    Raises:
        ModelLoadError: the kernels do not take the model's shape (ask `refuses` first) or weights in float32.
    """

    def __init__(self, packed: PackedModel, *, numerics: str = "invariant", name: str = "") -> None:
        config = packed.config
        reason = self.refuses(config) or _unfit(packed)
        if reason is not None:
            raise ModelLoadError(f"model: the native forward does not run {name}: {reason}", param="model")
        self.config = config
        self.numerics = numerics
        self.info: ModelInfo = config.info("bfloat16", name)
        self._best = (c_int64 * 0)()  # room for ids
        self._logits = empty((0, self.info.vocab_size))  # room for forward_draw's logits
        self._kept: _Kept | None = None
        self._rotary = RotaryTable(config.inv_freq, config.rope_scale)
        embedding = packed.embedding
        self._forward = Forward(_shape(config), packed.layers, embedding.kind, embedding.rows, packed.norm, packed.head)

    @staticmethod
    def refuses(config: ModelConfig) -> str | None:
        """Why such a model does not run here; None where it does."""
        return refusal(_shape(config))

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Store K and V of all rows; return the logits of `batch.logit_rows`, float32 [m, vocab_size]."""
        return torch.from_numpy(self.forward_host(batch, cache))

    def forward_host(self, batch: ForwardBatch, cache: PagedKVCache) -> Logits:
        """The same as an array."""
        logits = empty((len(batch.logit_rows), self.info.vocab_size))
        if batch.num_rows:
            step = self._step(batch, cache)
            step.logits, step.logits_stride = logits.ctypes.data, self.info.vocab_size
            self._forward.run(step)
        return logits

    def forward_best(self, batch: ForwardBatch, cache: PagedKVCache, vocab_size: int | None = None) -> list[int]:
        """The same where only the greatest logit counts: its id for each, the lowest among equals.

        Args:
            vocab_size: ids from there on are padding; None: all are meant.

        Returns:
            -1 where the greatest logit is not finite.
        """
        step = self._step(batch, cache)
        self._choose(step, self.info.vocab_size if vocab_size is None else vocab_size)
        return self._best[: step.logit_count]

    def forward_draw(
        self, batch: ForwardBatch, cache: PagedKVCache, vocab_size: int, rows: bytes
    ) -> tuple[list[int], Logits]:
        """The same where tokens are drawn from nothing but the logits and packed options.

        Args:
            rows: of each of batch.logit_rows its ROW, without a pointer to logits, and its options; see sample_rows.

        Returns:
            As sample_rows; and the logits, float32 [m, info.vocab_size], which the next call may write over.
        """
        step = self._step(batch, cache)
        count = step.logit_count
        if len(self._logits) < count:
            self._logits = empty((1 << (count - 1).bit_length(), self.info.vocab_size))
        step.logits, step.logits_stride = self._logits.ctypes.data, self.info.vocab_size
        step.sampled = cast(c_char_p(rows), c_void_p).value
        self._choose(step, vocab_size)
        return self._best[:count], self._logits[:count]

    def _choose(self, step: Step, choices: int) -> None:
        """Run the step; ids of each row, among so many, are in `_best` then."""
        if len(self._best) < step.logit_count:
            self._best = (c_int64 * step.logit_count)()
        if step.rows:
            step.best, step.choices = addressof(self._best), choices
            self._forward.run(step)

    def forward_partial(self, batch: ForwardBatch, cache: PagedKVCache, partial: Partial) -> PartialResult:
        """A part of the layers, from and to hidden states; see Partial. The rows are never empty.

        Raises:
            ValueError: layers, rows or ids that the model or the batch does not have.
        """
        self._check(partial, batch)
        last = self.info.num_layers if partial.last_layer is None else partial.last_layer
        rows = torch.arange(batch.num_rows) if partial.keep_rows is None else partial.keep_rows
        size = self.info.hidden_size
        result = PartialResult(
            torch.empty(0, 0), torch.empty(batch.num_rows, size), torch.empty(len(partial.keep_layers), len(rows), size)
        )
        self._rotary.ensure(max(start + count for _, count, _, start in batch.segments))
        step = self._new_step(batch, cache)  # it sets fields that another forward would not reset
        layers = torch.tensor(list(partial.keep_layers), dtype=torch.int64)
        step.first_layer, step.last_layer = partial.first_layer, last
        step.hidden_in, step.hidden_out = _pointer(partial.hidden), result.hidden.data_ptr()
        step.num_kept, step.kept_layers = len(layers), layers.data_ptr()
        step.num_kept_rows, step.kept_rows, step.kept = len(rows), _pointer(rows), result.kept.data_ptr()
        columns = None
        panels = torch.empty(0, dtype=torch.int64)
        if last == self.info.num_layers:
            width = self.info.vocab_size
            if partial.vocabulary is not None:
                panels, place = torch.unique(partial.vocabulary // PANEL, return_inverse=True)
                columns = place * PANEL + partial.vocabulary % PANEL
                step.num_panels, step.panels = len(panels), panels.data_ptr()
                width = len(panels) * PANEL
            result.logits = torch.empty(len(batch.logit_rows), width)
            step.logits, step.logits_stride = result.logits.data_ptr(), width
        self._forward.run(step)
        if columns is not None:
            result.logits = result.logits[:, columns]
        return result

    def _step(self, batch: ForwardBatch, cache: PagedKVCache) -> Step:
        """The step without what is asked of it.

        After a forward nothing of torch is in the caches: with a batch its step is kept too, and then a step of decodes
        touches no tensor.
        """
        kept = self._kept
        if kept is not None and kept.batch is batch and kept.cache is cache and kept.cos is self._rotary.cos:
            kept.step.logits = kept.step.best = kept.step.sampled = None
            return kept.step
        positions = max((start + count for _, count, _, start in batch.segments), default=0)
        if batch.kept:  # whatever its tables have room for
            positions = max(positions, batch.block_tables.shape[1] * cache.block_size)
        self._rotary.ensure(positions)
        step = self._new_step(batch, cache)
        self._kept = _Kept(batch, cache, self._rotary.cos, step) if batch.kept else None
        return step

    def _new_step(self, batch: ForwardBatch, cache: PagedKVCache) -> Step:
        assert cache.dtype == "bfloat16"
        at, layer_bytes = cache.memory.ctypes.data, cache.layer_bytes
        return Step(
            rows=batch.num_rows,
            logit_count=len(batch.logit_rows),
            token_ids=pointer(batch.token_ids),
            positions=pointer(batch.positions),
            slots=pointer(batch.slots),
            row_sequence=pointer(batch.row_sequence),
            tables=pointer(batch.block_tables),
            table_stride=batch.block_tables.shape[1],
            logit_rows=pointer(batch.logit_rows),
            key_cache=at,
            value_cache=at + cache.num_layers * layer_bytes,
            layer_stride=layer_bytes // ITEM_BYTES[cache.dtype],
            block_size=cache.block_size,
            cos=pointer(self._rotary.cos),
            sin=pointer(self._rotary.sin),
            last_layer=self.info.num_layers,
            threads=num_threads(),
        )

    def _check(self, partial: Partial, batch: ForwardBatch) -> None:
        layers = self.info.num_layers
        last = layers if partial.last_layer is None else partial.last_layer
        if not 0 <= partial.first_layer <= last <= layers:
            raise ValueError(f"layers {partial.first_layer}..{last} are not within 0..{layers}")
        if any(not partial.first_layer <= layer < last for layer in partial.keep_layers):
            raise ValueError(f"layers {list(partial.keep_layers)} are not among those that are run")
        hidden = partial.hidden
        if hidden is not None and (
            hidden.shape != (batch.num_rows, self.info.hidden_size)
            or hidden.dtype != torch.float32
            or not hidden.is_contiguous()
        ):
            raise ValueError(f"hidden is not float32 [{batch.num_rows}, {self.info.hidden_size}] without gaps")
        for name, ids, limit in (
            ("keep_rows", partial.keep_rows, batch.num_rows),
            ("vocabulary", partial.vocabulary, self.info.vocab_size),
        ):
            if ids is None:
                continue
            if ids.dtype != torch.int64 or ids.ndim != 1 or not ids.is_contiguous():
                raise ValueError(f"{name} is not int64 [n] without gaps")
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
                raise ValueError(f"{name}: ids are not within 0..{limit - 1}")


def _pointer(tensor: torch.Tensor | None) -> int | None:
    """Where a contiguous tensor's data is."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _shape(config: ModelConfig) -> Shape:
    return Shape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.rms_norm_eps,
    )


def _unfit(packed: PackedModel) -> str | None:
    """Why these weights cannot be multiplied by; None where they can."""
    matrices = [w for layer in packed.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return "its weights are float32" if any(w.kind is Kind.F32 for w in [*matrices, packed.head]) else None
