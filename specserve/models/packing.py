"""PackedModel: a member of the Llama family as the native forward reads it, all of it in one piece of memory.

A layout says where everything lies. Making a model fills the memory tensor by tensor, a cache file is the memory's
image, and either way the model is views of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specserve.kernels.cpu import packing
from specserve.kernels.cpu.packing import Kind, PackedWeights
from specserve.models.config import ModelConfig
from specserve.models.quantize import LABELS

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

INTERLEAVE = 16  # rows of gate, then so many of up: a panel of 32 outputs holds both
EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """The embedding, row by row.

    Attributes:
        kind: F32, BF16 or Q8.
        k: hidden.
        rows: uint8 [vocab, packing.row_bytes(kind, hidden)].
    """

    kind: Kind
    k: int
    rows: npt.NDArray[np.uint8]

    def dequantise(self) -> torch.Tensor:
        """float32 [vocab, hidden]."""
        return packing.dequantise_rows(self.kind, torch.from_numpy(self.rows), self.k)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One decoder layer.

    Attributes:
        qkv: hidden -> [q | k | v]; output: heads -> hidden; down: inner -> hidden.
        gate_up: hidden -> 16 of gate, 16 of up, and so on.
        input_norm, mlp_norm: float32 [hidden]; q_norm, k_norm: float32 [head_dim] or None.
        window: positions a row sees, 0 for all.
    """

    input_norm: npt.NDArray[np.float32]
    qkv: PackedWeights
    q_norm: npt.NDArray[np.float32] | None
    k_norm: npt.NDArray[np.float32] | None
    output: PackedWeights
    mlp_norm: npt.NDArray[np.float32]
    gate_up: PackedWeights
    down: PackedWeights
    window: int


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model's weights, packed; its arrays are views of one piece of memory.

    Attributes:
        norm: float32 [hidden].
        head: hidden -> vocab; packed from the embedding's rows where the two are tied.
    """

    config: ModelConfig
    embedding: PackedEmbedding
    layers: list[PackedLayer]
    norm: npt.NDArray[np.float32]
    head: PackedWeights

    @property
    def kinds(self) -> str:
        """Such as "q4_1+q8_0": the kinds of the layers' matrices, then the head's where it is another."""
        layers = [w for layer in self.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return "+".join(dict.fromkeys(LABELS[w.kind] for w in [*layers, self.head]))


@dataclass(frozen=True, slots=True)
class Matrix:
    """One packed matrix of a layer: its name here, and the tensors it is made of, without ".weight" and ".bias"."""

    name: str
    stems: tuple[str, ...]
    sizes: tuple[int, ...]  # outputs
    k: int  # inputs
    bias: bool

    @property
    def interleaved(self) -> bool:
        return self.name == "gate_up"

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Rows (or numbers) of the parts in the order of the packed matrix."""
        if not self.interleaved:
            return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        groups = [part.view(-1, INTERLEAVE, *part.shape[1:]) for part in parts]
        return torch.stack(groups, dim=1).flatten(0, 2)

    def separated(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `joined`."""
        if not self.interleaved:
            return list(torch.split(whole, list(self.sizes)))
        groups = whole.view(-1, 2, INTERLEAVE, *whole.shape[1:])
        return [groups[:, i].flatten(0, 1) for i in range(2)]


def layer_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """The matrices of every layer, in the order in which the forward reads them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = "self_attn", "mlp"
    return (
        Matrix("qkv", tuple(f"{attention}.{x}_proj" for x in "qkv"), (q, kv, kv), hidden, config.qkv_bias),
        Matrix("output", (f"{attention}.o_proj",), (hidden,), q, config.output_bias),
        Matrix("gate_up", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, inner), hidden, config.mlp_bias),
        Matrix("down", (f"{mlp}.down_proj",), (hidden,), inner, config.mlp_bias),
    )


def layer_norms(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Name here -> the tensor without ".weight", and its size."""
    norms = {
        "input_norm": ("input_layernorm", config.hidden_size),
        "mlp_norm": ("post_attention_layernorm", config.hidden_size),
    }
    if config.qk_norm:
        norms["q_norm"] = ("self_attn.q_norm", config.head_dim)
        norms["k_norm"] = ("self_attn.k_norm", config.head_dim)
    return norms


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies.

    Attributes:
        name: such as "layers.3.qkv", "layers.3.qkv.bias", "layers.3.input_norm", "embedding", "norm", "head".
        kind: of the matrix; F32 for vectors.
        n, k: outputs and inputs; k is 0 for vectors.
        offset, nbytes: in the memory.
    """

    name: str
    kind: Kind
    n: int
    k: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Every tensor's place, and the bytes of all."""

    entries: tuple[Entry, ...]
    nbytes: int


def assemble(config: ModelConfig, layout: Layout, memory: npt.NDArray[np.uint8]) -> PackedModel:
    """The model over memory, uint8 [layout.nbytes], that holds its tensors. KeyError: a tensor has no place."""
    entries = {entry.name: entry for entry in layout.entries}

    def data(name: str) -> npt.NDArray[np.uint8]:
        return memory[entries[name].offset : entries[name].offset + entries[name].nbytes]

    def vector(name: str) -> npt.NDArray[np.float32]:
        return data(name).view(np.float32)

    def packed(name: str) -> PackedWeights:
        entry, bias = entries[name], f"{name}.bias"
        return PackedWeights(entry.kind, entry.n, entry.k, data(name), vector(bias) if bias in entries else None)

    def layer(i: int) -> PackedLayer:
        at = f"layers.{i}"
        return PackedLayer(
            input_norm=vector(f"{at}.input_norm"),
            qkv=packed(f"{at}.qkv"),
            q_norm=vector(f"{at}.q_norm") if config.qk_norm else None,
            k_norm=vector(f"{at}.k_norm") if config.qk_norm else None,
            output=packed(f"{at}.output"),
            mlp_norm=vector(f"{at}.mlp_norm"),
            gate_up=packed(f"{at}.gate_up"),
            down=packed(f"{at}.down"),
            window=config.windows[i],
        )

    table = entries["embedding"]
    return PackedModel(
        config=config,
        embedding=PackedEmbedding(table.kind, table.k, data("embedding").reshape(table.n, -1)),
        layers=[layer(i) for i in range(config.num_layers)],
        norm=vector("norm"),
        head=packed("head"),
    )


def unpack(model: PackedModel) -> dict[str, torch.Tensor]:
    """What the packed weights stand for: float32 tensors under transformers' names."""
    config = model.config
    weights = {f"{EMBEDDING}.weight": model.embedding.dequantise(), f"{NORM}.weight": torch.from_numpy(model.norm)}
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}"
        for matrix in layer_matrices(config):
            packed: PackedWeights = getattr(layer, matrix.name)
            for stem, part in zip(matrix.stems, matrix.separated(packed.dequantise()), strict=True):
                weights[f"{at}.{stem}.weight"] = part
            if packed.bias is not None:
                for stem, part in zip(matrix.stems, matrix.separated(torch.from_numpy(packed.bias)), strict=True):
                    weights[f"{at}.{stem}.bias"] = part
        for name, (stem, _) in layer_norms(config).items():
            weights[f"{at}.{stem}.weight"] = torch.from_numpy(getattr(layer, name))
    if not config.tie_word_embeddings:
        weights[f"{HEAD}.weight"] = model.head.dequantise()
    return weights
