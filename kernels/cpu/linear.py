"""Linear layers over weights packed once for the native GEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve.kernels.cpu.native import library
from specserve.kernels.kv_layout import name_of
from specserve.kernels.lazy import num_threads

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

_NAMES = {"float32": "f32", "bfloat16": "bf16"}
COLUMNS = 32


def available(dtype: torch.dtype) -> bool:
    """Whether PackedLinear can be made for weights of this dtype."""
    return library() is not None and name_of(dtype) in _NAMES


class PackedLinear:
    """y = x W^T + b; a row's bits depend on the row and the weight alone.

    Args:
        weight: [out, in], float32 or bfloat16; a packed copy is kept.
        bias: [out] or None.
        out_dtype: float32, or weight's dtype (the default).
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        lib = library()
        assert lib is not None, "ask available() first"
        self.out_features, self.in_features = weight.shape
        self._out_dtype = out_dtype or weight.dtype
        self._bias = bias
        name = _NAMES[name_of(weight.dtype)]
        blocks = -(-self.out_features // COLUMNS)
        self._packed = torch.empty(blocks * COLUMNS * self.in_features, dtype=weight.dtype)
        getattr(lib, f"ss_pack_{name}")(
            weight.contiguous().data_ptr(), self._packed.data_ptr(), self.out_features, self.in_features
        )
        self._run = getattr(lib, f"ss_gemm_{name}_{_NAMES[name_of(self._out_dtype)]}")
        self._packed_at = self._packed.data_ptr()
        self._bias_at = None if bias is None else bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] of weight's dtype -> [n, out]."""
        x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=self._out_dtype)
        self._run(
            x.data_ptr(),
            self._packed_at,
            self._bias_at,
            out.data_ptr(),
            rows,
            self.out_features,
            self.in_features,
            num_threads(),
        )
        return out
