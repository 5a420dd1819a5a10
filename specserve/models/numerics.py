"""Linear layers whose rows do not depend on the batch.

numerics="invariant" uses, in order of preference, for each shape of weight:

1. the native GEMM, where each output is one sum in a fixed order, whatever the rows;
2. the library's GEMM in tiles of one fixed number of rows, the last one filled up. A library chooses its kernel, and
   with it the order of its sums, by the number of rows; with a fixed number it computes each row alike wherever the row
   stands and whatever the others hold;
3. the library's GEMM row by row.

Each is checked bit by bit when a model is loaded; one that fails is not used. numerics="fast" takes what is fastest.

The number of threads may enter the order of sums: set it before a model is loaded and leave it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from specserve.core.errors import ModelLoadError
from specserve.kernels.cpu import linear as native_linear

log = logging.getLogger(__name__)

# Rows [tile, in] -> [tile, out]. It may not keep or change its argument.
Kernel = Callable[[torch.Tensor], torch.Tensor]
Linear = Callable[[torch.Tensor], torch.Tensor]

# bfloat16 runs on matrix units where a tile of 32 costs little more than one row; float32 on vector units.
TILES = {torch.bfloat16: 32, torch.float32: 16}
ALIGNMENT = 64  # bytes; kernels may treat other addresses otherwise


class TiledLinear:
    """y = x W^T + b over rows [n, in], in tiles of exactly `tile` rows."""

    def __init__(self, kernel: Kernel, tile: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        self.kernel = kernel
        self.tile = tile
        self.out_features = out_features
        self._scratch = torch.zeros(tile, in_features, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n <= self.tile:
            return self._rows(x)[:n]
        out = x.new_empty(n, self.out_features)
        for first in range(0, n, self.tile):
            rows = x[first : first + self.tile]
            out[first : first + self.tile] = self._rows(rows)[: rows.shape[0]]
        return out

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == self.tile and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
            return self.kernel(x)
        # What the rest of the scratch holds does not matter: that is the property that was checked.
        self._scratch[: x.shape[0]].copy_(x)
        return self.kernel(self._scratch)


class LinearFactory:
    """Makes the linear layers of one model. The check runs once for each shape of weight.

    Args:
        numerics: "invariant" or "fast".
        native: whether the native GEMM may be used where it can be built.
    """

    def __init__(self, numerics: str, native: bool = True) -> None:
        self.numerics = numerics
        self._native = native
        self._chosen: dict[tuple[object, ...], str] = {}

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False) -> Linear:
        """Of weight [out, in]. Raises ModelLoadError if not even single rows are computed alike.

        Args:
            wide: float32 results where the kernel can give them without rounding to weight's dtype first (the head:
                bfloat16 logits tie often).
        """
        weight = weight.contiguous()
        if self.numerics == "fast":
            # For float32 the library is the faster one; for bfloat16 it is not where rows are few.
            native = self._native and weight.dtype == torch.bfloat16 and native_linear.available(weight.dtype)
            return _build("native" if native else "library", weight, bias, wide)
        key = (tuple(weight.shape), weight.dtype, bias is not None, wide)
        if key not in self._chosen:
            self._chosen[key] = self._choose(weight, bias, wide)
        return _build(self._chosen[key], weight, bias, wide)

    def _choose(self, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> str:
        candidates = ["tiles", "rows"]
        if _packable(weight):
            candidates.insert(0, "packed tiles")
        if self._native and native_linear.available(weight.dtype):
            candidates.insert(0, "native")
        for kind in candidates:
            if is_invariant(_build(kind, weight, bias, wide), weight.shape[1], weight.dtype):
                return kind
            log.warning("GEMM %s %s: a row depends on the others here, so it is not used", tuple(weight.shape), kind)
        raise ModelLoadError(
            f'numerics: this machine\'s GEMM of shape {tuple(weight.shape)} is not reproducible; use numerics="fast"',
            param="numerics",
        )


def is_invariant(linear: Linear, in_features: int, dtype: torch.dtype) -> bool:
    """Whether a row's result is the same bits in any number of rows, at any place, with any neighbours and address.

    The inputs' magnitudes are spread widely, so that another order of summation shows after rounding too.
    """
    random = torch.Generator().manual_seed(0)
    rows = 2 * max(TILES.values()) + 6
    spread = torch.exp2(torch.randint(-8, 9, (rows, in_features), generator=random).float())
    x = (torch.randn(rows, in_features, generator=random) * spread).to(dtype)
    expected = linear(x)
    order = torch.randperm(rows, generator=random)
    if not torch.equal(linear(x[order]), expected[order]):
        return False
    for first, count in ((0, 1), (rows - 1, 1), (3, 2), (5, 7), (1, 16), (9, 33), (2, 64)):  # other addresses as well
        if not torch.equal(linear(x[first : first + count]), expected[first : first + count]):
            return False
    for at in (0, 15, 31, 40):  # one row among zeros
        lonely = torch.zeros_like(x)
        lonely[at] = x[7]
        if not torch.equal(linear(lonely)[at], expected[7]):
            return False
    return True


def _packable(weight: torch.Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _build(kind: str, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> Linear:
    if kind == "native":
        return native_linear.PackedLinear(weight, bias, torch.float32 if wide else None)
    if kind == "library":
        return lambda x: F.linear(x, weight, bias)
    tile = 1 if kind == "rows" else TILES[weight.dtype]
    kernel = _packed_kernel(weight, bias, tile) if kind == "packed tiles" else lambda x: F.linear(x, weight, bias)
    return TiledLinear(kernel, tile, weight.shape[1], weight.shape[0], weight.dtype)


def _packed_kernel(weight: torch.Tensor, bias: torch.Tensor | None, tile: int) -> Kernel:
    # The weight in the order in which the kernel reads it: not reordered within each call.
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, tile)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, reordered, bias, "none", [], "")
