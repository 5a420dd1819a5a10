"""Compiles the native CPU kernels, one library for each instruction set.

The package's own build (kernels/cpu/package.py) puts libraries beside the sources; what is not there, or was made from
other sources than those, is compiled at first use into a cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specserve.kernels.cpu.isa import Variant

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

log = logging.getLogger("specserve.kernels")

SOURCES = Path(__file__).resolve().parent
# No library may meet another one's symbols: tests load several into one process, and the inline functions of each are
# compiled for its own instructions. Hence no symbols that are unique in the process, and few that leave the library.
FLAGS = ("-std=c++17", "-O3", "-pthread", "-fPIC", "-fno-semantic-interposition", "-Wno-psabi")
LINUX_FLAGS = ("-fno-gnu-unique",)
# gumbel.cpp must give the reference's bits, so products and sums are not fused there.
SOURCE_FLAGS = {"gumbel.cpp": ("-ffp-contract=off",)}
SANITISE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
EXPORTED = "{ global: ss_*; local: *; };\n"
KEY_MARK = b"specserve-sources:"
TIMEOUT_SECONDS = 600


class BuildError(Exception):
    """No compiler, or it failed; the message says what it said."""


def default_folder() -> Path:
    """SPECSERVE_HOME, else the user's cache folder."""
    home = os.environ.get("SPECSERVE_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"


def sanitised() -> bool:
    """SPECSERVE_SANITISE=1: libraries that stop at the first wrong access or undefined operation."""
    return os.environ.get("SPECSERVE_SANITISE", "0") == "1"


def library_name(variant: Variant) -> str:
    return f"libspecserve_{variant.name}.so"


def built(variant: Variant, folder: Path = SOURCES) -> Path | None:
    """The library that the package's build made, unless it is missing or made from other sources or flags."""
    library = folder / library_name(variant)
    try:
        return library if KEY_MARK + key(variant).encode() in library.read_bytes() else None
    except OSError:
        return None


def build(variant: Variant, folder: Path | None = None) -> Path:
    """Path of the library in the cache, compiled unless this very one is there. Several processes may build at once.

    Raises:
        BuildError: no compiler, one that lacks the instruction set, a failed compilation, or a folder that cannot be
            written.
    """
    try:
        compiler = _compiler()
        made_by = hashlib.sha256(f"{key(variant)} {compiler} {_version(compiler)}".encode()).hexdigest()[:24]
        target = (folder or default_folder()) / "native" / made_by
        library = target / library_name(variant)
        if not library.exists():
            target.mkdir(parents=True, exist_ok=True)
            compile_into(variant, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from None
    return library


def compile_into(variant: Variant, folder: Path) -> Path:
    """Compile one library into a folder, replacing what is there at once when it is done. Raises BuildError."""
    compiler = _compiler()
    start = time.perf_counter()
    library = folder / library_name(variant)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        mark, exports, linked = work / "key.cpp", work / "exports.map", work / library.name
        mark.write_text(f'extern "C" const char ss_key[] = "{KEY_MARK.decode()}{key(variant)}";\n')
        exports.write_text(EXPORTED)
        base = (compiler, *_flags(variant))
        # The largest first: they take the longest.
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
        commands = [
            (*base, *SOURCE_FLAGS.get(s.name, ()), "-c", str(s), "-o", str(work / f"{s.stem}.o"))
            for s in [*sources, mark]
        ]
        with ThreadPoolExecutor(_cores()) as pool:
            list(pool.map(_run, commands))
        script = (f"-Wl,--version-script={exports}",) if _on_linux() else ()
        _run((*base, "-shared", *script, *(str(o) for o in work.glob("*.o")), "-o", str(linked)))
        linked.replace(library)
    log.info("compiled the native CPU kernels for %s in %.1f s", variant.name, time.perf_counter() - start)
    return library


def key(variant: Variant) -> str:
    """Changes with whatever a library is made from, the compiler apart: the sources and the flags."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((_flags(variant), sorted(SOURCE_FLAGS.items()), EXPORTED)).encode())
    return digest.hexdigest()[:24]


def _flags(variant: Variant) -> tuple[str, ...]:
    return (*FLAGS, *(LINUX_FLAGS if _on_linux() else ()), *variant.flags, *(SANITISE if sanitised() else ()))


def _on_linux() -> bool:
    return sys.platform.startswith("linux")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or c++) is on the PATH")
    return compiler


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout


def _run(command: tuple[str, ...]) -> None:
    # A sanitiser that is loaded into this process is not for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from None
    if done.returncode != 0:
        raise BuildError(f"the compiler failed with status {done.returncode}: {done.stdout.strip()[:400]}")
