"""Masks over the demo model's whole vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.core.errors import GrammarError, ModelLoadError
from specserve.guided.compiler import GrammarCompiler
from specserve.guided.masks import allocate, tokens_of
from specserve.models.loader import load_tokenizer
from tests.fakes.data import shared_lines
from tests.fakes.instances import in_declared_order

PADDED = 64


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    try:
        return load_tokenizer("demo")
    except ModelLoadError as error:
        pytest.skip(f"the demo model is not here: {error.message}")


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    token_bytes = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    return GrammarCompiler(token_bytes, tokenizer.vocab_size + PADDED, tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("guided", "prefixes"),
    [
        ({"json_object": True}, ["", '{"', '{"na', '{"a": ', '{"a": -1', '{"a": "\\', '{"é": [1, ', '{"a": {}}']),
        ({"json_schema": {"type": "string", "maxLength": 12}}, ['"', '"hello wor', '"日本', '"abcdefghijkl']),
        ({"regex": "[😀-🙏]+ ok"}, ["", b"\xf0", b"\xf0\x9f\x98", "😀", "😀 o"]),
        ({"choice": ["yes", "yes, sir", "no"]}, ["", "y", "yes", "no"]),
    ],
    ids=["object", "string", "emoji", "choice"],
)
def test_trap_b16_over_the_demo_vocabulary(
    compiler: GrammarCompiler, guided: dict[str, Any], prefixes: list[str | bytes], capfd: Any
) -> None:
    grammar = compiler.compile(guided)
    single = {text: i for i, text in enumerate(compiler.vocabulary.token_bytes) if len(text) == 1}
    size = compiler.vocabulary.vocab_size
    for prefix in prefixes:
        matcher = grammar.matcher()
        for byte in prefix if isinstance(prefix, bytes) else prefix.encode():
            assert matcher.accept(single[bytes([byte])])
        mask = allocate(1, size)
        matcher.fill(mask, 0)
        allowed = set(tokens_of(mask[0]))
        for token in range(size):
            clone_accepts = matcher.accept(token)
            if clone_accepts:
                matcher.rollback(1)
            assert clone_accepts == (token in allowed), (prefix, token)
    assert capfd.readouterr().err == ""


def test_maskbench_tokenised_as_the_model_does(compiler: GrammarCompiler, tokenizer: Any) -> None:
    """Valid instances pass as the tokenizer cuts them, and each step's mask allows the next token."""
    passed = 0
    for row in shared_lines("maskbench.jsonl")[5::40]:
        try:
            grammar = compiler.compile({"json_schema": row["schema"]})
        except GrammarError:
            continue
        for test in [t for t in row["tests"] if t["valid"]][:1]:
            value = in_declared_order(test["data"], row["schema"], row["schema"])
            matcher = grammar.matcher()
            mask = allocate(1, compiler.vocabulary.vocab_size)
            for token in tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)[:200]:
                matcher.fill(mask, 0)
                assert mask[0][token >> 5] >> (token & 31) & 1, row["name"]
                assert matcher.accept(token)
            passed += 1
    assert passed >= 5
