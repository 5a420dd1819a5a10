"""The native sampler gives what the torch path gives, bit for bit, and decides nearly every row."""

import numpy as np
import pytest
import torch

from specserve.core.plan import NewRequest
from specserve.core.sampling import SamplingParams
from specserve.kernels.cpu import native
from specserve.kernels.cpu.sample import UNDECIDED
from specserve.worker import sampler
from specserve.worker.sampler import NO_TOKEN, RowGroup, sample
from specserve.worker.states import StateTable

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler on this machine")


def random_logits(random, vocab):
    """Rows of all kinds: nearly flat, peaked, with many ties."""
    x = random.standard_normal(vocab) * random.choice([0.05, 1, 3, 8])
    if random.random() < 0.3:
        x = np.round(x)
    if random.random() < 0.2:
        x[random.integers(0, vocab, 5)] += 20
    return x.astype(np.float32)


def random_options(random, vocab):
    options = {"temperature": float(random.choice([0.0001, 0.3, 0.8, 1.0, 1.7, 10]))}
    if random.random() < 0.1:
        options["temperature"] = 0.0
    if random.random() < 0.4:
        options["top_k"] = int(random.choice([1, 2, 5, 50, 1000, max(vocab - 1, 1), vocab, vocab + 5]))
    if random.random() < 0.6:
        options["top_p"] = float(random.choice([0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999]))
    if random.random() < 0.3:
        options["min_p"] = float(random.choice([0.01, 0.05, 0.3, 1.0]))
    if random.random() < 0.2:
        options["logit_bias"] = {int(i): float(random.integers(-100, 100)) for i in random.integers(0, vocab, 3)}
    if random.random() < 0.2:
        options["banned_token_ids"] = tuple(int(i) for i in random.integers(0, vocab, 3))
    if random.random() < 0.1:
        options["allowed_token_ids"] = tuple(int(i) for i in random.integers(0, vocab, 30))
    return options


