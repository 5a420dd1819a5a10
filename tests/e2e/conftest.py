"""Shared by the end-to-end tests: the demo model in process, one engine at a time, pools checked after each test."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specserve import LLM
from specserve.models.demo import fetch_demo

_MAX_ENGINES = 2


class Engines:
    """LLMs by configuration. Building one takes seconds, so a few are kept; the oldest makes room."""

    def __init__(self) -> None:
        self._open: dict[str, LLM] = {}

    def __call__(self, model: str = "demo", **options: Any) -> LLM:
        key = repr((model, sorted(options.items(), key=str)))
        llm = self._open.pop(key, None)
        if llm is None:
            while len(self._open) >= _MAX_ENGINES:
                self._open.pop(next(iter(self._open))).close()
            llm = LLM(model, **{"kv_memory": "256MiB", **options})
        self._open[key] = llm
        return llm

    def check_baseline(self) -> None:
        for llm in self._open.values():
            stats = llm.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            assert (stats.kv_blocks_used, stats.draft_kv_blocks_used) == (0, 0), "KV blocks leaked"

    def close(self) -> None:
        for llm in self._open.values():
            llm.close()
        self._open.clear()


@pytest.fixture(scope="session")
def _engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture
def engine(_engines: Engines) -> Iterator[Callable[..., LLM]]:
    """`engine(model, **options) -> LLM`; after the test every pool must be at its baseline."""
    yield _engines
    _engines.check_baseline()


@pytest.fixture(scope="session")
def oracle() -> Any:
    """transformers' own model over the demo weights, in float32."""
    from transformers import AutoModelForCausalLM

    path = fetch_demo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()
