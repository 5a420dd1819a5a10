"""Sampling ops: masks, log-softmax, argmax, and noise whose bits are the same on both paths."""

from __future__ import annotations

import math

import pytest
import torch

from specserve.kernels import reference
from specserve.kernels.cpu import native, ops

pytestmark = pytest.mark.usefixtures("native_variants")
torch.set_num_threads(1)


@pytest.fixture(params=["reference", "native"])
def path(request):
    if request.param == "reference":
        return reference
    if native.library() is None:
        pytest.skip("no C++ compiler on this machine")
    return ops


@pytest.mark.parametrize("vocab", [1, 37, 64, 1000])
def test_gumbel_bits_are_equal_on_both_paths(vocab):
    if native.library() is None:
        pytest.skip("no C++ compiler on this machine")
    seeds = torch.tensor([0, 1, -1, -(2**63), 2**63 - 1, 123456789])
    positions = torch.tensor([0, 1, 2, 2**31, 2**40, 77])
    assert torch.equal(ops.gumbel(seeds, positions, vocab), reference.gumbel(seeds, positions, vocab))


def test_gumbel_is_a_function_of_seed_position_and_token(path):
    seeds, positions = torch.tensor([7, 7, 8, 7]), torch.tensor([3, 4, 3, 3])
    noise = path.gumbel(seeds, positions, 300)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(noise[0, :100], path.gumbel(seeds[:1], positions[:1], 100)[0])  # not of the vocabulary's size
    for other in (1, 2):
        assert not torch.any(noise[0] == noise[other])


def test_gumbel_is_philox(path):
    """Known answer of Philox4x32-10: counter 0, key 0 gives 6627e8d5 e169c58d bc57ac4c 9b00dbd8."""
    noise = path.gumbel(torch.tensor([0]), torch.tensor([0]), 64)[0]
    for token, word in zip((0, 16, 32, 48), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), strict=True):
        uniform = 1.0 - (word + 0.5) * 2.0**-32
        assert float(noise[token]) == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6)


def test_gumbel_samples_the_softmax(path):
    """20,000 draws from 5 tokens, chi-square with 4 degrees of freedom: 23.5 is exceeded once in 10,000 times."""
    logits, draws = torch.tensor([0.0, 1.0, -2.0, 0.5, 2.0]), 20000
    noise = path.gumbel(torch.arange(draws) % 7, torch.arange(draws), 5)
    seen = torch.bincount((logits + noise).argmax(-1), minlength=5).double()
    expected = torch.softmax(logits.double(), 0) * draws
    assert float(((seen - expected) ** 2 / expected).sum()) < 23.5


def test_argmax(path):
    logits = torch.randn(7, 1001)
    logits[1, 5] = logits[1, 900] = 50.0
    logits[2] = -math.inf
    logits[3, 4] = math.nan
    logits[4] = -math.inf
    logits[4, 1000] = -5.0
    logits[5] = math.nan
    expected = [int(logits[row].nan_to_num(nan=-math.inf).max(-1).indices) for row in (0, 3, 6)]
    found = path.argmax(logits).tolist()
    assert [found[0], found[3], found[6]] == expected
    assert (found[1], found[2], found[4], found[5]) == (5, 0, 1000, 0)


def test_log_softmax(path):
    logits = torch.randn(5, 777) * 20
    logits[1, 3:] = -math.inf
    logits[2] = -math.inf
    out = path.log_softmax(logits)
    keep = [0, 1, 3, 4]
    torch.testing.assert_close(out[keep], torch.log_softmax(logits[keep].double(), -1).float(), rtol=1e-5, atol=1e-5)
    assert bool((out[2] == -math.inf).all())
    assert torch.equal(path.log_softmax(logits[3:4])[0], out[3])


@pytest.mark.parametrize(("vocab", "words"), [(1001, 32), (1001, 31), (64, 2), (70, 4)])
def test_apply_bitmask(path, vocab, words):
    logits = torch.randn(3, vocab)
    mask = torch.randint(-(2**31), 2**31 - 1, (3, words)).int()
    mask[1] = -1
    mask[2, 0] = 0
    expected = logits.clone()
    for row in range(3):
        for token in range(vocab):
            word = int(mask[row, token // 32]) if token // 32 < words else 0
            if not word >> (token % 32) & 1:
                expected[row, token] = -math.inf
    assert torch.equal(path.apply_bitmask_(logits, mask), expected)
    assert torch.equal(logits, expected)
