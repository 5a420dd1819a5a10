"""A checkpoint's tensors -> the layout of the packed model, and the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from specserve.kernels.cpu import packing
from specserve.kernels.cpu.memory import huge
from specserve.kernels.cpu.packing import Kind
from specserve.models.config import ModelConfig
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
from specserve.models.quantize import BF16, F32, Q4_0, Q8_0, Form, Rows, common, convert, wanted

Progress = Callable[[int, int, str], None]
log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes; where every tensor begins


class Tensors(Protocol):
    """A checkpoint's tensors under transformers' names, read when they are asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def form(self, name: str) -> Form | None:
        """Of a matrix's rows; None for a type that `rows` dequantises."""

    def rows(self, name: str) -> Rows:
        """A matrix [n, k]."""

    def vector(self, name: str) -> torch.Tensor:
        """float32 [n]."""


def plan(config: ModelConfig, tensors: Tensors, mode: str, dtype: torch.dtype) -> Layout | None:
    """The layout of the packed model; None where the native kernels do not take one of its shapes.

    Args:
        mode: "auto", "none", "q8" or "q4"; see quantize.wanted.
        dtype: of what is not quantised.
    """
    if config.intermediate_size % INTERLEAVE:
        return None
    entries: list[Entry] = []
    mixed: list[str] = []

    def add(name: str, form: Form, n: int, k: int, nbytes: int) -> None:
        end = entries[-1].offset + entries[-1].nbytes if entries else 0
        entries.append(Entry(name, form, n, k, -(-end // ALIGNMENT) * ALIGNMENT, nbytes))

    def vector(name: str, n: int) -> None:
        add(name, F32, n, 0, 4 * n)

    def packed(name: str, form: Form, n: int, k: int) -> None:
        add(name, form, n, k, packing.packed_bytes(form.kind, n, k, form.block))

    hidden, vocab = config.hidden_size, config.vocab_size
    table = _embedding_form(tensors.form(f"{EMBEDDING}.weight"), mode, dtype, hidden)
    add("embedding", table, vocab, hidden, vocab * packing.row_bytes(table.kind, hidden, table.block))
    for index in range(config.num_layers):
        for matrix in layer_matrices(config):
            name = f"layers.{index}.{matrix.name}"
            form, exact = _matrix_form(tensors, f"model.layers.{index}", matrix, mode, dtype)
            mixed += [] if exact else [name]
            packed(name, form, sum(matrix.sizes), matrix.k)
            if matrix.bias:
                vector(f"{name}.bias", sum(matrix.sizes))
        for norm, (_, size) in layer_norms(config).items():
            vector(f"layers.{index}.{norm}", size)
    vector("norm", hidden)
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    packed("head", wanted(tensors.form(f"{head}.weight"), mode, dtype, hidden, table=True), vocab, hidden)
    if mixed:
        log.info("parts of different types are requantised to q8 to be one matrix: %s", ", ".join(mixed))
    taken = all(entry.nbytes for entry in entries)
    return Layout(tuple(entries), entries[-1].offset + entries[-1].nbytes) if taken else None


def fill(config: ModelConfig, tensors: Tensors, layout: Layout, progress: Progress | None = None) -> torch.Tensor:
    """Memory uint8 [layout.nbytes] with the model in it; beyond it, the tensors of one matrix are held at a time."""
    memory = huge(layout.nbytes)
    entries = {entry.name: entry for entry in layout.entries}

    def write(name: str, joined: torch.Tensor) -> None:
        entry = entries[name]
        out = memory[entry.offset : entry.offset + entry.nbytes]
        if entry.k == 0 or name == "embedding":
            out.copy_(joined.contiguous().view(torch.uint8).view(-1))
        else:
            packing.pack_rows(entry.form.kind, entry.k, entry.form.block, joined, out)
        if progress is not None:
            progress(entry.offset + entry.nbytes, layout.nbytes, "weights")

    def rows(name: str, tensor: str) -> torch.Tensor:
        return convert(tensors.rows(tensor), entries[name].form).data

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


def _matrix_form(tensors: Tensors, at: str, matrix: Matrix, mode: str, dtype: torch.dtype) -> tuple[Form, bool]:
    """The form of a matrix, and whether all of its parts come to it without more loss than asked for."""
    return common([wanted(tensors.form(f"{at}.{stem}.weight"), mode, dtype, matrix.k) for stem in matrix.stems])


def _embedding_form(form: Form | None, mode: str, dtype: torch.dtype, hidden: int) -> Form:
    """Floats or q8, one of which every row can be read as."""
    want = wanted(form, mode, dtype, hidden, table=True)
    if not want.kind.quantised or want.kind is Kind.Q8:
        return want
    return Q8_0 if want == Q4_0 else BF16  # Q4_0 is q8 without loss; Q4_1 loses less as bfloat16
