"""The rules of beam search against a straightforward reference, that against transformers, and both against all texts.

The reference keeps whole arrays and sorts everything, step by step, as transformers' `_beam_search` does for a batch of
one; it knows nothing of beams that share KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from specserve.core.plan import TokenLogprobs
from specserve.engine.beam_search import Continuation, Finished, choose, continuations

# (tokens so far) -> log probabilities [vocab], minus infinity for what is forbidden.
Rows = Callable[[tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Rules:
    """One search. `ends` gives the reason why an answer is over with its last token, but for its length."""

    width: int
    max_tokens: int
    penalty: float = 1.0
    early: bool | str = False
    ends: Callable[[tuple[int, ...]], str | None] = lambda tokens: "stop" if tokens[-1] == 0 else None
    limit: int | None = None  # candidates of each beam
    answer: Callable[[tuple[int, ...]], object] = lambda tokens: tokens  # finished texts with one answer are one


@dataclass(frozen=True)
class Found:
    score: float
    tokens: tuple[int, ...]
    reason: str


def reference(rows: Rows, rules: Rules) -> list[Found]:
    """transformers' beam search, from its rules."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Found] = []
    for step in range(1, rules.max_tokens + 1):
        every: list[tuple[float, tuple[int, ...]]] = []
        for total, tokens in running:
            values = rows(tokens)
            best = sorted(range(len(values)), key=lambda i: -values[i])[: rules.limit]
            every += [(total + values[i], (*tokens, i)) for i in best if values[i] > -np.inf]
        every.sort(key=lambda entry: -entry[0])
        reasons = [rules.ends(tokens) or ("length" if step == rules.max_tokens else None) for _, tokens in every]
        just_ended = [
            Found(total / step**rules.penalty, tokens, reason)
            for (total, tokens), reason in list(zip(every, reasons, strict=True))[: rules.width]
            if reason
        ]
        ranked = sorted([*finished, *just_ended], key=lambda found: -found.score)
        finished = list({rules.answer(found.tokens): found for found in reversed(ranked)}.values())
        finished = sorted(finished, key=lambda found: -found.score)[: rules.width]
        running = [entry for entry, reason in zip(every, reasons, strict=True) if not reason][: rules.width]
        if not running:
            break
        if len(finished) == rules.width:
            if rules.early is True:
                break
            reach = rules.max_tokens if rules.early == "never" and rules.penalty > 0 else step
            if not running[0][0] / reach**rules.penalty > finished[-1].score:
                break
    return finished


def searched(rows: Rows, rules: Rules) -> list[Found]:
    """The same with the engine's rules."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: Finished[tuple[tuple[int, ...], str]] = Finished(
        rules.width, rules.penalty, rules.early, rules.max_tokens
    )
    for step in range(1, rules.max_tokens + 1):

        def end_by(beam: int, token: int, beams=beams, step=step) -> str | None:
            return rules.ends((*beams[beam][1], token)) or ("length" if step == rules.max_tokens else None)

        entries = [entry(rows(tokens), rules.limit) for _, tokens in beams]
        outcome = choose(continuations([total for total, _ in beams], entries), rules.width, end_by)
        for ended, reason in outcome.ended:
            finished.add(ended.total, step, ((*beams[ended.beam][1], ended.token), reason))
        beams = [(c.total, (*beams[c.beam][1], c.token)) for c in outcome.running]
        assert finished.advance(beams[0][0] if beams else None, step) == finished.done
        if finished.done:
            break
    assert finished.done
    return [Found(score, tokens, reason) for score, (tokens, reason) in finished]


def entry(values: np.ndarray, limit: int | None) -> TokenLogprobs:
    best = [int(i) for i in np.argsort(-values, kind="stable")[:limit] if values[i] > -np.inf]
    return TokenLogprobs(-1, None, tuple(best), tuple(float(values[i]) for i in best))


def same(got: Sequence[Found], expected: Sequence[Found]) -> None:
    assert [(f.tokens, f.reason) for f in got] == [(f.tokens, f.reason) for f in expected]
    assert [f.score for f in got] == pytest.approx([f.score for f in expected], rel=1e-5)


def table(seed: int, vocab: int, sharpness: float) -> Rows:
    """Random log probabilities for every text."""

    def rows(tokens: tuple[int, ...]) -> np.ndarray:
        scores = np.random.default_rng([seed, *(t + 1 for t in tokens)]).normal(size=vocab) * sharpness
        return scores - np.log(np.exp(scores).sum())

    return rows


PENALTIES = st.one_of(st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.floats(-1, 2))
EARLY = st.sampled_from([True, False, "never"])


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(4, 6), st.floats(0.3, 4), st.integers(2, 5), st.integers(1, 4), PENALTIES, EARLY
)
def test_rules_equal_the_reference(seed, vocab, sharpness, width, max_tokens, penalty, early):
    rows = table(seed, vocab, sharpness)
    rules = Rules(width, max_tokens, penalty, early)
    same(searched(rows, rules), reference(rows, rules))
    # A few candidates of each beam are enough: its end token, and as many others as beams go on.
    few = Rules(width, max_tokens, penalty, early, limit=width + 1)
    same(searched(rows, few), reference(rows, rules))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.3, 4), PENALTIES)
def test_a_width_that_holds_every_text_finds_the_best_ones(seed, sharpness, penalty):
    vocab, length = 4, 3
    rows = table(seed, vocab, sharpness)
    texts = []
    for tokens in itertools.chain.from_iterable(
        itertools.product(range(vocab), repeat=n) for n in range(1, length + 1)
    ):
        if 0 in tokens[:-1] or (tokens[-1] != 0 and len(tokens) < length):
            continue
        total = sum(rows(tokens[:i])[token] for i, token in enumerate(tokens))
        texts.append(Found(total / len(tokens) ** penalty, tokens, "stop" if tokens[-1] == 0 else "length"))
    texts.sort(key=lambda found: -found.score)
    same(searched(rows, Rules(len(texts), length, penalty, "never")), texts)


class TableConfig(PretrainedConfig):
    model_type = "specserve-test-table"


class TableModel(PreTrainedModel, GenerationMixin):
    """transformers' search over a table."""

    config_class = TableConfig

    def __init__(self, rows: Rows, vocab: int) -> None:
        super().__init__(TableConfig(vocab_size=vocab, num_hidden_layers=1, hidden_size=1))
        self.one = torch.nn.Parameter(torch.zeros(1))
        self.rows = rows

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}

    def forward(self, input_ids, **kwargs):
        # The prompt is one token.
        found = [self.rows(tuple(text[1:])) for text in input_ids.tolist()]
        return CausalLMOutputWithPast(logits=torch.tensor(np.array(found), dtype=torch.float32)[:, None])


