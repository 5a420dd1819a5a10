"""OpenVINO GenAI by its ContinuousBatchingPipeline, prefix caching on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

CACHE_GB = 2


class OpenVino:
    """See bench.engines.child.Stepped.

    Args:
        model: a folder with the model in OpenVINO's format.
        threads: of inference.
        batch: tokens a step at most.
    """

    def __init__(self, model: str, threads: int, batch: int = 512) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = batch
        scheduler.max_num_seqs = 64
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._live: dict[int, Any] = {}
        self._batch, self._threads, self._count = batch, threads, 0

    def config(self) -> dict[str, Any]:
        core = openvino.Core()
        return {
            "versions": {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__},
            "max_num_batched_tokens": self._batch,
            "threads": self._threads,
            "prefix_caching": True,
            "inference_precision": str(core.get_property("CPU", "INFERENCE_PRECISION_HINT")),
            "kv_cache_precision": str(core.get_property("CPU", "KV_CACHE_PRECISION")),
            "device": core.get_property("CPU", "FULL_DEVICE_NAME"),
        }

    def prepare(self, width: int, tokens: int) -> None:
        """Its cache holds any of the workloads."""

    def start(self, request: int, prompt: Sequence[int], out: int) -> None:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens, generation.ignore_eos, generation.do_sample = out, True, False
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._count += 1
        self._live[request] = self._pipe.add_request(self._count, ids, generation)

    def step(self) -> list[tuple[int, list[int]]]:
        self._pipe.step()
        given = []
        for request, handle in list(self._live.items()):
            if handle.can_read():
                given.append((request, [i for o in handle.read().values() for i in o.generated_ids]))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._live[request]
        return given
