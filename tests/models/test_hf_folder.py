"""Folders in Hugging Face format: single and sharded, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.core.errors import ModelLoadError
from specserve.models.checkpoint import family_shapes, fit_weights
from specserve.models.config import ModelConfig
from specserve.models.hf_folder import folder_config, folder_weights
from tests.fakes.tiny import tiny_llama_folder


def shard(folder: Path) -> None:
    """Split the folder's weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {}
    for i, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        name = f"model-{i}.safetensors"
        save_file({key: weights[key] for key in names}, folder / name)
        places |= dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_weights_in_the_asked_dtype_with_progress(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path)
    want = load_file(folder / "model.safetensors")
    seen: list[tuple[int, int]] = []
    assert equal(folder_weights(folder, torch.float32, lambda done, total, what: seen.append((done, total))), want)
    half = folder_weights(folder, torch.bfloat16)
    assert equal(half, {key: value.to(torch.bfloat16) for key, value in want.items()})
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] <= seen[-1][1]


def test_a_sharded_folder_gives_the_same(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path)
    want = folder_weights(folder, torch.float32)
    shard(folder)
    assert equal(folder_weights(folder, torch.float32), want)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_familys_parameters_are_those_of_the_checkpoint(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = tiny_llama_folder(tmp_path, model_type=kind, tied=tied)
    shapes = family_shapes(ModelConfig.from_hf(folder_config(folder)))
    assert shapes == {key: tuple(value.shape) for key, value in load_file(folder / "model.safetensors").items()}


def test_wrong_tensors_are_named() -> None:
    shapes = {"a.weight": (2, 3), "b.weight": (2,)}
    weights = {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2), "lm_head.weight": torch.zeros(1)}
    assert set(fit_weights(weights, shapes, optional=["lm_head.weight"])) == set(shapes)
    assert set(fit_weights({**weights, "x.rotary_emb.inv_freq": weights["b.weight"]}, shapes, optional=weights)) == set(
        shapes
    )
    with pytest.raises(ModelLoadError, match=r"has lm_head\.weight"):
        fit_weights(weights, shapes)
    with pytest.raises(ModelLoadError, match=r"lacks b\.weight and has c"):
        fit_weights({"a.weight": weights["a.weight"], "c": weights["b.weight"]}, shapes)
    with pytest.raises(ModelLoadError, match=r"a\.weight has the shape \(3, 2\), not \(2, 3\)"):
        fit_weights({**weights, "a.weight": torch.zeros(3, 2)}, shapes, optional=["lm_head.weight"])
    with pytest.raises(ModelLoadError, match="and 3 more"):
        fit_weights({}, {f"p{i}": (1,) for i in range(8)})


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged or was cut short"):
        folder_weights(folder, torch.float32)


def test_shards_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path)
    shard(folder)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": places | {"model.extra": "model-0.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"lacks model\.extra"):
        folder_weights(folder, torch.float32)
    index.write_text(json.dumps({"weight_map": places}))
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-1\.safetensors"):
        folder_weights(folder, torch.float32)
    index.write_text("{")
    with pytest.raises(ModelLoadError, match="cannot read"):
        folder_weights(folder, torch.float32)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../outside.safetensors"}}')
    with pytest.raises(ModelLoadError, match="lacks outside"):
        folder_weights(folder, torch.float32)


def test_pickles_are_refused_and_no_weights_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        folder_weights(tmp_path, torch.float32)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickles"):
        folder_weights(tmp_path, torch.float32)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no-such-model"}', "{}"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
        folder_config(tmp_path)
