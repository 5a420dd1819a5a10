"""Which instruction set is chosen, and what an impossible wish gives."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specserve.kernels import reference
from specserve.kernels.cpu import build as builder
from specserve.kernels.cpu import isa, native, ops

ROOT = Path(__file__).resolve().parents[2]
NAMES = [variant.name for variant in isa.runnable()]

needs_native = pytest.mark.skipif(native.library() is None, reason="the native kernels are not to be had here")


@pytest.fixture
def fresh(monkeypatch):
    """native.library() decides anew, and again after the test."""
    native.forget()
    yield monkeypatch
    native.forget()


@pytest.fixture
def cpu(fresh):
    """Set the features that the CPU claims to have; the kernel grants tile registers as told."""

    def claim(features: str, tiles: bool = True) -> list[str]:
        fresh.setattr(isa, "_features", lambda: frozenset(features.split()))
        fresh.setattr(isa, "_tiles_granted", lambda: tiles)
        fresh.setattr(isa, "machine", lambda: "aarch64" if "asimd" in features else "x86_64")
        isa.runnable.cache_clear()
        return [variant.name for variant in isa.runnable()]

    yield claim
    isa.runnable.cache_clear()


def test_features_decide(cpu):
    assert cpu("avx2") == []
    assert cpu(isa._HAS_AVX2) == ["avx2"]
    assert cpu(isa._HAS_AVX512) == ["avx2", "avx512"]
    assert cpu(isa._HAS_AVX512.replace("avx512vl", "")) == ["avx2"]
    assert cpu(isa._HAS_VNNI) == ["avx2", "avx512", "avx512_vnni"]
    assert cpu(isa._HAS_BF16) == ["avx2", "avx512", "avx512_vnni", "avx512_bf16"]
    assert cpu(isa._HAS_AMX) == ["avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
    assert cpu("asimd asimddp") == ["neon"]
    assert cpu("asimd asimddp bf16") == ["neon", "neon_bf16"]


def test_tiles_need_the_kernels_permission(cpu):
    assert cpu(isa._HAS_AMX, tiles=False) == ["avx2", "avx512", "avx512_vnni", "avx512_bf16"]


def test_features_are_read_from_the_kernel():
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("no /proc/cpuinfo")
    assert isa._features() <= set(re.split(r"\s+", info.read_text()))
    assert len(isa._features()) > 5


def test_flags_are_explicit():
    for variant in isa.VARIANTS:
        assert not [flag for flag in variant.flags if "native" in flag]


@needs_native
def test_the_best_one_is_chosen(fresh):
    fresh.delenv("SPECSERVE_ISA", raising=False)
    assert native.isa() in NAMES
    assert native.isa() == NAMES[-1] or builder.built(isa.runnable()[-1]) is None


@needs_native
def test_a_block_can_use_another_one():
    before = native.library()
    with native.use_library(NAMES[0]) as library:
        assert native.isa() == NAMES[0]
        assert native.library() is library
    assert native.library() is before


def test_what_cannot_run_is_an_error_with_what_can(fresh, cpu):
    cpu(isa._HAS_AVX512)
    fresh.setenv("SPECSERVE_ISA", "amx")
    with pytest.raises(native.ISAError, match="this machine cannot run it; it can run: avx2, avx512"):
        native.library()
    fresh.setenv("SPECSERVE_ISA", "mmx")
    with pytest.raises(native.ISAError, match="no such instruction set; this machine can run: avx2, avx512"):
        native.library()


@needs_native
def test_what_is_asked_for_and_cannot_be_compiled_is_an_error(fresh, tmp_path):
    fresh.setenv("SPECSERVE_ISA", NAMES[0])
    fresh.setenv("SPECSERVE_HOME", str(tmp_path))
    fresh.setattr(builder, "FLAGS", ("-no-such-flag",))
    with pytest.raises(native.ISAError, match="no-such-flag"):
        native.library()


def test_a_cpu_without_any_is_one_warning(fresh, cpu, caplog):
    cpu("fpu")
    fresh.delenv("SPECSERVE_ISA", raising=False)
    with caplog.at_level(logging.INFO):
        assert native.library() is None
        assert native.isa() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no native CPU kernels, the slower torch operations are used: " in caplog.text


@needs_native
def test_every_process_can_be_told(tmp_path):
    code = "from specserve.kernels.cpu import native; native.library(); print(native.isa())"
    for name in (NAMES[0], NAMES[-1]):
        environment = {**os.environ, "SPECSERVE_ISA": name}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == name, done.stderr


@needs_native
def test_all_of_them_compute_in_one_process():
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    expected = reference.rms_norm(x, torch.ones(48), 1e-6)
    for name in NAMES * 2:
        with native.use_library(name):
            assert torch.allclose(ops.rms_norm(x, torch.ones(48), 1e-6), expected)


@needs_native
def test_libraries_share_no_symbol():
    """Inline functions that two libraries have in common are compiled for different instructions."""
    for variant in isa.runnable():
        path = builder.built(variant) or builder.build(variant)
        listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
        names = {line.split()[2] for line in listed.stdout.splitlines()}
        assert names >= native.SIGNATURES.keys()
        assert not [name for name in names if not name.startswith("ss_")]
