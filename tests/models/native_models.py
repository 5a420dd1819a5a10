"""Tiny random models for the native forward: awkward shapes, every kind of weights, and the plain model of the same.

Weights are spread over magnitudes, block by block and number by number, so that another order of any sum shows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

from specserve.kernels import reference
from specserve.kernels.cpu import native
from specserve.kernels.cpu.packing import Kind
from specserve.models.checkpoint import family_shapes
from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaFamily
from specserve.models.native import NativeLlama
from specserve.models.packed_build import fill, plan
from specserve.models.packed_cache import Source
from specserve.models.packing import PackedModel, assemble, unpack
from specserve.models.quantize import Rows
from tests.fakes.paging import Paged

TYPES = {Kind.Q8: Type.Q8_0, Kind.Q4_0: Type.Q4_0, Kind.Q4_1: Type.Q4_1}
# Of one layer's matrices in turn, the embedding and the head. Parts of a merged matrix may differ.
KINDS = {
    "bf16": (Kind.BF16,),
    "q8": (Kind.Q8,),
    "q4_0": (Kind.Q4_0,),
    "q4_1": (Kind.Q4_1,),
    "mixed": (
        *(Kind.Q4_0, Kind.Q4_1, Kind.Q4_0, Kind.BF16, Kind.Q8, Kind.Q8, Kind.Q4_0),
        *(Kind.Q8, Kind.Q8, Kind.Q8, Kind.Q4_1, Kind.Q4_0, Kind.Q4_0, Kind.BF16),
    ),
}


def _config(**numbers: object) -> ModelConfig:
    dim = int(numbers["head_dim"])  # type: ignore[call-overload]
    plain = ModelConfig(
        num_layers=2,
        num_heads=9,
        num_kv_heads=3,
        head_dim=dim,
        hidden_size=96,
        intermediate_size=160,
        vocab_size=331,
        max_position=2048,
        rms_norm_eps=1e-5,
        inv_freq=tuple(float(10000.0 ** (-2 * i / dim)) for i in range(dim // 2)),
        rope_scale=1.0,
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(0, 0),
    )
    return replace(plain, **numbers)  # type: ignore[arg-type]


SHAPES = {
    # Three heads share one of keys; products longer than what tiles take in one go; a window in one of the layers.
    "odd": _config(head_dim=64, qkv_bias=True, output_bias=True, mlp_bias=True, windows=(0, 20)),
    "dim16": _config(head_dim=16, num_heads=6, vocab_size=97, tie_word_embeddings=True, qk_norm=True),
    # More heads share one of keys than are computed together, on vectors and on tiles.
    "dim48": _config(head_dim=48, num_heads=10, num_kv_heads=2, vocab_size=64, windows=(33, 0), qk_norm=True),
    "dim80": _config(head_dim=80, num_heads=6, num_kv_heads=6, vocab_size=20, mlp_bias=True, rope_scale=1.2),
    "dim128": _config(head_dim=128, num_heads=20, num_kv_heads=1, hidden_size=64, qkv_bias=True, windows=(1, 70)),
    # Rows of so many inputs are taken in several pieces.
    "wide": _config(head_dim=32, num_heads=1, num_kv_heads=1, hidden_size=32, intermediate_size=6144, vocab_size=33),
}


@dataclass(frozen=True)
class Checkpoint:
    """Tensors under transformers' names, each matrix as rows of a kind."""

    weights: Mapping[str, torch.Tensor]
    kinds: Mapping[str, Kind]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(weight.shape) for name, weight in self.weights.items()}

    def source(self) -> Source:
        raise NotImplementedError("these models are not cached")

    def kind(self, name: str) -> Kind:
        return self.kinds[name]

    def rows(self, name: str) -> Rows:
        kind, weight = self.kinds[name], self.weights[name]
        if not kind.quantised:
            return Rows.of(weight.bfloat16() if kind is Kind.BF16 else weight)
        data = quants.quantize(weight.contiguous().numpy(), TYPES[kind])
        return Rows(kind, weight.shape[1], torch.from_numpy(data).contiguous())

    def vector(self, name: str) -> torch.Tensor:
        return self.weights[name].float()

    def packed(self, config: ModelConfig, dtype: str = "bfloat16") -> PackedModel:
        """Packed for the library in use."""
        layout = plan(config, self, "auto", dtype)
        assert layout is not None
        return assemble(config, layout, fill(config, self, layout))


def spread(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Of numbers that differ by up to 2^14; each output has a variance of about 1."""
    x = torch.randn(*shape, generator=random) * torch.exp2(torch.randint(-3, 4, shape, generator=random).float())
    blocks = torch.exp2(torch.randint(-4, 5, (shape[0], -(-shape[1] // 32)), generator=random).float())
    x *= blocks.repeat_interleave(32, dim=1)[:, : shape[1]]
    return x / x.square().sum(dim=1, keepdim=True).sqrt()


@functools.cache
def checkpoint(shape: str, kind: str, seed: int = 0) -> Checkpoint:
    """A random one, the same for every instruction set."""
    random = torch.Generator().manual_seed(seed)
    weights, kinds = {}, {}
    for name, size in family_shapes(SHAPES[shape]).items():
        if len(size) == 1:
            weights[name] = torch.randn(size, generator=random) * 0.3 + (0.0 if name.endswith("bias") else 1.0)
            continue
        table = "embed" in name or "lm_head" in name
        # The residual stream gets about as much from the embedding as from each layer.
        weights[name] = spread(random, *size) * (size[1] ** 0.5 if "embed" in name else 1.0)
        if table and kind == "mixed":
            kinds[name] = Kind.Q8 if "embed" in name else Kind.Q4_0
        else:
            kinds[name] = KINDS[kind][sum("layers" in n for n in kinds) % len(KINDS[kind])]
    return Checkpoint(weights, kinds)


@functools.cache
def _packed(isa: str | None, shape: str, kind: str) -> PackedModel:
    return checkpoint(shape, kind).packed(SHAPES[shape])


@functools.cache
def _model(isa: str | None, shape: str, kind: str) -> NativeLlama:
    return NativeLlama(packed(shape, kind), name=f"{shape} {kind}")


def packed(shape: str, kind: str) -> PackedModel:
    """For the library in use."""
    return _packed(native.isa(), shape, kind)


def model(shape: str, kind: str) -> NativeLlama:
    """On the library in use."""
    return _model(native.isa(), shape, kind)


def plain(config: ModelConfig, made: PackedModel) -> LlamaFamily:
    """The numbers that packed weights stand for, as float32 in single operations of torch."""
    return LlamaFamily(config, unpack(made), "fast", dtype=torch.float32, ops=reference)


@functools.cache
def expected(shape: str, kind: str, count: int) -> torch.Tensor:
    """The plain model's logits of tokens(count): the same for every instruction set, as the rows are."""
    family = plain(SHAPES[shape], packed(shape, kind))
    return Paged(family).logits(tokens(count, SHAPES[shape].vocab_size))


def tokens(count: int, vocab: int, seed: int = 1) -> list[int]:
    """Random ids, of which the first ones are the same for every count."""
    return torch.randint(0, vocab, (1024,), generator=torch.Generator().manual_seed(seed)).tolist()[:count]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float32 tensors agree in every bit; -0.0 is not 0.0, and a NaN equals itself."""
    assert a.dtype == b.dtype == torch.float32
    assert a.shape == b.shape
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
