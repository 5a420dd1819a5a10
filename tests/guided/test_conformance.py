"""JSON Schema against public corpora and against random schemas: nothing invalid is ever accepted."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specserve.core.errors import GrammarError
from tests.fakes.data import shared_data, shared_lines
from tests.fakes.instances import in_declared_order
from tests.fakes.vocabulary import accepts_value, make_compiler

COMPILER = make_compiler(cache_bytes=8 * 2**20)


def compiled(schema: Any) -> Any:
    return COMPILER.compile({"json_schema": schema})


def _maskbench(rows: list[dict[str, Any]]) -> tuple[int, int, int, int]:
    """Schemas compiled, valid instances, those accepted, and refused schemas; asserts that none invalid is accepted."""
    done = valid = taken = refused = 0
    for row in rows:
        try:
            grammar = compiled(row["schema"])
        except GrammarError:
            refused += 1
            continue
        done += 1
        for test in row["tests"]:
            ordered = in_declared_order(test["data"], row["schema"], row["schema"])
            ok = accepts_value(grammar, ordered) or accepts_value(grammar, test["data"])
            if test["valid"]:
                valid += 1
                taken += ok
            else:
                assert not ok, row["name"]
    return done, valid, taken, refused


def test_maskbench_sample() -> None:
    done, valid, taken, refused = _maskbench(shared_lines("maskbench.jsonl")[::16])
    assert done >= 23
    assert refused <= 2
    assert taken == valid >= 20


@pytest.mark.slow
def test_maskbench_all() -> None:
    done, valid, taken, refused = _maskbench(shared_lines("maskbench.jsonl"))
    assert done + refused == 400
    assert done >= 383
    assert taken == valid >= 470


def test_json_schema_test_suite_accepts_nothing_invalid() -> None:
    done = valid = taken = 0
    for path in sorted(shared_data("json_schema_test_suite").rglob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            try:
                grammar = compiled(case["schema"])
            except GrammarError:
                continue
            done += 1
            for test in case["tests"]:
                ordered = in_declared_order(test["data"], case["schema"], case["schema"])
                ok = accepts_value(grammar, ordered) or accepts_value(grammar, test["data"])
                assert test["valid"] or not ok, (path.name, case["description"], test["description"])
                valid += test["valid"]
                taken += test["valid"] and ok
    assert done >= 280
    assert taken / valid > 0.9


_SCALARS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": -2, "maximum": 11},
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "a|^b"},
        {"type": ["null", "boolean"]},
        {"enum": ["a", 1, None, [1], {"a": 1}]},
        {"const": "b"},
        {"not": {"const": 1}, "type": ["integer", "null"]},
        {"minimum": 0},
        True,
        False,
    ]
)
_NAMES = st.sampled_from(["a", "b", "ab"])


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", ["object", "string"]]),
            "properties": st.dictionaries(_NAMES, inner, max_size=3),
            "required": st.lists(_NAMES, unique=True, max_size=2),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2),
            "propertyNames": st.sampled_from([{"maxLength": 1}, {"enum": ["a", "ab"]}, {"pattern": "b"}]),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
        },
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("array"),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
            "contains": inner,
        },
    )


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda s: {"anyOf": s}, several),
        st.builds(lambda s: {"oneOf": s}, several),
        st.builds(lambda s: {"allOf": s}, several),
        st.builds(lambda s: {"not": s}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
    )


_SCHEMAS = st.recursive(_SCALARS, lambda inner: _objects(inner) | _arrays(inner) | _combined(inner), max_leaves=6)
_VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -2, 12, 1.5, -0.25, 2.0, "", "a", "b", "cab", "abcd", "ü"]),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["a", "ab", "b", "c", "bb"]), v, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(_SCHEMAS, st.lists(_VALUES, min_size=4, max_size=10))
def test_nothing_invalid_is_accepted(schema: Any, values: list[Any]) -> None:
    try:
        grammar = compiled(schema)
    except GrammarError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        if not validator.is_valid(value):
            assert not accepts_value(grammar, value), (schema, value)
        elif not isinstance(value, (dict, list, float)):
            assert accepts_value(grammar, value), (schema, value)
