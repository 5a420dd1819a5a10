"""One loader for every kind of name."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from specserve.core.errors import ModelLoadError
from specserve.models.batch import ForwardBatch
from specserve.models.hf import TransformersModel
from specserve.models.kv_cache import PagedKVCache
from specserve.models.llama import LlamaFamily
from specserve.models.loader import LoadedModel, load_model, load_tokenizer
from tests.fakes.tiny import tiny_llama_folder, tiny_tokenizer_folder
from tests.fakes.tiny_gguf import tiny_gguf

IDS = [1, 40, 300, 7, 99, 12, 500]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))


def logits(loaded: LoadedModel) -> torch.Tensor:
    info, n = loaded.info, len(IDS)
    cache = PagedKVCache(info.num_layers, 2, 16, info.num_kv_heads, info.head_dim, info.dtype)
    at = torch.arange(n)
    zero = torch.zeros(n, dtype=torch.int32)
    table = torch.tensor([[1]], dtype=torch.int32)
    batch = ForwardBatch(torch.tensor(IDS), at, at + 16, zero, table, at, [(0, n, 0, 0)])
    return loaded.model.forward(batch, cache)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_folder_and_its_gguf_file_are_one_model(tmp_path: Path, kind: str) -> None:
    folder = tiny_llama_folder(tmp_path / "hf", model_type=kind, tied=kind == "qwen3")
    path = tiny_gguf(folder, tmp_path / "a.gguf", Kind.F32)
    seen: list[tuple[int, int, str]] = []
    one = load_model(str(folder), dtype="float32", numerics="invariant", progress=lambda *step: seen.append(step))
    other = load_model(str(path), dtype="float32", numerics="invariant")
    assert isinstance(one.model, LlamaFamily)
    assert (one.info.dtype, one.info.name, one.info.vocab_size) == (torch.float32, str(folder), 512)
    assert torch.allclose(logits(one), logits(other), atol=1e-4)  # the file has its epsilon in float32
    assert one.tokenizer.encode("hello") == other.tokenizer.encode("hello") == load_tokenizer(str(path)).encode("hello")
    assert seen[-1][2] == "weights"


def test_bfloat16(tmp_path: Path) -> None:
    loaded = load_model(str(tiny_llama_folder(tmp_path)), dtype="bfloat16", numerics="fast")
    assert loaded.info.dtype == torch.bfloat16
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
