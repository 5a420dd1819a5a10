"""Masks and matcher states: every bit is right, every step can be undone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from specserve.guided.masks import allocate, fill_chain, legal, longest_legal, row_of, tokens_of
from tests.fakes.vocabulary import CONTROL, END, OTHER_END, TOKENS, WIDTH, encode, make_compiler, token_id

COMPILER = make_compiler()
NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "minItems": 1, "maxItems": 4},
        "inner": {"type": "object", "properties": {"n": {"type": "number"}, "e": {"enum": ["é", "日本", "ab"]}}},
    },
    "required": ["name", "tags"],
}
NESTED_TEXT = (
    '{"name": "日本 😀 abc", "tags": ["abc", "xyz"], "inner": {"n": -12.5e+3, "e": "日本"}, "b": [1, {"x": null}]}'
)
GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": NESTED}, NESTED_TEXT),
    ({"json_object": True}, '{"a": [1, -0.5e+10, "\\u00e9\\n\\"😀"], "é": {}}'),
    ({"regex": r"[😀-🙏]+\d{2,4}"}, "😀🙏😂2024"),
    ({"regex": r"(ab|abc)*x{3,9}"}, "ababcabxxxx"),
    ({"choice": ["a", "ab", "abc", "日本", '"quoted\\"']}, "abc"),
    ({"grammar": {"name": "arithmetic"}}, "(1 + 2.5) * -3 / 4"),
    ({"json_schema": {"type": "integer", "multipleOf": 12}}, "-1200"),
    ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 9}}, '"aaaaaaaaa"'),
    ({"json_schema": {}}, '{"hello": "\\\\ world"}'),
    # more repeats than the backend unrolls, of classes with characters of several bytes
    ({"json_schema": {"type": "string", "minLength": 2, "maxLength": 400}}, '"日本 abc"'),
    ({"json_schema": {"type": "string", "minLength": 150, "maxLength": 300}}, '"' + "日本ab c" * 40 + '"'),
    ({"json_schema": {"type": "string", "minLength": 256, "maxLength": 256}}, '"' + "aé" * 128 + '"'),
    ({"regex": "[a-zé-ü日-本]{2,300}"}, "abé日本"),
    ({"regex": "(?:[a-c]+x){1,200}"}, "abxcx"),
    ({"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 200}}, "[true, false]"),
]
IDS = [next(iter(g)) + str(i) for i, (g, _) in enumerate(GRAMMARS)]


def row(matcher: Any) -> np.ndarray:
    mask = allocate(1, WIDTH)
    matcher.fill(mask, 0)
    return mask[0]


@pytest.mark.parametrize(("guided", "text"), GRAMMARS, ids=IDS)
def test_trap_b16_every_mask_bit_is_what_a_clone_accepts(guided: dict[str, Any], text: str, capfd: Any) -> None:
    matcher = COMPILER.compile(guided).matcher()
    random.seed(3)
    for cut in (True, False):  # byte by byte, so that states inside characters are met, and by longest tokens
        matcher = COMPILER.compile(guided).matcher()
        ids = [token_id(bytes([b])) for b in text.encode()] if cut else encode(text)
        for token in [*ids, END]:
            allowed = tokens_of(row(matcher))
            assert allowed == [t for t in range(WIDTH + 40) if matcher.fork().accept(t)]
            assert allowed, "a state without a legal token"
            assert matcher.accept(token), (text, token)
        assert matcher.terminated
    assert capfd.readouterr() == ("", "")


def test_trap_b16_control_tokens_and_padding_are_never_legal() -> None:
    matcher = COMPILER.compile({"regex": r"[\s\S]*"}).matcher()
    allowed = set(tokens_of(row(matcher)))
    assert {END, OTHER_END} <= allowed
    assert CONTROL not in allowed
    assert not allowed & set(range(len(TOKENS), WIDTH + 32))
    for token in (CONTROL, len(TOKENS), WIDTH, -1, 2**31):
        assert not matcher.accept(token)
    assert set(tokens_of(row(matcher))) == allowed


def test_trap_b16_masks_may_be_wider_than_the_vocabulary() -> None:
    matcher = COMPILER.compile({"json_object": True}).matcher()
    wide = allocate(2, WIDTH + 100)
    matcher.fill(wide, 1)
    assert tokens_of(wide[1]) == tokens_of(row(matcher))
    assert (wide[0] == -1).all()


def test_trap_b2_each_position_has_its_own_mask() -> None:
    grammar = COMPILER.compile({"json_schema": NESTED})
    matcher = grammar.matcher()
    draft = encode(NESTED_TEXT)[:9]
    before = row(matcher)
    mask = allocate(len(draft) + 1, WIDTH)
    fill_chain(matcher, draft, mask)
    for position in range(len(draft) + 1):
        alone = grammar.matcher()
        assert all(alone.accept(token) for token in draft[:position])
        assert (mask[position] == row(alone)).all()
    assert (row(matcher) == before).all()
    assert len({bytes(r.tobytes()) for r in mask}) > 3
    assert mask.dtype == np.int32
    assert mask.flags.c_contiguous


def test_trap_b2_rows_behind_an_illegal_draft_token_are_open() -> None:
    matcher = COMPILER.compile({"choice": ["abx", "aby"]}).matcher()
    draft = [token_id("a"), token_id("z"), token_id("x")]
    mask = np.zeros((4, COMPILER.vocabulary.words), dtype=np.int32)
    fill_chain(matcher, draft, mask)
    assert legal(mask[0], token_id("a"))
    assert tokens_of(mask[1]) == [t for t in range(WIDTH) if _after(matcher, token_id("a"), t)]
    assert (mask[2:] == -1).all()
    assert longest_legal(matcher, draft) == 1
    assert matcher.accept(token_id("ab"))


def _after(matcher: Any, first: int, token: int) -> bool:
    clone = matcher.fork()
    return clone.accept(first) and clone.accept(token)


def test_trap_b8_after_the_end_only_end_tokens_are_legal() -> None:
    matcher = COMPILER.compile({"json_schema": {"enum": ["ab"]}}).matcher()
    assert not matcher.complete
    draft = [*encode('"ab"'), END, END]
    mask = allocate(len(draft) + 1, WIDTH)
    fill_chain(matcher, draft, mask)
    assert tokens_of(mask[len(draft) - 2]) == sorted([END, OTHER_END])
    assert tokens_of(mask[len(draft) - 1]) == sorted([END, OTHER_END])
    for token in encode('"ab"'):
        assert not matcher.complete
        assert matcher.accept(token)
    assert matcher.complete
    assert not matcher.terminated
    assert matcher.accept(OTHER_END)
    assert matcher.terminated
    assert matcher.complete
    assert tokens_of(row(matcher)) == sorted([END, OTHER_END])
    assert not matcher.accept(END)
    assert not matcher.accept(token_id("a"))
    matcher.rollback(1)
    assert matcher.complete
    assert not matcher.terminated


def test_complete_is_not_only_may_end() -> None:
    matcher = COMPILER.compile({"choice": ["a", "ab"]}).matcher()
    assert matcher.accept(token_id("a"))
    assert legal(row(matcher), END)
    assert not matcher.complete
    assert matcher.accept(token_id("b"))
    assert matcher.complete


@pytest.mark.parametrize(("guided", "text"), GRAMMARS, ids=IDS)
def test_trap_b12_rollback_is_exact(guided: dict[str, Any], text: str) -> None:
    matcher = COMPILER.compile(guided).matcher()
    ids = [token_id(bytes([b])) for b in text.encode()] + [END]
    rows = []
    for token in ids:
        rows.append(row(matcher))
        assert matcher.accept(token)
    for n in range(len(ids), 0, -1):
        matcher.rollback(1)
        assert (row(matcher) == rows[n - 1]).all()
    for token in ids:
        assert matcher.accept(token)
    matcher.rollback(len(ids))
    assert (row(matcher) == rows[0]).all()


def test_trap_b12_rollback_of_hundreds_of_tokens() -> None:
    matcher = COMPILER.compile({"json_object": True}).matcher()
    for token in encode('{"a": "'):
        assert matcher.accept(token)
    before = row(matcher)
    for _ in range(500):
        assert matcher.accept(token_id("ab"))
    assert matcher.accept(token_id('"'))
    matcher.rollback(501)
    assert (row(matcher) == before).all()


def test_an_illegal_token_changes_nothing(capfd: Any) -> None:
    matcher = COMPILER.compile({"json_schema": NESTED}).matcher()
    for token in encode(NESTED_TEXT)[:7]:
        before = row(matcher)
        for wrong in [t for t in range(WIDTH + 2) if not legal(before, t) or t >= WIDTH] if token % 3 == 0 else []:
            assert not matcher.accept(wrong)
        assert (row(matcher) == before).all()
        assert matcher.accept(token)
    matcher.rollback(7)
    assert capfd.readouterr() == ("", "")


def test_forks_are_independent() -> None:
    matcher = COMPILER.compile({"choice": ["ax", "bx"]}).matcher()
    other = matcher.fork()
    assert matcher.accept(token_id("a"))
    assert other.accept(token_id("b"))
    assert matcher.accept(token_id("x"))
    assert not other.complete
    assert other.accept(token_id("x"))
    assert other.complete


def test_trap_c24_a_class_of_emoji_matches_byte_by_byte() -> None:
    matcher = COMPILER.compile({"grammar": "root ::= [😀-🙏]+"}).matcher()
    assert matcher.accept(token_id(b"\xf0\x9f"))
    assert not matcher.accept(token_id("a"))
    assert not matcher.accept(END)
    assert matcher.accept(token_id(b"\x98\x80"))
    assert matcher.accept(token_id("😀"))
    assert matcher.accept(END)


def test_masks_by_hand() -> None:
    mask = row_of([0, 31, 32, 70], 71)
    assert mask.shape == (3,)
    assert tokens_of(mask) == [0, 31, 32, 70]
    assert [t for t in range(71) if legal(mask, t)] == [0, 31, 32, 70]
    assert tokens_of(allocate(2, 40)[1]) == list(range(64))
