"""One loader for every kind of name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from safetensors.torch import load_file, save_file

from specserve.core.errors import ModelLoadError
from specserve.kernels.cpu.native import library
from specserve.kernels.cpu.packing import Kind as Q
from specserve.models.batch import ForwardBatch
from specserve.models.config import ModelConfig
from specserve.models.gguf import GGUFTensors, gguf_model_config, gguf_weights
from specserve.models.gguf_file import GGUFFile
from specserve.models.hf import TransformersModel
from specserve.models.hf_folder import FolderTensors, folder_config, folder_weights
from specserve.models.kv_cache import PagedKVCache
from specserve.models.llama import LlamaFamily
from specserve.models.loader import LoadedModel, load_model, load_tokenizer, packed_model
from specserve.models.native import NativeLlama
from specserve.models.packing import PackedModel, unpack
from specserve.models.quantize import Rows, convert
from tests.fakes.tiny import tiny_llama_folder, tiny_tokenizer_folder
from tests.fakes.tiny_gguf import tiny_gguf

library()  # before each test has a home of its own, where it would be compiled again
IDS = [1, 40, 300, 7, 99, 12, 500]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))


def logits(loaded: LoadedModel) -> torch.Tensor:
    return logits_of(loaded.model)


def logits_of(model: Any) -> torch.Tensor:
    info, n = model.info, len(IDS)
    cache = PagedKVCache(info.num_layers, 2, 16, info.num_kv_heads, info.head_dim, info.dtype)
    at = np.arange(n)
    zero = np.zeros(n, np.int32)
    table = np.array([[1]], np.int32)
    batch = ForwardBatch(np.array(IDS), at, at + 16, zero, table, at, [(0, n, 0, 0)])
    return model.forward(batch, cache)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_folder_and_its_gguf_file_are_one_model(tmp_path: Path, kind: str) -> None:
    folder = tiny_llama_folder(tmp_path / "hf", model_type=kind, tied=kind == "qwen3")
    path = tiny_gguf(folder, tmp_path / "a.gguf", Kind.F32)
    seen: list[tuple[int, int, str]] = []
    one = load_model(str(folder), dtype="float32", numerics="invariant", progress=lambda *step: seen.append(step))
    other = load_model(str(path), dtype="float32", numerics="invariant")
    assert isinstance(one.model, LlamaFamily)
    assert (one.info.dtype, one.info.name, one.info.vocab_size) == ("float32", str(folder), 512)
    assert torch.allclose(logits(one), logits(other), atol=1e-4)  # the file has its epsilon in float32
    assert one.tokenizer.encode("hello") == other.tokenizer.encode("hello") == load_tokenizer(str(path)).encode("hello")
    assert seen[-1][2] == "weights"


def test_bfloat16(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_llama_folder(tmp_path)), dtype="bfloat16", numerics="fast")
    assert loaded.info.dtype == "bfloat16"
    assert logits(loaded).dtype == torch.float32


def test_a_tied_checkpoint_may_carry_its_head(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path, tied=True)
    want = logits(load_model(str(folder), dtype="float32", numerics="fast"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(logits(load_model(str(folder), dtype="float32", numerics="fast")), want)


def test_another_architecture_runs_through_transformers_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, OlmoConfig

    config = OlmoConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer_folder(tmp_path)
    with caplog.at_level(logging.INFO, "specserve.models.loader"):
        loaded = load_model(str(tmp_path), dtype="float32", numerics="invariant")
    assert isinstance(loaded.model, TransformersModel)
    assert len([record for record in caplog.records if "olmo" in record.message]) == 1
    assert logits(loaded).isfinite().all()


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path)
    with pytest.raises(ModelLoadError, match="float16"):
        load_model(str(folder), dtype="float16", numerics="fast")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "model.norm.weight"}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks model\.norm\.weight"):
        load_model(str(folder), dtype="float32", numerics="fast")


def test_a_tokenizer_larger_than_the_logits_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path, vocab_size=300)
    tiny_tokenizer_folder(folder, size=400)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 300
    with pytest.raises(ModelLoadError, match="tokenizer is of another model"):
        load_model(str(folder), dtype="float32", numerics="fast")


def native() -> None:
    if library() is None:
        pytest.skip("there is no native library")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("file_kind", "quantization", "weights"),
    [
        (Kind.F32, "auto", "bfloat16"),
        (Kind.F16, "auto", "bfloat16"),
        (Kind.Q4_0, "auto", "q4_0"),
        (Kind.Q4_1, "auto", "q4_1"),
        (Kind.Q8_0, "auto", "q8_0"),
        (Kind.Q5_0, "auto", "q8_0"),
        (Kind.Q4_0, "none", "bfloat16"),
        (Kind.Q4_0, "q8", "q8_0"),
        (Kind.Q4_0, "q4", "q4_0+q8_0"),
        (Kind.F32, "q4", "q4_1+q8_0"),
        (Kind.F32, "q8", "q8_0"),
    ],
)
def test_quantization_is_what_was_asked_for(
    tmp_path: Path, kind: str, file_kind: Kind, quantization: str, weights: str
) -> None:
    native()
    folder = tiny_llama_folder(tmp_path / "hf", model_type=kind, tied=kind == "qwen3", hidden=128)
    path = tiny_gguf(folder, tmp_path / "a.gguf", file_kind)
    loaded = load_model(str(path), dtype="bfloat16", numerics="invariant", quantization=quantization)
    assert isinstance(loaded.model, NativeLlama)
    assert loaded.info.weights == weights
    file = GGUFFile(path)
    packed = packed_model(gguf_model_config(file), GGUFTensors(file), "bfloat16", quantization)
    assert_runs_on(loaded, packed)
    assert_near(packed, gguf_weights(file, torch.float32))
    again = load_model(str(path), dtype="bfloat16", numerics="invariant", quantization=quantization)
    assert torch.equal(logits(again), logits(loaded)), "read from the cache"
    assert len(list((tmp_path / "home" / "packed").glob("*.packed"))) == 1


@pytest.mark.parametrize(("quantization", "weights"), [("auto", "bfloat16"), ("q8", "q8_0"), ("q4", "q4_1+q8_0")])
def test_a_folder_is_quantised_as_it_is_loaded(tmp_path: Path, quantization: str, weights: str) -> None:
    native()
    folder = tiny_llama_folder(tmp_path / "hf", model_type="qwen2", hidden=128)
    loaded = load_model(str(folder), dtype="bfloat16", numerics="invariant", quantization=quantization)
    assert loaded.info.weights == weights
    config = ModelConfig.from_hf(folder_config(folder))
    packed = packed_model(config, FolderTensors(folder), "bfloat16", quantization)
    assert_runs_on(loaded, packed)
    assert_near(packed, folder_weights(folder, torch.float32))


def assert_runs_on(loaded: LoadedModel, packed: PackedModel | None) -> None:
    """The model's logits are those of the packed weights, dequantised and run in float32."""
    assert packed is not None
    oracle = logits_of(LlamaFamily(packed.config, unpack(packed), "fast", dtype=torch.float32))
    assert float((logits(loaded) - oracle).norm() / oracle.norm()) < 0.05


