"""Products with packed weights, of whole numbers: every sum is exact, so that every output must be, whatever the shape.

A forward without layers is one: hidden states of 1 and -1 keep their norm of 1, and the last norm's weights make them
the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specserve.kernels.cpu import native
from specserve.kernels.cpu.forward import Forward, Shape, Step
from specserve.kernels.cpu.packing import Kind, PackedWeights, pack_rows, packed_bytes, row_bytes

KINDS = (Kind.BF16, Kind.Q8, Kind.Q4_0, Kind.Q4_1)
MAX_ROWS = 97
SHAPES = [(1, 32), (31, 64), (32, 96), (33, 288), (97, 320), (70, 1184)]
ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, MAX_ROWS)


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest, every_variant: str | None) -> Iterator[int]:
    if every_variant is None:
        pytest.skip("there is no native library")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_of(kind: Kind, n: int, k: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a kind as files hold them, and the numbers that they are: whole halves that bfloat16 holds."""
    if kind is Kind.BF16:
        w = torch.randint(-64, 65, (n, k), generator=random) / 2
        return w.bfloat16().view(torch.uint8), w
    blocks = (n, k // 32)
    scale = torch.exp2(torch.randint(-1, 3, (*blocks, 1), generator=random))
    if kind is Kind.Q8:
        q = torch.randint(-127, 128, (*blocks, 32), generator=random)
        data = torch.cat((scale.half().view(torch.uint8), q.to(torch.int8).view(torch.uint8)), dim=-1)
        return data.view(n, row_bytes(kind, k)), (scale * q).view(n, k)
    q = torch.randint(0, 16, (*blocks, 32), generator=random)
    nibbles = (q[..., :16] | q[..., 16:] << 4).to(torch.uint8)
    least = torch.randint(-9, 10, (*blocks, 1), generator=random) / 2 if kind is Kind.Q4_1 else -8 * scale
    numbers = [scale, least] if kind is Kind.Q4_1 else [scale]
    data = torch.cat((*(number.half().view(torch.uint8) for number in numbers), nibbles), dim=-1)
    return data.view(n, row_bytes(kind, k)), (scale * q + least).view(n, k)


@dataclass(frozen=True)
class Product:
    """Weights [n, k], inputs [MAX_ROWS, k] and their product."""

    forward: Forward
    hidden: torch.Tensor
    want: torch.Tensor

    def run(self, rows: int, **fields: int) -> None:
        """Of the last `rows` inputs."""
        hidden, last = self.hidden[MAX_ROWS - rows :].contiguous(), torch.arange(rows)
        zeros = torch.zeros(rows, dtype=torch.int64)
        step = Step(
            rows=rows,
            logit_count=rows,
            token_ids=zeros.data_ptr(),
            positions=zeros.data_ptr(),
            slots=zeros.data_ptr(),
            row_sequence=zeros.data_ptr(),
            logit_rows=last.data_ptr(),
            hidden_in=hidden.data_ptr(),
            threads=torch.get_num_threads(),
            **fields,
        )
        self.forward.run(step)


@functools.cache
def _product(isa: str, kind: Kind, n: int, k: int) -> Product:
    random = torch.Generator().manual_seed(n * k + kind)
    rows, w = rows_of(kind, n, k, random)
    data = np.empty(packed_bytes(kind, n, k), np.uint8)
    pack_rows(kind, k, rows.contiguous(), data)
    # 127 in each half of a block, so that inputs which are rounded to a 127th of the greatest stay what they are.
    norm = torch.randint(0, 128, (k,), generator=random).float()
    norm[5::16] = 127
    hidden = torch.randint(0, 2, (MAX_ROWS, k), generator=random).float() * 2 - 1
    head = PackedWeights(kind, n, k, data)
    table = np.zeros((1, 4 * k), np.uint8)
    forward = Forward(Shape(k, 32, 1, 1, 32, n, 0.0), [], Kind.F32, table, norm.numpy(), head)
    want = ((hidden * norm).double() @ w.double().T).float()
    return Product(forward, hidden, want)


def product(kind: Kind, n: int, k: int) -> Product:
    """On the library in use."""
    return _product(str(native.isa()), kind, n, k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_exact(kind: Kind, n: int, k: int) -> None:
    p = product(kind, n, k)
    for rows in ROWS:
        out = torch.full((rows + 1, n + 3), 1e9)  # what is beside and below stays
        p.run(rows, logits=out.data_ptr(), logits_stride=n + 3)
        assert torch.equal(out[:rows, :n], p.want[MAX_ROWS - rows :])
        assert bool((out[:, n:] == 1e9).all())
        assert bool((out[rows] == 1e9).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_greatest_is_found(kind: Kind, n: int, k: int) -> None:
    p = product(kind, n, k)
    for rows in ROWS:
        for choices in {1, n // 2 + 1, n}:
            best = torch.full((rows + 1,), -7)
            p.run(rows, best=best.data_ptr(), choices=choices)
            want = p.want[MAX_ROWS - rows :, :choices].numpy().argmax(1)  # the first of equals
            assert best.tolist() == [*want.tolist(), -7]


@pytest.mark.parametrize("kind", KINDS)
def test_panels_are_chosen(kind: Kind) -> None:
    p = product(kind, 97, 320)
    whole = torch.nn.functional.pad(p.want, (0, 31))
    for panels in ([3], [1], [2, 0], [3, 3, 1], [0, 1, 2, 3]):
        columns = torch.cat([torch.arange(32) + 32 * panel for panel in panels])
        chosen = torch.tensor(panels)
        for rows in (1, 16, 33):
            out = torch.zeros(rows, 32 * len(panels))
            p.run(rows, logits=out.data_ptr(), logits_stride=len(columns), panels=chosen.data_ptr(),
                  num_panels=len(panels))  # fmt: skip
            assert torch.equal(out, whole[MAX_ROWS - rows :, columns])
