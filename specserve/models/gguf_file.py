"""A GGUF file: its metadata, and its tensors as views of the mapped file.

The header is parsed here rather than by gguf.GGUFReader, which makes an object for every entry of the vocabulary
(seconds) and trusts every length it reads. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from specserve.core.errors import ModelLoadError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` as torch has it (rows first), `kind` its ggml type, `offset` and `num_bytes` in the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Strings:
    """An array of strings that is decoded when it is asked for: a vocabulary is long and often not needed."""

    position: int
    count: int


class _Corrupt(Exception):
    pass


class GGUFFile:
    """A GGUF file, opened for reading. Keep it open as long as its tensors' data is used.

    Attributes:
        metadata: key -> number, bool, text or list of numbers; arrays of strings are reached by `strings(key)`.
        tensors: name -> GGUFTensor, in the file's order.

    Raises:
        ModelLoadError: not a GGUF file, a version that is not known, or a file that ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelLoadError(f"model: cannot read {path}: {error}", param="model") from None
        self._position = 0
        try:
            self._parse()
        except (_Corrupt, struct.error, UnicodeDecodeError) as error:
            reason = str(error) if isinstance(error, _Corrupt) else "it ends inside its header or is damaged"
            raise ModelLoadError(f"model: {path} is not a usable GGUF file: {reason}", param="model") from None

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def strings(self, key: str) -> list[str]:
        """An array of strings; [] where the file has none."""
        entry = self.metadata.get(key)
        if not isinstance(entry, _Strings):
            return []
        self._position = entry.position
        try:
            return [self._string() for _ in range(entry.count)]
        except UnicodeDecodeError:
            raise ModelLoadError(f"model: {self.path} is damaged: {key} is not text", param="model") from None

    def data(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, uint8 [rows, bytes of a row], a read-only view of the mapped file."""
        flat = np.frombuffer(self._data, np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return flat.reshape(rows, -1)

    def header(self) -> bytes:
        """The file up to its tensors' data: metadata and the list of tensors."""
        return self._data[: self._header_end]

    def _parse(self) -> None:
        if self._data[:4] != b"GGUF":
            raise _Corrupt("it does not begin with GGUF")
        self._position = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            big_endian = version & 0xFFFF == 0
            raise _Corrupt("it is big-endian" if big_endian else f"version {version} is not known (2 and 3 are)")
        num_tensors, num_entries = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(self._count(num_entries, 13)):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(self._count(num_tensors, 24))]
        self._header_end = self._position
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _Corrupt(f"alignment {alignment!r} is not a positive number")
        start = -(-self._position // alignment) * alignment
        for tensor in self._placed(infos, start):
            if tensor.name in self.tensors:
                raise _Corrupt(f"tensor {tensor.name} is there twice")
            self.tensors[tensor.name] = tensor

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterator[GGUFTensor]:
        for name, shape, raw_kind, offset in infos:
            try:
                kind = gguf.GGMLQuantizationType(raw_kind)
            except ValueError:
                raise _Corrupt(f"tensor {name} has the unknown type {raw_kind}") from None
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            elements = 1
            for size in shape:
                elements *= size
            if not elements or shape[-1] % block:
                raise _Corrupt(f"tensor {name} has the shape {shape}, which type {kind.name} cannot have")
            num_bytes = elements // block * block_bytes
            if start + offset + num_bytes > len(self._data):
                raise _Corrupt(
                    f"tensor {name} ends at byte {start + offset + num_bytes}, the file at {len(self._data)}; "
                    "the download was cut short"
                )
            yield GGUFTensor(name, shape, kind, start + offset, num_bytes)

    def _count(self, count: int, least_bytes: int) -> int:
        if count * least_bytes > len(self._data) - self._position:
            raise _Corrupt(f"it announces {count} entries and has no room for them")
        return count

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._position)
        self._position += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._count(self._scalar("<Q"), 1)
        text = self._data[self._position : self._position + length].decode("utf-8")
        self._position += length
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _Corrupt(f"a metadata value has the unknown type {kind}")
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if inner == _STRING:
            entry = _Strings(self._position, self._count(count, 8))
            for _ in range(count):
                self._position += 8 + self._count(struct.unpack_from("<Q", self._data, self._position)[0], 1)
            return entry
        if inner not in _SCALARS:
            raise _Corrupt(f"a metadata array has the unknown type {inner}")
        form = _SCALARS[inner]
        self._count(count, struct.calcsize(form))
        values = list(struct.unpack_from(f"<{count}{form[1]}", self._data, self._position))
        self._position += struct.calcsize(form) * count
        return values

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar("<I")
        if not 1 <= dims <= _MOST_DIMS:
            raise _Corrupt(f"tensor {name} has {dims} dimensions")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(dims)]))
        return name, shape, self._scalar("<I"), self._scalar("<Q")
