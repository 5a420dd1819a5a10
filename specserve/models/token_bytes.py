"""The exact bytes that each token stands for, read from a fast tokenizer's vocabulary and decoder."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import tokenizers

from specserve.core.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_table(backend: tokenizers.Tokenizer, unused: frozenset[int] = frozenset()) -> list[bytes | None]:
    """For each id the bytes it stands for; None for special tokens, ids without a token, and `unused` ones.

    Byte-level vocabularies (GPT-2's alphabet) and SentencePiece ones (U+2581 for a space, <0xNN> for a byte) are
    known. A token of a SentencePiece vocabulary that begins a word carries its space here, also at the start of a
    text, where SentencePiece's decoder drops it.

    Raises:
        ModelLoadError: another kind of vocabulary, whose tokens do not stand for bytes.
    """
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    to_bytes = _translator(backend)
    table: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for text, token in vocab.items():
        if token in unused:
            continue
        if token not in added:
            table[token] = to_bytes(text)
        elif not added[token].special:
            table[token] = added[token].content.encode()
    return table


def _translator(backend: tokenizers.Tokenizer) -> Any:
    parts = list(_parts(backend.decoder))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        marks = [part["replacement"] for part in parts if part["type"] == "Metaspace"]
        marks += [
            part["pattern"].get("String") for part in parts if part["type"] == "Replace" and part["content"] == " "
        ]
        fallback = "ByteFallback" in kinds or bool(getattr(backend.model, "byte_fallback", False))
        return functools.partial(_sentencepiece, mark=marks[0] if marks else "\u2581", fallback=fallback)
    raise ModelLoadError(
        f"tokenizer: its decoder ({', '.join(sorted(kinds)) or 'none'}) is neither byte-level nor SentencePiece's, so "
        "its tokens do not stand for bytes; this tokenizer is not supported",
        param="model",
    )


def _parts(decoder: Any) -> Any:
    """The JSON of a decoder and of those that it is a sequence of."""
    if decoder is None:
        return
    stack = [json.loads(decoder.__getstate__())]
    while stack:
        part = stack.pop()
        if part["type"] == "Sequence":
            stack.extend(reversed(part["decoders"]))
        else:
            yield part


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(text: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:  # a token that no text reaches; decoders print it as it is
        return text.encode()


def _sentencepiece(text: str, mark: str, fallback: bool) -> bytes:
    found = _BYTE_TOKEN.fullmatch(text) if fallback else None
    return bytes([int(found[1], 16)]) if found else text.replace(mark, " ").encode()
