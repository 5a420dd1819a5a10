"""A folder in Hugging Face format -> transformers configuration and weights, read by safetensors' memory map."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from specserve.core.errors import ModelLoadError
from specserve.core.imports import TRANSFORMERS
from specserve.kernels.cpu.packing import Kind
from specserve.models.checkpoint import some
from specserve.models.packed_cache import Source
from specserve.models.quantize import Rows

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

Progress = Callable[[int, int, str], None]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def folder_config(folder: Path) -> Any:
    """The folder's transformers configuration; code that a folder may bring is never run.

    Raises:
        ModelLoadError: config.json is missing, damaged, or of a kind that this transformers does not know.
    """
    # Imported here: the Auto classes take a quarter of a second, as long as a packed model to load.
    with TRANSFORMERS:
        from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises nearly anything for a damaged configuration
        raise ModelLoadError(
            f"model: cannot read {folder / 'config.json'}: {_first_line(error)}", param="model"
        ) from None


def folder_weights(folder: Path, dtype: torch.dtype, progress: Progress | None = None) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors files, floating-point ones as `dtype`.

    Raises:
        ModelLoadError: no safetensors, a shard that is missing or damaged, or a tensor that its shard lacks.
    """
    shards = _shards(folder)
    total, done = sum(shard.stat().st_size for shard in shards), 0
    weights: dict[str, torch.Tensor] = {}
    for shard, expected in shards.items():
        with _reading(shard), safe_open(shard, framework="pt") as file:
            for name in _names(shard, file, expected):
                tensor = file.get_tensor(name)
                weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
                done += tensor.nbytes
                if progress is not None:
                    progress(min(done, total), total, "weights")
    return weights


class FolderTensors:
    """The folder's tensors, as packed_build.Tensors; each is read when it is asked for.

    Raises:
        ModelLoadError: as for folder_weights, also while tensors are read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for shard, expected in _shards(folder).items():
            with _reading(shard):
                file: Any = safe_open(shard, framework="pt")
                for name in _names(shard, file, expected):
                    self._files[name] = (shard, file)
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def source(self) -> Source:
        """What a packed model of them is made from."""
        shards = sorted({shard for shard, _ in self._files.values()})
        headers = [(self._folder / "config.json").read_bytes(), *(_header(shard) for shard in shards)]
        return Source.of(self._folder, shards, headers)

    def kind(self, name: str) -> Kind | None:
        shard, file = self._files[name]
        with _reading(shard):
            return Kind.BF16 if file.get_slice(name).get_dtype() == "BF16" else Kind.F32

    def rows(self, name: str) -> Rows:
        return Rows.of(self._tensor(name))

    def vector(self, name: str) -> torch.Tensor:
        return self._tensor(name).float()

    def _tensor(self, name: str) -> torch.Tensor:
        shard, file = self._files[name]
        with _reading(shard):
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@contextmanager
def _reading(shard: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"model: {shard} is damaged or was cut short ({_first_line(error)}); fetch it again", param="model"
        ) from None


def _header(shard: Path) -> bytes:
    """What safetensors says of the tensors: u64 length, JSON."""
    with shard.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return file.read(length)


def _names(shard: Path, file: Any, expected: set[str]) -> list[str]:
    """The tensors to read of an opened shard."""
    held = set(file.keys())
    lacking = sorted(expected - held)
    if lacking:
        raise ModelLoadError(f"model: {shard} lacks {some(lacking)}, which {_INDEX} places there", param="model")
    return sorted(expected or held)


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Shard -> the tensors that the index places there; one shard with the empty set for all of its tensors."""
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: set()}
    index = folder / _INDEX
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        reason = (
            f"its weights are pickles ({pickles[0]}), which may run code when read; convert them to safetensors"
            if pickles
            else f"it has neither {_SINGLE} nor {_INDEX}"
        )
        raise ModelLoadError(f"model: {folder} has no weights that can be read: {reason}", param="model")
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, set[str]] = {}
        for name, shard in places.items():
            shards.setdefault(folder / Path(shard).name, set()).add(name)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"model: cannot read {index}: {_first_line(error)}", param="model") from None
    missing = sorted(shard.name for shard in shards if not shard.is_file())
    if missing:
        raise ModelLoadError(f"model: {folder} lacks {some(missing)}, which {_INDEX} names", param="model")
    return shards


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
