"""Random walks through the masks: whatever a grammar lets a model write is valid under its schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from specserve.core.errors import GrammarError
from specserve.guided.masks import allocate, tokens_of
from tests.fakes.data import shared_lines
from tests.fakes.vocabulary import END, OTHER_END, TOKENS, WIDTH, make_compiler

COMPILER = make_compiler(cache_bytes=8 * 2**20)
MAX_STEPS = 1500


def walk(grammar: Any, rng: random.Random) -> str | None:
    """A random text of the grammar; None if it does not end soon. Ends and closing quotes are preferred."""
    matcher = grammar.matcher()
    mask = allocate(1, WIDTH)
    data = b""
    for step in range(MAX_STEPS):
        matcher.fill(mask, 0)
        allowed = tokens_of(mask[0])
        assert allowed, "a state without a legal token"
        if END in allowed and (step > 200 or rng.random() < 0.5 or allowed == sorted([END, OTHER_END])):
            assert matcher.accept(END)
            return data.decode()
        words = [t for t in allowed if t not in (END, OTHER_END)]
        closing = [t for t in words if TOKENS[t] in (b'"', b"}", b"]")]
        ascii_only = [t for t in words if TOKENS[t].isascii()]
        hurry = min(0.9, 0.3 + step / 300)
        token = rng.choice(closing if closing and rng.random() < hurry else ascii_only if ascii_only else words)
        assert matcher.accept(token)
        data += TOKENS[token]
    return None


def check(schema: Any, rng: random.Random, walks: int) -> int:
    """How many of the walks ended; each such text must be valid."""
    try:
        grammar = COMPILER.compile({"json_schema": schema})
    except GrammarError:
        return 0
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    ended = 0
    for _ in range(walks):
        text = walk(grammar, rng)
        if text is not None:
            ended += 1
            problems = list(validator.iter_errors(json.loads(text)))
            assert not problems, (text[:500], problems[0].message[:300])
    return ended


def test_walks_through_maskbench() -> None:
    rng = random.Random(5)
    assert sum(check(row["schema"], rng, 2) for row in shared_lines("maskbench.jsonl")[3::20]) >= 25


@pytest.mark.slow
def test_walks_through_all_of_maskbench() -> None:
    rng = random.Random(6)
    assert sum(check(row["schema"], rng, 3) for row in shared_lines("maskbench.jsonl")) >= 900


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": -1.25, "exclusiveMaximum": 3.5},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "integer", "multipleOf": 6, "minimum": -40},
        {"type": "string", "pattern": "[a-c]\\d|^x", "maxLength": 5},
        {"type": "object", "minProperties": 2, "maxProperties": 3, "properties": {"a": {}, "b": {}, "c": {}}},
        {"type": "object", "patternProperties": {"a": {"type": "null"}, "b$": {"type": ["null", "integer"]}}},
        {"type": "array", "contains": {"enum": ["x", 1]}, "items": {"type": ["string", "integer"]}},
        {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "minimum": 5, "multipleOf": 1}]},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}, "type": "object"},
        *[
            {"type": "string", "format": name}
            for name in (
                "date",
                "time",
                "date-time",
                "email",
                "ipv4",
                "ipv6",
                "uuid",
                "idn-hostname",
                "duration",
                "uri",
            )
        ],
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_walks_through_single_schemas(schema: Any) -> None:
    try:
        COMPILER.compile({"json_schema": schema})
    except GrammarError:
        assert "oneOf" in schema
        return
    assert check(schema, random.Random(7), 40) >= 20
