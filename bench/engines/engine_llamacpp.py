"""llama.cpp by its C API: continuous batching as its server does it.

Slots of their own context each, decodes and prompt pieces in one batch, a request goes to the slot whose cache begins
most like its prompt. In process, since the bindings' server decodes one request at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

BATCH, UBATCH = 2048, 512  # the server's defaults


@dataclass
class Slot:
    """One sequence of a context. `cached` are the tokens whose KV it holds; `todo` those to be computed next."""

    sequence: int
    cached: list[int] = field(default_factory=list)
    request: int | None = None
    todo: list[int] = field(default_factory=list)
    missing: int = 0
    used: int = 0


class Slots:
    """A context with its slots."""

    def __init__(self, model: Any, width: int, tokens: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = width * (-(-tokens // 256) * 256)
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH, UBATCH, width
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False  # a common pool makes every row look at every sequence's cells
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.slots = [Slot(i) for i in range(width)]
        self.tokens = tokens
        self.clock = 0

    def close(self) -> None:
        llama_cpp.llama_free(self.context)

    def start(self, request: int, prompt: Sequence[int], out: int) -> None:
        free = [slot for slot in self.slots if slot.request is None]
        slot = max(free, key=lambda s: (common(s.cached, prompt), -s.used))
        kept = min(common(slot.cached, prompt), len(prompt) - 1)
        llama_cpp.llama_memory_seq_rm(self.memory, slot.sequence, kept, -1)
        slot.cached = list(prompt[:kept])
        slot.todo = list(prompt[kept:])
        slot.request, slot.missing = request, out
        self.clock += 1
        slot.used = self.clock


class LlamaCpp:
    """See bench.engines.child.Stepped.

    Args:
        model: a GGUF file.
        threads: of prompt and decode.
    """

    def __init__(self, model: str, threads: int) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[int, Slots] = {}
        self._now: Slots | None = None

    def config(self) -> dict[str, Any]:
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "n_batch": BATCH,
            "n_ubatch": UBATCH,
            "threads": self._threads,
            "flash_attention": "auto",
            "kv": "f16, a context a slot",
            "prefix": "a request goes to the slot with the longest common beginning",
            "system": system.strip(),
        }

    def prepare(self, width: int, tokens: int) -> None:
        slots = self._contexts.get(width)
        if slots is None or slots.tokens < tokens:
            if slots is not None:
                slots.close()
            slots = self._contexts[width] = Slots(self._model, width, tokens, self._threads)
        self._now = slots

    def start(self, request: int, prompt: Sequence[int], out: int) -> None:
        assert self._now is not None
        self._now.start(request, prompt, out)

    def step(self) -> list[tuple[int, list[int]]]:
        assert self._now is not None
        slots = [slot for slot in self._now.slots if slot.request is not None]
        slots.sort(key=lambda slot: len(slot.todo) > 1)  # those that decode first
        rows, ready = 0, list[tuple[Slot, int]]()
        for slot in slots:
            take = slot.todo[: BATCH - rows]
            del slot.todo[: len(take)]
            for token in take:
                self._put(rows, token, len(slot.cached), slot.sequence)
                slot.cached.append(token)
                rows += 1
            if take and not slot.todo:
                self._batch.logits[rows - 1] = 1
                ready.append((slot, rows - 1))
        self._batch.n_tokens = rows
        if llama_cpp.llama_decode(self._now.context, self._batch):
            raise RuntimeError("llama_decode failed")
        return [self._sampled(slot, row) for slot, row in ready]

    def _put(self, row: int, token: int, position: int, sequence: int) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row] = token, position
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.logits[row] = 0

    def _sampled(self, slot: Slot, row: int) -> tuple[int, list[int]]:
        assert self._now is not None
        assert slot.request is not None
        logits = llama_cpp.llama_get_logits_ith(self._now.context, row)
        token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        request = slot.request
        slot.missing -= 1
        if slot.missing:
            slot.todo = [token]
        else:
            slot.request = None
        return request, [token]


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin alike with."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, data: Any) -> None:
    """Say errors only."""
    if level == 4:
        print(text.decode(errors="replace"), end="", flush=True)