def random_mask(random, count, vocab):
    words = -(-vocab // 32)
    mask = random.integers(-(2**31), 2**31, (count, words)).astype(np.int32)
    if random.random() < 0.3:
        mask[:, : words // 2] = 0
    return np.ascontiguousarray(mask[:, : max(1, words - int(random.integers(0, 2)))])


def random_groups(random, vocab, rows):
    """Groups that cover the rows, and states of their own."""
    groups, first = [], 0
    while first < rows:
        count = min(int(random.integers(1, 4)), rows - first)
        params = SamplingParams(**random_options(random, vocab))
        table = StateTable(vocab, [7])
        table.update([NewRequest("r", (1, 2, 3), 3, params, int(random.integers(0, 2**63)) * 2 + 1)], [])
        mask = random_mask(random, count, vocab) if random.random() < 0.3 else None
        position = int(random.integers(3, 2**35))
        keep = bool(random.random() < 0.5)
        groups.append(RowGroup(table["r"], first, count, position, (), (1,) * (count - 1), mask, keep))
        first += count
    return groups


def in_torch(monkeypatch, *arguments, **options):
    """The same without the native sampler."""
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample_rows", lambda *_: None)
        patch.setattr(sampler, "best_rows", lambda *_: None)
        return sample(*arguments, **options)


@pytest.mark.parametrize(("vocab", "rows", "rounds"), [(1, 8, 2), (37, 40, 8), (1000, 40, 8), (3000, 40, 4)])
def test_tokens_and_processed_logits_are_those_of_torch(monkeypatch, vocab, rows, rounds):
    random = np.random.default_rng(vocab)
    left = []
    decide = sampler._draw

    def counted(logits, groups, *rest):
        left.append((len(decide(logits, groups, *rest)), len(groups)))
        return decide(logits, groups, *rest)

    for _ in range(rounds):
        width = vocab + int(random.integers(0, 3)) * 8
        x = torch.from_numpy(np.stack([random_logits(random, width) for _ in range(rows)]))
        groups = random_groups(random, vocab, rows)
        monkeypatch.setattr(sampler, "_draw", counted)
        found = sample(x, groups, vocab)
        monkeypatch.setattr(sampler, "_draw", decide)
        expected = in_torch(monkeypatch, x, groups, vocab)
        assert found.token_ids == expected.token_ids
        assert found.processed.keys() == expected.processed.keys()
        for row, logits in expected.processed.items():
            assert np.array_equal(found.processed[row], logits)
    undecided, all_groups = np.sum(left, axis=0)
    assert undecided < 0.15 * all_groups  # ties whose sums are exactly top_p of the whole


def test_a_vocabulary_of_a_real_model(monkeypatch):
    vocab, random = 49152, np.random.default_rng(1)
    kinds = [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.95, "top_k": 1000}, {"min_p": 0.05}, {"top_p": 0.999}]
    x = torch.from_numpy((random.standard_normal((len(kinds), vocab)) * 3).astype(np.float32))
    groups = []
    for i, kind in enumerate(kinds):
        table = StateTable(vocab, [7])
        table.update([NewRequest("r", (1,), 1, SamplingParams(temperature=0.7 + i / 10, **kind), 5 + i)], [])
        groups.append(RowGroup(table["r"], i, 1, 100 + i, keep_processed=True))
    found, expected = sample(x, groups, vocab), in_torch(monkeypatch, x, groups, vocab)
    assert found.token_ids == expected.token_ids
    assert all(np.array_equal(found.processed[i], expected.processed[i]) for i in range(len(kinds)))


@pytest.mark.parametrize(
    "temperature", [1e-4, 0.1, 0.7, 0.8, 1 / 3, 1.0, 1.2999999523162842, 2.0, 9.99, 3.999999761581421]
)
def test_quotients_are_those_of_a_division(temperature):
    """The native sampler divides by products; the last one's fraction is all ones."""
    random = np.random.default_rng(4)
    vocab = 4096
    x = (random.standard_normal((4, vocab)) * 10).astype(np.float32)
    x[1] *= np.exp2(random.integers(-140, 100, vocab)).astype(np.float32)
    x[2, ::3], x[2, 1::3] = -np.inf, 0.0
    x[3] = np.exp2(random.integers(-149, 90, vocab)).astype(np.float32) * np.where(random.random(vocab) < 0.5, -1, 1)
    logits = torch.from_numpy(x)
    table = StateTable(vocab, [7])
    table.update([NewRequest("r", (1,), 1, SamplingParams(temperature=temperature), 5)], [])
    groups = [RowGroup(table["r"], i, 1, 9, keep_processed=True) for i in range(4)]
    found = sample(logits, groups, vocab).processed
    divisor = torch.tensor(temperature, dtype=torch.float32)
    for i in range(4):
        assert np.array_equal(found[i].view(np.int32), (logits[i] / divisor).numpy().view(np.int32))


def test_the_set_of_top_p_does_not_depend_on_where_it_is_looked_for(monkeypatch):
    """Flat rows and steep ones: what is kept lies near the largest logit, or far."""
    vocab, random = 20000, np.random.default_rng(5)
    scales = [0.01, 0.3, 1.0, 2.0, 3.0, 5.0, 9.0]
    x = torch.from_numpy(np.stack([random.standard_normal(vocab) * s for s in scales]).astype(np.float32))
    for top_p in (0.05, 0.5, 0.9, 0.99, 0.9999):
        table = StateTable(vocab, [7])
        table.update([NewRequest("r", (1,), 1, SamplingParams(temperature=0.9, top_p=top_p), 5)], [])
        groups = [RowGroup(table["r"], i, 1, 70 + i, keep_processed=True) for i in range(len(scales))]
        found, expected = sample(x, groups, vocab), in_torch(monkeypatch, x, groups, vocab)
        assert found.token_ids == expected.token_ids
        assert all(np.array_equal(found.processed[i], expected.processed[i]) for i in range(len(scales)))


def test_rows_do_not_depend_on_threads_or_neighbours():
    random = np.random.default_rng(3)
    x = torch.from_numpy(np.stack([random_logits(random, 700) for _ in range(24)]))
    groups = random_groups(random, 700, 24)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = sample(x, groups, 700).token_ids
        torch.set_num_threads(1)
        assert sample(x, groups, 700).token_ids == together
        alone = []
        for g in groups:
            rows = x[g.first : g.first + g.count]
            alone += sample(rows, [RowGroup(g.state, 0, g.count, g.position, g.prefix, g.chain, g.mask)], 700).token_ids
        assert alone == together
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_rows_that_are_not_finite(monkeypatch, options):
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    x[0, 5] = float("nan")
    x[1] = float("nan")
    x[2, 7] = float("inf")
    x[3] = float("-inf")
    x[4, 1:] = float("-inf")
    table = StateTable(100, [7])
    table.update([NewRequest("r", (1,), 1, SamplingParams(**{"temperature": 0.8, **options}), 5)], [])
    groups = [RowGroup(table["r"], i, 1, 9) for i in range(6)]
    found = sample(x, groups, 100).token_ids
    assert found == in_torch(monkeypatch, x, groups, 100).token_ids
    assert (found[1], found[2], found[3], found[4]) == (NO_TOKEN, NO_TOKEN, NO_TOKEN, 0)


def test_sums_that_rounding_would_decide_are_left_to_torch(monkeypatch):
    """Of equal logits top_p = 0.5 keeps exactly half."""
    table = StateTable(64, [7])
    table.update([NewRequest("r", (1,), 1, SamplingParams(temperature=1.0, top_p=0.5), 5)], [])
    seen = []
    decide = sampler.sample_rows

    def watched(*arguments):
        seen.append(decide(*arguments))
        return seen[-1]

    monkeypatch.setattr(sampler, "sample_rows", watched)
    groups = [RowGroup(table["r"], 0, 1, 9, keep_processed=True)]
    result = sample(torch.zeros(1, 64), groups, 64)
    assert seen == [[UNDECIDED]]
    assert np.isfinite(result.processed[0]).sum() == 32


def test_probabilities_are_those_of_torch(monkeypatch):
    random = np.random.default_rng(9)
    x = torch.from_numpy(np.stack([random_logits(random, 500) for _ in range(20)]))
    groups = random_groups(random, 500, 20)
    found = sample(x, groups, 500, probs=True)
    expected = in_torch(monkeypatch, x, groups, 500, probs=True)
    assert found.token_ids == expected.token_ids
    assert found.probs == pytest.approx(expected.probs, rel=1e-6)
