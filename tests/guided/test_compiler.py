"""The compiler: kinds of guidance, limits, budgets, the cache."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specserve.core.errors import GrammarError
from specserve.guided.compiler import GrammarCompiler
from specserve.guided.library import named_grammars
from tests.fakes.vocabulary import END, TOKENS, accepts, encode, make_compiler

COMPILER = make_compiler()


def refusal(guided: Any, compiler: GrammarCompiler = COMPILER) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(guided)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), GrammarError)
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        "root ::= foo",
        'root ::= "a',
        'root ::= ("a"',
        'start ::= "a"',
        "root ::= root",
        "root ::= [z-a]",
        "hello",
        "",
        '{"name": "sql_select"}',
        'root ::= "a"{5,2}',
        'root ::= "a"{99999}',
    ],
)
def test_trap_c11_a_grammar_that_does_not_parse(text: str) -> None:
    error = refusal({"grammar": text})
    assert error.param == "guided.grammar"
    assert ".cc" not in error.message
    assert "project/cpp" not in error.message


@pytest.mark.parametrize(
    "pattern",
    ["(?<=x)+", "(?=a)", "(?!a)b", r"(a)\1", r"\bword\b", "(?i)a", r"\p{L}", "(", ")", "a**", "*a", "[z-a]", "a{3,2}"],
)
def test_trap_c12_unsupported_regular_expressions(pattern: str) -> None:
    assert refusal({"regex": pattern}).param == "guided.regex"


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema"])
@pytest.mark.parametrize("count", [200, 10_000, 100_000])
def test_trap_c12_deep_nesting(kind: str, count: int) -> None:
    nested = "(" * count + "a" + ")" * count
    content: Any = {"regex": nested, "grammar": f"root ::= {nested.replace('a', chr(34) + 'a' + chr(34))}"}.get(kind)
    if kind == "json_schema":
        content = {"type": "string", "pattern": nested}
    assert refusal({kind: content}).status == 400


def test_trap_c12_deep_schemas() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    assert refusal({"json_schema": schema}).param.startswith("guided")
    assert "bytes" in refusal({"json_schema": {"enum": ["x" * 10**6]}}).message


def test_trap_c13_a_failure_leaves_the_compiler_usable() -> None:
    compiler = make_compiler()
    for bad in ({"regex": "("}, {"json_schema": {"type": 3}}, {"grammar": "x"}, {"choice": []}):
        refusal(bad, compiler)
        assert accepts(compiler.compile({"regex": "[ab]+"}), "abba")


@pytest.mark.parametrize(
    ("guided", "param"),
    [
        ({}, "guided"),
        ({"regex": "a", "choice": ["a"]}, "guided"),
        ({"xml": "a"}, "guided.xml"),
        ({"regex": 3}, "guided.regex"),
        ({"regex": ""}, "guided.regex"),
        ({"regex": "a" * 10_000}, "guided.regex"),
        ({"regex": "a^b"}, "guided.regex"),
        ({"choice": "ab"}, "guided.choice"),
        ({"choice": []}, "guided.choice"),
        ({"choice": ["a", ""]}, "guided.choice[1]"),
        ({"choice": ["a", 3]}, "guided.choice[1]"),
        ({"choice": ["\ud800"]}, "guided.choice[0]"),
        ({"choice": ["a"] * 5000}, "guided.choice"),
        ({"json_object": False}, "guided.json_object"),
        ({"json_object": {}}, "guided.json_object"),
        ({"grammar": {"file": "x"}}, "guided.grammar"),
        ({"grammar": 3}, "guided.grammar"),
        ({"json_schema": float("nan")}, "guided"),
        ({"json_schema": "{}"}, "guided.json_schema"),
        ({"regex": "a", "whitespace": "none"}, "guided.whitespace"),
        ({"regex": "a", "whitespace": 3}, "guided.whitespace"),
        ("regex", "guided"),
    ],
)
def test_wrong_options_name_the_field(guided: Any, param: str) -> None:
    assert refusal(guided).param == param


def test_choice_with_prefixes_and_special_characters() -> None:
    choices = ["a", "ab", 'say "hi"\n', "back\\slash", "[x]", "日本", "😀"]
    grammar = COMPILER.compile({"choice": choices})
    for text in choices:
        assert accepts(grammar, text)
    for text in ("", "b", "abc", "say", "x", "日"):
        assert not accepts(grammar, text)


def test_regex_matches_the_whole_text() -> None:
    grammar = COMPILER.compile({"regex": "^a|b$"})
    assert accepts(grammar, "a")
    assert accepts(grammar, "b")
    assert not accepts(grammar, "ax")
    assert not accepts(grammar, "xb")
    assert accepts(COMPILER.compile({"regex": r"\d+(\.\d+)?"}), "12.5")
    assert not accepts(COMPILER.compile({"regex": r"\d+(\.\d+)?"}), "12.")
    assert accepts(COMPILER.compile({"regex": r"x(^a|b$)"}), "xb")


def test_json_object() -> None:
    grammar = COMPILER.compile({"json_object": True})
    assert accepts(grammar, '{"a": [1, {"b": null}]}')
    for text in (
        "[]",
        '"a"',
        "{",
        '{"a": 01}',
        '{"a": 1,}',
        "{a: 1}",
        '{"a": "\n"}',
        '{"a": "\\x"}',
        '{"a": "\\ud800"}',
    ):
        assert not accepts(grammar, text)


@pytest.mark.parametrize("name", sorted(named_grammars()))
def test_named_grammars(name: str) -> None:
    entry = named_grammars()[name]
    grammar = COMPILER.compile({"grammar": {"name": name}})
    assert accepts(grammar, entry.accepted)
    assert not accepts(grammar, entry.refused)
    assert entry.description.endswith(".")


def test_an_unknown_name_lists_the_known_ones() -> None:
    error = refusal({"grammar": {"name": "cobol"}})
    assert error.param == "guided.grammar.name"
    assert all(name in error.message for name in ("sql_select", "iso8601", "tool_call", "json", "arithmetic"))


def test_trap_c16_c17_the_budget_ends_a_compilation_and_its_callers() -> None:
    """A native compilation that does not end: its callers get errors, and the number of such threads is bounded."""
    compiler = make_compiler(compile_seconds=0.2, compile_threads=2)
    released = threading.Event()
    native = compiler._backend.compile

    def stuck(text: str) -> Any:
        assert released.wait(60)
        return native(text)

    compiler._backend.compile = stuck  # type: ignore[method-assign]
    try:
        for i in range(2):
            error = refusal({"regex": f"a{{{i + 1}}}"}, compiler)
            assert "0.2 s" in error.message
        busy = refusal({"regex": "c"}, compiler)
        assert busy.code == "grammar_busy"
        assert "0.2 s" in refusal({"regex": "a{1}"}, compiler).message, "kept: a second caller does not start another"
        assert compiler.cache.failures == 2
    finally:
        released.set()
    for _ in range(2):
        assert compiler._slots.acquire(timeout=60)
    for _ in range(2):
        compiler._slots.release()
    compiler._backend.compile = native  # type: ignore[method-assign]
    assert accepts(compiler.compile({"regex": "c"}), "c"), "busy is not remembered"


def test_trap_c17_an_internal_fault_is_raised_and_nobody_waits() -> None:
    compiler = make_compiler()

    def broken(text: str) -> Any:
        raise RuntimeError("out of luck")

    native, compiler._backend.compile = compiler._backend.compile, broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        compiler.compile({"regex": "a"})
    compiler._backend.compile = native  # type: ignore[method-assign]
    assert accepts(compiler.compile({"regex": "a"}), "a")


def test_compiling_from_many_threads_makes_each_grammar_once() -> None:
    compiler = make_compiler()
    made: list[str] = []
    native = compiler._backend.compile

    def counted(text: str) -> Any:
        made.append(text)
        return native(text)

    compiler._backend.compile = counted  # type: ignore[method-assign]
    options = [{"choice": [f"x{i % 5}", "y"]} for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(compiler.compile, options))
    assert len(made) == 5
    assert len({id(g) for g in grammars}) == 5
    assert all(accepts(grammar, f"x{i % 5}") for i, grammar in enumerate(grammars))


def test_matchers_of_one_grammar_in_many_threads() -> None:
    """Masks are made on demand and shared; two threads that need the same one must not disturb each other."""
    grammar = make_compiler().compile({"json_object": True})
    ids = encode('{"a": [1, 2.5, {"b": "text"}], "c": null}')

    def walk(_: int) -> bytes:
        import numpy as np

        matcher = grammar.matcher()
        mask = np.zeros((len(ids), COMPILER.vocabulary.words), dtype=np.int32)
        for i, token in enumerate(ids):
            matcher.fill(mask, i)
            assert matcher.accept(token)
        return mask.tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(walk, range(32)))) == 1


def test_trap_c33_the_cache_is_bounded_in_bytes() -> None:
    compiler = make_compiler(cache_bytes=2 * 2**20)
    for i in range(400):
        compiler.compile({"json_schema": {"type": "object", "properties": {f"key{i}": {"type": "integer"}}}})
        refusal({"json_schema": {"type": "array", "uniqueItems": True, "title": str(i)}}, compiler)
    compiler.cache.check()
    assert 0 < len(compiler.cache) < 400
    assert compiler.cache.failures <= compiler.cache.max_failures


def test_the_order_of_properties_makes_another_grammar() -> None:
    a = COMPILER.compile({"json_schema": {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}})
    b = COMPILER.compile({"json_schema": {"properties": {"b": {}, "a": {}}, "required": ["a", "b"]}})
    assert accepts(a, '{"a": 1, "b": 2}')
    assert accepts(b, '{"b": 2, "a": 1}')
    assert not accepts(b, '{"a": 1, "b": 2}')


def test_large_enumerations_are_no_work() -> None:
    """Each value is tried once against the other constraints."""
    compiler = make_compiler(compile_seconds=5.0)
    values = [f"value-{i}" for i in range(2000)]
    grammar = compiler.compile({"json_schema": {"enum": values, "pattern": "7$"}})
    assert accepts(grammar, '"value-77"')
    assert not accepts(grammar, '"value-78"')
    assert accepts(compiler.compile({"choice": values}), "value-1999")


def test_ambiguous_groups_are_counted_by_an_automaton_or_refused() -> None:
    """A matcher that guesses how often a group came needs seconds for one mask."""
    assert accepts(COMPILER.compile({"regex": r"([a-z]+ ){1,200}"}), "hello world " * 20)
    assert refusal({"regex": r"(\w+\s?){1,50}"}).param == "guided.regex"
    assert refusal({"json_schema": {"pattern": r"^(\w+\s?){1,50}$"}}).param == "guided.json_schema/pattern"


def test_messages_hold_no_text_of_the_schema_values() -> None:
    """Error messages go to logs: they name keywords and paths, never values."""
    error = refusal({"json_schema": {"properties": {"a": {"enum": "SECRET"}}}})
    assert "SECRET" not in error.message


def test_a_vocabulary_is_checked() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        GrammarCompiler(TOKENS, 3, (END,))
    with pytest.raises(ValueError, match="eos_ids"):
        GrammarCompiler(TOKENS, None, ())


LONE = "a\ud83d"


@pytest.mark.parametrize(
    "guided",
    [
        {"json_schema": {"const": LONE}},
        {"json_schema": {"enum": ["b", LONE]}},
        {"json_schema": {"type": "object", "properties": {LONE: {}}, "required": [LONE]}},
        {"json_schema": {"type": "string", "pattern": LONE}},
        {"regex": LONE + "+"},
        {"choice": [LONE]},
        {"grammar": f'root ::= "{LONE}"'},
    ],
)
def test_lone_surrogates_are_no_text_and_refused(guided: Any) -> None:
    assert next(iter(guided)) in (refusal(guided).param or "")
