"""Where specserve keeps what it fetches and converts. The only place that reads the environment for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from specserve.core.errors import ModelLoadError


def home() -> Path:
    """SPECSERVE_HOME, else `specserve` in the user's cache folder (XDG_CACHE_HOME or ~/.cache). May not exist yet."""
    chosen = os.environ.get("SPECSERVE_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "specserve"


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold `folder`/.`name`.lock, so that two processes do not fetch or convert the same thing at once.

    Makes the folder. The lock is the operating system's: it ends with the process that holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{name}.lock")
        lock.acquire()
    except OSError as error:
        raise ModelLoadError(
            f"cache: cannot write to {folder}: {error.strerror or error}; set SPECSERVE_HOME to another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Delete half-made files and folders of processes that ended. Call with the lock held."""
    for path in folder.glob(pattern):
        remove(path)


def remove(path: Path) -> None:
    """Delete a file or a folder with everything in it; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            remove(inner)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
