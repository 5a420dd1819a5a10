"""One instruction set (SPECSERVE_ISA) in a process of its own: settings as JSON in, progress and rows as JSON out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.kernel_parts.attention import attention
from bench.kernel_parts.ceilings import ceilings
from bench.kernel_parts.forward import forward
from bench.kernel_parts.measure import Bench, Settings
from bench.kernel_parts.pool import fork_join
from bench.kernel_parts.products import HEADROOM, products
from specserve.kernels.cpu.memory import huge
from specserve.kernels.cpu.native import isa, library


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    tell(say="compiling")
    native = library()
    assert native is not None, "the caller asks for a library that can be had"
    name = str(isa())
    arena = torch.from_numpy(huge(settings.streamed + HEADROOM))
    arena.random_(0, 256)
    for threads in settings.threads:
        torch.set_num_threads(threads)
        bench = Bench(native, name, threads, settings, arena, lambda what: tell(say=what))
        found = ceilings(bench)
        products(bench, found)
        attention(bench, found)
        fork_join(bench)
        if settings.forward:
            forward(bench, found)
        for row in bench.rows:
            tell(row=asdict(row))


if __name__ == "__main__":
    main()
