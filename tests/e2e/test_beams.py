"""Beam search on the demo model in float32 against transformers' own, and against itself under every disturbance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jsonschema
import orjson
import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.llm import GenerationResult
from tests.fakes.prompts import prompts

WIDTH = 4
MAX_TOKENS = 24
MODES = [(1.0, False), (1.0, True), (0.0, "never"), (2.0, "never")]
PARAMS = SamplingParams(beam_width=WIDTH, n=WIDTH, max_tokens=MAX_TOKENS)


def expected(
    oracle: Any, tokens: list[int], eos: int, penalty: float, early: bool | str
) -> list[tuple[list[int], float]]:
    """(answer, score) of transformers' hypotheses, best first."""
    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=eos,
            pad_token_id=-1 % 2**31,
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = []
    for row in found.sequences[:, len(tokens) :].tolist():
        answers.append(row[: row.index(eos) + 1] if eos in row else row)
    return list(zip(answers, found.sequences_scores.tolist(), strict=True))


def compare(oracle: Any, llm: LLM, texts: list[str], penalty: float, early: bool | str) -> None:
    params = dataclasses.replace(PARAMS, length_penalty=penalty, early_stopping=early)
    tokenizer: Any = llm._tokenizer
    encoded = [tokenizer.encode(text)[:120] for text in texts]
    for tokens, result in zip(encoded, llm.generate(encoded, params), strict=True):
        wanted = expected(oracle, tokens, tokenizer.eos_ids[0], penalty, early)
        assert [choice.token_ids for choice in result.choices] == [answer for answer, _ in wanted]
        for choice, (_, score) in zip(result.choices, wanted, strict=True):
            assert choice.score == pytest.approx(score, abs=2e-4)


def test_beams_equal_transformers(oracle: Any, engine: Callable[..., LLM]) -> None:
    compare(oracle, engine(dtype="float32"), prompts(4), 1.0, False)


@pytest.mark.slow
@pytest.mark.parametrize(("penalty", "early"), MODES)
def test_beams_equal_transformers_on_20_prompts(
    oracle: Any, engine: Callable[..., LLM], penalty: float, early: bool | str
) -> None:
    compare(oracle, engine(dtype="float32"), prompts(20), penalty, early)


def told(results: list[GenerationResult]) -> list[Any]:
    return [[(c.token_ids, c.text, c.score, c.finish_reason) for c in result.choices] for result in results]


DISTURBANCES: dict[str, dict[str, Any]] = {
    "drafts": {},
    "chunks": {"max_batched_tokens": 16},
    "no cache": {"prefix_cache": False},
    "recompute": {"kv_memory": "9MiB", "preemption": "recompute"},
    "swap": {"kv_memory": "9MiB", "preemption": "swap"},
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_beams_never_change(engine: Callable[..., LLM], name: str) -> None:
    tokenizer: Any = engine()._tokenizer
    encoded = [tokenizer.encode(text)[:20] for text in prompts(5)]
    calm = [engine().generate(tokens, PARAMS)[0] for tokens in encoded]
    params = dataclasses.replace(PARAMS, speculation=True) if name == "drafts" else PARAMS
    llm = engine(**DISTURBANCES[name])
    before = llm.stats().counters
    assert told(llm.generate(encoded, params)) == told(calm)
    after = llm.stats().counters
    if "preemption" in DISTURBANCES[name]:
        assert after["num_preemptions_total"] > before["num_preemptions_total"], "the pool is too large for this test"
    if name == "swap":
        assert after["num_swapped_total"] > before["num_swapped_total"]


def test_beams_follow_a_schema(engine: Callable[..., LLM]) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "visits": {"type": "integer", "maximum": 99}},
        "required": ["city", "visits"],
        "additionalProperties": False,
    }
    params = SamplingParams(beam_width=WIDTH, n=WIDTH, max_tokens=60, guided={"json_schema": schema})
    text = "Name a city and how often it was visited, as JSON: "
    plain = engine().generate(text, params)[0]
    finished = [choice for choice in plain.choices if choice.finish_reason == "stop"]
    assert len({choice.text for choice in finished}) == len(finished) > 1
    for choice in finished:
        jsonschema.validate(orjson.loads(choice.text), schema)
    drafted = engine().generate(text, dataclasses.replace(params, speculation=True))[0]
    assert told([drafted]) == told([plain])
