import numpy as np
import pytest
import torch

from specserve.core.plan import NewRequest
from specserve.core.sampling import SamplingParams, choice_seed
from specserve.kernels.cpu.ops import gumbel
from specserve.worker.sampler import NO_TOKEN, RowGroup, sample
from specserve.worker.states import StateTable

VOCAB = 1000
EOS = 7


def state(token_ids=(1, 2, 3), num_prompt=3, seed=11, **params):
    table = StateTable(VOCAB, [EOS])
    table.update([NewRequest("r", tuple(token_ids), num_prompt, SamplingParams(**params), seed)], [])
    return table["r"]


def group(first=0, count=1, *, position=None, prefix=(), chain=(), mask=None, keep=False, **options):
    s = state(**options)
    position = s.num_prompt_tokens if position is None else position
    return RowGroup(s, first, count, position, prefix, chain, mask, keep)


def logits(rows, seed=0, width=VOCAB):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def mask_of(*rows, vocab=VOCAB):
    mask = np.zeros((len(rows), -(-vocab // 32)), dtype=np.uint32)
    for row, ids in zip(mask, rows, strict=True):
        for token in ids:
            row[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


OPTIONS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 0.8, "logit_bias": {5: 3.0, 999: -100}, "banned_token_ids": (1, 2)},
    {"allowed_token_ids": tuple(range(0, 1000, 7)), "min_tokens": 5},
]


class TestRows:
    @pytest.mark.parametrize("neighbours", [1, 3, 70])
    def test_trap_a8_rows_never_depend_on_their_neighbours(self, neighbours):
        x = logits(len(OPTIONS))
        alone = [
            sample(x[i : i + 1].clone(), [group(0, seed=i, keep=True, **o)], VOCAB, probs=True)
            for i, o in enumerate(OPTIONS)
        ]
        others = [group(i, seed=99 + i, **OPTIONS[i % len(OPTIONS)]) for i in range(neighbours)]
        groups = [group(neighbours + i, seed=i, keep=True, **o) for i, o in enumerate(OPTIONS)]
        together = sample(torch.cat([logits(neighbours, 5), x]), others + groups, VOCAB, probs=True)
        for i, one in enumerate(alone):
            assert together.token_ids[neighbours + i] == one.token_ids[0]
            assert np.array_equal(together.processed[neighbours + i], one.processed[0])

    def test_the_models_logits_are_not_changed(self):
        x = logits(len(OPTIONS))
        before = x.clone()
        sample(x, [group(i, **o) for i, o in enumerate(OPTIONS)], VOCAB)
        assert torch.equal(x, before)

    def test_ties_fall_to_the_lowest_id(self):
        x = torch.zeros(1, VOCAB)
        x[0, [30, 40, 50]] = 1.0
        assert sample(x, [group()], VOCAB).token_ids == [30]
        assert sample(x, [group(banned_token_ids=(30,))], VOCAB).token_ids == [40]

    def test_trap_f1_padding_is_never_sampled(self):
        x = logits(4, width=VOCAB + 24)
        x[:, VOCAB:] = 1e6
        for options in OPTIONS:
            tokens = sample(x, [group(i, seed=i, **options) for i in range(4)], VOCAB).token_ids
            assert all(0 <= t < VOCAB for t in tokens)

    def test_noise_is_keyed_by_seed_and_position_alone(self):
        x = logits(1)
        noisy = x / torch.tensor(0.8) + gumbel(torch.tensor([2**63 - 2**64]), torch.tensor([9]), VOCAB)
        g = group(position=9, seed=2**63, temperature=0.8)
        assert sample(x, [g], VOCAB).token_ids == [int(noisy.argmax())]

    def test_choices_of_one_prompt_draw_independently(self):
        """Equal rows at equal positions, of the four seeds that a request with n = 4 gives its choices."""
        vocab, draws = 4, 1500
        x = torch.zeros(4, vocab)
        tokens = []
        for request in range(draws):
            table = StateTable(vocab, [])
            seeds = [choice_seed(request, i) for i in range(4)]
            new = [NewRequest(str(i), (1,), 1, SamplingParams(temperature=1.0), s) for i, s in enumerate(seeds)]
            table.update(new, [])
            tokens.append(sample(x, [RowGroup(table[str(i)], i, 1, 1) for i in range(4)], vocab).token_ids)
        drawn = np.array(tokens)
        for a in range(4):
            for b in range(a):
                counts = np.bincount(drawn[:, a] * vocab + drawn[:, b], minlength=vocab**2)
                expected = draws / vocab**2
                # chi-square of all pairs of tokens, 15 degrees: 44.3 is exceeded once in 10,000 times
                assert ((counts - expected) ** 2 / expected).sum() < 44.3

    def test_draws_follow_the_distribution(self):
        n = 4000
        x = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).repeat(n, 1)
        s = state_of_small_vocabulary(temperature=1.0)
        tokens = sample(x, [RowGroup(s, 0, n, 1, chain=(0,) * n)], 4).token_ids
        counts = np.bincount(tokens, minlength=4)
        expected = np.array([0.5, 0.3, 0.15, 0.05]) * n
        assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees, p = 0.001


def state_of_small_vocabulary(**params):
    table = StateTable(4, [])
    table.update([NewRequest("r", (1,), 1, SamplingParams(**params), 3)], [])
    return table["r"]


class TestOptions:
    def test_trap_a12_bias_and_min_p_hold_at_every_row(self):
        x = logits(5)
        x[:, 77] = 50.0
        g = group(0, 5, chain=(77,) * 4, logit_bias={77: -100})
        assert 77 not in sample(x, [g], VOCAB).token_ids
        x[:, 500] = 49.0
        x[:, 501] = 48.9
        options = {"temperature": 1.0, "min_p": 0.5, "logit_bias": {77: -100}}
        for seed in range(20):
            tokens = sample(x, [group(0, 5, chain=(77,) * 4, seed=seed, **options)], VOCAB).token_ids
            assert set(tokens) <= {500, 501}

    def test_penalties_count_the_draft_tokens_before_a_row(self):
        x = torch.zeros(4, VOCAB)
        x[:, 20], x[:, 21] = 3.0, 2.5
        g = group(0, 4, chain=(20, 20, 5), token_ids=(1, 2, 3, 20), num_prompt=3, position=4, frequency_penalty=0.4)
        # 20 was there once, then twice, then three times: 2.6, 2.2, 1.8 against 2.5
        assert sample(x, [g], VOCAB).token_ids == [20, 21, 21, 21]
        assert g.state.counts[20] == 1, "drafts are not history yet"

    def test_prefix_tokens_are_history(self):
        x = torch.zeros(1, VOCAB)
        x[:, 20], x[:, 21] = 3.0, 2.5
        assert sample(x, [group(prefix=(20,), presence_penalty=1.0)], VOCAB).token_ids == [21]
        assert sample(x, [group(presence_penalty=1.0)], VOCAB).token_ids == [20]

    def test_repetition_penalty_reads_the_prompt(self):
        x = torch.full((1, VOCAB), -5.0)
        x[:, 2], x[:, 9] = 3.0, 2.0
        assert sample(x, [group(repetition_penalty=2.0)], VOCAB).token_ids == [9]
        x[:, 2], x[:, 9] = -1.0, -1.5
        assert sample(x, [group(repetition_penalty=2.0)], VOCAB).token_ids == [9]
        assert sample(x, [group(frequency_penalty=2.0)], VOCAB).token_ids == [2], "of the output only"

    def test_trap_a11_min_tokens_counts_tokens_not_steps(self):
        x = torch.zeros(6, VOCAB)
        x[:, EOS], x[:, 9] = 5.0, 4.0
        g = group(0, 6, position=3 + 5, token_ids=range(10, 18), chain=(9,) * 5, min_tokens=8)
        # outputs 5, 6, 7 are below the minimum of 8; the next may end
        assert sample(x, [g], VOCAB).token_ids == [9, 9, 9, EOS, EOS, EOS]

    def test_min_tokens_knows_stop_ids_and_ignore_eos(self):
        x = torch.zeros(1, VOCAB)
        x[:, EOS], x[:, 30], x[:, 9] = 5.0, 6.0, 4.0
        assert sample(x, [group(min_tokens=1, stop_token_ids=(30,))], VOCAB).token_ids == [9]
        assert sample(x, [group(min_tokens=1, stop_token_ids=(30,), ignore_eos=True)], VOCAB).token_ids == [EOS]

    def test_trap_b14_where_only_an_end_token_is_legal_the_grammar_wins(self):
        mask = mask_of([EOS], [EOS, 12])
        g = group(0, 2, chain=(12,), mask=mask, min_tokens=64)
        assert sample(logits(2), [g], VOCAB).token_ids == [EOS, 12]

    def test_trap_c35_the_mask_comes_before_truncation(self):
        x = logits(1)
        order = torch.argsort(x[0], descending=True)
        legal = order[-3:].tolist()  # top_p, top_k and min_p of the unmasked row would drop all of them
        for seed in range(10):
            g = group(0, mask=mask_of(legal), temperature=1.0, top_p=0.1, top_k=2, min_p=0.3, seed=seed)
            assert sample(x, [g], VOCAB).token_ids[0] in legal

    def test_trap_b2_each_row_has_its_own_mask(self):
        masks = mask_of([1], [2, 3], [4])
        for options in ({}, {"temperature": 1.5}):
            g = group(0, 3, chain=(1, 2), mask=masks, **options)
            first, second, third = sample(logits(3), [g], VOCAB).token_ids
            assert (first, third) == (1, 4)
            assert second in (2, 3)

    def test_a_mask_narrower_than_the_vocabulary_forbids_the_rest(self):
        x = logits(1)
        x[0, 900] = 99.0
        narrow = np.full((1, 4), -1, dtype=np.int32)
        assert sample(x, [group(mask=narrow)], VOCAB).token_ids[0] < 128

    def test_no_legal_token_is_told_and_other_rows_go_on(self):
        x = logits(3)
        x[2] = float("nan")
        groups = [group(0, mask=mask_of([4]), allowed_token_ids=(5,)), group(1, temperature=1.0), group(2)]
        tokens = sample(x, groups, VOCAB).token_ids
        assert tokens[0] == NO_TOKEN
        assert tokens[2] == NO_TOKEN
        assert tokens[1] == sample(x[1:2], [group(0, temperature=1.0)], VOCAB).token_ids[0]

    def test_greedy_ignores_truncation(self):
        x = logits(1)
        assert sample(x, [group(top_k=1, top_p=0.1, min_p=1.0)], VOCAB).token_ids == [int(x.argmax())]

    def test_probabilities_are_of_the_distribution_drawn_from(self):
        x = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
        s = state_of_small_vocabulary(temperature=1.0, top_k=2)
        result = sample(x, [RowGroup(s, 0, 1, 1)], 4, probs=True)
        assert result.probs[0] == pytest.approx([0.5 / 0.8, 0.3 / 0.8][result.token_ids[0]], rel=1e-5)
        assert sample(x, [RowGroup(state_of_small_vocabulary(), 0, 1, 1)], 4, probs=True).probs == [1.0]


def test_states_are_replaced_and_removed():
    table = StateTable(VOCAB, [EOS])
    new = NewRequest("a", (1, 2, 3), 2, SamplingParams(presence_penalty=1.0), 5)
    table.update([new], [])
    table["a"].append((9, 9))
    assert table["a"].counts[[3, 9]].tolist() == [1, 2]
    table.update([new], ["a"])
    assert table["a"].counts[[3, 9]].tolist() == [1, 0]
    table.update([], ["a", "unknown"])
    assert len(table) == 0


def test_ids_outside_the_vocabulary_are_ignored():
    options = {"logit_bias": {5000: 1.0}, "banned_token_ids": (5000,), "stop_token_ids": (5000,), "min_tokens": 2}
    x = logits(1)
    x[:, EOS] = 99.0
    assert sample(x, [group(**options)], VOCAB).token_ids[0] not in (EOS, NO_TOKEN)
