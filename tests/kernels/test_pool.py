"""The pool of threads: every piece is computed once, whoever calls and however many threads there are."""

from __future__ import annotations

import threading

import pytest
import torch

from specserve.kernels.cpu.linear import PackedLinear
from specserve.kernels.cpu.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built here")


def layer() -> tuple[PackedLinear, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return PackedLinear(torch.randn(700, 64, generator=random)), torch.randn(40, 64, generator=random)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_number_of_threads_changes_no_bit(threads):
    linear, x = layer()
    threads(1)
    expected = linear(x)
    for count in (2, 3, 9):
        threads(count)
        for _ in range(50):
            assert torch.equal(linear(x), expected)


def test_callers_at_once(threads):
    linear, x = layer()
    threads(2)
    expected = linear(x)
    wrong: list[int] = []

    def call(number: int) -> None:
        torch.set_num_threads(2)
        for rows in [1 + (number * 7 + i) % 40 for i in range(200)]:
            if not torch.equal(linear(x[:rows]), expected[:rows]):
                wrong.append(rows)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
