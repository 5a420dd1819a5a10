"""GrammarCompiler: from a request's `guided` option to a compiled grammar, under budgets, with a cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from specserve.core.errors import GrammarError
from specserve.core.protocols import Matcher
from specserve.guided.backend_xgrammar import BackendError, XGrammarBackend, XGrammarProgram
from specserve.guided.cache import GrammarCache
from specserve.guided.request import GuidedLimits, grammar_text, key_of, kind_of
from specserve.guided.vocabulary import Vocabulary


class CompiledGrammar:
    """A grammar ready to match."""

    def __init__(self, program: XGrammarProgram) -> None:
        self._program = program

    @property
    def memory_bytes(self) -> int:
        """About what it holds in memory now."""
        return self._program.memory_bytes

    def matcher(self) -> Matcher:
        """A fresh matcher at the start of the grammar."""
        return self._program.matcher()


class GrammarCompiler:
    """Compiles and caches. `compile` blocks; call it in a thread. Thread-safe.

    Args:
        token_bytes: exact bytes of every token, b"" for control tokens.
        vocab_size: width of the logits.
        eos_ids: ids that end an answer.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int | None = None,
        eos_ids: Sequence[int] = (),
        limits: GuidedLimits | None = None,
    ) -> None:
        self.vocabulary = Vocabulary.build(token_bytes, vocab_size, eos_ids)
        self.limits = limits or GuidedLimits()
        self.cache: GrammarCache[CompiledGrammar] = GrammarCache(self.limits.cache_bytes)
        self._backend = XGrammarBackend(self.vocabulary)
        self._slots = threading.BoundedSemaphore(self.limits.compile_threads)

    def compile(self, guided: Mapping[str, Any]) -> CompiledGrammar:
        """The grammar of a request's `guided` option.

        Raises:
            GrammarError: it is wrong, cannot be enforced whole, or needs more than the budgets allow.
        """
        if not isinstance(guided, Mapping):
            raise GrammarError("guided: must be an object", param="guided")
        key = key_of(guided)
        return self.cache.get(key, lambda: self._make(guided), self.limits.compile_seconds)

    def _make(self, guided: Mapping[str, Any]) -> CompiledGrammar:
        deadline = time.monotonic() + self.limits.compile_seconds
        kind = kind_of(guided)
        text = grammar_text(guided, self.limits, deadline)
        try:
            program = self._native(text, kind, deadline)
        except BackendError as error:
            raise GrammarError(f"{kind}: {error}", param=f"guided.{kind}") from None
        self._check_start(program, kind)
        return CompiledGrammar(program)

    def _native(self, text: str, kind: str, deadline: float) -> XGrammarProgram:
        """Compile in a thread of its own, which cannot be interrupted but is not waited for past the deadline."""
        param = f"guided.{kind}"
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise GrammarError(f"{kind}: too many grammars are being compiled", param=param, code="grammar_busy")
        future: Future[XGrammarProgram] = Future()

        def work() -> None:
            try:
                future.set_result(self._backend.compile(text))
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._slots.release()

        threading.Thread(target=work, name="grammar-compile", daemon=True).start()
        try:
            return future.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            seconds = self.limits.compile_seconds
            raise GrammarError(f"{kind}: takes longer than {seconds:g} s to compile", param=param) from None

    def _check_start(self, program: XGrammarProgram, kind: str) -> None:
        mask = np.zeros((1, self.vocabulary.words), dtype=np.int32)
        program.matcher().fill(mask, 0)
        if not mask.any():
            raise GrammarError(f"{kind}: no token can begin a text that matches it", param=f"guided.{kind}")
