"""Rotary tables against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from specserve.models.config import ModelConfig
from specserve.models.rotary import TABLE_ROWS, RotaryTable


def config(theta: float, dim: int) -> ModelConfig:
    names = ("num_hidden_layers", "intermediate_size", "vocab_size", "num_key_value_heads", "num_attention_heads")
    values = {**dict.fromkeys(names, 1), "hidden_size": dim, "head_dim": dim, "rms_norm_eps": 1e-5}
    rope = {"rope_type": "default", "rope_theta": theta}
    plain = {"model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 9000, "tie_word_embeddings": True}
    return ModelConfig.from_hf(SimpleNamespace(**values, **plain, rope_parameters=rope))


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("theta", [10000, 100000.0, 500000.0, 1e6])
def test_tables_are_transformers_own(theta: float, dim: int) -> None:
    made = config(theta, dim)
    rope = {"rope_type": "default", "rope_theta": theta}
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=dim, num_attention_heads=1, rope_parameters=rope))
    frequencies = np.array(made.inv_freq, np.float32)
    # A power may be off by an ulp there; here it is rounded once.
    assert np.all(np.abs(frequencies - theirs.inv_freq.numpy()) <= np.spacing(frequencies))
    table = RotaryTable(tuple(theirs.inv_freq.tolist()), 1.0)
    table.ensure(8192)
    cos, sin = theirs(torch.zeros(1), torch.arange(8192)[None])
    for mine, other in ((table.cos, cos), (table.sin, sin)):
        assert mine.dtype == np.float32
        assert np.abs(mine - other[0, :, : dim // 2].numpy()).max() < 2e-7


def test_rows_do_not_depend_on_when_they_were_made() -> None:
    frequencies = config(1e5, 64).inv_freq
    at_once, bit_by_bit = RotaryTable(frequencies, 1.3), RotaryTable(frequencies, 1.3)
    at_once.ensure(3 * TABLE_ROWS)
    for positions in (1, 5, TABLE_ROWS, TABLE_ROWS + 1, 2 * TABLE_ROWS + 7):
        bit_by_bit.ensure(positions)
        assert len(bit_by_bit.cos) >= positions
    assert np.array_equal(at_once.cos, bit_by_bit.cos)
    assert np.array_equal(at_once.sin, bit_by_bit.sin)
