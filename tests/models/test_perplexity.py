"""What runs against transformers' own model over the same weights in float32: perplexity, and the logits.

The oracle's weights are the packed ones, dequantised, so that only the arithmetic differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specserve.kernels.cpu.native import isa, library
from specserve.models.demo import fetch_demo
from specserve.models.gguf import GGUFTensors, gguf_config, gguf_model_config
from specserve.models.gguf_file import GGUFFile
from specserve.models.gguf_tokenizer import gguf_tokenizer
from specserve.models.loader import packed_model
from specserve.models.native import NativeLlama
from specserve.models.packing import PackedModel, unpack
from specserve.models.tokenizer import Tokenizer
from tests.fakes.paging import Paged
from tests.fakes.prompts import prompts

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library")

MODES = ("auto", "none", "q8", "q4")
PERPLEXITY = 0.005  # relative
# Of the quick test: inputs of 8 bits, where there are no tiles, need more to be told from chance.
TEXTS = 10 if isa() == "amx" else 200
LOGITS = 1e-2  # relative, of bfloat16 weights
TOKENS = 128  # of a text at most


@dataclass(frozen=True)
class Pair:
    """The native model, and the oracle's over the same weights."""

    ours: NativeLlama
    oracle: Any
    tokenizer: Tokenizer

    def texts(self, count: int) -> list[list[int]]:
        texts = (self.tokenizer.encode(text)[:TOKENS] for text in prompts(count))
        return [ids for ids in texts if len(ids) > 1]

    def logits(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ours and the oracle's, float32 [len(ids), vocab_size]."""
        with torch.inference_mode():
            return Paged(self.ours, num_blocks=TOKENS // 16 + 2).logits(ids), self.oracle(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def pair() -> Callable[[str], Pair]:
    file = GGUFFile(fetch_demo())
    tokenizer = gguf_tokenizer(file, "demo")
    config, tensors = gguf_model_config(file), GGUFTensors(file)
    oracle = LlamaForCausalLM(gguf_config(file)).eval()

    def make(mode: str) -> Pair:
        packed = packed_model(config, tensors, "bfloat16", mode)
        assert packed is not None
        oracle.load_state_dict(weights_of(packed))
        return Pair(NativeLlama(packed, name="demo"), oracle, tokenizer)

    return make


def weights_of(packed: PackedModel) -> dict[str, torch.Tensor]:
    weights = unpack(packed)
    # transformers names the head also where it is the embedding.
    return weights | {"lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"])}


def perplexities(pair: Pair, texts: list[list[int]]) -> tuple[float, float]:
    """Ours and the oracle's, over all tokens of all texts but the first of each."""
    sums, count = [0.0, 0.0], 0
    for ids in texts:
        for i, logits in enumerate(pair.logits(ids)):
            losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")
            sums[i] += float(losses)
        count += len(ids) - 1
    return math.exp(sums[0] / count), math.exp(sums[1] / count)


def check_perplexity(pair: Pair, texts: int) -> None:
    ours, oracle = perplexities(pair, pair.texts(texts))
    print(f"perplexity {ours:.4f}, the oracle's {oracle:.4f}, {ours / oracle - 1:+.3%}")
    assert abs(ours / oracle - 1) < PERPLEXITY


def relative_error(pair: Pair, texts: list[list[int]]) -> float:
    """|ours - oracle| / |oracle| over the logits of all rows of all texts."""
    difference = size = 0.0
    for ids in texts:
        ours, oracle = (logits.double() for logits in pair.logits(ids))
        difference += float((ours - oracle).square().sum())
        size += float(oracle.square().sum())
    return math.sqrt(difference / size)


@pytest.mark.parametrize("mode", ["auto", "q8"])
def test_perplexity(pair: Callable[[str], Pair], mode: str) -> None:
    check_perplexity(pair(mode), TEXTS)


def test_bfloat16_logits(pair: Callable[[str], Pair]) -> None:
    bfloat16 = pair("none")
    assert relative_error(bfloat16, bfloat16.texts(10)) < LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_perplexity_of_two_hundred_texts(pair: Callable[[str], Pair], mode: str) -> None:
    check_perplexity(pair(mode), 200)


@pytest.mark.slow
def test_bfloat16_logits_of_two_hundred_texts(pair: Callable[[str], Pair]) -> None:
    bfloat16 = pair("none")
    error = relative_error(bfloat16, bfloat16.texts(200))
    print(f"relative error {error:.2e}")
    assert error < LOGITS
