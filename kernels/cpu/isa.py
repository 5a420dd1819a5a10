"""The instruction sets that the native kernels are compiled for, and which of them this machine has.

Standard library only and no other module of ours: the package's own build loads this file by its path.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512cd", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_AMX = (*_BF16, "-mavx512vbmi", "-mavx512vbmi2", "-mamx-tile", "-mamx-bf16", "-mamx-int8")

_HAS_AVX2 = "avx2 fma f16c bmi1 bmi2 abm popcnt"
_HAS_AVX512 = f"{_HAS_AVX2} avx512f avx512cd avx512bw avx512dq avx512vl"
_HAS_VNNI = f"{_HAS_AVX512} avx512_vnni"
_HAS_BF16 = f"{_HAS_VNNI} avx512_bf16"
_HAS_AMX = f"{_HAS_BF16} avx512vbmi avx512_vbmi2 amx_tile amx_bf16 amx_int8"

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Variant:
    """One instruction set.

    Args:
        name: what SPECSERVE_ISA takes.
        machine: the architecture, as platform.machine() names it on Linux.
        flags: the compiler's, explicit: a library never depends on the machine that it was compiled on.
        needs: features of the CPU, as /proc/cpuinfo names them.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _x86(name: str, flags: tuple[str, ...], tune: str, needs: str) -> Variant:
    return Variant(name, "x86_64", (*flags, f"-mtune={tune}"), frozenset(needs.split()))


# From the plainest to the best of each architecture.
VARIANTS = (
    _x86("avx2", _AVX2, "haswell", _HAS_AVX2),
    _x86("avx512", _AVX512, "skylake-avx512", _HAS_AVX512),
    _x86("avx512_vnni", _VNNI, "icelake-server", _HAS_VNNI),
    _x86("avx512_bf16", _BF16, "icelake-server", _HAS_BF16),
    _x86("amx", _AMX, "sapphirerapids", _HAS_AMX),
    Variant("neon", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
    Variant("neon_bf16", "aarch64", ("-march=armv8.2-a+dotprod+bf16",), frozenset({"asimd", "asimddp", "bf16"})),
)


def machine() -> str:
    """This machine's architecture, by the name that Linux has for it."""
    name = platform.machine().lower()
    return _MACHINES.get(name, name)


def for_this_machine() -> list[Variant]:
    """What can be compiled here, the plainest first."""
    return [variant for variant in VARIANTS if variant.machine == machine()]


@functools.cache
def runnable() -> list[Variant]:
    """What this machine can run, the plainest first; empty where it has none of them."""
    has = _features()
    return [v for v in for_this_machine() if v.needs <= has and ("amx_tile" not in v.needs or _tiles_granted())]


def _features() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    if not info.exists():  # Apple's CPUs have these; elsewhere nothing is assumed
        return frozenset({"asimd", "asimddp"} if machine() == "aarch64" and platform.system() == "Darwin" else ())
    for line in info.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _tiles_granted() -> bool:
    """Whether the kernel lets this process use tile registers; it must be asked once, for all threads to come."""
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False
