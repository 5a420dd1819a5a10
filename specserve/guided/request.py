"""From the `guided` option of a request to grammar text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.core.errors import GrammarError
from specserve.guided import automaton
from specserve.guided.automaton import TooComplexError
from specserve.guided.document import PARAM
from specserve.guided.ebnf import write
from specserve.guided.expr import Class, Expr, Lit, Ref, alt
from specserve.guided.jsontext import Style, any_value_rules, style_of
from specserve.guided.library import find
from specserve.guided.lower import lower_schema
from specserve.guided.regex import AnchorError, RegexError, counted_groups, full, parse, small

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
STYLES = ("spaced", "compact", "flexible")
# More of them in one place, and xgrammar 0.2.9 makes wrong masks for some classes.
MAX_EBNF_REPEAT = 128


@dataclass(frozen=True, slots=True)
class GuidedLimits:
    """What a request may ask of the compiler.

    Attributes:
        schema_bytes: of a JSON Schema as JSON text.
        schema_depth: nesting of a JSON Schema.
        grammar_bytes: of an EBNF text.
        grammar_depth: parentheses in an EBNF text.
        regex_chars: of a regular expression.
        choices, choice_bytes: entries of a choice, and their texts together.
        compile_seconds: for one request.
        compile_threads: native compilations at once, those included whose caller has given up.
        cache_bytes: compiled grammars kept.
    """

    schema_bytes: int = 512 * 1024
    schema_depth: int = 128
    grammar_bytes: int = 128 * 1024
    grammar_depth: int = 64
    regex_chars: int = 8192
    choices: int = 4096
    choice_bytes: int = 256 * 1024
    compile_seconds: float = 15.0
    compile_threads: int = 4
    cache_bytes: int = 256 * 2**20


def _fail(kind: str, message: str, param: str = "") -> GrammarError:
    return GrammarError(f"{kind}: {message}", param=f"guided.{kind}{param}")


_SURROGATE = re.compile("[\ud800-\udfff]")


def kind_of(guided: Mapping[str, Any]) -> str:
    """The one kind of guidance that a request names."""
    for name in guided:
        if name not in KINDS and name != "whitespace":
            raise GrammarError(f"guided.{name}: unknown; use one of {', '.join(KINDS)}", param=f"guided.{name}")
    kinds = [kind for kind in KINDS if kind in guided]
    if len(kinds) != 1:
        raise GrammarError(f"guided: must have exactly one of {', '.join(KINDS)}", param="guided")
    return kinds[0]


def key_of(guided: Mapping[str, Any]) -> str:
    """A text that differs for requests that need different grammars (the order of properties counts)."""
    try:
        return json.dumps(guided, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise GrammarError("guided: must be plain JSON data of moderate depth", param="guided") from None


def grammar_text(guided: Mapping[str, Any], limits: GuidedLimits, deadline: float) -> str:
    """GBNF text for a request.

    Raises:
        GrammarError: the option is wrong, unsupported or beyond the limits.
    """
    kind = kind_of(guided)
    style = style_of(guided.get("whitespace", "spaced")) if isinstance(guided.get("whitespace", ""), str) else None
    if style is None:
        raise GrammarError(f"whitespace: must be one of {', '.join(STYLES)}", param="guided.whitespace")
    content = guided[kind]
    if kind == "grammar" and isinstance(content, Mapping):
        if set(content) != {"name"}:
            raise _fail("grammar", 'must be a grammar\'s text or {"name": ...}')
        named = find(content["name"])
        kind, content = named.kind, named.content
    return _by_kind(kind, content, style, limits, deadline)


def _by_kind(kind: str, content: Any, style: Style, limits: GuidedLimits, deadline: float) -> str:
    if kind == "choice":
        return _choice(content, limits)
    if _SURROGATE.search(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)):
        raise _fail(kind, "holds a lone surrogate, which is not valid Unicode and stands for no text")
    if kind == "json_schema":
        return _schema(content, style, limits, deadline)
    if kind == "json_object":
        if content is not True:
            raise _fail(kind, "must be true")
        return _written(kind, {**any_value_rules(style), "root": Ref("any_object")})
    if kind == "regex":
        return _regex(content, limits)
    return _ebnf(content, limits)


def _schema(content: Any, style: Style, limits: GuidedLimits, deadline: float) -> str:
    if isinstance(content, str):
        raise GrammarError("json_schema: must be a JSON Schema object, not a text", param=PARAM)
    size = len(json.dumps(content))
    if size > limits.schema_bytes:
        raise GrammarError(f"json_schema: is {size} bytes; at most {limits.schema_bytes} are allowed", param=PARAM)
    try:
        return lower_schema(content, style, max_depth=limits.schema_depth, deadline=deadline)
    except RecursionError:
        raise GrammarError("json_schema: nests too deep", param=PARAM) from None


def _regex(content: Any, limits: GuidedLimits) -> str:
    if not isinstance(content, str) or not content:
        raise _fail("regex", "must be a regular expression as a text that is not empty")
    if len(content) > limits.regex_chars:
        raise _fail("regex", f"is {len(content)} characters long; at most {limits.regex_chars} are allowed")
    try:
        expr = parse(content)
        try:
            whole = full(expr)
            dfa = small(whole) if counted_groups(whole) > 1 else None
        except AnchorError:  # an automaton knows where the text begins and ends
            dfa = automaton.build(expr)
        if dfa is None:
            return _written("regex", {"root": whole})
        return _written("regex", {**automaton.to_rules(dfa, "d", Class), "root": Ref("d_0")})
    except (RegexError, TooComplexError) as error:
        raise _fail("regex", str(error)) from None


def _choice(content: Any, limits: GuidedLimits) -> str:
    if not isinstance(content, (list, tuple)) or not content:
        raise _fail("choice", "must be a list of texts with at least one entry")
    if len(content) > limits.choices:
        raise _fail("choice", f"has {len(content)} entries; at most {limits.choices} are allowed")
    for i, text in enumerate(content):
        if not isinstance(text, str) or not text:
            raise _fail("choice", f"entry {i} must be a text that is not empty", f"[{i}]")
        if _SURROGATE.search(text):
            raise _fail("choice", f"entry {i} is not valid Unicode", f"[{i}]")
    if sum(len(text.encode()) for text in content) > limits.choice_bytes:
        raise _fail("choice", f"is longer than {limits.choice_bytes} bytes in all")
    return _written("choice", {"root": alt([Lit(text) for text in content])})


def _written(kind: str, rules: dict[str, Expr]) -> str:
    text = write(rules)
    if text is None:
        raise _fail(kind, "no text matches it")
    return text


def _ebnf(content: Any, limits: GuidedLimits) -> str:
    if not isinstance(content, str) or not content.strip():
        raise _fail("grammar", 'must be a grammar in GBNF notation as a text, or {"name": ...}')
    if len(content.encode(errors="replace")) > limits.grammar_bytes:
        raise _fail("grammar", f"is longer than {limits.grammar_bytes} bytes")
    depth = deepest = 0
    # texts and classes are skipped: a bracket inside them does not nest
    for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|\{\s*\d*\s*,?\s*\d*\s*\}|[()]', content):
        part = found[0]
        if part in "()":
            depth += 1 if part == "(" else -1
            deepest = max(deepest, depth)
        elif part.startswith("{") and any(int(n) > MAX_EBNF_REPEAT for n in re.findall(r"\d+", part)):
            raise _fail("grammar", f"repeats more than {MAX_EBNF_REPEAT} times; split the repeat into several")
    if deepest > limits.grammar_depth:
        raise _fail("grammar", f"parentheses nest deeper than {limits.grammar_depth}")
    return content
