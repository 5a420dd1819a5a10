"""Reading GGUF files: the same as gguf's own reader, and every damaged file is an error, never a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.core.errors import ModelLoadError
from specserve.models.gguf_file import GGUFFile
from tests.fakes.tiny import tiny_llama_folder
from tests.fakes.tiny_gguf import tiny_gguf


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return tiny_gguf(tiny_llama_folder(folder / "hf"), folder / "a.gguf", gguf.GGMLQuantizationType.Q4_1)


def test_equal_to_gguf_reader(made: Path) -> None:
    ours, theirs = GGUFFile(made), gguf.GGUFReader(made)
    assert ours.architecture == "llama"
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        want = field.contents()
        assert (ours.strings(key) or ours.metadata[key]) == want, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(ours.data(mine).ravel(), tensor.data.view(np.uint8).ravel())


def test_strings_of_what_is_no_array_of_strings(made: Path) -> None:
    file = GGUFFile(made)
    assert file.strings("general.architecture") == []
    assert file.strings("absent") == []


def test_header_ends_before_the_data(made: Path) -> None:
    file = GGUFFile(made)
    header, first = file.header(), min(tensor.offset for tensor in file.tensors.values())
    assert header == made.read_bytes()[: len(header)]
    assert first - 32 < len(header) <= first


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 20, 24, 60, 0.1, 0.5, 0.999])
def test_a_file_that_was_cut_short_is_an_error(made: Path, tmp_path: Path, keep: float) -> None:
    data = made.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf") as caught:
        GGUFFile(path)
    assert caught.value.param == "model"


def test_the_reason_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    cases = {
        b"GGML": "does not begin with GGUF",
        b"GGUF" + struct.pack("<I", 99): "version 99",
        b"GGUF" + struct.pack(">I", 3): "big-endian",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60): "announces",
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0): "announces",
    }
    for data, reason in cases.items():
        path.write_bytes(data + bytes(40) if reason != "announces" else data)
        with pytest.raises(ModelLoadError, match=reason):
            GGUFFile(path)
    with pytest.raises(ModelLoadError, match="cannot read"):
        GGUFFile(tmp_path / "absent.gguf")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_never_crashes(made: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(made.read_bytes())
    end = len(GGUFFile(made).header())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
        for tensor in file.tensors.values():
            file.data(tensor)
        file.strings("tokenizer.ggml.tokens")
    except ModelLoadError:
        pass
