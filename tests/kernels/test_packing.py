"""Packed weights stand for exactly the rows that they were made of, and quantised rows are near theirs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

from specserve.kernels.cpu.native import library
from specserve.kernels.cpu.packing import (
    Kind,
    PackedWeights,
    dequantise_rows,
    pack_rows,
    packed_bytes,
    quantise_rows,
    row_bytes,
)

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library")

SHAPES = [(1, 32), (31, 64), (32, 96), (33, 32), (192, 576)]
TYPES = {Kind.Q8: Type.Q8_0, Kind.Q4_0: Type.Q4_0, Kind.Q4_1: Type.Q4_1}


def floats(n: int, k: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(n * 1000 + k)
    # Blocks of very different magnitudes, and one of zeros.
    x = torch.randn(n, k, generator=random) * torch.exp2(torch.randint(-6, 7, (n, 1), generator=random).float())
    x[n // 2, :32] = 0
    return x


def rows_of(kind: Kind, x: torch.Tensor) -> torch.Tensor:
    if kind is Kind.F32:
        return x.view(torch.uint8)
    if kind is Kind.BF16:
        return x.bfloat16().view(torch.uint8)
    return torch.from_numpy(quants.quantize(x.numpy(), TYPES[kind])).contiguous()


def packed(kind: Kind, rows: torch.Tensor, k: int) -> PackedWeights:
    n = rows.shape[0]
    # What was in the memory before does not matter: columns beyond n are zeros, every other byte is written.
    data = np.full(packed_bytes(kind, n, k), 0xAB, np.uint8)
    pack_rows(kind, k, rows, data)
    return PackedWeights(kind, n, k, data)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packed_weights_are_the_rows(kind: Kind, n: int, k: int) -> None:
    x = floats(n, k)
    rows = rows_of(kind, x)
    want = {Kind.F32: x, Kind.BF16: x.bfloat16().float()}.get(kind)
    if want is None:
        want = torch.from_numpy(quants.dequantize(rows.numpy(), TYPES[kind]))
    assert rows.shape == (n, row_bytes(kind, k))
    assert torch.equal(dequantise_rows(kind, rows, k), want)
    assert torch.equal(packed(kind, rows, k).dequantise(), want)


@pytest.mark.parametrize("kind", list(Kind))
def test_panels_are_filled_up_with_zeros(kind: Kind) -> None:
    rows = rows_of(kind, floats(33, 64))
    data = packed(kind, rows, 64).data
    alone = packed(kind, rows[32:].contiguous(), 64).data
    assert np.array_equal(data[data.size // 2 :], alone)
    assert int((alone == 0).sum()) > alone.size // 2


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    x = floats(97, 160)
    try:
        torch.set_num_threads(threads)
        for kind in (Kind.Q8, Kind.Q4_1):
            rows = quantise_rows(kind, x)
            assert torch.equal(rows[5:6], quantise_rows(kind, x[5:6]))
            assert torch.equal(packed(kind, rows, 160).dequantise(), dequantise_rows(kind, rows, 160))
    finally:
        torch.set_num_threads(before)


def test_q8_is_gguf_s_up_to_ties() -> None:
    x = floats(64, 256)
    ours, theirs = quantise_rows(Kind.Q8, x), rows_of(Kind.Q8, x)
    scale, other = (r.view(64, 8, 34)[..., :2].contiguous().view(torch.float16) for r in (ours, theirs))
    assert torch.equal(scale, other)
    # GGUF divides by the scale before it is rounded to float16, here the values are placed on the grid that is kept.
    off = ours.view(64, 8, 34)[..., 2:].to(torch.int8).short() - theirs.view(64, 8, 34)[..., 2:].to(torch.int8).short()
    assert int(off.abs().max()) <= 1
    error = (dequantise_rows(Kind.Q8, ours, 256) - x).abs().view(64, 8, 32)
    assert bool((error <= scale.float() * 0.505).all())


def test_q4_1_is_not_worse_than_gguf_s() -> None:
    x = floats(64, 256)
    error, other = ((dequantise_rows(Kind.Q4_1, rows, 256) - x).double().square().view(64, 8, 32).sum(-1)
                    for rows in (quantise_rows(Kind.Q4_1, x), rows_of(Kind.Q4_1, x)))  # fmt: skip
    assert float(error.sum()) < float(other.sum())
    assert float((error <= other * 1.01).double().mean()) > 0.95


def test_zeros_and_constants_are_kept() -> None:
    for value in (0.0, 3.0, -0.5):
        x = torch.full((2, 64), value)
        for kind in (Kind.Q8, Kind.Q4_1):
            assert torch.allclose(dequantise_rows(kind, quantise_rows(kind, x), 64), x, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("kind", "n", "k"), [(Kind.Q8, 4, 48), (Kind.BF16, 4, 16), (Kind.Q4_1, 0, 32), (Kind.F32, 4, 0)]
)
def test_shapes_that_are_not_taken(kind: Kind, n: int, k: int) -> None:
    assert packed_bytes(kind, n, k) == 0
    rows = torch.zeros(n, row_bytes(kind, k), dtype=torch.uint8)
    with pytest.raises(ValueError, match="does not fit"):
        pack_rows(kind, k, rows, torch.empty(64, dtype=torch.uint8))


def test_rows_of_another_size_are_refused() -> None:
    out = torch.empty(packed_bytes(Kind.Q8, 2, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="does not fit"):
        pack_rows(Kind.Q8, 64, torch.zeros(2, 34, dtype=torch.uint8), out)
    with pytest.raises(ValueError, match="is not for"):
        quantise_rows(Kind.Q4_0, torch.zeros(2, 64))
    with pytest.raises(ValueError, match="is not for"):
        quantise_rows(Kind.Q8, torch.zeros(2, 48))