def assert_near(packed: PackedModel, weights: dict[str, torch.Tensor]) -> None:
    """The packed weights are the checkpoint's, but for the rounding that their kinds are known for."""
    found = unpack(packed)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        most = 1e-6 if weight.ndim == 1 else 0.1 if "q4" in packed.kinds and "layers" in name else 0.01
        assert float((found[name] - weight).norm() / weight.norm()) < most, name


def test_packed_weights_stand_for_the_file_s(tmp_path: Path) -> None:
    native()
    folder = tiny_llama_folder(tmp_path / "hf", model_type="llama", hidden=128)
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        file = GGUFFile(tiny_gguf(folder, tmp_path / f"{kind.name}.gguf", kind))
        packed = packed_model(gguf_model_config(file), GGUFTensors(file), "bfloat16", "auto")
        assert packed is not None
        found, want = unpack(packed), gguf_weights(file, torch.float32)
        if kind == Kind.Q4_1:  # an embedding is read row by row, and has no kernel for these
            want["model.embed_tokens.weight"] = want["model.embed_tokens.weight"].bfloat16().float()
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_parts_of_different_types_become_one_matrix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """q and k in Q4_0 beside v in Q4_1 lose nothing; gate in Q8_0 beside up in Q4_1 is told in the log."""
    native()
    config = ModelConfig.from_hf(folder_config(tiny_llama_folder(tmp_path / "hf", hidden=128)))
    tensors = Mixed(FolderTensors(tmp_path / "hf"), {"v_proj": Q.Q4_1, "gate_proj": Q.Q8, "up_proj": Q.Q4_1})
    with caplog.at_level(logging.INFO, "specserve.models.packed_build"):
        packed = packed_model(config, tensors, "bfloat16", "auto")
    assert packed is not None
    assert [record.message.count("gate_up") for record in caplog.records] == [2]
    assert (packed.layers[0].qkv.kind, packed.layers[0].gate_up.kind) == (Q.Q4_1, Q.Q8)
    found = unpack(packed)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
        full = f"model.layers.1.{name}.weight"
        assert torch.equal(found[full], tensors.rows(full).dequantise()), name
    up = "model.layers.1.mlp.up_proj.weight"
    assert torch.allclose(found[up], tensors.rows(up).dequantise(), atol=0.02)


