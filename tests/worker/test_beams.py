"""The best continuations of beams against plain torch and against transformers' logits processors."""

import math

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation import SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor

from specserve.core.plan import NewRequest
from specserve.core.sampling import SamplingParams
from specserve.worker.beams import continuations
from specserve.worker.sampler import RowGroup, sample
from specserve.worker.states import StateTable
from tests.worker.test_sampler import EOS, VOCAB, logits, mask_of

OPTIONS = [
    {},
    {"logprobs": 15},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"logit_bias": {5: 3.0, 999: -100}, "banned_token_ids": (1, 2)},
    {"allowed_token_ids": tuple(range(0, 1000, 7)), "min_tokens": 5},
]


def group(first=0, count=1, *, token_ids=(1, 2, 3), num_prompt=3, chain=(), mask=None, width=4, **params):
    table = StateTable(VOCAB, [EOS])
    params = SamplingParams(beam_width=width, **params)
    table.update([NewRequest("r", tuple(token_ids), num_prompt, params, 1)], [])
    return RowGroup(table["r"], first, count, len(token_ids), (), chain, mask)


def best(scores, count):
    """(id, score) of the best finite entries, ties by id."""
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    return [(i, float(scores[i])) for i in order[:count] if math.isfinite(scores[i])]


def check(entry, scores, count):
    expected = best(scores, count)
    assert (entry.token_id, entry.logprob) == (-1, None)
    assert entry.top_ids == tuple(i for i, _ in expected)
    assert entry.top_logprobs == pytest.approx([value for _, value in expected], abs=1e-5)


class TestScores:
    def test_log_probabilities_of_the_row(self):
        x = logits(3, width=VOCAB + 24)
        x[:, VOCAB:] = 1e4  # padding takes no probability
        x[1] *= 30
        for entry, row in zip(continuations(x, [group(0, 3, chain=(4, 5))], VOCAB)[0], x, strict=True):
            check(entry, torch.log_softmax(row[:VOCAB], 0), 4 + 1)

    def test_penalties_act_on_log_probabilities(self):
        x = logits(1)
        repetition, frequency, presence = 1.3, 0.75, 0.25
        g = group(
            token_ids=(10, 11, 11, 12, 12, 12),
            num_prompt=2,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
        )
        x[0, 10:13] = x.max()
        scores = torch.log_softmax(x[0], 0)
        scores[10:13] *= repetition
        scores[11] -= 1 * frequency + presence
        scores[12] -= 3 * frequency + presence
        check(continuations(x, [g], VOCAB)[0][0], scores, 5)

    def test_a_draft_is_history_for_the_rows_after_it(self):
        x = logits(1).repeat(4, 1)
        x[:, 20], x[:, 21] = 19.0, 18.9
        chain = (20, 20, 21)
        g = group(0, 4, chain=chain, frequency_penalty=0.5)
        rows = continuations(x, [g], VOCAB)[0]
        for j, entry in enumerate(rows):
            scores = torch.log_softmax(x[0], 0)
            for token in chain[:j]:
                scores[token] -= 0.5
            check(entry, scores, 5)
        assert g.state.counts[20] == 0, "drafts are not history yet"

    def test_a_grammar_is_not_normalised_again(self):
        x = logits(2)
        legal = [3, 500, 999]
        for entry, ids in zip(
            continuations(x, [group(0, 2, chain=(3,), mask=mask_of(legal, [7, 8]))], VOCAB)[0],
            (legal, [7, 8]),
            strict=True,
        ):
            row = torch.full((VOCAB,), -math.inf)
            row[ids] = torch.log_softmax(x[0 if ids is legal else 1], 0)[ids]
            check(entry, row, 5)
            assert len(entry.top_ids) == len(ids)

    def test_bias_and_bans(self):
        x = logits(1)
        scores = torch.log_softmax(x[0], 0)
        order = torch.argsort(scores, descending=True).tolist()
        scores[order[0]] = scores[order[1]] = -math.inf
        scores[order[40]] += 20.0
        banned = {"banned_token_ids": (order[0],), "logit_bias": {order[40]: 20.0}}
        check(continuations(x, [group(mask=mask_of(set(order) - {order[1]}), **banned)], VOCAB)[0][0], scores, 5)

    def test_the_models_logits_are_not_changed(self):
        x = logits(len(OPTIONS))
        before = x.clone()
        continuations(x, [group(i, **o) for i, o in enumerate(OPTIONS)], VOCAB)
        assert torch.equal(x, before)


class TestTransformers:
    """Beam search in transformers: log_softmax, then these processors on the log probabilities."""

    @pytest.mark.parametrize("penalty", [0.7, 1.0, 1.6])
    @pytest.mark.parametrize("num_output", [0, 2, 5])
    def test_processors(self, penalty, num_output):
        tokens = [5, 9, 9, 30, EOS, 41, 5, 77][: 3 + num_output]
        x = logits(1, seed=num_output)
        x[0, tokens] += 6.0
        x[0, EOS] += 9.0
        bias, banned = {41: 4.5, 77: -3.0}, [100, int(x.topk(2).indices[0, 1])]
        processors = LogitsProcessorList(
            [
                SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
                RepetitionPenaltyLogitsProcessor(penalty),
                MinNewTokensLengthLogitsProcessor(3, 3, [EOS], device="cpu"),
                SuppressTokensLogitsProcessor(banned, device="cpu"),
            ]
        )
        scores = processors(torch.tensor([tokens]), torch.log_softmax(x, -1))[0]
        g = group(
            token_ids=tokens,
            repetition_penalty=penalty,
            logit_bias=bias,
            banned_token_ids=tuple(banned),
            min_tokens=3,
            width=16,
        )
        entry = continuations(x, [g], VOCAB)[0][0]
        check(entry, scores, 17)
        assert (EOS in entry.top_ids) == (num_output >= 3)