def by_transformers(rows: Rows, rules: Rules, vocab: int) -> list[tuple[float, tuple[int, ...]]]:
    config = GenerationConfig(
        num_beams=rules.width,
        num_return_sequences=rules.width,
        max_new_tokens=rules.max_tokens,
        length_penalty=rules.penalty,
        early_stopping=rules.early,
        eos_token_id=0,
        pad_token_id=vocab,
        return_dict_in_generate=True,
        output_scores=True,
        use_cache=False,
        do_sample=False,
    )
    out = TableModel(rows, vocab).generate(torch.tensor([[1]]), generation_config=config)
    texts = [tuple(t for t in text[1:] if t != vocab) for text in out.sequences.tolist()]
    return list(zip(out.sequences_scores.tolist(), texts, strict=True))


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.7, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_the_reference_is_transformers(width, penalty, early):
    vocab = 9
    for seed in range(2):
        for max_tokens in (2, 6):
            rows = table(100 * seed + width, vocab, 1.0 + 2 * seed)
            rules = Rules(width, max_tokens, penalty, early)
            theirs, ours = by_transformers(rows, rules, vocab), reference(rows, rules)
            assert [text for _, text in theirs] == [found.tokens for found in ours]
            assert [score for score, _ in theirs] == pytest.approx([found.score for found in ours], rel=1e-4)


def test_equal_continuations_go_by_beam_and_id():
    rows = [TokenLogprobs(-1, None, (7, 5), (-1.0, -1.0)), TokenLogprobs(-1, None, (3, 9), (-1.0, None))]
    found = continuations([0.0, 0.0], rows)
    assert [(c.beam, c.token) for c in found] == [(0, 5), (0, 7), (1, 3)], "minus infinity is no continuation"


def test_what_ends_behind_the_best_is_dropped_and_others_move_up():
    candidates = [Continuation(0, token, -float(token), -1.0) for token in range(6)]
    outcome = choose(candidates, 2, lambda beam, token: "stop" if token in (0, 2) else None)
    assert [c.token for c in outcome.running] == [1, 3]
    assert [(c.token, reason) for c, reason in outcome.ended] == [(0, "stop")]
    outcome = choose(candidates, 3, lambda beam, token: "length")
    assert [c.token for c, _ in outcome.ended] == [0, 1, 2]
    assert not outcome.running


def test_with_early_stopping_all_that_end_in_the_last_step_count():
    finished = Finished(2, 1.0, True, 10)
    finished.add(-9.0, 1, "bad")
    assert not finished.advance(-1.0, 1)
    finished.add(-2.0, 2, "good")
    finished.add(-3.0, 2, "better than bad")
    assert finished.advance(-1.0, 2)
    assert list(finished) == [(-1.0, "good"), (-1.5, "better than bad")]


def test_nothing_left_to_run_ends_the_search():
    finished = Finished(3, 1.0, False, 10)
    finished.add(-1.0, 1, "only")
    assert finished.advance(None, 1)
    assert not finished.full
    assert [item for _, item in finished] == ["only"]


@pytest.mark.parametrize(
    ("early", "penalty", "done"), [(False, 1.0, True), ("never", 1.0, False), ("never", -1.0, True)]
)
def test_never_hopes_for_the_longest_answer_where_length_helps(early, penalty, done):
    finished = Finished(1, penalty, early, 10)
    finished.add(-2.0, 2, "one")
    assert finished.advance(-3.0, 2) == done
    hopeful = Finished(1, -1.0, "never", 10)
    hopeful.add(-2.0, 2, "one")
    assert not hopeful.advance(-1.5, 2), "a longer one is worse, not the present one"


def test_equal_scores_keep_the_earlier():
    finished = Finished(2, 0.0, "never", 10)
    for item in "abc":
        finished.add(-1.0, 1, item)
    assert [item for _, item in finished] == ["a", "b"]


def test_of_equal_answers_the_better_is_kept():
    finished = Finished(2, 0.0, False, 9)

    def add(total, text):
        finished.add(total, 3, text, lambda kept: kept == text)

    add(-3.0, "a")
    add(-1.0, "b")
    add(-2.0, "a")
    add(-2.5, "a")
    assert list(finished) == [(-1.0, "b"), (-2.0, "a")]
    add(-1.5, "c")
    assert list(finished) == [(-1.0, "b"), (-1.5, "c")]
