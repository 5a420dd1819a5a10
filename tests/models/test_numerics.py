"""Linear layers in tiles, and the check that finds kernels whose rows depend on the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specserve.core.errors import ModelLoadError
from specserve.kernels.cpu import linear as native_linear
from specserve.models import numerics
from specserve.models.numerics import TILES, LinearFactory, TiledLinear, is_invariant

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(960, 576), (77, 130), (331, 576), (3072, 64), (1, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(native, dtype, out, width, bias):
    weight, x = torch.randn(out, width).to(dtype), torch.randn(100, width).to(dtype)
    b = torch.randn(out).to(dtype) if bias else None
    linear = LinearFactory("invariant", native).make(weight, b)
    every = linear(x)
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double()).to(dtype)
    torch.testing.assert_close(every, exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-4)
    for rows in (slice(0, 1), slice(99, 100), slice(3, 20), slice(17, 81), slice(0, 32)):
        assert torch.equal(linear(x[rows]), every[rows])
    assert torch.equal(linear(x.flip(0)), every.flip(0))
    assert linear(x[:0]).shape == (0, out)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_computes_the_same_product(native, dtype):
    weight, x = torch.randn(64, 48).to(dtype), torch.randn(40, 48).to(dtype)
    linear = LinearFactory("fast", native).make(weight)
    torch.testing.assert_close(linear(x), F.linear(x, weight), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(960, 576), (77, 130), (3072, 64), (1, 8)])
def test_native_passes_the_check(dtype, out, width):
    """Else the library's GEMM would quietly take its place."""
    if not native_linear.available(dtype):
        pytest.skip("no C++ compiler on this machine")
    assert is_invariant(native_linear.PackedLinear(torch.randn(out, width).to(dtype)), width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_output_in_float32(dtype):
    if not native_linear.available(dtype):
        pytest.skip("no C++ compiler on this machine")
    weight, x = torch.randn(70, 96).to(dtype), torch.randn(40, 96).to(dtype)
    out = native_linear.PackedLinear(weight, out_dtype=torch.float32)(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, F.linear(x.float(), weight.float()), rtol=1e-4, atol=1e-4)


def test_the_check_finds_another_order_of_sums():
    weight = torch.randn(20, 64)

    def by_position(x: torch.Tensor) -> torch.Tensor:
        last = (x[-1:, :32] @ weight[:, :32].T) + (x[-1:, 32:] @ weight[:, 32:].T)
        return torch.cat((F.linear(x[:-1], weight), last))

    def by_neighbours(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + x.sum() * 1e-7

    def by_call(x: torch.Tensor) -> torch.Tensor:
        by_call.count += 1
        return F.linear(x, weight) * (1 + 1e-6 * (by_call.count % 2))

    by_call.count = 0
    for linear in (by_position, by_neighbours, by_call):
        assert not is_invariant(linear, 64, torch.float32)
    assert is_invariant(lambda x: torch.stack([(row * weight).sum(-1) for row in x]), 64, torch.float32)


def test_a_shape_that_fails_is_computed_row_by_row(monkeypatch):
    monkeypatch.setattr(numerics, "is_invariant", lambda linear, *_: getattr(linear, "tile", 0) == 1)
    linear = LinearFactory("invariant").make(torch.randn(8, 16))
    assert isinstance(linear, TiledLinear)
    assert linear.tile == 1
    assert linear(torch.randn(5, 16)).shape == (5, 8)


def test_a_machine_without_any_order_is_refused(monkeypatch):
    monkeypatch.setattr(numerics, "is_invariant", lambda *_: False)
    with pytest.raises(ModelLoadError, match="fast"):
        LinearFactory("invariant").make(torch.randn(8, 16))


def test_the_check_runs_once_a_shape(monkeypatch):
    seen = []
    monkeypatch.setattr(numerics, "is_invariant", lambda linear, width, dtype: seen.append(width) or True)
    factory = LinearFactory("invariant", native=False)
    for _ in range(3):
        assert factory.make(torch.randn(8, 16)).tile == TILES[torch.float32]
    factory.make(torch.randn(8, 24))
    assert seen == [16, 24]
