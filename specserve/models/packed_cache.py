"""Packed models on disk, so that they are made once: files in `packed` below specserve's cache folder.

Not beside the models: hubs' folders are shared and often read-only. A file is named after the model's path and
the quantization, and holds the image of a packed model's memory:

    magic, u32 bytes of the header, u32 CRC-32 of the header, header (JSON), zeros up to 4096 bytes, the memory

The header says of which source (size, modification time, a hash of its own header) and of which layout the memory is,
and has a CRC-32 of each chunk of it. What does not fit or is damaged is made anew. Files of models that are gone, and
the least recently used ones beyond LIMIT bytes in all, are deleted when another one is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specserve.core.errors import ModelLoadError
from specserve.kernels.cpu.memory import huge
from specserve.kernels.lazy import num_threads
from specserve.models.home import home, locked
from specserve.models.packing import Layout

Progress = Callable[[int, int, str], None]
Memory = npt.NDArray[np.uint8]
log = logging.getLogger(__name__)

LIMIT = 32 << 30  # bytes of all files
VERSION = 2  # of this format and of how models are packed; raise it when either changes
MAGIC = b"SSPACKED"
CHUNK = 4 << 20  # bytes under one checksum
_SUFFIX = ".packed"
_START = struct.Struct("<8sII")
_PAGE = 4096
_MOST_HEADER = 64 << 20
_ABANDONED_SECONDS = 24 * 3600  # age of a half-written file that nobody writes any more


@dataclass(frozen=True, slots=True)
class Source:
    """What a packed model is made from.

    Attributes:
        path: of the file or folder, resolved.
        files: (name, bytes, modification time in ns) of every file with weights.
        header: hash of what describes the weights: configuration and the files' own headers.
    """

    path: Path
    files: tuple[tuple[str, int, int], ...]
    header: str

    @classmethod
    def of(cls, path: Path, files: list[Path], headers: list[bytes]) -> Source:
        digest = hashlib.blake2b(digest_size=16)
        for header in headers:
            digest.update(struct.pack("<Q", len(header)) + header)
        stats = [(file.name, file.stat()) for file in files]
        return cls(path.resolve(), tuple((n, s.st_size, s.st_mtime_ns) for n, s in stats), digest.hexdigest())


class _Unfit(Exception):
    """Why a file is not used."""


def cached(
    source: Source, variant: str, layout: Layout, make: Callable[[], Memory], progress: Progress | None = None
) -> Memory:
    """The memory of the packed model, uint8 [layout.nbytes]: read if it is in the cache, else made and written there.

    Several processes may ask at once; one makes it. A cache that cannot be written is told in the log, once.

    Args:
        variant: of the model, such as its quantization and dtype.
        make: makes the memory.
        progress: called with (bytes done, bytes in all, what).
    """
    folder = home() / "packed"
    path = folder / _file_name(source, variant)
    expected = _expected(source, variant, layout)
    memory = _read(path, expected, layout.nbytes, progress)
    if memory is not None:
        return memory
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, path.stem))
        except ModelLoadError as error:
            log.warning("packed weights are not kept: %s", error.message)
            return make()
        memory = _read(path, expected, layout.nbytes, progress, quiet=True)  # another process may have made it
        if memory is None:
            memory = make()
            _write(path, expected, memory)
            _clean(folder, path)
    return memory


def _file_name(source: Source, variant: str) -> str:
    digest = hashlib.blake2b(f"{source.path}\0{variant}".encode(), digest_size=8).hexdigest()
    return f"{source.path.stem[:40]}-{digest}{_SUFFIX}"


def _expected(source: Source, variant: str, layout: Layout) -> dict[str, Any]:
    entries = json.dumps([astuple(entry) for entry in layout.entries])
    return {
        "version": VERSION,
        "path": str(source.path),
        "files": [list(file) for file in source.files],
        "source": source.header,
        "variant": variant,
        "layout": hashlib.blake2b(entries.encode(), digest_size=16).hexdigest(),
        "nbytes": layout.nbytes,
        "chunk": CHUNK,
    }


def _read(
    path: Path, expected: dict[str, Any], nbytes: int, progress: Progress | None, *, quiet: bool = False
) -> Memory | None:
    try:
        with path.open("rb") as file:
            header, start = _header(file.fileno())
            if header.get("version") != VERSION:
                raise _Unfit("of another version")
            if {name: header.get(name) for name in expected} != expected:
                raise _Unfit("of another state of the model")
            memory = huge(nbytes)
            if not _fill(file.fileno(), start, memory, header["checksums"], progress):
                raise _Unfit("damaged")
        os.utime(path)  # when it was last used
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (_Unfit, OSError, ValueError, KeyError, TypeError) as error:
        reason = error if isinstance(error, _Unfit) else "damaged"
        if not quiet:
            log.warning("the packed weights %s are %s; they are made again", path, reason)
        return None
    return memory


def _header(descriptor: int) -> tuple[dict[str, Any], int]:
    """The header, and where the memory begins."""
    start = os.pread(descriptor, _START.size, 0)
    if len(start) < _START.size:
        raise _Unfit("damaged")
    magic, length, checksum = _START.unpack(start)
    if magic != MAGIC or length > _MOST_HEADER:
        raise _Unfit("damaged")
    text = os.pread(descriptor, length, _START.size)
    if zlib.crc32(text) != checksum:
        raise _Unfit("damaged")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise _Unfit("damaged")
    return header, -(-(_START.size + length) // _PAGE) * _PAGE


def _fill(descriptor: int, start: int, memory: Memory, checksums: list[int], progress: Progress | None) -> bool:
    """Read the memory on several threads; whether every chunk is what it was."""
    view = memory.data
    chunks = _chunks(memory.nbytes)
    if len(chunks) != len(checksums):
        return False

    def read(i: int) -> bool:
        first, end = chunks[i]
        part = view[first:end]
        return os.preadv(descriptor, [part], start + first) == len(part) and zlib.crc32(part) == checksums[i]

    with ThreadPoolExecutor(num_threads()) as pool:
        for i, good in enumerate(pool.map(read, range(len(chunks)))):
            if not good:
                pool.shutdown(cancel_futures=True)
                return False
            if progress is not None:
                progress(chunks[i][1], memory.nbytes, "weights")
    return True


def _write(path: Path, expected: dict[str, Any], memory: Memory) -> None:
    """Write the file whole or not at all; a disk that is full or broken is told in the log."""
    view = memory.data
    with ThreadPoolExecutor(num_threads()) as pool:
        checksums = list(pool.map(lambda chunk: zlib.crc32(view[chunk[0] : chunk[1]]), _chunks(memory.nbytes)))
    text = json.dumps({**expected, "checksums": checksums}).encode()
    start = _START.pack(MAGIC, len(text), zlib.crc32(text)) + text
    part = path.with_name(f"part-{path.name}")
    try:
        with part.open("wb") as file:
            file.write(start + bytes(-len(start) % _PAGE))
            file.write(view)
        part.replace(path)
    except OSError as error:
        log.warning("packed weights are not kept: cannot write %s: %s", path, error.strerror or error)
        part.unlink(missing_ok=True)


def _chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(first, min(first + CHUNK, nbytes)) for first in range(0, nbytes, CHUNK)]


def _clean(folder: Path, keep: Path) -> None:
    """Delete files of models that are gone, the least recently used beyond LIMIT, and abandoned halves."""
    total = 0
    for path, stat in sorted(_entries(folder), key=lambda entry: entry[1].st_mtime, reverse=True):
        if path.name.startswith("part-"):
            # Another process may be writing it.
            gone = time.time() - stat.st_mtime > _ABANDONED_SECONDS
        else:
            total += stat.st_size
            gone = path != keep and (total > LIMIT or not _has_source(path))
        if gone:
            path.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            yield path, path.stat()
        except OSError:  # another process deleted it
            continue


def _has_source(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header, _ = _header(file.fileno())
        return Path(header["path"]).exists()
    except (_Unfit, OSError, ValueError, KeyError, TypeError):
        return False
