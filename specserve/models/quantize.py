"""Rows of weights in files' order, and what becomes of them: which kind, by which conversion, with or without loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specserve.kernels.cpu import packing
from specserve.kernels.cpu.packing import Kind

MODES = ("auto", "none", "q8", "q4")
Q4_BLOCK = 32
# Embedding rows are read one by one and their head may be packed from them; blocks as GGUF has them.
EMBEDDING_BLOCK = 32
_HALF_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Form:
    """How the rows of a matrix are stored. `block` is 0 for floats."""

    kind: Kind
    block: int = 0

    @property
    def label(self) -> str:
        """As people name it; "q8_0" and "q8_1" are taken by GGUF, so blocks of 64 are "q8"."""
        names = {Kind.F32: "float32", Kind.BF16: "bfloat16", Kind.Q4_0: "q4_0", Kind.Q4_1: "q4_1"}
        return names.get(self.kind, "q8_0" if self.block == 32 else "q8")


F32, BF16 = Form(Kind.F32), Form(Kind.BF16)
FLOATS = {torch.float32: F32, torch.bfloat16: BF16}
Q8_0, Q4_0, Q4_1 = Form(Kind.Q8, 32), Form(Kind.Q4_0, Q4_BLOCK), Form(Kind.Q4_1, Q4_BLOCK)


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix as a file holds it.

    Attributes:
        form: of the rows.
        k: inputs.
        data: uint8 [n, packing.row_bytes(form.kind, k, form.block)], contiguous.
    """

    form: Form
    k: int
    data: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Rows:
        """Of a float tensor [n, k]; float16 becomes float32."""
        weight = weight if weight.dtype in FLOATS else weight.float()
        return cls(FLOATS[weight.dtype], weight.shape[1], weight.contiguous().view(torch.uint8))

    def dequantise(self) -> torch.Tensor:
        """float32 [n, k]."""
        return packing.dequantise_rows(self.form.kind, self.data, self.k, self.form.block)


def q8_block(k: int) -> int:
    """Inputs a scale where weights are quantised here: longer blocks are read faster."""
    return 64 if k % 64 == 0 else 32


def wanted(form: Form | None, mode: str, dtype: torch.dtype, k: int, *, table: bool = False) -> Form:
    """What a matrix of k inputs is brought to.

    Args:
        form: of the file's rows; None for a type that is only dequantised (k-quants and the like).
        mode: "auto" leaves blocks as they are and makes q8 of types that are only dequantised; "none" makes `dtype` of
            everything; "q8" and "q4" quantise, and leave what is of their class already.
        table: the embedding or the head, which "q4" too brings to q8.
    """
    floats = FLOATS[dtype]
    if mode == "none":
        return floats
    if mode == "auto":
        return Q8_0 if form is None else form if form.kind.quantised else floats
    own = (
        form if form is not None and form.kind is Kind.Q8 else Form(Kind.Q8, EMBEDDING_BLOCK if table else q8_block(k))
    )
    if mode == "q8" or table:
        return Q8_0 if form == Q4_0 else own  # Q4_0 is q8 without loss
    return form if form in (Q4_0, Q4_1) else Q4_1


def common(forms: Sequence[Form]) -> tuple[Form, bool]:
    """One form for all parts of a merged matrix, and whether every part gets there without loss."""
    kinds = set(forms)
    if len(kinds) == 1:
        return forms[0], True
    if kinds == {Q4_0, Q4_1}:
        return Q4_1, True
    return Q8_0, kinds <= {Q4_0, Q8_0} or all(form.kind is Kind.Q8 for form in kinds)


def convert(rows: Rows, form: Form) -> Rows:
    """The rows in another form: exactly where it can hold them (Q4_0 as Q4_1 or Q8_0), else rounded anew."""
    if rows.form == form:
        return rows
    if rows.form == Q4_0 and form in (Q4_1, Q8_0):
        exact = _q4_0_as_q4_1(rows) if form == Q4_1 else _q4_0_as_q8(rows)
        if exact is not None:
            return exact
    values = rows.dequantise()
    if form in FLOATS.values():
        return Rows.of(values.to(packing.DTYPES[form.kind]))
    return Rows(form, rows.k, packing.quantise_rows(form.kind, values, form.block))


def _q4_0_as_q4_1(rows: Rows) -> Rows | None:
    """scale * (q - 8) = scale * q - 8 scale; None where 8 scale is no float16."""
    blocks = rows.data.view(-1, 18)
    scale = blocks[:, :2].contiguous().view(torch.float16)
    least = scale.float() * -8
    if bool(least.abs().max() > _HALF_MAX):
        return None
    data = torch.cat((blocks[:, :2], least.half().view(torch.uint8), blocks[:, 2:]), dim=1)
    return Rows(Q4_1, rows.k, data.view(rows.data.shape[0], -1))


def _q4_0_as_q8(rows: Rows) -> Rows:
    blocks = rows.data.view(-1, 18)
    nibbles = blocks[:, 2:]
    q = torch.cat((nibbles & 15, nibbles >> 4), dim=1).to(torch.int8) - 8
    data = torch.cat((blocks[:, :2], q.view(torch.uint8)), dim=1)
    return Rows(Q8_0, rows.k, data.view(rows.data.shape[0], -1))
