"""GGUF files give the configuration and weights of the model that they were made from."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from specserve.core.errors import ModelLoadError
from specserve.models.checkpoint import family_shapes, fit_weights
from specserve.models.config import ModelConfig
from specserve.models.demo import fetch_demo
from specserve.models.gguf import gguf_config, gguf_model_config, gguf_weights
from specserve.models.gguf_file import GGUFFile
from specserve.models.hf_folder import folder_config, folder_weights
from tests.fakes.tiny import tiny_llama_folder
from tests.fakes.tiny_gguf import tiny_gguf


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_model_as_its_folder(tmp_path: Path, arch: str, tied: bool) -> None:
    folder = tiny_llama_folder(tmp_path / "hf", model_type=arch, tied=tied)
    file = GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf"))
    ours, want = gguf_model_config(file), ModelConfig.from_hf(folder_config(folder))
    assert ours == want or abs(ours.rms_norm_eps - want.rms_norm_eps) < 1e-11  # the file has it in float32
    weights, original = gguf_weights(file, torch.float32), folder_weights(folder, torch.float32)
    assert weights.keys() == original.keys() == family_shapes(ours).keys()
    assert all(torch.equal(weights[name], original[name]) for name in original)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_every_kind_is_dequantised_as_gguf_does(tmp_path: Path, kind: Kind) -> None:
    folder = tiny_llama_folder(tmp_path / "hf", model_type="qwen2")
    file = GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf", kind))
    original = folder_weights(folder, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        for name, weight in gguf_weights(file, dtype).items():
            data = original[name].numpy()
            want = quants.dequantize(quants.quantize(data, kind), kind) if data.ndim > 1 else data
            assert weight.dtype == dtype
            assert torch.equal(weight, torch.from_numpy(want).to(dtype)), name


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS])
def test_kinds_with_long_blocks(tmp_path: Path, kind: Kind) -> None:
    _, width = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (48, 2 * width), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weight = gguf_weights(GGUFFile(tmp_path / "a.gguf"), torch.float32)["model.embed_tokens.weight"]
    want = torch.from_numpy(quants.dequantize(data, kind))
    assert weight.shape == (48, 512)
    assert torch.equal(weight.nan_to_num(7), want.nan_to_num(7))


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    file = GGUFFile(tiny_gguf(tiny_llama_folder(tmp_path / "hf"), tmp_path / "a.gguf"))
    seen: list[tuple[int, int, str]] = []
    gguf_weights(file, torch.float32, lambda *step: seen.append(step))
    assert len(seen) == len(file.tensors)
    assert seen[-1][0] == seen[-1][1] == sum(tensor.num_bytes for tensor in file.tensors.values())


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "hf")
    file = GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf", leave_out="blk.1.ffn_up.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        fit_weights(gguf_weights(file, torch.float32), family_shapes(gguf_model_config(file)))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "join the parts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.sliding_window": 32}, "sliding-window"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, extra: dict[str, int | str], reason: str) -> None:
    file = GGUFFile(tiny_gguf(tiny_llama_folder(tmp_path / "hf"), tmp_path / "a.gguf", extra=extra))
    with pytest.raises(ModelLoadError, match=reason):
        gguf_config(file)


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="'rwkv7'"):
        gguf_config(GGUFFile(tmp_path / "a.gguf"))


def test_metadata_that_is_missing_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"lacks the metadata llama\.attention\.head_count"):
        gguf_config(GGUFFile(tmp_path / "a.gguf"))


def test_rope_scaling_is_read(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "hf")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf", extra=linear))
    plain = ModelConfig.from_hf(folder_config(folder))
    assert torch.equal(torch.tensor(gguf_model_config(file).inv_freq), torch.tensor(plain.inv_freq) / 4)


@pytest.mark.slow
def test_the_demo_equals_transformers_bit_for_bit() -> None:
    from transformers import AutoModelForCausalLM

    path = fetch_demo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    want = oracle.state_dict()
    ours = gguf_weights(GGUFFile(path), torch.float32)
    assert ours.keys() == want.keys() - {"lm_head.weight"}
    assert all(torch.equal(ours[name], want[name]) for name in ours)
