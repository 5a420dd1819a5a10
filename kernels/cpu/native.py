"""The native library for the best instruction set of this machine, or the reason why there is none.

SPECSERVE_ISA=avx2|avx512|avx512_vnni|avx512_bf16|amx|neon|neon_bf16 asks for one of them, SPECSERVE_NATIVE=0 for none.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from specserve.kernels.cpu.build import BuildError, build, built, sanitised
from specserve.kernels.cpu.isa import VARIANTS, Variant, runnable

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

log = logging.getLogger("specserve.kernels")

_P, _I, _F, _N = c_void_p, c_int64, c_float, c_int
# Pointers, then sizes, then numbers, then the number of threads: the C functions' own order.
_NORM = (_P, _P, _P, _P, _I, _I, _F, _N)
_ROPE = (_P,) * 9 + (_I,) * 6 + (_F, _N)
_ATTENTION = (_P,) * 9 + (_I,) * 8 + (_F, _I, _N)
_PACK = (_P, _P, _I, _I)
_GEMM = (_P, _P, _P, _P, _I, _I, _I, _N)
_SILU = (_P, _P, _I, _I, _N)
_PACK_ROWS = (_I,) * 4 + (_P, _P, _N)
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
    "ss_attention_f32_int8": _ATTENTION,
    "ss_attention_bf16_int8": _ATTENTION,
    "ss_silu_mul_f32": _SILU,
    "ss_silu_mul_bf16": _SILU,
    "ss_move_blocks": _MOVE,
    "ss_packed_bytes": (_I,) * 4,
    "ss_pack": _PACK_ROWS,
    "ss_quantise_rows": _PACK_ROWS,
    "ss_unpack": _PACK_ROWS,
    "ss_forward": (_P, _P),
    "ss_forward_scratch": (_P, _I, _I, _I),
    "ss_log_softmax": (_P, _P, _I, _I, _N),
    "ss_argmax": (_P, _P, _I, _I, _N),
    "ss_apply_bitmask": (_P, _P, _I, _I, _I, _N),
    "ss_gumbel": (_P, _P, _P, _I, _I, _N),
    "ss_limit_threads": (_N,),
    "ss_count_claims": (_P, _P, _I, _I, _N),
    "ss_gemm_packed": (_I, _I, _I, _P, _P, _P, _I, _N),
    "ss_bench_gemm": (_I, _I, _I, _P, _I, _P, _P, _I, _I, _N),
    "ss_bench_attention": (_P,) * 7 + (_I,) * 8 + (_N,),
    "ss_peak_read": (_P, _I, _I, _I, _N),
    "ss_peak_operations": (_I, _I, _N),
    "ss_peak_fork_join": (_P, _I, _I, _N),
}
# Of those that give something back.
RESULTS = {
    "ss_forward_scratch": _I,
    "ss_packed_bytes": _I,
    "ss_bench_gemm": c_double,
    "ss_bench_attention": c_double,
    "ss_peak_read": c_double,
    "ss_peak_operations": c_double,
}


class ISAError(ValueError):
    """SPECSERVE_ISA asks for what is not to be had; the message lists what is."""


@dataclass(frozen=True)
class Native:
    """A loaded library and the instruction set that it is compiled for."""

    isa: str
    library: ctypes.CDLL


def open_library(isa: str | None = None, folder: Path | None = None) -> ctypes.CDLL:
    """Load the library for an instruction set (default: the best), compiled first if the package brought none.

    ctypes releases the GIL during its calls. Several of them can be open in one process.

    Args:
        isa: name of a variant that this machine can run.
        folder: where compiled libraries are kept (default: the user's cache folder).

    Raises:
        ISAError: the machine cannot run it.
        BuildError: it cannot be compiled or loaded.
    """
    return _open(isa, folder).library


def library() -> ctypes.CDLL | None:
    """The library in use, or None where SPECSERVE_NATIVE=0 or it cannot be had (said once in the log).

    Raises:
        ISAError: SPECSERVE_ISA asks for an instruction set that cannot be had.
    """
    native = _swapped or _chosen()
    return None if native is None else native.library


def isa() -> str | None:
    """The instruction set of the library in use, or None where there is no library. Raises ISAError as library()."""
    native = _swapped or _chosen()
    return None if native is None else native.isa


def forget() -> None:
    """The next library() reads the environment and decides anew."""
    _chosen.cache_clear()


@contextmanager
def use_library(isa: str) -> Iterator[ctypes.CDLL]:
    """For tests: library() is this one inside the block, in every thread. Raises ISAError, BuildError."""
    global _swapped
    before, _swapped = _swapped, _open_once(isa)
    try:
        yield _swapped.library
    finally:
        _swapped = before


_swapped: Native | None = None


@functools.cache
def _open_once(isa: str) -> Native:
    return _open(isa, None)


@functools.cache
def _chosen() -> Native | None:
    if os.environ.get("SPECSERVE_NATIVE", "1") == "0":
        log.info("native CPU kernels are switched off by SPECSERVE_NATIVE=0; torch operations are used")
        return None
    forced = os.environ.get("SPECSERVE_ISA")
    try:
        native = _open(forced or None, None)
    except BuildError as error:
        if forced:
            raise ISAError(f"SPECSERVE_ISA={forced} cannot be had: {error}") from None
        log.warning("no native CPU kernels, the slower torch operations are used: %s", error)
        return None
    log.info("native CPU kernels for %s", native.isa)
    return native


def _open(isa: str | None, folder: Path | None) -> Native:
    """The named one; or the best that the package brought; or the best that can be compiled."""
    possible = list(reversed(runnable()))
    if isa is not None:
        possible = [variant for variant in possible if variant.name == isa]
        if not possible:
            raise ISAError(_cannot_run(isa))
    if not possible:
        raise BuildError("they need AVX2 with FMA, or Arm's NEON with dot products, which this CPU lacks")
    if not sanitised():
        for variant in possible:
            if folder is None and (path := built(variant)):
                return _load(variant, path)
    errors = []
    for variant in possible:
        try:
            return _load(variant, build(variant, folder))
        except BuildError as error:
            errors.append(str(error))
    raise BuildError(errors[0])


def _cannot_run(isa: str) -> str:
    names = ", ".join(variant.name for variant in runnable()) or "none"
    if isa in (variant.name for variant in VARIANTS):
        return f"SPECSERVE_ISA={isa}: this machine cannot run it; it can run: {names}"
    return f"SPECSERVE_ISA={isa}: there is no such instruction set; this machine can run: {names}"


def _load(variant: Variant, path: Path) -> Native:
    try:
        loaded = ctypes.CDLL(str(path))
        for name, types in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, RESULTS.get(name)
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {path}: {error}") from None
    return Native(variant.name, loaded)
