"""The native forward against plain ones: the weights that it stands for in single operations, and transformers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specserve.kernels.cpu import native
from specserve.kernels.cpu.packing import Kind
from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaFamily
from specserve.models.loader import load_model
from specserve.models.native import NativeLlama
from tests.fakes.llamas import SMALL, transformers_model
from tests.fakes.paging import Paged
from tests.fakes.tiny import tiny_llama_folder
from tests.models.native_models import KINDS, SHAPES, Checkpoint, expected, model, packed, tokens

pytestmark = pytest.mark.usefixtures("native_library")

# Activations are rounded to bfloat16, which is 2^-9 at most and 0.0017 on average of each number. What meets quantised
# weights is rounded to a 127th of the greatest in its block of 32 where there are no tile registers: on average that is
# 0.0066 of a block of normal numbers (the greatest is 2.3 deviations; 2.3 / 127 / sqrt(12) = 0.0052) and more where few
# numbers dominate one, 0.013 at worst. Two layers round eight times, and part of that adds up in the logits.
BFLOAT16, INT8 = 1e-2, 3e-2
REST = [shape for shape in SHAPES if shape != "odd"]
VARIANTS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-head-dim": ("llama", {"head_dim": 48, "tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Relative to what is wanted: of all rows together, and a half of that of the worst row."""
    rows = (found - want).norm(dim=1) / want.norm(dim=1)
    return max(float((found - want).norm() / want.norm()), float(rows.max()) / 2)


@pytest.mark.parametrize(("shape", "kind"), [*(("odd", kind) for kind in KINDS), *((shape, "bf16") for shape in REST),
                                              *((shape, "mixed") for shape in REST)])  # fmt: skip
def test_logits_are_those_of_the_plain_model(shape: str, kind: str) -> None:
    found = Paged(model(shape, kind)).logits(tokens(80, SHAPES[shape].vocab_size), 33)
    exact = kind == "bf16" or native.isa() == "amx"  # whose quantised weights meet inputs in bfloat16
    assert error(found, expected(shape, kind, 80)) < (BFLOAT16 if exact else INT8)


@functools.cache
def theirs(variant: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A tiny model of transformers with weights that bfloat16 holds, and its logits of 90 tokens, in float32."""
    kind, changes = VARIANTS[variant]
    made = transformers_model(kind, **{**SMALL, **changes})
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.copy_(weight.bfloat16().float())
        return made, made(torch.tensor([tokens(90, 99)])).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str) -> None:
    made, want = theirs(variant)
    config, weights = ModelConfig.from_hf(made.config), dict(made.state_dict())
    llama = NativeLlama(Checkpoint(weights, dict.fromkeys(weights, Kind.BF16)).packed(config))
    assert error(Paged(llama).logits(tokens(90, 99), 33), want) < BFLOAT16


@pytest.mark.parametrize("forget", ["qkv", "output", "gate_up", "down"])
def test_the_bound_is_smaller_than_a_forgotten_bias(forget: str) -> None:
    made = packed("odd", "bf16")
    layers = [replace(x, **{forget: replace(getattr(x, forget), bias=None)}) for x in made.layers]
    llama = NativeLlama(replace(made, layers=layers))
    assert error(Paged(llama).logits(tokens(80, 331), 33), expected("odd", "bf16", 80)) > 3 * INT8


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"head_dim": 24}, "heads of 24"),
        ({"head_dim": 272, "num_heads": 2, "num_kv_heads": 1}, "heads of 272"),
        ({"num_heads": 7}, "7 heads"),
        ({"hidden_size": 112}, "112"),
        ({"intermediate_size": 48}, "48"),
        ({"head_dim": 48}, "432"),
    ],
)
def test_shapes_that_are_refused(change: dict[str, int], match: str) -> None:
    reason = NativeLlama.refuses(replace(SHAPES["odd"], **change))
    assert reason is not None
    assert match in reason


@pytest.mark.parametrize("size", [{"hidden": 72, "heads": 3, "kv_heads": 3}, {"hidden": 48, "heads": 3, "kv_heads": 1}])
def test_other_shapes_run_in_torch_with_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: dict[str, int]
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    folder = tiny_llama_folder(tmp_path / "model", **size)
    exact = load_model(str(folder), dtype="float32", numerics="fast").model
    caplog.clear()
    with caplog.at_level(logging.INFO, "specserve.models.loader"):
        loaded = load_model(str(folder), dtype="bfloat16", numerics="invariant", quantization="q8")
    assert isinstance(loaded.model, LlamaFamily)
    assert len([record for record in caplog.records if "native forward" in record.message]) == 1
    want = Paged(exact).logits(tokens(30, 512))
    assert error(Paged(loaded.model).logits(tokens(30, 512)), want) < 5e-2  # weights are rounded to bfloat16 too
