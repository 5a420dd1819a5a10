"""The Llama family against transformers, and the independence of every row from the batch, bit for bit."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch

from specserve.core.errors import ModelLoadError
from specserve.kernels import reference
from specserve.kernels.cpu import native, ops
from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaFamily
from tests.fakes.llamas import ODD, SMALL, ours, transformers_model
from tests.fakes.paging import Paged, make_batch

torch.set_num_threads(1)

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-odd": ("llama", ODD),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-head-dim": ("llama", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture(params=["reference", "native"])
def path(request):
    if request.param == "reference":
        return reference
    if native.library() is None:
        pytest.skip("no C++ compiler on this machine")
    return ops


@functools.cache
def pair(variant: str):
    kind, changes = VARIANTS[variant]
    return transformers_model(kind, **{**SMALL, **changes})


def tokens(count: int, vocab: int, seed: int = 1) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(vocab) for i in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [7, None])
def test_logits_equal_transformers(variant, chunk, path):
    theirs = pair(variant)
    ids = tokens(90, theirs.config.vocab_size)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    for numerics in ("invariant", "fast"):
        paged = Paged(ours(theirs, numerics=numerics, ops=path), block_size=16)
        assert float((paged.logits(ids, chunk) - expected).abs().max()) < 1e-4, numerics


def test_bfloat16_is_close():
    theirs = pair("llama-odd")
    ids = tokens(60, theirs.config.vocab_size)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    found = Paged(ours(theirs, torch.bfloat16)).logits(ids)
    assert found.dtype == torch.float32
    assert float((found - expected).abs().mean() / expected.abs().mean()) < 0.02


@functools.cache
def odd_model(dtype, path) -> LlamaFamily:
    return ours(pair("llama-odd"), dtype, ops=path)


LENGTHS = (1, 2, 5, 31, 33, 64, 70, 90)


@functools.cache
def alone(dtype, path) -> list[torch.Tensor]:
    """Logits of every position of eight sequences, each computed one row at a time by itself."""
    paged = Paged(odd_model(dtype, path), num_blocks=40)
    return [paged.logits(tokens(n, 331, seed), chunk=1) for seed, n in enumerate(LENGTHS)]


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 16, 256])
def test_trap_d13_chunks_and_layouts_change_no_bit(dtype, block_size, chunk, path):
    paged = Paged(odd_model(dtype, path), num_blocks=24, block_size=block_size, seed=chunk)
    for seed in (3, 7):
        assert torch.equal(paged.logits(tokens(LENGTHS[seed], 331, seed), chunk), alone(dtype, path)[seed])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order_seed", range(3))
def test_neighbours_and_order_change_no_bit(dtype, order_seed, path):
    """All sequences advance together, at random speeds, in a random order in every step."""
    chance = random.Random(order_seed)
    paged = Paged(odd_model(dtype, path), num_blocks=60, seed=order_seed)
    sequences = [tokens(n, 331, seed) for seed, n in enumerate(LENGTHS)]
    blocks, done = [paged.blocks(n) for n in LENGTHS], [0] * len(LENGTHS)
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        live = [i for i in range(len(LENGTHS)) if done[i] < LENGTHS[i]]
        chosen = chance.sample(live, chance.randint(1, len(live)))
        counts = [min(chance.choice([1, 1, 4, 40]), LENGTHS[i] - done[i]) for i in chosen]
        chunks = [
            (sequences[i][done[i] : done[i] + c], done[i], blocks[i]) for i, c in zip(chosen, counts, strict=True)
        ]
        parts = paged.forward(chunks).split(counts)
        for i, count, part in zip(chosen, counts, parts, strict=True):
            assert torch.equal(part, alone(dtype, path)[i][done[i] : done[i] + count])
            done[i] += count


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_counts_change_no_bit(dtype, path):
    """A decode step of 1..64 rows: a row has the same bits in each. Rows 8.. repeat the first eight sequences."""
    paged = Paged(odd_model(dtype, path), num_blocks=80)
    prompts = [tokens(9, 331, seed) for seed in range(8)]
    blocks = [paged.blocks(10) for _ in range(64)]
    for row in range(64):
        paged.forward([(prompts[row % 8][:8], 0, blocks[row])], "last")
    rows = [([prompts[row % 8][8]], 8, blocks[row]) for row in range(64)]
    expected = [paged.forward([rows[row]])[0] for row in range(8)]
    for count in (2, 3, 4, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64):
        logits = paged.forward(random.Random(count).sample(rows, count) if count < 64 else rows)
        order = random.Random(count).sample(range(64), count) if count < 64 else range(64)
        for found, row in zip(logits, order, strict=True):
            assert torch.equal(found, expected[row % 8])


def test_logit_rows_choose_rows_and_their_order():
    paged = Paged(odd_model(torch.float32, ops))
    ids = tokens(10, 331)
    every = paged.logits(ids)
    batch = make_batch([(ids, 0, paged.blocks(10))], 16)
    batch.logit_rows = np.array([9, 2])
    assert torch.equal(paged.model.forward(batch, paged.cache), every[[9, 2]])
    batch.logit_rows = np.empty(0, np.int64)
    assert paged.model.forward(batch, paged.cache).shape == (0, 331)


def test_info():
    info = odd_model(torch.bfloat16, ops).info
    assert (info.num_heads, info.num_kv_heads, info.head_dim, info.vocab_size) == (9, 3, 64, 331)
    assert info.kv_bytes_per_block(16) == 2 * 2 * 16 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_the_family_lacks_is_refused(kind, changes, reason):
    config = transformers_model(kind, **{**SMALL, **changes}).config
    with pytest.raises(ModelLoadError, match=reason):
        ModelConfig.from_hf(config)


def test_wrong_checkpoints_are_typed_errors():
    model = pair("llama")
    config, weights = ModelConfig.from_hf(model.config), dict(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelLoadError, match=name):
        LlamaFamily(config, {**weights, name: weights[name][:5]})
    del weights[name]
    with pytest.raises(ModelLoadError, match=name):
        LlamaFamily(config, weights)
