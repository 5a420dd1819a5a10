"""The demo model in float32 against transformers' LlamaForCausalLM: logits and greedy tokens, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specserve.models.batch import ForwardBatch
from specserve.models.kv_cache import PagedKVCache
from specserve.models.loader import LoadedModel, load_model
from tests.fakes.prompts import prompts

BLOCK = 16
MAX_PROMPT = 200
TOLERANCE = 2e-3
CHUNKS = (1, 7, 64, MAX_PROMPT)


@pytest.fixture(scope="module")
def ours() -> LoadedModel:
    return load_model("demo", dtype="float32", numerics="invariant")


class Sequence:
    """One sequence on a paged cache of its own, with its blocks in a scattered order."""

    def __init__(self, loaded: LoadedModel, length: int) -> None:
        info = loaded.info
        blocks = -(-length // BLOCK)
        self.model = loaded.model
        self.cache = PagedKVCache(info.num_layers, blocks + 3, BLOCK, info.num_kv_heads, info.head_dim, torch.float32)
        self.table = np.random.default_rng(length).permutation(blocks + 3)[:blocks]

    def forward(self, tokens: list[int], start: int) -> torch.Tensor:
        """Logits of every one of `tokens` at positions start..., float32 [n, vocab]."""
        n = len(tokens)
        positions = np.arange(start, start + n)
        return self.model.forward(
            ForwardBatch(
                token_ids=np.array(tokens),
                positions=positions,
                slots=self.table[positions // BLOCK] * BLOCK + positions % BLOCK,
                row_sequence=np.zeros(n, np.int32),
                block_tables=self.table.astype(np.int32)[None],
                logit_rows=np.arange(n),
                segments=[(0, n, 0, start)],
            ),
            self.cache,
        )


def chunked(loaded: LoadedModel, tokens: list[int], size: int) -> torch.Tensor:
    sequence = Sequence(loaded, len(tokens))
    parts = [sequence.forward(tokens[i : i + size], i).clone() for i in range(0, len(tokens), size)]
    return torch.cat(parts)


def compare(oracle: Any, ours: LoadedModel, texts: list[str], chunks: tuple[int, ...]) -> None:
    for text in texts:
        tokens = ours.tokenizer.encode(text)[:MAX_PROMPT]
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0]
            whole = chunked(ours, tokens, MAX_PROMPT)
            assert (whole - expected).abs().max().item() < TOLERANCE
            for size in chunks:
                assert torch.equal(chunked(ours, tokens, size), whole), f"chunks of {size} change bits"


def greedy(loaded: LoadedModel, tokens: list[int], chunk: int, count: int) -> list[int]:
    sequence = Sequence(loaded, len(tokens) + count)
    for i in range(0, len(tokens), chunk):
        logits = sequence.forward(tokens[i : i + chunk], i)
    out = [int(logits[-1].argmax())]
    while len(out) < count:
        out.append(int(sequence.forward(out[-1:], len(tokens) + len(out) - 1)[-1].argmax()))
    return out


def compare_greedy(oracle: Any, ours: LoadedModel, texts: list[str], chunks: tuple[int, ...], count: int) -> None:
    for text in texts:
        tokens = ours.tokenizer.encode(text)[:MAX_PROMPT]
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            expected = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )[0, len(tokens) :].tolist()
            # min_new_tokens forbids the end token; ours is compared up to the first one.
            for chunk in chunks:
                got = greedy(ours, tokens, chunk, count)
                end = next((i for i, t in enumerate(got) if t in ours.tokenizer.eos_ids), count)
                assert got[:end] == expected[:end], f"chunks of {chunk}"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_logits_and_trap_d13_chunks(oracle: Any, ours: LoadedModel) -> None:
    compare(oracle, ours, prompts(3), (7, 64))
    compare(oracle, ours, prompts(1), (1,))


def test_greedy_tokens(oracle: Any, ours: LoadedModel) -> None:
    compare_greedy(oracle, ours, prompts(3), (MAX_PROMPT,), 64)


@pytest.mark.slow
def test_logits_on_twenty_prompts(oracle: Any, ours: LoadedModel) -> None:
    compare(oracle, ours, prompts(20), CHUNKS)


@pytest.mark.slow
def test_greedy_on_twenty_prompts(oracle: Any, ours: LoadedModel) -> None:
    compare_greedy(oracle, ours, prompts(20), CHUNKS, 64)