class Mixed:
    """A folder's tensors, quantised by the leaf of their names; Q4_0 where nothing is said."""

    def __init__(self, tensors: FolderTensors, kinds: dict[str, Q]) -> None:
        self._tensors = tensors
        self._kinds = kinds
        self.shapes, self.vector, self.source = tensors.shapes, tensors.vector, tensors.source

    def kind(self, name: str) -> Q:
        return self._kinds.get(name.split(".")[-2], Q.Q4_0)

    def rows(self, name: str) -> Rows:
        rows, kind = self._tensors.rows(name), self.kind(name)
        if kind is not Q.Q4_0:
            return convert(rows, kind)
        return Rows(kind, rows.k, torch.from_numpy(quants.quantize(rows.dequantise().numpy(), Kind.Q4_0)))


def test_a_shape_that_is_not_taken_runs_in_torch_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native()
    folder = tiny_llama_folder(tmp_path / "hf", hidden=80, heads=5, kv_heads=1)
    with caplog.at_level(logging.WARNING, "specserve.models.loader"):
        loaded = load_model(str(folder), dtype="bfloat16", numerics="fast", quantization="q4")
    assert isinstance(loaded.model, LlamaFamily)
    assert loaded.info.weights == "bfloat16"
    assert len(caplog.records) == 1
    assert "multiples of 32" in caplog.text
    oracle = logits(load_model(str(folder), dtype="float32", numerics="fast"))
    assert float((logits(loaded) - oracle).norm() / oracle.norm()) < 0.03


def test_without_native_kernels_the_file_is_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_gguf(tiny_llama_folder(tmp_path / "hf"), tmp_path / "a.gguf", Kind.Q4_1)
    monkeypatch.setattr("specserve.models.loader.library", lambda: None)
    with caplog.at_level(logging.WARNING, "specserve.models.loader"):
        loaded = load_model(str(path), dtype="bfloat16", numerics="fast")
    assert isinstance(loaded.model, LlamaFamily)
    assert loaded.info.weights == "bfloat16"
    assert "there are no native kernels here" in caplog.text
    assert not (tmp_path / "home" / "packed").exists()


def test_a_quantization_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'q3' is not one of auto, none, q8, q4") as refused:
        load_model(str(tiny_llama_folder(tmp_path)), dtype="bfloat16", numerics="fast", quantization="q3")
    assert refused.value.param == "quantization"


def test_loading_imports_no_models_of_transformers(tmp_path: Path) -> None:
    """They take seconds, more than all the rest of loading. Converting a tokenizer needs them, once."""
    path = tiny_gguf(tiny_llama_folder(tmp_path / "hf"), tmp_path / "a.gguf", Kind.Q4_1)
    load_tokenizer(str(path))
    code = (
        "import sys\nfrom specserve.models.loader import load_model\n"
        f"load_model({str(path)!r}, dtype='bfloat16', numerics='fast')\n"
        "heavy = ('transformers.models.auto.auto_factory', 'sympy', 'xgrammar')\n"
        "heavy += ('transformers.modeling_utils', 'torch._dynamo', 'torch.distributed.tensor')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    environment = {**os.environ, "SPECSERVE_NATIVE": "0"}  # nothing is compiled in the test's own home
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr
