"""Block copies and swaps: the native op and the reference against one copy a block, plane by plane, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from specserve.kernels import reference
from specserve.kernels.cpu import native, ops

LAYERS, BLOCKS, SLOTS = 3, 12, 7
pytestmark = pytest.mark.usefixtures("native_variants")
SHAPES = [(torch.float32, 4, 2, 8), (torch.bfloat16, 5, 1, 7), (torch.bfloat16, 16, 3, 64)]


@pytest.fixture(params=["reference", "native"])
def path(request):
    if request.param == "reference":
        return reference
    if native.library() is None:
        pytest.skip("no C++ compiler on this machine")
    return ops


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def bits(memory: torch.Tensor) -> torch.Tensor:
    """Any bits are KV, those of NaN among them."""
    return memory.view(torch.uint8)


def memories(dtype, *block, blocks=BLOCKS, slots=SLOTS, layers=LAYERS):
    generator = torch.Generator().manual_seed(5)
    found = []
    for shape in ((2, layers, blocks, *block), (slots, 2, layers, *block)):
        memory = torch.empty(shape, dtype=dtype)
        memory.view(torch.uint8).random_(0, 256, generator=generator)
        found.append(memory)
    return found


def swapped(storage, host, pairs, *, out):
    """Both memories afterwards, piece by piece."""
    storage, host = storage.clone(), host.clone()
    for device, slot in pairs:
        for plane in range(2):
            for layer in range(storage.shape[1]):
                if out:
                    host[slot, plane, layer] = storage[plane, layer, device]
                else:
                    storage[plane, layer, device] = host[slot, plane, layer]
    return storage, host


@pytest.mark.parametrize(("dtype", "size", "heads", "dim"), SHAPES)
@pytest.mark.parametrize("out", [True, False], ids=["out", "in"])
def test_swaps(path, dtype, size, heads, dim, out):
    pairs = [(11, 3), (0, 6), (5, 0)]
    storage, host = memories(dtype, size, heads, dim)
    expected = swapped(storage, host, pairs, out=out)
    (path.swap_out if out else path.swap_in)(storage, host, pairs)
    assert torch.equal(bits(storage), bits(expected[0]))
    assert torch.equal(bits(host), bits(expected[1]))


@pytest.mark.parametrize("count", [1, 3])
def test_many_blocks_on_several_threads(path, threads, count):
    storage, host = memories(torch.bfloat16, 16, 3, 64, blocks=60, slots=50, layers=5)
    numbers = random.Random(1)
    pairs = list(zip(numbers.sample(range(60), 40), numbers.sample(range(50), 40), strict=True))
    elsewhere = [(slot, block) for block, slot in enumerate(reversed(range(40)))]
    assert 40 * 2 * 5 * storage[0, 0, 0].nbytes > 2**21, "enough that threads share it"
    threads(count)
    _, expected_host = swapped(storage, host, pairs, out=True)
    expected_storage, _ = swapped(storage, expected_host, elsewhere, out=False)
    path.swap_out(storage, host, pairs)
    path.swap_in(storage, host, elsewhere)
    assert torch.equal(bits(host), bits(expected_host))
    assert torch.equal(bits(storage), bits(expected_storage))


@pytest.mark.parametrize(("dtype", "size", "heads", "dim"), SHAPES)
def test_copies_run_in_order(path, dtype, size, heads, dim):
    storage, _ = memories(dtype, size, heads, dim)
    before = bits(storage).clone()
    path.copy_blocks(storage, [(0, 2), (2, 3), (5, 2), (4, 4)])
    order = torch.arange(BLOCKS)
    order[2], order[3] = 5, 0
    assert torch.equal(bits(storage), before[:, :, order])


def test_no_pairs(path):
    storage, host = memories(torch.float32, 2, 1, 3, slots=0)
    before = bits(storage).clone()
    path.copy_blocks(storage, [])
    path.swap_out(storage, host, [])
    path.swap_in(storage, host, [])
    assert torch.equal(bits(storage), before)


@pytest.mark.parametrize("pair", [(BLOCKS, 0), (-1, 0), (0, SLOTS), (0, -1)])
def test_blocks_that_are_not_there(path, pair):
    """Before anything is moved: native code would write anywhere."""
    storage, host = memories(torch.float32, 2, 1, 3)
    before = bits(storage).clone(), bits(host).clone()
    for operation in (path.swap_out, path.swap_in):
        with pytest.raises(IndexError, match="below"):
            operation(storage, host, [(1, 1), pair])
    with pytest.raises(IndexError, match="below"):
        path.copy_blocks(storage, [(1, 2), (0, pair[0] or BLOCKS)])
    assert torch.equal(bits(storage), before[0])
    assert torch.equal(bits(host), before[1])


def test_memory_that_is_not_contiguous():
    """Goes to the reference."""
    storage, host = memories(torch.float32, 4, 2, 8)
    expected = swapped(storage, host, [(3, 1)], out=True)[1]
    strided = torch.stack([storage, storage], -1)[..., 0]
    ops.swap_out(strided, host, [(3, 1)])
    assert torch.equal(bits(host), bits(expected))
