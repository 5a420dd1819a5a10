"""Weights of linear layers in the order in which the native GEMM reads them (packed.h), and rows in files' order."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch

from specserve.kernels.cpu.native import library

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

PANEL, HALF = 32, 16  # outputs; packed.h


class Kind(IntEnum):
    """How a weight is stored; the numbers are packed.h's.

    Q8 is GGUF's Q8_0 (with blocks of 64 inputs as well): w = scale * q. Q4_0 is w = scale * (q - 8), Q4_1 is
    w = scale * q + least.
    """

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4_0 = 3
    Q4_1 = 4

    @property
    def quantised(self) -> bool:
        return self >= Kind.Q8


DTYPES = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """One linear layer y = x W^T + b for the native forward.

    Attributes:
        kind: of W.
        n, k: outputs and inputs.
        block: inputs that share a scale: 32 or 64 for Q8, 32 for Q4_0 and Q4_1, 0 for floats.
        data: uint8 [packed_bytes(kind, n, k, block)], as packed.h says.
        bias: float32 [n] or None.
    """

    kind: Kind
    n: int
    k: int
    block: int
    data: torch.Tensor
    bias: torch.Tensor | None = None

    def dequantise(self) -> torch.Tensor:
        """W as float32 [n, k]: scale * q, plus the least, each computed in float32."""
        panels = -(-self.n // PANEL)
        if self.kind is Kind.F32:
            whole = self.data.view(torch.float32).view(panels, self.k, PANEL).transpose(1, 2)
        elif self.kind is Kind.BF16:
            pairs = self.data.view(torch.bfloat16).view(panels, self.k // 32, 2, 16, HALF, 2)
            whole = pairs.permute(0, 2, 4, 1, 3, 5).float()
        else:
            whole = _blocks_to_rows(self.kind, self.data.view(panels, self.k // self.block, -1), self.block)
        return whole.reshape(panels * PANEL, self.k)[: self.n]


def row_bytes(kind: Kind, k: int, block: int) -> int:
    """Bytes of one row of k inputs as files hold it."""
    if kind in DTYPES:
        return k * DTYPES[kind].itemsize
    return k // block * {Kind.Q8: 2 + block, Kind.Q4_0: 18, Kind.Q4_1: 20}[kind]


def packed_bytes(kind: Kind, n: int, k: int, block: int) -> int:
    """Bytes of the packed layer; 0 where the kernels do not take the shape, or where there are no kernels."""
    lib = library()
    return int(lib.ss_packed_bytes(kind, n, k, block)) if lib is not None else 0


def pack_rows(kind: Kind, k: int, block: int, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out`, uint8 [packed_bytes(...)], from rows uint8 [n, row_bytes(kind, k, block)], both contiguous."""
    n = rows.shape[0]
    size = packed_bytes(kind, n, k, block)
    if not size or out.numel() != size or rows.numel() != n * row_bytes(kind, k, block):
        raise ValueError(f"{kind.name} [{n}, {k}] in blocks of {block} does not fit {rows.numel()} and {out.numel()}")
    assert rows.is_contiguous()
    assert out.is_contiguous()
    _library().ss_pack(kind, n, k, block, rows.data_ptr(), out.data_ptr(), torch.get_num_threads())


def quantise_rows(kind: Kind, x: torch.Tensor, block: int) -> torch.Tensor:
    """x float32 [n, k] -> rows uint8 [n, row_bytes] of kind Q8 (blocks of 32 or 64 inputs) or Q4_1 (32)."""
    n, k = x.shape
    if kind not in (Kind.Q8, Kind.Q4_1) or k % block or block not in ((32, 64) if kind is Kind.Q8 else (32,)):
        raise ValueError(f"{kind.name} in blocks of {block} is not for [{n}, {k}]")
    x = x.contiguous()
    assert x.dtype == torch.float32
    rows = torch.empty(n, row_bytes(kind, k, block), dtype=torch.uint8)
    _library().ss_quantise_rows(kind, n, k, block, x.data_ptr(), rows.data_ptr(), torch.get_num_threads())
    return rows


def dequantise_rows(kind: Kind, rows: torch.Tensor, k: int, block: int) -> torch.Tensor:
    """Rows uint8 [n, row_bytes] -> float32 [n, k], as PackedWeights.dequantise does."""
    n = rows.shape[0]
    if kind in DTYPES:
        return rows.contiguous().view(DTYPES[kind]).view(n, k).float()
    blocks = rows.reshape(n, k // block, -1)
    numbers = 2 if kind is Kind.Q4_1 else 1
    halves = blocks[..., : 2 * numbers].contiguous().view(torch.float16).float()
    body = blocks[..., 2 * numbers :].contiguous()
    q = body.view(torch.int8).float() if kind is Kind.Q8 else torch.cat((body & 15, body >> 4), dim=-1).float()
    return _grid(kind, q, halves[..., 0:1], halves[..., 1:2]).reshape(n, k)


def _blocks_to_rows(kind: Kind, blocks: torch.Tensor, block: int) -> torch.Tensor:
    """[panels, k / block, block_bytes] -> float32 [panels, 32 outputs, k / block, block]."""
    panels, count, _ = blocks.shape
    numbers = 2 if kind is Kind.Q4_1 else 1
    head = 2 * PANEL * numbers
    halves = blocks[..., :head].contiguous().view(torch.float16).float().view(panels, count, numbers, PANEL)
    halves = halves.permute(2, 0, 3, 1).unsqueeze(-1)  # [numbers, panels, outputs, blocks, 1]
    body = blocks[..., head:].contiguous()
    if kind is Kind.Q8:
        q = body.view(torch.int8).view(panels, count, 2, block // 4, HALF, 4)
    else:
        nibbles = body.view(panels, count, block // 4, HALF, 4)
        q = torch.stack((nibbles & 15, nibbles >> 4), dim=2)
    q = q.permute(0, 2, 4, 1, 3, 5).reshape(panels, PANEL, count, block).float()
    return _grid(kind, q, halves[0], halves[-1])


def _grid(kind: Kind, q: torch.Tensor, scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    if kind is Kind.Q4_0:
        return scale * (q - 8)
    return scale * q + least if kind is Kind.Q4_1 else scale * q


def _library() -> ctypes.CDLL:
    lib = library()
    assert lib is not None, "ask packed_bytes() first"
    return lib
