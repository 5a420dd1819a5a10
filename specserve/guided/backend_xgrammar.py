"""The xgrammar backend: compiles GBNF text against a vocabulary and matches tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from specserve.core.imports import TRANSFORMERS
from specserve.guided.masks import Mask, row_of
from specserve.guided.vocabulary import Vocabulary

MASK_CACHE_BYTES = 64 * 2**20


class BackendError(ValueError):
    """The backend does not accept a grammar."""


class XGrammarBackend:
    """Compiles grammars for one vocabulary. Thread-safe."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Imported here: it takes seconds and brings torch along.
        with TRANSFORMERS:
            import xgrammar

        self.vocabulary = vocabulary
        self._module = xgrammar
        info = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=list(vocabulary.eos_ids),
            add_prefix_space=False,
        )
        # Masks are made when a state is first met: a compilation takes milliseconds instead of seconds, and most
        # states of a schema are never met. Finished masks are shared between grammars in the backend's own cache.
        self._compiler = xgrammar.GrammarCompiler(
            info,
            max_threads=1,
            cache_enabled=True,
            cache_limit_bytes=MASK_CACHE_BYTES,
            enable_dynamic_compilation=True,
        )
        self.end_row = row_of(vocabulary.eos_ids, vocabulary.vocab_size)
        words = [i for i, text in enumerate(vocabulary.token_bytes) if text]
        self.usable_row = row_of([*words, *vocabulary.eos_ids], vocabulary.vocab_size)

    def compile(self, grammar: str) -> XGrammarProgram:
        """Compile GBNF text; its rule "root" is the start.

        Raises:
            BackendError: the text does not parse.
        """
        try:
            compiled = self._compiler.compile_grammar(grammar)
        except Exception as error:
            raise BackendError(_reason(error)) from None
        return XGrammarProgram(self, compiled, len(grammar))

    def new_matcher(self, compiled: Any) -> Any:
        return self._module.GrammarMatcher(compiled)


def _reason(error: Exception) -> str:
    """The backend's message without its time stamp, source file and echo of the grammar."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text.rsplit(".cc:", 1)[-1].partition(": ")[2].strip() or text


class XGrammarProgram:
    """A compiled grammar."""

    def __init__(self, backend: XGrammarBackend, compiled: Any, text_bytes: int) -> None:
        self._backend = backend
        self._compiled = compiled
        self._text_bytes = text_bytes

    @property
    def memory_bytes(self) -> int:
        """About what it holds now; it grows as masks are made."""
        return int(self._compiled.memory_size_bytes) + self._text_bytes + 4096

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._backend, self._backend.new_matcher(self._compiled))


class XGrammarMatcher:
    """The state of one sequence (core.protocols.Matcher). Rollback is not limited in depth."""

    __slots__ = ("_backend", "_native", "_vocabulary")

    def __init__(self, backend: XGrammarBackend, native: Any) -> None:
        self._backend = backend
        self._vocabulary = backend.vocabulary
        self._native = native

    def fill(self, mask: Mask, row: int) -> None:
        words = self._vocabulary.words
        if mask.shape[1] > words:  # logits wider than the vocabulary, as of a padded model
            narrow = np.empty((1, words), dtype=np.int32)
            self.fill(narrow, 0)
            mask[row, :words] = narrow[0]
            mask[row, words:] = 0
            return
        if self._native.is_terminated():
            mask[row] = self._backend.end_row
            return
        if self._native.fill_next_token_bitmask(mask, row):
            mask[row] &= self._backend.usable_row
        else:  # everything is legal, which the backend does not write out
            mask[row] = self._backend.usable_row

    def accept(self, token: int) -> bool:
        # What is illegal in every state is decided here: the backend writes a warning for such tokens.
        texts = self._vocabulary.token_bytes
        if not 0 <= token < len(texts) or self._native.is_terminated():
            return False
        if not texts[token] and (token not in self._vocabulary.eos_ids or not self._native.is_completed()):
            return False
        return bool(self._native.accept_token(token))

    def rollback(self, n: int) -> None:
        if n:
            self._native.rollback(n)

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._backend, self._native.fork())

    @property
    def terminated(self) -> bool:
        return bool(self._native.is_terminated())

    @property
    def complete(self) -> bool:
        if self._native.is_terminated():
            return True
        if not self._native.is_completed():
            return False
        mask = np.zeros((1, self._vocabulary.words), dtype=np.int32)
        self.fill(mask, 0)
        return bool((mask[0] == self._backend.end_row).all())
