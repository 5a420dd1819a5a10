"""The native forward: a model and a step as the structures of forward.h, and one call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specserve.kernels.cpu.memory import huge
from specserve.kernels.cpu.native import library
from specserve.kernels.cpu.packing import Kind, PackedWeights

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

PANEL = 32  # outputs that the head computes together
MAX_HEAD_DIM = 256
_P, _I = c_void_p, c_int64
Floats = npt.NDArray[np.float32]


class Linear(Structure):
    _fields_ = [("kind", _I), ("n", _I), ("k", _I), ("packed", _P), ("bias", _P)]


class Layer(Structure):
    _fields_ = [
        ("input_norm", _P),
        ("qkv", Linear),
        ("q_norm", _P),
        ("k_norm", _P),
        ("output", Linear),
        ("mlp_norm", _P),
        ("gate_up", Linear),
        ("down", Linear),
        ("window", _I),
    ]


class Model(Structure):
    _fields_ = [
        *((name, _I) for name in ("num_layers", "hidden", "inner", "q_heads", "kv_heads", "dim", "vocab")),
        ("embedding_kind", _I),
        ("embedding", _P),
        ("layers", POINTER(Layer)),
        ("norm", _P),
        ("head", Linear),
        ("eps", c_double),
        ("scale", c_double),
    ]


class Step(Structure):
    """See forward.h; every field not set is 0 or null."""

    _fields_ = [
        ("rows", _I),
        ("logit_count", _I),
        *((name, _P) for name in ("token_ids", "positions", "slots", "row_sequence", "tables")),
        ("table_stride", _I),
        *((name, _P) for name in ("logit_rows", "key_cache", "value_cache")),
        ("layer_stride", _I),
        ("block_size", _I),
        ("cos", _P),
        ("sin", _P),
        ("first_layer", _I),
        ("last_layer", _I),
        ("hidden_in", _P),
        ("hidden_out", _P),
        ("num_kept", _I),
        ("kept_layers", _P),
        ("num_kept_rows", _I),
        ("kept_rows", _P),
        ("kept", _P),
        ("num_panels", _I),
        ("panels", _P),
        ("logits", _P),
        ("logits_stride", _I),
        ("best", _P),
        ("choices", _I),
        ("sampled", _P),
        ("scratch", _P),
        ("threads", _I),
    ]


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a model; see ModelConfig."""

    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float


class LayerWeights(Protocol):
    """One layer's tensors. Norms are float32, [hidden] and [head_dim]; `window` is in positions, 0 for all."""

    @property
    def input_norm(self) -> Floats: ...
    @property
    def qkv(self) -> PackedWeights: ...
    @property
    def q_norm(self) -> Floats | None: ...
    @property
    def k_norm(self) -> Floats | None: ...
    @property
    def output(self) -> PackedWeights: ...
    @property
    def mlp_norm(self) -> Floats: ...
    @property
    def gate_up(self) -> PackedWeights: ...
    @property
    def down(self) -> PackedWeights: ...
    @property
    def window(self) -> int: ...


def refusal(shape: Shape) -> str | None:
    """Why the native forward does not run models of such a shape; None where it does."""
    if library() is None:
        return "there are no native kernels"
    if shape.head_dim % 16 or shape.head_dim > MAX_HEAD_DIM:
        return f"heads of {shape.head_dim} are no multiple of 16 up to {MAX_HEAD_DIM}"
    if shape.q_heads % shape.kv_heads:
        return f"{shape.q_heads} heads do not share {shape.kv_heads} of keys"
    sizes = (shape.hidden, shape.inner, shape.q_heads * shape.head_dim)
    if any(size % 32 for size in sizes):
        return f"of the sizes {sizes} not all are multiples of 32"
    return None


class Forward:
    """A packed model, ready to run steps. Not for two threads at once: its scratch memory is its own.

    Args:
        shape, layers, norm, head: the model's; norm is float32 [hidden].
        embedding_kind, embedding: F32, BF16 or Q8 and its rows, uint8 [vocab, ...].
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        embedding_kind: Kind,
        embedding: npt.NDArray[np.uint8],
        norm: Floats,
        head: PackedWeights,
    ) -> None:
        lib = library()
        assert lib is not None, "ask refusal() first"
        self._lib = lib
        self._kept = (layers, embedding, norm, head)  # alive as long as there are pointers into them
        self._layers = (Layer * len(layers))(*(_layer(layer) for layer in layers))
        self._model = Model(
            len(layers),
            shape.hidden,
            shape.inner,
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.vocab,
            embedding_kind,
            pointer(embedding),
            self._layers,
            pointer(norm),
            _linear(head),
            shape.eps,
            shape.head_dim**-0.5,
        )
        self._scratch = huge(0)
        self._scratch_at = 0
        self._fits = (0, 0, 0)  # the last that were asked for
        self._room = (0, 0, 0)  # rows, logits and threads that the scratch is for

    def run(self, step: Step) -> None:
        """Run one step; `scratch` is filled in. The interpreter lock is free meanwhile."""
        self._reserve(step)
        step.scratch = self._scratch_at
        self._lib.ss_forward(byref(self._model), byref(step))

    def _reserve(self, step: Step) -> None:
        wanted = (step.rows, step.logit_count, step.threads)
        if wanted == self._fits or all(a <= b for a, b in zip(wanted, self._room, strict=True)):
            self._fits = wanted
            return
        # In powers of two, so that growing ends soon.
        rows, logits, threads = (max(a, b) for a, b in zip(wanted, self._room, strict=True))
        rows, logits = 1 << (rows - 1).bit_length(), 1 << max(0, logits - 1).bit_length()
        self._room = (rows, logits, threads)
        size = self._lib.ss_forward_scratch(byref(self._model), rows, logits, threads)
        self._scratch = huge(size)
        self._scratch_at = self._scratch.ctypes.data


def _linear(w: PackedWeights) -> Linear:
    return Linear(w.kind, w.n, w.k, pointer(w.data), pointer(w.bias))


def _layer(w: LayerWeights) -> Layer:
    return Layer(
        pointer(w.input_norm),
        _linear(w.qkv),
        pointer(w.q_norm),
        pointer(w.k_norm),
        _linear(w.output),
        pointer(w.mlp_norm),
        _linear(w.gate_up),
        _linear(w.down),
        w.window,
    )


def pointer(array: npt.NDArray[Any] | None) -> int | None:
    """Where a contiguous array's data is."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data
