"""The demo model's weights in the formats that the peers read. Made once, kept in the cache folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

# What the files say of themselves: some readers want it.
_FILE_TYPES = {Type.F16: 1, Type.Q4_0: 2, Type.Q8_0: 7, Type.BF16: 32}
_WRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")
# name -> (type of the matrices, type of the embedding, which is the head too)
VARIANTS = {
    "bf16": (Type.BF16, Type.BF16),
    "q8": (Type.Q8_0, Type.Q8_0),
    "q4": (Type.Q4_0, Type.Q8_0),
    "f16": (Type.F16, Type.F16),
}


def gguf_variant(source: Path, folder: Path, name: str, say: Callable[[str], None]) -> Path:
    """Path of the model in another of VARIANTS, made where it is not there yet."""
    target = folder / f"demo-{name}.gguf"
    if not target.exists():
        say(f"writing {target.name}")
        part = target.with_suffix(".part")
        requantise(source, part, *VARIANTS[name])
        part.replace(target)
    return target


def requantise(source: Path, target: Path, matrices: Type, embedding: Type) -> None:
    """Write a GGUF file's model with other types; vectors become float32.

    A tensor that has its type already is copied byte for byte.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, _text(reader, "general.architecture"))
    writer.add_file_type(_FILE_TYPES[matrices])
    writer.add_quantization_version(2)
    for name, field in reader.fields.items():
        if name not in _WRITTEN and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        kind = Type(tensor.tensor_type)
        wanted = embedding if tensor.name.startswith("token_embd") else matrices
        if len(tensor.shape) == 1:
            values = quants.dequantize(tensor.data, kind).astype(np.float32)
            writer.add_tensor(tensor.name, values)
        elif kind == wanted:
            writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data), raw_dtype=wanted)
        else:
            values = np.ascontiguousarray(quants.dequantize(tensor.data, kind), np.float32)
            writer.add_tensor(tensor.name, quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text(reader: Any, key: str) -> str:
    return str(reader.fields[key].contents())
