"""The flags of `specserve serve` and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

API_KEY = "SPECSERVE_API_KEY"

Model = Annotated[str | None, typer.Option(help='"demo", a Hugging Face folder, a GGUF file or a hub name.')]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Quantization = Annotated[
    str | None, typer.Option(help="Of weights: auto (a quantised GGUF file's own blocks, else none), none, q8 or q4.")
]
Speculation = Annotated[
    str | None,
    typer.Option(help='"off", or JSON such as {"methods": ["draft_model"], "model": "path"}.', metavar="JSON|off"),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; all cores by default.")]
KVMemory = Annotated[str | None, typer.Option(help="Memory for KV blocks, such as 2GiB.")]
Numerics = Annotated[str | None, typer.Option(help="invariant or fast.")]
TargetITL = Annotated[
    float | None,
    typer.Option(
        help="Inter-token latency that prompt chunks must leave to running answers, in milliseconds; by default twice "
        "what a step without chunks takes, 0 for no limit."
    ),
]
Preemption = Annotated[
    str | None,
    typer.Option(
        help="What happens to the KV of a request that gives way: swap to host memory, recompute later, or auto, "
        "whichever is measured to be faster (the default)."
    ),
]
SwapMemory = Annotated[
    str | None, typer.Option(help="Host memory for swapped KV, such as 512MiB (the default); 0 never swaps.")
]
APIKeys = Annotated[
    list[str] | None, typer.Option(help="A key that clients must send; may be given more than once.", envvar=API_KEY)
]
Config = Annotated[Path | None, typer.Option(help="A specserve.toml; flags win over it.")]
