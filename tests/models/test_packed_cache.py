"""The cache of packed models gives back what was written, and nothing else."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specserve.kernels.cpu.native import library
from specserve.kernels.cpu.packing import Kind
from specserve.models import packed_cache
from specserve.models.packed_cache import Memory, Source, cached
from specserve.models.packing import Entry, Layout

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library")

SIZE = 3 * packed_cache.CHUNK // 2
LAYOUT = Layout((Entry("norm", Kind.F32, SIZE // 4, 0, 0, SIZE),), SIZE)


class Maker:
    """Makes one content after another, and counts."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Memory:
        self.made += 1
        return content(self.made)


def content(seed: int) -> Memory:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def source(model: Path, header: bytes = b"header") -> Source:
    return Source.of(model, [model], [header])


def files(home: Path) -> list[Path]:
    return sorted((home / "packed").glob("*.packed"))


def test_it_is_made_once(home: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = Maker()
    seen: list[tuple[int, int, str]] = []
    for _ in range(3):
        memory = cached(source(model), "q8", LAYOUT, make, lambda *step: seen.append(step))
        assert np.array_equal(memory, content(1))
    assert make.made == 1
    assert seen[-1] == (SIZE, SIZE, "weights")
    assert not caplog.records


def test_variants_and_models_are_kept_apart(home: Path, model: Path, tmp_path: Path) -> None:
    make = Maker()
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weights")
    for _ in range(2):
        for i, (path, variant) in enumerate([(model, "q8"), (model, "q4"), (other, "q8")]):
            assert np.array_equal(cached(source(path), variant, LAYOUT, make), content(i + 1))
    assert make.made == len(files(home)) == 3


def changed_size(model: Path) -> Source:
    model.write_bytes(b"other weights")
    return source(model)


def changed_time(model: Path) -> Source:
    os.utime(model, ns=(0, model.stat().st_mtime_ns + 1))
    return source(model)


def changed_header(model: Path) -> Source:
    return source(model, b"another")


@pytest.mark.parametrize("change", [changed_size, changed_time, changed_header])
def test_a_model_that_changed_is_packed_anew(
    home: Path, model: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path], Source]
) -> None:
    make = Maker()
    cached(source(model), "q8", LAYOUT, make)
    changed = change(model)
    for _ in range(2):
        assert np.array_equal(cached(changed, "q8", LAYOUT, make), content(2))
    assert make.made == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "another state of the model" in caplog.text
    assert len(files(home)) == 1


def test_another_layout_is_not_read(home: Path, model: Path) -> None:
    make = Maker()
    cached(source(model), "q8", LAYOUT, make)
    moved = Layout((Entry("norm", Kind.F32, SIZE // 4 - 16, 0, 64, SIZE - 64),), SIZE)
    cached(source(model), "q8", moved, make)
    assert make.made == 2


def test_another_version_is_not_read(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    cached(source(model), "q8", LAYOUT, make)
    monkeypatch.setattr(packed_cache, "VERSION", packed_cache.VERSION + 1)
    cached(source(model), "q8", LAYOUT, make)
    assert make.made == 2
    assert "of another version" in caplog.text


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def forge(path: Path, _: int) -> None:
    """A header that is whole and says nothing of the memory."""
    text = json.dumps([]).encode()
    path.write_bytes(struct.pack("<8sII", packed_cache.MAGIC, len(text), packed_cache.zlib.crc32(text)) + text)


@pytest.mark.parametrize(
    ("damage", "at"),
    [
        (cut, 0),
        (cut, 10),
        (cut, 100),
        (cut, 5000),
        (cut, -1),
        (flip, 0),
        (flip, 9),
        (flip, 40),
        (flip, -1),
        (flip, 5000),
        (forge, 0),
    ],
)
def test_a_damaged_file_is_replaced(
    home: Path, model: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path, int], None], at: int
) -> None:
    make = Maker()
    cached(source(model), "q8", LAYOUT, make)
    (path,) = files(home)
    damage(path, at)
    for _ in range(2):
        assert np.array_equal(cached(source(model), "q8", LAYOUT, make), content(2))
    assert make.made == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "file"))
    make = Maker()
    assert np.array_equal(cached(source(model), "q8", LAYOUT, make), content(1))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_leaves_nothing_behind(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    make = Maker()
    assert np.array_equal(cached(source(model), "q8", LAYOUT, make), content(1))
    assert "No space left" in caplog.text
    assert not list((home / "packed").glob("*packed*.packed*"))
    assert files(home) == []


def test_an_error_while_making_passes_and_writes_nothing(home: Path, model: Path) -> None:
    def broken() -> Memory:
        raise ValueError("the model is broken")

    with pytest.raises(ValueError, match="is broken"):
        cached(source(model), "q8", LAYOUT, broken)
    assert files(home) == []


def test_the_least_recently_used_make_room(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    for i, variant in enumerate(["a", "b", "c"]):
        cached(source(model), variant, LAYOUT, make)
        for path in files(home):  # a file system's clock may be coarse
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9 * (3 - i)))
    cached(source(model), "a", LAYOUT, make)  # used again
    monkeypatch.setattr(packed_cache, "LIMIT", 3 * (SIZE + 4096))
    cached(source(model), "d", LAYOUT, make)
    assert make.made == 4
    assert len(files(home)) == 3
    for variant in "acd":
        cached(source(model), variant, LAYOUT, make)
    assert make.made == 4
    cached(source(model), "b", LAYOUT, make)
    assert make.made == 5


def test_files_of_models_that_are_gone_are_deleted(home: Path, model: Path, tmp_path: Path) -> None:
    make = Maker()
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weights")
    cached(source(other), "q8", LAYOUT, make)
    other.unlink()
    abandoned, living = (home / "packed" / f"part-{name}.packed" for name in ("old", "new"))
    abandoned.write_bytes(b"half")
    living.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    cached(source(model), "q8", LAYOUT, make)
    assert [path.name.split("-")[0] for path in files(home)] == ["model", "part"]
    assert living.exists()
