"""Any transformers model on the paged cache: equal to its own eager attention, and its rows apart from the batch."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from specserve.core.errors import ModelLoadError
from specserve.models.batch import ForwardBatch
from specserve.models.hf import TransformersModel
from specserve.models.hf_attention import NAME
from specserve.models.hf_invariant import RowwiseMath
from specserve.models.kv_cache import PagedKVCache

VOCAB, BLOCK, LENGTH = 300, 4, 37
# The inner width is no multiple of a vector, which is where elementwise functions come to depend on the batch.
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {**BASE, "num_key_value_heads": 1}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 72,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {**BASE, "hidden_size": 96},
    "Phi": {**BASE, "hidden_size": 96},
    "Gemma": {**GROUPED, "head_dim": 24},
    "Olmo": BASE,
    "StableLm": {**GROUPED, "hidden_size": 96},
    "GPT2": GPT,
    "Cohere": GROUPED,
    "Starcoder2": {**GROUPED, "sliding_window": 8},
    "Gemma3Text": {
        **GROUPED,
        "head_dim": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@functools.cache
def eager(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def paged(kind: str, dtype: torch.dtype, numerics: str) -> TransformersModel:
    original = eager(kind)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(original.config), attn_implementation=NAME, dtype=dtype)
    model.load_state_dict(original.state_dict())
    return TransformersModel(model.to(dtype), numerics, kind)


def prompt() -> list[int]:
    return torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


class Sequence:
    """One sequence that owns every second block of a cache from `first` on."""

    def __init__(self, first: int) -> None:
        self.table = list(range(first, first + 2 * -(-LENGTH // BLOCK), 2))[::-1]

    def slot(self, position: int) -> int:
        return self.table[position // BLOCK] * BLOCK + position % BLOCK


def cache_for(model: TransformersModel) -> PagedKVCache:
    info = model.info
    return PagedKVCache(info.num_layers, 24, BLOCK, info.num_kv_heads, info.head_dim, info.dtype)


def batch(parts: list[tuple[Sequence, list[int], int]]) -> ForwardBatch:
    """(sequence, tokens, position of the first) for each sequence; all rows have logits."""
    rows = [(i, s, t, start + j) for i, (s, ts, start) in enumerate(parts) for j, t in enumerate(ts)]
    segments, first = [], 0
    for i, (_, tokens, start) in enumerate(parts):
        segments.append((first, len(tokens), i, start))
        first += len(tokens)
    made = ForwardBatch(
        token_ids=np.array([t for _, _, t, _ in rows]),
        positions=np.array([p for _, _, _, p in rows]),
        slots=np.array([s.slot(p) for _, s, _, p in rows]),
        row_sequence=np.array([i for i, _, _, _ in rows], dtype=np.int32),
        block_tables=np.array([s.table for s, _, _ in parts], dtype=np.int32),
        logit_rows=np.arange(len(rows)),
        segments=segments,
    )
    made.check(24, BLOCK)
    return made


def run(model: TransformersModel, tokens: list[int], chunk: int) -> torch.Tensor:
    cache, sequence = cache_for(model), Sequence(1)
    starts = range(0, len(tokens), chunk)
    return torch.cat([model.forward(batch([(sequence, tokens[at : at + chunk], at)]), cache) for at in starts])


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_transformers_own_in_any_chunks(kind: str) -> None:
    with torch.no_grad():
        want = eager(kind)(torch.tensor([prompt()])).logits[0]
    model = paged(kind, torch.float32, "fast")
    assert model.info.num_layers == 2
    assert model.info.vocab_size == VOCAB
    for chunk in (LENGTH, 1, 7):
        got = run(model, prompt(), chunk)
        assert got.shape == (LENGTH, VOCAB)
        assert got.dtype == torch.float32
        assert (got - want).abs().max() < 1e-4, chunk


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "Cohere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_bits_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    model = paged(kind, dtype, "invariant")
    tokens = prompt()
    want = run(model, tokens, LENGTH)
    for chunk in (1, 5, 16):
        assert torch.equal(run(model, tokens, chunk), want), chunk
    # Two sequences, at different positions, in one forward.
    cache, one, other = cache_for(model), Sequence(0), Sequence(1)
    model.forward(batch([(one, tokens[:20], 0)]), cache)
    got = model.forward(batch([(other, tokens[:9], 0), (one, tokens[20:33], 20)]), cache)
    assert torch.equal(got, torch.cat((want[:9], want[20:33])))


def test_only_the_asked_rows_have_logits() -> None:
    model = paged("Olmo", torch.float32, "fast")
    whole = batch([(Sequence(0), prompt(), 0)])
    want = model.forward(whole, cache_for(model))
    whole.logit_rows = np.array([30, 2])
    assert torch.allclose(model.forward(whole, cache_for(model)), want[[30, 2]], atol=1e-5)
    whole.logit_rows = np.empty(0, np.int64)
    assert model.forward(whole, cache_for(model)).shape == (0, VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.nn.functional.gelu, torch.tanh, torch.cos])
def test_elementwise_functions_do_not_see_their_neighbours(dtype: torch.dtype, function: Any) -> None:
    x = (torch.randn(50, 101, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    with RowwiseMath():
        whole = function(x)
        for first, last in ((0, 1), (1, 4), (7, 50)):
            assert torch.equal(function(x[first:last]), whole[first:last])
        assert function(x[:0]).shape == (0, 101)
    assert torch.allclose(whole, function(x), atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("Gemma2", {**GROUPED, "head_dim": 24}, "softcap"),
        ("GptOss", {**GROUPED, "head_dim": 24, "num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
        ("Bloom", {"vocab_size": VOCAB, "hidden_size": 72, "n_layer": 1, "n_head": 3}, "position_ids"),
        ("Mamba", {"vocab_size": VOCAB, "hidden_size": 72, "num_hidden_layers": 1}, "position_ids"),
    ],
)
def test_what_paged_attention_cannot_do_is_refused(kind: str, values: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**values)
    model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = NAME
    with pytest.raises(ModelLoadError, match=reason):
        TransformersModel(model, "fast")


def test_a_mixture_of_experts_runs_fast_only() -> None:
    values = {**GROUPED, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**values), attn_implementation=NAME)
    assert run(TransformersModel(model, "fast"), prompt(), 7).isfinite().all()
    with pytest.raises(ModelLoadError, match='numerics="fast"'):
        TransformersModel(model, "invariant")


def test_a_folder_is_loaded_and_a_missing_tensor_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    eager("Olmo").save_pretrained(tmp_path)
    model = TransformersModel.from_folder(tmp_path, torch.float32, "fast", "olmo")
    assert model.info.name == "olmo"
    with torch.no_grad():
        want = eager("Olmo")(torch.tensor([prompt()])).logits[0]
    assert (run(model, prompt(), LENGTH) - want).abs().max() < 1e-4
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        TransformersModel.from_folder(tmp_path, torch.float32, "fast")
