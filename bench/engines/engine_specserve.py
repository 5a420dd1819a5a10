"""specserve's engine in process, speculation off, the default numerics, a prefix cache as it is by default.

Steps are filled with prompts, as its peers do it (target_itl_ms 0): by default it leaves time to those that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from specserve.cluster.build import build_served_engine
from specserve.core.config import EngineConfig
from specserve.core.messages import TERMINAL, DeltaEvent, FailedEvent, GenerateCommand
from specserve.core.sampling import SamplingParams
from specserve.engine import heap


class Specserve:
    """See bench.engines.child.Stepped.

    Args:
        model: name of a model.
        threads: of the forward.
        options: further fields of EngineConfig.
    """

    def __init__(self, model: str, threads: int, **options: Any) -> None:
        values = {"model": model, "threads": threads, "speculation": "off", "kv_memory": "2GiB", "target_itl_ms": 0.0}
        values |= options
        self._config = EngineConfig.from_dict(values)
        self._engine = build_served_engine(self._config)
        heap.freeze()  # as its own process does
        heap.collapse()
        self._engine.executor.populate()
        self._count = 0
        self._numbers: dict[str, int] = {}

    def config(self) -> dict[str, Any]:
        config = self._config
        return {
            "versions": {"specserve": version("specserve"), "torch": version("torch")},
            "quantization": config.quantization,
            "numerics": config.numerics,
            "threads": config.threads,
            "max_batched_tokens": config.max_batched_tokens,
            "target_itl_ms": config.target_itl_ms,
            "prefix_cache": config.prefix_cache,
        }

    def prepare(self, width: int, tokens: int) -> None:
        """Its cache holds any of the workloads."""

    def start(self, request: int, prompt: Sequence[int], out: int) -> None:
        self._count += 1
        name = f"r{self._count}"
        self._numbers[name] = request
        self._engine.handle(GenerateCommand(name, tuple(prompt), SamplingParams(max_tokens=out, ignore_eos=True)))

    def step(self) -> list[tuple[int, list[int]]]:
        given = []
        for event in self._engine.step():
            if isinstance(event, FailedEvent):
                raise RuntimeError(f"a request failed: {event.message}")
            if isinstance(event, DeltaEvent):
                given.append((self._numbers[event.request_id], list(event.token_ids)))
            elif isinstance(event, TERMINAL):
                del self._numbers[event.request_id]
        return given
