"""A fake grammar compiler: choices of texts, over any byte-exact vocabulary. No grammar library."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from specserve.core.errors import GrammarError


class ChoiceMatcher:
    """The state of one text that must become one of `choices`."""

    def __init__(self, choices: tuple[bytes, ...], vocabulary: Any) -> None:
        self._choices = choices
        self._vocabulary = vocabulary
        self._path: list[bytes] = []  # what each accepted token appended
        self._ended = False

    @property
    def _text(self) -> bytes:
        return b"".join(self._path)

    def _legal(self, token: int) -> bool:
        text = self._text
        if token in self._vocabulary.eos_ids:
            return text in self._choices
        data = self._vocabulary.token_bytes(token)
        return bool(data) and any(choice.startswith(text + data) for choice in self._choices)

    def fill(self, mask: np.ndarray, row: int) -> None:
        bits = np.zeros(mask.shape[1] * 32, dtype=np.uint8)
        for token in range(self._vocabulary.vocab_size):
            bits[token] = self._legal(token)
        mask[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        if self._ended or not self._legal(token):
            return False
        self._ended = token in self._vocabulary.eos_ids
        self._path.append(self._vocabulary.token_bytes(token))
        return True

    def rollback(self, n: int) -> None:
        assert n <= len(self._path)
        del self._path[len(self._path) - n :]
        if n:
            self._ended = False

    def fork(self) -> ChoiceMatcher:
        other = ChoiceMatcher(self._choices, self._vocabulary)
        other._path, other._ended = list(self._path), self._ended
        return other

    @property
    def terminated(self) -> bool:
        return self._ended

    @property
    def complete(self) -> bool:
        text = self._text
        return text in self._choices and not any(c != text and c.startswith(text) for c in self._choices)


class FakeGrammar:
    def __init__(self, choices: tuple[bytes, ...], vocabulary: Any) -> None:
        self._choices = choices
        self._vocabulary = vocabulary

    def matcher(self) -> ChoiceMatcher:
        return ChoiceMatcher(self._choices, self._vocabulary)


class FakeCompiler:
    """Compiles {"choice": [...]}; {"regex": ...} is refused; {"grammar": ...} fails in a way nobody foresaw.

    Attributes:
        gate: compilations wait for it.
    """

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self.gate = threading.Event()
        self.gate.set()
        self.compiled = 0

    def compile(self, guided: Mapping[str, Any]) -> FakeGrammar:
        assert self.gate.wait(30)
        self.compiled += 1
        if "regex" in guided:
            raise GrammarError("guided.regex: cannot be parsed", param="guided.regex")
        if "choice" not in guided:
            raise KeyError(f"secret {guided}")
        return FakeGrammar(tuple(choice.encode() for choice in guided["choice"]), self._vocabulary)
