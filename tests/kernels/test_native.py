"""Building, caching and doing without the native library."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specserve.kernels.cpu import build as builder
from specserve.kernels.cpu import isa, native, ops, package

ROOT = Path(__file__).resolve().parents[2]
SMALL = 'extern "C" void ss_answer(int* out) { *out = 42; }\n'

needs_native = pytest.mark.skipif(native.library() is None, reason="the native kernels are not to be had here")


@pytest.fixture
def fresh(monkeypatch):
    """native.library() decides anew, and again after the test; the package brought no libraries."""
    monkeypatch.setattr(native, "built", lambda variant: None)
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    native.forget()
    yield monkeypatch
    native.forget()


@pytest.fixture
def small(monkeypatch, tmp_path) -> Path:
    """The sources are one that compiles at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(builder, "SOURCES", folder)
    return folder


def plainest() -> isa.Variant:
    return isa.for_this_machine()[0]


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


def test_folder_that_cannot_be_made(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(builder.BuildError):
        builder.build(plainest(), file)


def test_damaged_library_is_no_crash(fresh, tmp_path):
    damaged = tmp_path / "libspecserve.so"
    damaged.write_bytes(b"not a library")
    fresh.setattr(native, "build", lambda variant, folder: damaged)
    with pytest.raises(builder.BuildError, match="cannot load"):
        native.open_library()
    still_works()


@needs_native
def test_a_compiler_without_the_best_flags_compiles_the_next_best(fresh, small, tmp_path):
    fresh.setenv("SPECSERVE_HOME", str(tmp_path))
    fresh.setattr(native, "SIGNATURES", {})
    lacking = isa.Variant("best", isa.machine(), ("-mno-such-instructions",), frozenset())
    fresh.setattr(native, "runnable", lambda: [plainest(), lacking])
    native.library()
    assert native.isa() == plainest().name


@needs_native
def test_two_processes_build_at_once(small, tmp_path):
    code = (
        "import sys, pathlib, specserve.kernels.cpu.build as b, specserve.kernels.cpu.isa as isa\n"
        "b.SOURCES = pathlib.Path(sys.argv[1])\n"
        "print(b.build(isa.for_this_machine()[0], pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(small), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [process.communicate(timeout=200)[0].strip() for process in running]
    assert paths[0] == paths[1]
    assert [p.name for p in Path(paths[0]).parent.iterdir()] == [builder.library_name(plainest())]


@needs_native
def test_a_library_of_other_sources_or_flags_is_not_used(monkeypatch, small, tmp_path):
    variant = plainest()
    assert builder.built(variant, tmp_path) is None
    library = builder.compile_into(variant, tmp_path)
    assert builder.built(variant, tmp_path) == library
    (small / "small.h").write_text("// new\n")
    assert builder.built(variant, tmp_path) is None
    (small / "small.h").unlink()
    assert builder.built(variant, tmp_path) == library
    monkeypatch.setattr(builder, "SOURCE_FLAGS", {"small.cpp": ("-O2",)})
    assert builder.built(variant, tmp_path) is None


@needs_native
def test_the_cache_is_keyed_by_the_sources(small, tmp_path):
    first = builder.build(plainest(), tmp_path)
    assert builder.build(plainest(), tmp_path) == first
    (small / "small.cpp").write_text(SMALL.replace("42", "43"))
    assert builder.build(plainest(), tmp_path) != first


@needs_native
def test_the_package_build_leaves_out_what_cannot_be_compiled(monkeypatch, small, tmp_path, caplog):
    stale = tmp_path / "libspecserve_old.so"
    stale.write_bytes(b"")
    lacking = isa.Variant("best", isa.machine(), ("-mno-such-instructions",), frozenset())
    monkeypatch.setattr(isa, "VARIANTS", (plainest(), lacking))
    monkeypatch.setattr(package, "_module", {"isa": isa, "build": builder}.get)
    assert package.compile_libraries(tmp_path, best_only=False) == [plainest().name]
    assert "best are left out" in caplog.text
    assert builder.built(plainest(), tmp_path)
    assert not stale.exists()


@needs_native
def test_an_editable_install_gets_the_best_one_and_keeps_it(monkeypatch, small, tmp_path):
    best = isa.Variant("best", isa.machine(), (), frozenset())
    monkeypatch.setattr(isa, "runnable", lambda: [plainest(), best])
    monkeypatch.setattr(package, "_module", {"isa": isa, "build": builder}.get)
    assert package.compile_libraries(tmp_path, best_only=True) == ["best"]
    made = [path.stat().st_mtime_ns for path in tmp_path.glob("*.so")]
    assert package.compile_libraries(tmp_path, best_only=True) == ["best"]
    assert [path.stat().st_mtime_ns for path in tmp_path.glob("*.so")] == made
    (small / "small.cpp").write_text(SMALL.replace("42", "43"))
    package.compile_libraries(tmp_path, best_only=True)
    assert builder.built(best, tmp_path)


def test_the_package_build_without_a_compiler_is_no_error(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(package, "_module", {"isa": isa, "build": builder}.get)
    assert package.compile_libraries(tmp_path, best_only=False) == []
    assert "no native kernels were compiled" in caplog.text
