"""A byte-level vocabulary for tests of guided decoding: every byte, some longer tokens, control tokens, padding."""

from __future__ import annotations

import json
from typing import Any

from specserve.guided.compiler import CompiledGrammar, GrammarCompiler
from specserve.guided.request import GuidedLimits

_LONGER = [
    *('": ', '", "', '"}', "}}", "]]", '{"', '["', ": ", ", ", '"a', 'a"', "ab", "abc", "true", "false", "null"),
    *('": "', "12", "123", "1234567890", "0.5", "00", "-1", "e1", "e+", ".0", '":', '",', '"}}', '": {', "\\n", '\\"'),
    *("\\u00", "hello", " world", "zulu", "alpha", "name", "value", "  ", "\n\n", "\t", "SELECT ", " FROM ", "é"),
    *("日本", "😀", "3, ", '3]', "3}", "aaaa", "aaaaaaaa", "2024", "-0", "T1", 'x": 1', '"b": ', "xyz"),
]  # fmt: skip
# Pieces of characters: the first and second half of an emoji, and a byte that begins nothing.
_PIECES = [b"\xf0\x9f", b"\x98\x80", b"\x99", b'\x98"', b"a\xf0", b"\xe6\x97", b"\xa5\xe6", b'"\xf0\x9f']
PADDING = 13


def _tokens() -> list[bytes]:
    singles = [bytes([i]) for i in range(256)]
    longer = [text.encode() for text in dict.fromkeys(_LONGER)]
    pairs = [bytes([a, b]) for a in b"abcxyz019" for b in b'abcxyz019",:}] ']
    unique = list(dict.fromkeys([*singles, *longer, *_PIECES, *pairs]))
    return [*unique[:100], b"", *unique[100:], b"", b""]


TOKENS: list[bytes] = _tokens()
END = len(TOKENS) - 1
OTHER_END = 100
CONTROL = len(TOKENS) - 2
WIDTH = len(TOKENS) + PADDING
_IDS = {text: i for i, text in enumerate(TOKENS) if text}
_LONGEST = max(map(len, TOKENS))


def make_compiler(**limits: Any) -> GrammarCompiler:
    """A compiler over the vocabulary with two end tokens, one control token and padded logits."""
    return GrammarCompiler(TOKENS, WIDTH, (END, OTHER_END), GuidedLimits(**limits))


def token_id(text: str | bytes) -> int:
    """The id of exactly this token."""
    return _IDS[text.encode() if isinstance(text, str) else text]


def encode(text: str | bytes) -> list[int]:
    """Token ids of a text, longest match first."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    ids = []
    while data:
        size = next(n for n in range(min(_LONGEST, len(data)), 0, -1) if data[:n] in _IDS)
        ids.append(_IDS[data[:size]])
        data = data[size:]
    return ids


def accepts(grammar: CompiledGrammar, text: str | bytes) -> bool:
    """Whether the grammar takes the whole text and may end behind it."""
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in encode(text)) and matcher.accept(END)


def accepts_value(grammar: CompiledGrammar, value: Any) -> bool:
    """As `accepts`, for a JSON value in the canonical text."""
    return accepts(grammar, json.dumps(value, ensure_ascii=False))
