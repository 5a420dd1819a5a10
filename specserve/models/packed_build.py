"""A checkpoint's tensors -> the layout of the packed model, and the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from specserve.kernels.cpu import packing
from specserve.kernels.cpu.memory import huge
from specserve.kernels.cpu.packing import Kind
from specserve.models.config import ModelConfig
from specserve.models.packed_cache import Memory, Source
from specserve.models.packing import (
    EMBEDDING,
    HEAD,
    INTERLEAVE,
    NORM,
    Entry,
    Layout,
    Matrix,
    layer_matrices,
    layer_norms,
)
from specserve.models.quantize import FLOATS, Rows, common, convert, wanted

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

Progress = Callable[[int, int, str], None]
log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes; where every tensor begins


class Tensors(Protocol):
    """A checkpoint's tensors under transformers' names, read when they are asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def source(self) -> Source:
        """What a packed model of them is made from."""

    def kind(self, name: str) -> Kind | None:
        """Of a matrix's rows; None for a type that `rows` dequantises."""

    def rows(self, name: str) -> Rows:
        """A matrix [n, k]."""

    def vector(self, name: str) -> torch.Tensor:
        """float32 [n]."""


def plan(config: ModelConfig, tensors: Tensors, mode: str, dtype: str) -> Layout | None:
    """The layout of the packed model; None where the native kernels do not take one of its shapes.

    Args:
        mode: "auto", "none", "q8" or "q4"; see quantize.wanted.
        dtype: of what is not quantised.
    """
    if config.intermediate_size % INTERLEAVE:
        return None
    entries: list[Entry] = []
    mixed: list[str] = []

    def add(name: str, kind: Kind, n: int, k: int, nbytes: int) -> None:
        end = entries[-1].offset + entries[-1].nbytes if entries else 0
        entries.append(Entry(name, kind, n, k, -(-end // ALIGNMENT) * ALIGNMENT, nbytes))

    def vector(name: str, n: int) -> None:
        add(name, Kind.F32, n, 0, 4 * n)

    def packed(name: str, kind: Kind, n: int, k: int) -> None:
        add(name, kind, n, k, packing.packed_bytes(kind, n, k))

    hidden, vocab = config.hidden_size, config.vocab_size
    table = _embedding_kind(tensors.kind(f"{EMBEDDING}.weight"), mode, dtype)
    add("embedding", table, vocab, hidden, vocab * packing.row_bytes(table, hidden))
    for index in range(config.num_layers):
        for matrix in layer_matrices(config):
            name = f"layers.{index}.{matrix.name}"
            kind, exact = _matrix_kind(tensors, f"model.layers.{index}", matrix, mode, dtype)
            mixed += [] if exact else [name]
            packed(name, kind, sum(matrix.sizes), matrix.k)
            if matrix.bias:
                vector(f"{name}.bias", sum(matrix.sizes))
        for norm, (_, size) in layer_norms(config).items():
            vector(f"layers.{index}.{norm}", size)
    vector("norm", hidden)
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    packed("head", wanted(tensors.kind(f"{head}.weight"), mode, dtype, table=True), vocab, hidden)
    if mixed:
        log.info("parts of different types are requantised to q8 to be one matrix: %s", ", ".join(mixed))
    taken = all(entry.nbytes for entry in entries)
    return Layout(tuple(entries), entries[-1].offset + entries[-1].nbytes) if taken else None


def fill(config: ModelConfig, tensors: Tensors, layout: Layout, progress: Progress | None = None) -> Memory:
    """Memory uint8 [layout.nbytes] with the model in it; beyond it, the tensors of one matrix are held at a time."""
    memory = huge(layout.nbytes)
    entries = {entry.name: entry for entry in layout.entries}

    def write(name: str, joined: torch.Tensor) -> None:
        entry = entries[name]
        out = memory[entry.offset : entry.offset + entry.nbytes]
        if entry.k == 0 or name == "embedding":
            torch.from_numpy(out).copy_(joined.contiguous().view(torch.uint8).view(-1))
        else:
            packing.pack_rows(entry.kind, entry.k, joined, out)
        if progress is not None:
            progress(entry.offset + entry.nbytes, layout.nbytes, "weights")

    def rows(name: str, tensor: str) -> torch.Tensor:
        return convert(tensors.rows(tensor), entries[name].kind).data

    write("embedding", rows("embedding", f"{EMBEDDING}.weight"))
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        for matrix in layer_matrices(config):
            name = f"layers.{index}.{matrix.name}"
            write(name, matrix.joined([rows(name, f"{at}.{stem}.weight") for stem in matrix.stems]))
            if matrix.bias:
                biases = [tensors.vector(f"{at}.{stem}.bias") for stem in matrix.stems]
                write(f"{name}.bias", matrix.joined(biases))
        for norm, (stem, _) in layer_norms(config).items():
            write(f"layers.{index}.{norm}", tensors.vector(f"{at}.{stem}.weight"))
    write("norm", tensors.vector(f"{NORM}.weight"))
    write("head", rows("head", f"{EMBEDDING if config.tie_word_embeddings else HEAD}.weight"))
    return memory


def _matrix_kind(tensors: Tensors, at: str, matrix: Matrix, mode: str, dtype: str) -> tuple[Kind, bool]:
    """The kind of a matrix, and whether all of its parts come to it without more loss than asked for."""
    return common([wanted(tensors.kind(f"{at}.{stem}.weight"), mode, dtype) for stem in matrix.stems])


def _embedding_kind(kind: Kind | None, mode: str, dtype: str) -> Kind:
    """Floats or q8, one of which every row can be read as."""
    want = wanted(kind, mode, dtype, table=True)
    if want is Kind.Q4_0:
        return Kind.Q8  # without loss
    return FLOATS[dtype] if want is Kind.Q4_1 else want  # which loses more as q8
