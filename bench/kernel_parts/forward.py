"""Whole forwards of the demo model, as the engine asks for them, against what the weights alone allow."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from bench.kernel_parts.ceilings import Ceilings, Peak
from bench.kernel_parts.measure import Bench, in_turn
from bench.kernel_parts.products import SHAPES
from specserve.core.errors import ModelLoadError
from specserve.models.batch import ForwardBatch
from specserve.models.gguf import GGUFTensors, gguf_model_config
from specserve.models.gguf_file import GGUFFile
from specserve.models.kv_cache import PagedKVCache
from specserve.models.loader import packed_model
from specserve.models.native import NativeLlama
from specserve.models.packing import PackedModel
from specserve.models.source import resolve

PRECISIONS = {"bf16": "none", "q8": "q8", "q4": "q4"}  # the label, and what `quantization` takes
DECODES = (1, 8, 32)
PROMPTS = (256, 2048)
CONTEXT = 128  # tokens of each sequence ahead of a decode
BLOCK = 16


def rows_of(sequences: int, count: int, start: int) -> ForwardBatch:
    """`count` rows from position `start` on of each sequence; the last of each has logits."""
    blocks = -(-(start + count) // BLOCK)
    tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
    positions = np.tile(np.arange(start, start + count), sequences)
    sequence = np.repeat(np.arange(sequences, dtype=np.int32), count)
    slots = tables[sequence, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    tokens = np.random.default_rng(count).integers(1000, 40000, sequences * count)
    last = np.arange(count - 1, sequences * count, count)
    segments = [(i * count, count, i, start) for i in range(sequences)]
    return ForwardBatch(tokens, positions, slots, sequence, tables, last, segments)


def forward(bench: Bench, ceilings: Ceilings) -> None:
    """Nothing where the demo model cannot be had."""
    for label, quantization in PRECISIONS.items():
        bench.say(f"forward, {label}")
        packed = _demo(quantization)
        if packed is None:
            bench.say("there is no demo model here")
            return
        _measure(bench, ceilings, packed, label)


def _demo(quantization: str) -> PackedModel | None:
    try:
        file = GGUFFile(resolve("demo").path)
    except ModelLoadError:
        return None
    return packed_model(gguf_model_config(file), GGUFTensors(file), "bfloat16", quantization)


def streamed_bytes(packed: PackedModel) -> int:
    """Bytes of the weights that a forward multiplies by."""
    matrices = [w for layer in packed.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(w.data.nbytes for w in [*matrices, packed.head])


def _measure(bench: Bench, ceilings: Ceilings, packed: PackedModel, label: str) -> None:
    model, nbytes = NativeLlama(packed), streamed_bytes(packed)
    info = model.info
    blocks = max(max(DECODES) * -(-(CONTEXT + 1) // BLOCK), -(-max(PROMPTS) // BLOCK))
    cache = PagedKVCache(info.num_layers, blocks, BLOCK, info.num_kv_heads, info.head_dim, "bfloat16")
    memory = bench.arena[:nbytes]
    for rows in DECODES:
        batch = rows_of(rows, 1, CONTEXT)
        rates, read = in_turn(bench.settings.repeats, _rate(model, cache, batch, 4), partial(ceilings.read, memory))
        bound = [rows * rate * 1e9 / nbytes for rate in read]
        bench.add(f"decode {label}, {rows} rows", [rows / rate * 1e3 for rate in rates], "ms")
        bench.add(f"decode {label}, {rows} rows, of the weights' bandwidth bound", rates, "tokens/s", bound)
    peak = ceilings.bf16 if label == "bf16" or ceilings.bf16 is Peak.BF16_TILES else Peak.INT8_VECTORS
    operations = 2.0 * sum(n * k * count for name, (n, k, count) in SHAPES.items() if name != "head")
    for rows in PROMPTS:
        rates, bound = in_turn(
            bench.settings.repeats,
            _rate(model, cache, rows_of(1, rows, 0), 1),
            lambda: ceilings.operations(peak) * 1e9 / operations,
        )
        bench.add(f"prefill {label}, {rows} rows", [rows / rate * 1e3 for rate in rates], "ms")
        bench.add(f"prefill {label}, {rows} rows, of the products' peak", rates, "tokens/s", bound)


def _rate(model: NativeLlama, cache: PagedKVCache, batch: ForwardBatch, times: int) -> Callable[[], float]:
    """Rows a second of `times` forwards."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(times):
            model.forward_best(batch, cache)
        return batch.num_rows * times / (time.perf_counter() - start)

    return measure
