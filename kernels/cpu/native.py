"""The native library, loaded once a process, or the reason why there is none."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

from specserve.kernels.cpu.build import BuildError, build

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

log = logging.getLogger("specserve.kernels")

_P, _I, _F, _N = c_void_p, c_int64, c_float, c_int
# Pointers, then sizes, then numbers, then the number of threads: the C functions' own order.
_NORM = (_P, _P, _P, _P, _I, _I, _F, _N)
_ROPE = (_P,) * 9 + (_I,) * 6 + (_F, _N)
_ATTENTION = (_P,) * 7 + (_I,) * 7 + (_F, _I, _N)
_PACK = (_P, _P, _I, _I)
_GEMM = (_P, _P, _P, _P, _I, _I, _I, _N)
_SILU = (_P, _P, _I, _I, _N)
_MOVE = (_P, _P, _P) + (_I,) * 7 + (_N,)
SIGNATURES = {
    "ss_pack_f32": _PACK,
    "ss_pack_bf16": _PACK,
    "ss_gemm_f32_f32": _GEMM,
    "ss_gemm_bf16_bf16": _GEMM,
    "ss_gemm_bf16_f32": _GEMM,
    "ss_norm_f32_f32": _NORM,
    "ss_norm_bf16_bf16": _NORM,
    "ss_norm_f32_bf16": _NORM,
    "ss_rope_store_f32": _ROPE,
    "ss_rope_store_bf16": _ROPE,
    "ss_rope_store_f32_int8": _ROPE,
    "ss_rope_store_bf16_int8": _ROPE,
    "ss_attention_f32": _ATTENTION,
    "ss_attention_bf16": _ATTENTION,
    "ss_silu_mul_f32": _SILU,
    "ss_silu_mul_bf16": _SILU,
    "ss_move_blocks": _MOVE,
    "ss_log_softmax": (_P, _P, _I, _I, _N),
    "ss_argmax": (_P, _P, _I, _I, _N),
    "ss_apply_bitmask": (_P, _P, _I, _I, _I, _N),
    "ss_gumbel": (_P, _P, _P, _I, _I, _N),
}


def open_library(folder: Path | None = None) -> ctypes.CDLL:
    """Build if need be and load. ctypes releases the GIL during its calls. Raises BuildError."""
    path = build(folder)
    try:
        library = ctypes.CDLL(str(path))
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {path}: {error}") from None
    return library


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where SPECSERVE_NATIVE=0 or it cannot be had (said once in the log)."""
    if os.environ.get("SPECSERVE_NATIVE", "1") == "0":
        log.info("native CPU kernels are switched off by SPECSERVE_NATIVE=0; torch operations are used")
        return None
    try:
        return open_library()
    except BuildError as error:
        log.warning("no native CPU kernels, the slower torch operations are used: %s", error)
        return None
