"""Products of quantised weights where there are AMX tiles: exact sums, few rows by vectors, many by tiles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specserve.kernels.cpu import native
from specserve.kernels.cpu.packing import Kind, PackedWeights, pack_rows, packed_bytes, quantise_rows, row_bytes

KINDS = (Kind.Q8, Kind.Q4_0, Kind.Q4_1)
ROWS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 40)  # by vectors up to 8


@pytest.fixture(autouse=True)
def tiles(native_variants: str | None) -> None:
    if native_variants != "amx":
        pytest.skip("products of limbs are those of AMX")


def packed(kind: Kind, k: int, rows: torch.Tensor) -> PackedWeights:
    n = rows.shape[0]
    data = np.empty(packed_bytes(kind, n, k), np.uint8)
    pack_rows(kind, k, rows, data)
    return PackedWeights(kind, n, k, data)


def random_weights(kind: Kind, n: int, k: int) -> PackedWeights:
    """Of blocks whose sizes differ by much within a row."""
    random = torch.Generator().manual_seed(n + k)
    x = torch.randn(n, k // 32, 32, generator=random) * torch.exp(torch.randn(n, k // 32, 1, generator=random) * 0.5)
    if kind is Kind.Q4_0:
        blocks = x.abs().amax(-1, keepdim=True) / 7
        q = (x / blocks).round().clamp(-8, 7).to(torch.int64) + 8
        nibbles = (q[..., :16] | q[..., 16:] << 4).to(torch.uint8)
        return packed(kind, k, torch.cat((blocks.half().view(torch.uint8), nibbles), -1).view(n, row_bytes(kind, k)))
    return packed(kind, k, quantise_rows(kind, x.view(n, k)))


def multiply(w: PackedWeights, x: torch.Tensor) -> torch.Tensor:
    """float32 [rows, n] of x bfloat16 [rows, k]."""
    library = native.library()
    assert library is not None
    out = torch.empty(len(x), w.n)
    library.ss_gemm_packed(w.kind, w.n, w.k, w.data.ctypes.data, x.contiguous().data_ptr(), out.data_ptr(), len(x), 2)
    return out


def inputs(rows: int, k: int) -> torch.Tensor:
    """With some entries a hundred times as large as the rest, as models have them."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(k))
    x[:, 3::97] *= 100
    return x.bfloat16()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(33, 96), (96, 576), (64, 1536)])
def test_products_are_near_those_of_the_weights(kind: Kind, n: int, k: int) -> None:
    """What is lost is the rounding of scales to units and of inputs to 16 bits, both relative to a row's greatest."""
    w, x = random_weights(kind, n, k), inputs(max(ROWS), k)
    exact = x.double() @ w.dequantise().double().T
    size = x.double().norm(dim=1, keepdim=True) * w.dequantise().double().norm(dim=1)
    error = (multiply(w, x) - exact).abs() / size
    assert float(error.max()) < (3e-3 if kind is Kind.Q8 else 5e-4)
    assert float(error.mean()) < (4e-4 if kind is Kind.Q8 else 6e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(33, 32), (97, 352), (64, 1536)])
def test_few_rows_and_many_give_the_same_bits(kind: Kind, n: int, k: int) -> None:
    w, x = random_weights(kind, n, k), inputs(max(ROWS), k)
    whole = multiply(w, x)
    for rows in ROWS:
        assert torch.equal(multiply(w, x[:rows]), whole[:rows]), rows
        assert torch.equal(multiply(w, x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_greatest_sums_do_not_overflow(kind: Kind, sign: int) -> None:
    """As many inputs as are taken, each the greatest number that its bytes hold, by weights that are the same."""
    k, n = 32768, 32
    blocks = torch.full((n, k // 32, 1), 1.9).half().view(torch.uint8)
    if kind is Kind.Q8:
        body = torch.full((n, k // 32, 32), 127 if sign > 0 else -128, dtype=torch.int8).view(torch.uint8)
    else:
        body = torch.full((n, k // 32, 16), 0 if sign < 0 and kind is Kind.Q4_0 else 255, dtype=torch.uint8)
    least = torch.full((n, k // 32, 1), 1.9 * sign).half().view(torch.uint8)
    parts = (blocks, least, body) if kind is Kind.Q4_1 else (blocks, body)
    w = packed(kind, k, torch.cat(parts, -1).view(n, row_bytes(kind, k)))
    x = torch.full((9, k), 1.984375).bfloat16()  # 254 / 128
    exact = x.double() @ w.dequantise().double().T
    for rows in (1, 9):
        found = multiply(w, x[:rows]).double()
        assert float(((found - exact[:rows]) / exact[:rows]).abs().max()) < 5e-3
        assert torch.allclose(found, -multiply(w, -x[:rows]).double(), rtol=1e-6)


def test_more_inputs_are_not_taken() -> None:
    for kind in KINDS:
        assert packed_bytes(kind, 32, 32768) > 0
        assert packed_bytes(kind, 32, 32768 + 32) == 0
    assert packed_bytes(Kind.BF16, 32, 32768 + 32) > 0


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_input_that_is_not_finite_spoils_its_row_alone(rows: int, value: float) -> None:
    w, x = random_weights(Kind.Q4_1, 40, 96), inputs(rows, 96)
    before = multiply(w, x)
    x[rows // 2, 70] = value
    found = multiply(w, x)
    assert bool(found[rows // 2].isnan().all())
    rest = [r for r in range(rows) if r != rows // 2]
    assert torch.equal(found[rest], before[rest])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_not_finite_spoils_its_output_alone(kind: Kind) -> None:
    rows = torch.zeros(40, row_bytes(kind, 96), dtype=torch.uint8)
    rows[:, 8] = 1
    good = multiply(packed(kind, 96, rows), inputs(9, 96))
    rows[5, 0], rows[5, 1] = 0, 0x7C  # infinity
    for count in (1, 9):
        found = multiply(packed(kind, 96, rows), inputs(9, 96)[:count])
        assert bool(found[:, 5].isnan().all())
        assert torch.equal(found[:, 6:], good[:count, 6:])
        assert torch.equal(found[:, :5], good[:count, :5])


@pytest.mark.parametrize("change", [lambda x: x * 0, lambda x: x * 1e-30, lambda x: x * 1e30])
def test_inputs_of_any_size(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    w = random_weights(Kind.Q8, 32, 64)
    x = change(inputs(9, 64).float()).bfloat16()
    exact = x.double() @ w.dequantise().double().T
    for rows in (1, 9):
        found = multiply(w, x[:rows]).double()
        assert float((found - exact[:rows]).abs().max()) <= 3e-3 * float(exact.abs().max())
