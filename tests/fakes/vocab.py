"""A toy vocabulary: every byte is a token, so are some words, and some are parts of characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

EOS = 0
SPECIAL = 1
FIRST_BYTE = 2
WORDS = [
    "hello",
    " world",
    "STOP",
    "ST",
    "OP",
    "ab",
    "abc",
    "\n\n",
    "true",
    "false",
    '{"a":',
    "}",
    "日本",
    " the",
    "ends here",
]
EMOJI = "👩‍👧".encode()  # three code points joined
PIECES = [EMOJI[:2], EMOJI[2:5], EMOJI[5:], "é".encode() + "ü".encode()[:1]]


class ToyVocabulary:
    """The tokenizer of the fakes. Ids: 0 the end token, 1 another special one, 2..257 the bytes, then words."""

    eos_ids = (EOS,)

    def __init__(self) -> None:
        self._bytes = [b"", b"", *(bytes([i]) for i in range(256)), *(w.encode() for w in WORDS), *PIECES]
        self._ids = {data: i for i, data in enumerate(self._bytes) if data}
        self._longest = max(map(len, self._bytes))

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def id(self, text: str | bytes) -> int:
        """The one token of a text."""
        return self._ids[text.encode() if isinstance(text, str) else text]

    def encode(self, text: str) -> list[int]:
        """Longest match first."""
        data, ids = text.encode(), []
        while data:
            piece = next(data[:n] for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[piece])
            data = data[len(piece) :]
        return ids

    def split(self, text: str) -> list[int]:
        """One token a byte."""
        return [FIRST_BYTE + byte for byte in text.encode()]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")