class TestTop:
    @pytest.mark.parametrize("params", [{}, {"stop_token_ids": (3, 8)}, {"stop_token_ids": (3, 8), "ignore_eos": True}])
    def test_the_best_that_end_nothing_are_always_there(self, params):
        x = logits(1)
        x[0, [EOS, 3, 8]] = 50.0  # the end tokens come first
        g = group(width=6, **params)
        ends = set(g.state.end_ids.tolist())
        entry = continuations(x, [g], VOCAB)[0][0]
        scores = torch.log_softmax(x[0], 0)
        scores[list(ends)] = -math.inf
        assert [i for i in entry.top_ids if i not in ends] == [i for i, _ in best(scores, 6)]
        assert len(entry.top_ids) == 6 + len(ends)

    def test_at_least_as_many_as_log_probabilities_are_asked_for(self):
        x = logits(1)
        for width, asked, count in ((2, 20, 20), (16, 5, 17), (2, None, 3), (2, 0, 3)):
            assert len(continuations(x, [group(width=width, logprobs=asked)], VOCAB)[0][0].top_ids) == count

    @pytest.mark.parametrize("equal", [3, 5, 6, 7, 400])
    def test_ties_fall_to_the_lowest_id(self, equal):
        for seed in range(10):
            x = logits(1)
            x[0, torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:equal]] = 30.0
            for width in (4, 16):
                check(continuations(x, [group(width=width)], VOCAB)[0][0], torch.log_softmax(x[0], 0), width + 1)
        assert continuations(torch.zeros(1, VOCAB), [group()], VOCAB)[0][0].top_ids == (0, 1, 2, 3, 4)

    def test_ties_among_the_few_that_are_legal(self):
        entry = continuations(torch.zeros(1, VOCAB), [group(mask=mask_of([900, 17, 4]))], VOCAB)[0][0]
        assert entry.top_ids == (4, 17, 900)

    def test_a_vocabulary_smaller_than_the_width(self):
        entry = continuations(logits(1), [group(width=16)], 6)[0][0]
        assert sorted(entry.top_ids) == list(range(6))

    def test_nothing_legal_gives_nothing(self):
        x = logits(3)
        x[2] = math.nan
        dead = group(0, 1, mask=mask_of([4]), banned_token_ids=(4,))
        entries = continuations(x, [dead, group(1), group(2)], VOCAB)
        assert [len(e[0].top_ids) for e in entries] == [0, 5, 0]

    def test_trap_b14_where_only_an_end_token_is_legal_the_grammar_wins(self):
        rows = continuations(
            logits(2), [group(0, 2, chain=(12,), mask=mask_of([EOS], [EOS, 12]), min_tokens=64)], VOCAB
        )
        assert [e.top_ids for e in rows[0]] == [(EOS,), (12,)]


class TestNeighbours:
    @pytest.mark.parametrize("neighbours", [1, 3, 70])
    def test_trap_a8_rows_never_depend_on_their_neighbours(self, neighbours):
        x = logits(2 * len(OPTIONS))
        alone = [
            continuations(x[2 * i : 2 * i + 2].clone(), [group(0, 2, chain=(8,), **o)], VOCAB)[0]
            for i, o in enumerate(OPTIONS)
        ]
        others = [group(i, width=2 + i % 14, **OPTIONS[i % len(OPTIONS)]) for i in range(neighbours)]
        groups = [group(neighbours + 2 * i, 2, chain=(8,), **o) for i, o in enumerate(OPTIONS)]
        together = continuations(torch.cat([logits(neighbours, 5), x]), others + groups, VOCAB)
        assert together[neighbours:] == alone, "bit for bit"

    def test_sampled_rows_between_them_are_left_alone(self):
        x = logits(6)
        table = StateTable(VOCAB, [EOS])
        table.update([NewRequest("r", (1, 2), 2, SamplingParams(temperature=0.8), 9)], [])
        sampled = [RowGroup(table["r"], i, 1, 2 + i) for i in (0, 2, 5)]
        expected = [sample(x[g.first : g.first + 1], [RowGroup(g.state, 0, 1, g.position)], VOCAB) for g in sampled]
        result = sample(x, sampled, VOCAB)
        assert [result.token_ids[g.first] for g in sampled] == [e.token_ids[0] for e in expected]
        rows = continuations(x, [group(1), group(3, 2, chain=(8,))], VOCAB)
        assert rows == [
            continuations(x[1:2], [group()], VOCAB)[0],
            continuations(x[3:5], [group(0, 2, chain=(8,))], VOCAB)[0],
        ]
