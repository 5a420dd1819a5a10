"""Compiles the native CPU ops at first use into a cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

log = logging.getLogger("specserve.kernels")

SOURCES = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread", "-fPIC", "-fvisibility=default", "-Wno-psabi")
# gumbel.cpp must give the reference's bits, so products and sums are not fused there.
SOURCE_FLAGS = {"gumbel.cpp": ("-ffp-contract=off",)}
TIMEOUT_SECONDS = 300


class BuildError(Exception):
    """No compiler, or it failed; the message says what it said."""


def default_folder() -> Path:
    """SPECSERVE_HOME, else the user's cache folder."""
    home = os.environ.get("SPECSERVE_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"


def build(folder: Path | None = None) -> Path:
    """Path of the shared library, compiled unless this very one is there. Several processes may build at once.

    Raises:
        BuildError: no compiler, a failed compilation, or a folder that cannot be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or c++) is on the PATH")
    try:
        target = (folder or default_folder()) / "native" / _key(compiler)
        library = target / "libspecserve_cpu.so"
        if not library.exists():
            target.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            _compile(compiler, library)
            log.info("compiled the native CPU kernels in %.1f s into %s", time.perf_counter() - start, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from None
    return library


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects, running = [], []
        for source in sorted(SOURCES.glob("*.cpp")):
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            flags = (*FLAGS, *SOURCE_FLAGS.get(source.name, ()))
            running.append(_start([compiler, *flags, "-c", str(source), "-o", objects[-1]]))
        _finish(running)
        linked = str(Path(scratch) / library.name)
        _finish([_start([compiler, *FLAGS, "-shared", *objects, "-o", linked])])
        Path(linked).replace(library)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(running: list[subprocess.Popen[str]]) -> None:
    """Wait for all; none is left behind, also when one fails."""
    failed = ""
    for process in running:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        if process.returncode != 0:
            failed = failed or f"the compiler failed with status {process.returncode}: {output.strip()[:400]}"
    if failed:
        raise BuildError(failed)


def _key(compiler: str) -> str:
    """Changes with whatever the library is made from: sources, flags, the compiler and the CPU's features."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout
    digest.update(repr((FLAGS, sorted(SOURCE_FLAGS.items()), compiler, version, _cpu())).encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"
