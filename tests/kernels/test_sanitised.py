"""The sanitised build: it is another library, and it does stop at the first wrong access."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.kernels.cpu import build as builder
from specserve.kernels.cpu import isa

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
WRONG = {
    "address": "int* some = new int[by]; return some[by];",
    "signed-integer-overflow": "int big = 2147483647; return big + (int)by;",
    "nothing": "return (int)by;",
}


def sanitisers() -> str:
    """The compiler's, as LD_PRELOAD takes them; empty where it has none."""
    paths = []
    for name in LIBRARIES:
        try:
            command = [builder._compiler(), f"-print-file-name={name}"]
            paths.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        except (OSError, subprocess.SubprocessError, builder.BuildError):
            return ""
    return " ".join(paths) if all(Path(path).is_absolute() for path in paths) else ""


@pytest.fixture
def variant(monkeypatch) -> isa.Variant:
    if not isa.runnable() or not sanitisers():
        pytest.skip("no compiler with sanitisers, or no native kernels, on this machine")
    monkeypatch.setenv("SPECSERVE_SANITISE", "1")
    return isa.runnable()[0]


def test_it_is_a_library_of_its_own(variant, monkeypatch):
    sanitised = builder.key(variant)
    monkeypatch.setenv("SPECSERVE_SANITISE", "0")
    assert builder.key(variant) != sanitised


@pytest.mark.parametrize("what", WRONG)
def test_it_stops_at_what_is_wrong(variant, monkeypatch, tmp_path, what):
    (tmp_path / "wrong.cpp").write_text(f'extern "C" int ss_wrong(long by) {{ {WRONG[what]} }}\n')
    monkeypatch.setattr(builder, "SOURCES", tmp_path)
    library = builder.compile_into(variant, tmp_path)
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).ss_wrong(ctypes.c_long(1)))"
    environment = {**os.environ, "LD_PRELOAD": sanitisers(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if what == "nothing":
        assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
    else:
        assert done.returncode != 0
        assert ("AddressSanitizer" if what == "address" else what.replace("-", " ")) in done.stderr
