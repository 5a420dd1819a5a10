"""Linear layers whose rows do not depend on the batch.

A library's GEMM chooses its kernel, and with it the order of its sums, by the number of rows. With a fixed number of
rows it computes each row alike wherever the row stands and whatever the others hold. So numerics="invariant" runs every
GEMM in tiles of one fixed number of rows, the last one filled up, and checks that claim bit by bit for each shape of
weight when a model is loaded; a shape that fails is computed row by row. numerics="fast" gives the library all rows.

The number of threads also enters the order of sums: set it before a model is loaded and leave it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from specserve.core.errors import ModelLoadError

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
    """Makes the linear layers of one model. The check runs once for each shape of weight."""

    def __init__(self, numerics: str) -> None:
        self.numerics = numerics
        self._chosen: dict[tuple[object, ...], tuple[bool, int]] = {}

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Of weight [out, in]. Raises ModelLoadError if not even single rows are computed alike."""
        weight = weight.contiguous()
        if self.numerics == "fast":
            return _kernel(weight, bias, packed=_packable(weight), tile=TILES[weight.dtype])
        key = (tuple(weight.shape), weight.dtype, bias is not None)
        if key not in self._chosen:
            self._chosen[key] = self._choose(weight, bias)
        packed, tile = self._chosen[key]
        kernel = _kernel(weight, bias, packed, tile)
        return TiledLinear(kernel, tile, weight.shape[1], weight.shape[0], weight.dtype)

    def _choose(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[bool, int]:
        tile = TILES[weight.dtype]
        candidates = [(True, tile)] if _packable(weight) else []
        for packed, rows in (*candidates, (False, tile), (False, 1)):
            if is_invariant(_kernel(weight, bias, packed, rows), rows, weight.shape[1], weight.dtype):
                return packed, rows
            log.warning("GEMM %s in tiles of %d rows depends on its rows here", tuple(weight.shape), rows)
        raise ModelLoadError(
            f'numerics: this machine\'s GEMM of shape {tuple(weight.shape)} is not reproducible; use numerics="fast"',
            param="numerics",
        )


def is_invariant(kernel: Kernel, tile: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether a row's result is the same bits at every position of a tile, with any neighbours, at any address.

    The inputs' magnitudes are spread widely, so that another order of summation shows after rounding too.
    """
    random = torch.Generator().manual_seed(0)
    rows = 2 * tile + 2
    spread = torch.exp2(torch.randint(-8, 9, (rows, in_features), generator=random).float())
    x = (torch.randn(rows, in_features, generator=random) * spread).to(dtype)
    linear = TiledLinear(kernel, tile, in_features, kernel(x[:tile].clone()).shape[1], dtype)
    expected = linear(x)
    order = torch.randperm(rows, generator=random)
    if not torch.equal(linear(x[order]), expected[order]):
        return False
    # Another address, and a second time.
    moved = torch.empty(tile * in_features + ALIGNMENT, dtype=dtype)[ALIGNMENT // dtype.itemsize :][
        : tile * in_features
    ]
    moved = moved.view(tile, in_features)
    moved.copy_(x[:tile])
    if not torch.equal(kernel(moved), expected[:tile]):
        return False
    # One row alone, first, last and in between, among zeros.
    for at in {0, tile // 2, tile - 1}:
        moved.zero_()
        moved[at] = x[rows - 1]
        if not torch.equal(kernel(moved)[at], expected[rows - 1]):
            return False
    return True


def _packable(weight: torch.Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _kernel(weight: torch.Tensor, bias: torch.Tensor | None, packed: bool, tile: int) -> Kernel:
    if not packed:
        return lambda x: F.linear(x, weight, bias)
    # The weight in the order in which the kernel reads it: a third faster than reordering within each call.
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, tile)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, reordered, bias, "none", [], "")
