"""Guided output on real weights: every finished answer parses and validates; drafts change no token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from specserve import LLM, SamplingParams
from specserve.core.errors import GrammarError
from tests.fakes.data import shared_lines
from tests.fakes.prompts import chat

OWN_SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 3},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
]


def maskbench(count: int) -> list[dict[str, Any]]:
    """The first `count` shared schemas."""
    rows = shared_lines("maskbench.jsonl")
    return [row["schema"] for row in rows if isinstance(row["schema"], dict)][:count]


def ask(schema: dict[str, Any]) -> list[dict[str, str]]:
    return chat(f"Give one short example of JSON for this schema: {json.dumps(schema)[:600]}")


def compilable(llm: LLM, schemas: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first `count` schemas that the engine accepts."""
    kept = []
    for schema in schemas:
        try:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, guided={"json_schema": schema}))
        except GrammarError:
            continue
        kept.append(schema)
        if len(kept) == count:
            return kept
    return kept


def check_schemas(engine: Callable[..., LLM], schemas: list[dict[str, Any]], tokens: int) -> int:
    """Same ids with and without drafts; finished answers are valid. Returns how many finished."""
    plain, drafted = engine(speculation=None), engine(speculation={"methods": ["suffix"], "adaptive": False})
    p = [
        SamplingParams(max_tokens=tokens, temperature=0.0 if i % 2 else 0.8, seed=i, guided={"json_schema": s})
        for i, s in enumerate(schemas)
    ]
    prompts = [ask(s) for s in schemas]
    expected = plain.generate(prompts, p)
    results = drafted.generate(prompts, p)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    finished = 0
    for schema, result in zip(schemas, results, strict=True):
        if result.finish_reason == "stop":
            finished += 1
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(result.text))
        else:
            assert result.finish_reason == "length"
            assert len(result.token_ids) == tokens
    return finished


def test_own_schemas(engine: Callable[..., LLM]) -> None:
    assert check_schemas(engine, OWN_SCHEMAS, 96) == len(OWN_SCHEMAS)


def test_maskbench_40(engine: Callable[..., LLM]) -> None:
    llm = engine(speculation=None)
    schemas = compilable(llm, maskbench(400), 40)
    assert len(schemas) == 40
    assert check_schemas(engine, schemas, 160) >= 10


def test_regex_choice_grammar(engine: Callable[..., LLM]) -> None:
    llm = engine(speculation={"methods": ["suffix"]})
    guides: list[dict[str, Any]] = [
        {"regex": r"[A-Z][a-z]{2,8} \d{2,4}"},
        {"choice": ["yes", "no", "perhaps"]},
        {"grammar": {"name": "arithmetic"}},
    ]
    p = [SamplingParams(max_tokens=48, temperature=0.8, seed=7, guided=g) for g in guides]
    regex, choice, arithmetic = llm.generate([chat("Answer me.")] * 3, p)
    assert re.fullmatch(r"[A-Z][a-z]{2,8} \d{2,4}", regex.text)
    assert choice.text in ("yes", "no", "perhaps")
    assert re.fullmatch(r"[-+*/() .\d]+", arithmetic.text)


def test_trap_b1_prose_prompt_gives_json(engine: Callable[..., LLM]) -> None:
    prompt = chat("Write a long poem about the sea. Do not use JSON.")
    p = SamplingParams(max_tokens=128, guided={"json_schema": OWN_SCHEMAS[0]})
    for speculation in (None, {"methods": ["suffix"]}):
        (result,) = engine(speculation=speculation).generate([prompt], p)
        jsonschema.validate(json.loads(result.text), OWN_SCHEMAS[0])


def test_trap_b7_broken_schema_fails_alone(engine: Callable[..., LLM]) -> None:
    llm = engine(speculation=None)
    with pytest.raises(GrammarError):
        llm.generate([chat("a")], SamplingParams(guided={"json_schema": {"type": "nonsense"}}))
    (result,) = llm.generate([chat("Say hi")], SamplingParams(max_tokens=4))
    assert result.token_ids


def test_trap_b13_thirty_concurrent_fixed_arrays(engine: Callable[..., LLM]) -> None:
    llm = engine(speculation={"methods": ["suffix"]})
    p = [
        SamplingParams(max_tokens=64, temperature=1.0, seed=i, guided={"json_schema": OWN_SCHEMAS[1]})
        for i in range(30)
    ]
    prefix = "You are a painter who answers in JSON lists of three colours. " * 4
    for result in llm.generate([chat(f"{prefix} Wish {i}") for i in range(30)], p):
        value = json.loads(result.text)
        assert len(value) == 3
        assert set(value) <= {"red", "green", "blue"}
