"""JSON Schema: what is accepted, what is refused, and that nothing invalid is ever accepted."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from specserve.core.errors import GrammarError
from tests.fakes.vocabulary import accepts, accepts_value, make_compiler, token_id

COMPILER = make_compiler(cache_bytes=8 * 2**20)


def compiled(schema: Any, **options: Any) -> Any:
    return COMPILER.compile({"json_schema": schema, **options})


def refusal(schema: Any) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        compiled(schema)
    return caught.value


# keyword -> (schema, accepted, not accepted); None for the schema's own refusal at this pointer
ENFORCED: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("type", {"type": "integer"}, [0, -5, 12], [1.5, "1", None, True]),
    ("enum", {"enum": ["a", 1, None, {"x": [1]}]}, ["a", 1, None, {"x": [1]}], ["b", 2, False, {"x": []}]),
    ("const", {"const": "é"}, ["é"], ["e"]),
    ("minimum", {"type": "integer", "minimum": -3}, [-3, 0, 10**17], [-4, -30]),
    ("minimum of numbers", {"type": "number", "minimum": 0.25}, [0.25, 0.3, 1.0, 99.5], [0.2, 0, -1]),
    ("maximum", {"type": "integer", "maximum": 120}, [120, 99, 7, -500], [121, 130, 1000]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, [0.1, 10.99, 1], [0, 0.0, -1]),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1}, [0.99, 0, -2.5], [1, 1.0, 1.01]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, [0, 7, 14, -21, 7000], [1, 13, 20]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", 'a"', "日本", "😀😀"], ["", "a", "😀"]),
    ("maxLength", {"type": "string", "maxLength": 3}, ["", "abc", "日本語"], ["abcd"]),
    ("pattern", {"type": "string", "pattern": "b+c"}, ["abbcd", "bc"], ["ac", ""]),
    ("format", {"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01", "x"]),
    ("items", {"items": {"type": "integer"}}, [[], [1], [1, 2], "x"], [["a"], [1, None]]),
    ("prefixItems", {"prefixItems": [{"const": 1}, {"const": 2}]}, [[], [1], [1, 2], [1, 2, "x"]], [[2], [1, 3]]),
    ("minItems", {"type": "array", "items": {"type": "null"}, "minItems": 2}, [[None] * 2, [None] * 5], [[], [None]]),
    ("maxItems", {"type": "array", "items": {"type": "null"}, "maxItems": 2}, [[], [None] * 2], [[None] * 3]),
    ("uniqueItems of one", {"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    ("contains", {"type": "array", "contains": {"const": 7}}, [[7], [1, 7, 2], [7, 7]], [[], [1, 2]]),
    ("properties", {"type": "object", "properties": {"a": {"type": "null"}}}, [{}, {"a": None}, {"b": 1}], [{"a": 1}]),
    (
        "additionalProperties",
        {"type": "object", "properties": {"a": True}, "additionalProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^s_": {"type": "string"}}, "additionalProperties": {"type": "null"}},
        [{}, {"s_a": "x"}, {"b": None}],
        [{"s_a": 1}, {"b": "x"}],
    ),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, [{}, {"abc": 1}], [{"d": 1}]),
    ("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}, 3], [{"a": 1}]),
    ("not", {"not": {"type": ["object", "array"]}}, [1, "x", None], [{}, []]),
    ("not over values", {"type": "string", "not": {"enum": ["a", "b"]}}, ["", "c", "ab"], ["a", "b"]),
    (
        "if",
        {
            "type": "object",
            "properties": {"k": {"enum": ["n", "s"]}, "v": True},
            "required": ["k", "v"],
            "if": {"properties": {"k": {"const": "n"}}},
            "then": {"properties": {"v": {"type": "number"}}},
            "else": {"properties": {"v": {"type": "string"}}},
        },
        [{"k": "n", "v": 1}, {"k": "s", "v": "x"}],
        [{"k": "n", "v": "x"}, {"k": "s", "v": 1}],
    ),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "x"]),
    ("oneOf", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 2}, 3]),
    ("unevaluatedProperties", {"properties": {"a": True}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), [row[1:] for row in ENFORCED], ids=[row[0] for row in ENFORCED])
def test_trap_c1_each_keyword_is_enforced(schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = compiled(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for value in good:
        assert validator.is_valid(value), value
        assert accepts_value(grammar, value), value
    for value in bad:
        assert not validator.is_valid(value), value
        assert not accepts_value(grammar, value), value


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"properties": {"a/b": {"multipleOf": 0.1}}}, "/properties/a~1b/multipleOf"),
        ({"contains": True, "maxContains": 2}, "/maxContains"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "/unevaluatedProperties"),
        ({"anyOf": [{}], "unevaluatedItems": False}, "/unevaluatedItems"),
        ({"items": {"$ref": "https://example.com/other.json"}}, "/items/$ref"),
        ({"$dynamicRef": "#node"}, "/$dynamicRef"),
        ({"type": "string", "format": "regex"}, "/format"),
        ({"type": "string", "pattern": "a(?=b)"}, "/pattern"),
        ({"not": {"propertyNames": {"maxLength": 2}}}, "/not/propertyNames"),
    ],
)
def test_trap_c1_what_cannot_be_enforced_names_keyword_and_path(schema: Any, pointer: str) -> None:
    error = refusal(schema)
    assert error.param == "guided.json_schema" + pointer
    assert pointer in error.message
    assert repr(pointer.rsplit("/", 1)[-1]) in error.message
    assert error.status == 400


def test_trap_c2_required_without_properties() -> None:
    grammar = compiled({"type": "object", "required": ["a"]})
    assert accepts_value(grammar, {"a": 1})
    assert accepts_value(grammar, {"a": {"x": []}, "b": 2})
    assert not accepts_value(grammar, {})
    assert not accepts_value(grammar, {"b": 2})


def test_trap_c3_any_of_beside_properties_is_a_conjunction() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    grammar = compiled(schema)
    for value in ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}):
        assert accepts_value(grammar, value)
    for value in ({}, {"c": 1}, {"a": "x"}, {"a": 1, "c": 2}):
        assert not accepts_value(grammar, value)


def test_trap_c6_property_names_with_a_value_schema_and_alternation() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^(a|b)"},
        "additionalProperties": {"type": "string", "pattern": "x|y"},
    }
    grammar = compiled(schema)
    assert accepts_value(grammar, {"apple": "my", "b": "x"})
    assert not accepts_value(grammar, {"cab": "x"})
    assert not accepts_value(grammar, {"a": "z"})


def test_trap_c8_additional_properties_are_allowed_by_default() -> None:
    grammar = compiled({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert accepts_value(grammar, {"a": 1, "b": ["anything"]})
    assert accepts_value(grammar, {"b": 1})


def test_an_additional_name_is_never_a_declared_one() -> None:
    """JSON readers keep the last of two equal names: a second "a" would escape its schema."""
    grammar = compiled({"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"type": "null"}}})
    assert accepts(grammar, '{"b": 1, "abc": 2}')
    for text in ('{"b": 1, "a": "x"}', '{"a": 1, "a": "x"}', '{"b": 1, "\\u0061": "x"}', '{"abc": 1, "ab": 2}'):
        assert not accepts(grammar, text), text


def test_trap_c9_pattern_is_not_anchored() -> None:
    grammar = compiled({"type": "string", "pattern": "\\S"})
    assert accepts_value(grammar, "  x ")
    assert accepts_value(grammar, '"')
    assert not accepts_value(grammar, "   ")
    assert not accepts_value(grammar, "")


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d+$", ["0", "123"], ["", "1a", "٣"]),
        (r"^\w \s$", ["a  ", "_ \t"], ["a", "a b"]),
        (r"^[\w.-]+@\w+\.[a-z]{2,3}$", ["a.b-c@x.org"], ["@x.org", "a@x.o"]),
        (r"^(foo|bar)$|^x", ["foo", "bar", "xyz"], ["foox", "ab"]),
        (r"(^a|b$)", ["ax", "xb"], ["xa"]),
        (r"^[^\\/:]*$", ["a b"], ["a/b", "a\\b"]),
        (r"^\"[\t\n]$", ['"\t', '"\n'], ['"x']),
        (r"^[A-Z]{2}-\d{3,5}$", ["AB-123", "ZZ-12345"], ["AB-12", "AB-123456"]),
    ],
)
def test_trap_c10_patterns(pattern: str, good: list[str], bad: list[str]) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    for text in good:
        assert accepts_value(grammar, text), text
    for text in bad:
        assert not accepts_value(grammar, text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"type": "object", "required": "a"},
        {"minLength": -1},
        {"$ref": "#/definitions/missing"},
        {"$ref": "#nowhere"},
        {"type": "string", "pattern": "("},
        {"properties": [1]},
        {"enum": []},
        [],
        "{}",
        7,
        None,
        {"not": {}},
        {"type": "string", "minLength": 3, "maxLength": 2},
    ],
    ids=repr,
)
def test_trap_c13_a_bad_schema_is_an_error_and_the_next_request_works(schema: Any) -> None:
    assert refusal(schema).param.startswith("guided.json_schema")
    assert accepts_value(compiled({"type": "boolean"}), True)


def test_trap_c14_reference_cycles_and_recursion() -> None:
    refusal({"$ref": "#"})
    refusal({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})
    # recursion that no finite value ends
    refusal({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}})
    tree = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["value"],
        "additionalProperties": False,
    }
    grammar = compiled(tree)
    assert accepts_value(grammar, {"value": 1, "children": [{"value": 2}, {"value": 3, "children": []}]})
    assert not accepts_value(grammar, {"value": 1, "children": [{"children": []}]})


@pytest.mark.parametrize("depth", [10, 15, 20])
def test_trap_c16_nested_one_of(depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for i in range(depth):
        schema = {"oneOf": [{"type": "object", "properties": {f"k{i}": schema}}, {"type": "array", "maxItems": i}]}
    assert accepts_value(compiled(schema), {f"k{depth - 1}": {f"k{depth - 2}": []}})
    assert not accepts_value(compiled(schema), {f"k{depth - 1}": {f"k{depth - 2}": 1}})
    overlapping: dict[str, Any] = {"type": "object", "required": ["x"]}
    for i in range(depth):
        overlapping = {"oneOf": [overlapping, {"required": [f"a{i}"]}, {"properties": {f"b{i}": {"type": "null"}}}]}
    limited = make_compiler(compile_seconds=5.0)
    with pytest.raises(GrammarError, match="overlap"):
        limited.compile({"json_schema": overlapping})
    choices = [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(4)]} for i in range(depth)]
    with pytest.raises(GrammarError, match=r"combinations|time budget"):
        limited.compile({"json_schema": {"allOf": choices}})


def test_trap_c26_declared_order_is_kept() -> None:
    schema = {"type": "object", "properties": {"zulu": {"type": "integer"}, "alpha": {"type": "integer"}}}
    grammar = compiled({**schema, "required": ["alpha", "zulu"]})
    assert accepts(grammar, '{"zulu": 1, "alpha": 2}')
    assert not accepts(grammar, '{"alpha": 2, "zulu": 1}')


def test_trap_c29_type_lists_and_null() -> None:
    grammar = compiled({"type": ["string", "null"]})
    assert accepts_value(grammar, None)
    assert accepts_value(grammar, "x")
    assert not accepts_value(grammar, 1)
    grammar = compiled({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "required": ["a"]})
    assert accepts_value(grammar, {"a": None})
    assert accepts_value(grammar, {"a": 3})
    assert not accepts_value(grammar, {"a": "x"})


def test_trap_c22_digits_are_bounded() -> None:
    for schema in ({"type": "number"}, {"type": "integer"}, {"type": "number", "minimum": 0}, {"minimum": -1}, {}):
        grammar = compiled(schema)
        matcher = grammar.matcher()
        steps = 0
        assert matcher.accept(token_id("1"))
        while matcher.accept(token_id("0")):
            steps += 1
            assert steps < 40, schema
        if matcher.accept(token_id(".")):
            while matcher.accept(token_id("0")):
                steps += 1
                assert steps < 80, schema
        if matcher.accept(token_id("e")):
            while matcher.accept(token_id("0")):
                steps += 1
                assert steps < 100, schema
        assert not any(matcher.accept(token_id(digit)) for digit in "0123456789")


@pytest.mark.parametrize("style", ["spaced", "compact", "flexible"])
def test_whitespace_styles_are_bounded(style: str) -> None:
    grammar = compiled({"type": "object", "properties": {"a": {"type": "array"}}}, whitespace=style)
    separators = {"spaced": (", ", ": "), "compact": (",", ":"), "flexible": (" ,\n ", ":")}[style]
    assert accepts(grammar, json.dumps({"a": [1, 2]}, separators=separators))
    blanks = 0
    matcher = grammar.matcher()
    assert matcher.accept(token_id("{"))
    while matcher.accept(token_id(" ")):
        blanks += 1
        assert blanks <= 16
    with pytest.raises(GrammarError, match="whitespace"):
        compiled({}, whitespace="endless")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 127), (0, 128), (1, 129), (128, 128), (129, 300), (256, 256), (255, 257)]
)
def test_long_strings_are_counted_exactly(low: int, high: int) -> None:
    grammar = compiled({"type": "string", "minLength": low, "maxLength": high})
    for size in {0, 1, low - 1, low, low + 1, 127, 128, 129, 255, 256, 257, high - 1, high, high + 1} - {-1}:
        assert accepts_value(grammar, "日" * size) == (low <= size <= high), size
    assert not accepts_value(compiled({"type": "string", "maxLength": 10**9}), 3)


def test_annotations_and_unknown_words_pass() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/a",
        "$comment": "c",
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [1],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": False,
        "x-vendor": {"type": "nonsense"},
        "format": "made-up",
        "type": "string",
    }
    assert accepts_value(compiled(schema), "x")


def test_references_by_pointer_anchor_and_id() -> None:
    schema = {
        "$id": "https://example.com/root",
        "$defs": {"n": {"$anchor": "num", "type": "integer"}, "s": {"$id": "text", "type": "string"}, "a~/b": True},
        "properties": {
            "a": {"$ref": "#num"},
            "b": {"$ref": "#/$defs/n", "minimum": 3},
            "c": {"$ref": "text"},
            "d": {"$ref": "https://example.com/root#/$defs/a~0~1b"},
        },
    }
    grammar = compiled(schema)
    assert accepts_value(grammar, {"a": 1, "b": 3, "c": "x", "d": None})
    for value in ({"a": "x"}, {"b": 2}, {"c": 1}):
        assert not accepts_value(grammar, value)
