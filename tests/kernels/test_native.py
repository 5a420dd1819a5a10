"""Building, caching and doing without the native library."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specserve.kernels.cpu import build as builder
from specserve.kernels.cpu import native, ops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fresh(monkeypatch):
    """native.library() decides anew, and again after the test."""
    native.library.cache_clear()
    yield monkeypatch
    native.library.cache_clear()


def still_works() -> None:
    assert native.library() is None
    x = torch.randn(3, 8)
    assert ops.rms_norm(x, torch.ones(8), 1e-6).shape == (3, 8)


def test_switched_off(fresh, caplog):
    fresh.setenv("SPECSERVE_NATIVE", "0")
    with caplog.at_level(logging.INFO):
        still_works()
        native.library()
    assert len(caplog.records) == 1


def test_no_compiler_is_one_warning(fresh, caplog, tmp_path):
    fresh.setenv("PATH", str(tmp_path))
    fresh.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO):
        still_works()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text


def test_failed_build_is_one_warning(fresh, caplog, tmp_path):
    fresh.setenv("SPECSERVE_HOME", str(tmp_path))
    fresh.setattr(builder, "FLAGS", ("-no-such-flag",))
    with caplog.at_level(logging.INFO):
        still_works()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert not list(tmp_path.glob("native/*/*"))


def test_folder_that_cannot_be_made(fresh, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(builder.BuildError):
        builder.build(file)


def test_damaged_library_is_no_crash(fresh, monkeypatch, tmp_path):
    damaged = tmp_path / "libspecserve_cpu.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(native, "build", lambda folder: damaged)
    with pytest.raises(builder.BuildError, match="cannot load"):
        native.open_library()
    still_works()


def test_two_processes_build_at_once(tmp_path):
    if native.library() is None:
        pytest.skip("no C++ compiler on this machine")
    code = (
        "import sys, pathlib, specserve.kernels.cpu.build as b\n"
        "b.FLAGS = tuple(f for f in b.FLAGS if f != '-O3')\n"
        "print(b.build(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [process.communicate(timeout=200)[0].strip() for process in running]
    assert paths[0] == paths[1]
    assert [p.name for p in Path(paths[0]).parent.iterdir()] == ["libspecserve_cpu.so"]
