"""Where things are kept, and that one process at a time makes them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from specserve.core.errors import ModelLoadError
from specserve.models.home import home, locked, remove


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.delenv("SPECSERVE_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_home_is_the_users_cache_folder(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert home() == tmp_path / ".cache" / "specserve"
    clean.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert home() == tmp_path / "xdg" / "specserve"
    clean.setenv("XDG_CACHE_HOME", "relative")
    assert home() == tmp_path / ".cache" / "specserve"


def test_specserve_home_comes_first(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    clean.setenv("SPECSERVE_HOME", "~/mine")
    assert home() == tmp_path / "mine"


def test_lock_admits_one_at_a_time(tmp_path: Path) -> None:
    inside, most = [], []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        for _ in range(20):
            with locked(tmp_path / "new", "thing"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 80


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="SPECSERVE_HOME"), locked(tmp_path / "file" / "inner", "x"):
        pass


def test_remove_takes_files_folders_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("x")
    (tmp_path / "kept").write_text("x")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "kept")
    remove(tmp_path / "a")
    remove(tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
