"""Rows of weights in files' order, and what becomes of them: which kind, by which conversion, with or without loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specserve.kernels.cpu import packing
from specserve.kernels.cpu.packing import Kind
from specserve.kernels.kv_layout import name_of

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

FLOATS = {name: kind for kind, name in packing.FLOATS.items()}
LABELS = {Kind.F32: "float32", Kind.BF16: "bfloat16", Kind.Q8: "q8_0", Kind.Q4_0: "q4_0", Kind.Q4_1: "q4_1"}
_HALF_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix as a file holds it.

    Attributes:
        kind: of the rows.
        k: inputs.
        data: uint8 [n, packing.row_bytes(kind, k)], contiguous.
    """

    kind: Kind
    k: int
    data: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Rows:
        """Of a float tensor [n, k]; other types than float32 and bfloat16 become float32."""
        weight = weight if name_of(weight.dtype) in FLOATS else weight.float()
        return cls(FLOATS[name_of(weight.dtype)], weight.shape[1], weight.contiguous().view(torch.uint8))

    def dequantise(self) -> torch.Tensor:
        """float32 [n, k]."""
        return packing.dequantise_rows(self.kind, self.data, self.k)


def wanted(kind: Kind | None, mode: str, dtype: str, *, table: bool = False) -> Kind:
    """What a matrix is brought to.

    Args:
        kind: of the file's rows; None for a type that is only dequantised (k-quants and the like).
        mode: "auto" leaves blocks as they are and makes q8 of types that are only dequantised; "none" makes `dtype` of
            everything; "q8" and "q4" quantise, and leave what is of their class already.
        table: the embedding or the head, which "q4" too brings to q8.
    """
    if mode == "none":
        return FLOATS[dtype]
    if mode == "auto":
        return Kind.Q8 if kind is None else kind if kind.quantised else FLOATS[dtype]
    if mode == "q8" or table:
        return Kind.Q8
    return kind if kind in (Kind.Q4_0, Kind.Q4_1) else Kind.Q4_1


def common(kinds: Sequence[Kind]) -> tuple[Kind, bool]:
    """One kind for all parts of a merged matrix, and whether every part gets there without loss."""
    found = set(kinds)
    if len(found) == 1:
        return kinds[0], True
    if found == {Kind.Q4_0, Kind.Q4_1}:
        return Kind.Q4_1, True
    return Kind.Q8, found == {Kind.Q4_0, Kind.Q8}


def convert(rows: Rows, kind: Kind) -> Rows:
    """The rows as another kind: exactly where it can hold them (Q4_0 as Q4_1 or Q8), else rounded anew."""
    if rows.kind is kind:
        return rows
    if rows.kind is Kind.Q4_0 and kind in (Kind.Q4_1, Kind.Q8):
        exact = _q4_0_as_q4_1(rows) if kind is Kind.Q4_1 else _q4_0_as_q8(rows)
        if exact is not None:
            return exact
    values = rows.dequantise()
    if not kind.quantised:
        return Rows.of(values.to(packing.float_dtype(kind)))
    return Rows(kind, rows.k, packing.quantise_rows(kind, values))


def _q4_0_as_q4_1(rows: Rows) -> Rows | None:
    """scale * (q - 8) = scale * q - 8 scale; None where 8 scale is no float16."""
    blocks = rows.data.view(-1, 18)
    scale = blocks[:, :2].contiguous().view(torch.float16)
    least = scale.float() * -8
    if bool(least.abs().max() > _HALF_MAX):
        return None
    data = torch.cat((blocks[:, :2], least.half().view(torch.uint8), blocks[:, 2:]), dim=1)
    return Rows(Kind.Q4_1, rows.k, data.view(rows.data.shape[0], -1))


def _q4_0_as_q8(rows: Rows) -> Rows:
    blocks = rows.data.view(-1, 18)
    nibbles = blocks[:, 2:]
    q = torch.cat((nibbles & 15, nibbles >> 4), dim=1).to(torch.int8) - 8
    data = torch.cat((blocks[:, :2], q.view(torch.uint8)), dim=1)
    return Rows(Kind.Q8, rows.k, data.view(rows.data.shape[0], -1))
