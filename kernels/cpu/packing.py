"""Weights of linear layers in the order in which the native GEMM reads them (packed.h), and rows in files' order."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specserve.kernels.cpu.native import library
from specserve.kernels.kv_layout import ITEM_BYTES, dtype_of
from specserve.kernels.lazy import num_threads

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

BLOCK = 32  # inputs that share a scale


class Kind(IntEnum):
    """How a weight is stored; the numbers are packed.h's.

    Q8, Q4_0 and Q4_1 are GGUF's Q8_0, Q4_0 and Q4_1: w = scale * q, scale * (q - 8), scale * q + least.
    """

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4_0 = 3
    Q4_1 = 4

    @property
    def quantised(self) -> bool:
        return self >= Kind.Q8


FLOATS = {Kind.F32: "float32", Kind.BF16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """One linear layer y = x W^T + b for the native forward.

    Attributes:
        kind: of W.
        n, k: outputs and inputs.
        data: uint8 [packed_bytes(kind, n, k)], as packed.h says.
        bias: float32 [n] or None.
    """

    kind: Kind
    n: int
    k: int
    data: npt.NDArray[np.uint8]
    bias: npt.NDArray[np.float32] | None = None

    @property
    def block(self) -> int:
        """Inputs that share a scale; 0 for floats."""
        return _block(self.kind)

    def dequantise(self) -> torch.Tensor:
        """W as float32 [n, k]: scale * q, plus the least, each rounded to float32."""
        out = torch.empty(self.n, self.k)
        _library().ss_unpack(
            self.kind, self.n, self.k, self.block, self.data.ctypes.data, out.data_ptr(), num_threads()
        )
        return out


def row_bytes(kind: Kind, k: int) -> int:
    """Bytes of one row of k inputs as files hold it."""
    if kind in FLOATS:
        return k * ITEM_BYTES[FLOATS[kind]]
    return k // BLOCK * {Kind.Q8: 34, Kind.Q4_0: 18, Kind.Q4_1: 20}[kind]


def packed_bytes(kind: Kind, n: int, k: int) -> int:
    """Bytes of the packed layer; 0 where the kernels do not take the shape, or where there are no kernels."""
    lib = library()
    return int(lib.ss_packed_bytes(kind, n, k, _block(kind))) if lib is not None else 0


def float_dtype(kind: Kind) -> torch.dtype:
    """torch's, of F32 or BF16."""
    return dtype_of(FLOATS[kind])


def pack_rows(kind: Kind, k: int, rows: torch.Tensor, out: npt.NDArray[np.uint8]) -> None:
    """Fill `out`, uint8 [packed_bytes(kind, n, k)], from rows uint8 [n, row_bytes(kind, k)], both contiguous."""
    n = rows.shape[0]
    size = packed_bytes(kind, n, k)
    if not size or out.size != size or rows.numel() != n * row_bytes(kind, k):
        raise ValueError(f"{kind.name} [{n}, {k}] does not fit {rows.numel()} bytes of rows and {out.size} packed")
    assert rows.is_contiguous()
    assert out.flags.c_contiguous
    _library().ss_pack(kind, n, k, _block(kind), rows.data_ptr(), out.ctypes.data, num_threads())


def quantise_rows(kind: Kind, x: torch.Tensor) -> torch.Tensor:
    """x float32 [n, k] -> rows uint8 [n, row_bytes(kind, k)] of kind Q8 or Q4_1; k is a multiple of 32."""
    n, k = x.shape
    if kind not in (Kind.Q8, Kind.Q4_1) or k % BLOCK or x.dtype != torch.float32:
        raise ValueError(f"{kind.name} is not for {x.dtype} [{n}, {k}]")
    x = x.contiguous()
    rows = torch.empty(n, row_bytes(kind, k), dtype=torch.uint8)
    _library().ss_quantise_rows(kind, n, k, BLOCK, x.data_ptr(), rows.data_ptr(), num_threads())
    return rows


def dequantise_rows(kind: Kind, rows: torch.Tensor, k: int) -> torch.Tensor:
    """Rows uint8 [n, row_bytes(kind, k)] -> float32 [n, k], as PackedWeights.dequantise."""
    n = rows.shape[0]
    if kind in FLOATS:
        return rows.contiguous().view(float_dtype(kind)).view(n, k).float()
    blocks = rows.reshape(n, k // BLOCK, -1)
    numbers = 2 if kind is Kind.Q4_1 else 1
    halves = blocks[..., : 2 * numbers].contiguous().view(torch.float16).float()
    body = blocks[..., 2 * numbers :].contiguous()
    q = body.view(torch.int8).float() if kind is Kind.Q8 else torch.cat((body & 15, body >> 4), dim=-1).float()
    if kind is Kind.Q4_0:
        q -= 8
    q *= halves[..., :1]
    if kind is Kind.Q4_1:
        q += halves[..., 1:]
    return q.view(n, k)


def _block(kind: Kind) -> int:
    return BLOCK if kind.quantised else 0


def _library() -> ctypes.CDLL:
    lib = library()
    assert lib is not None, "ask packed_bytes() first"
    return lib
