"""specserve: speculative and guided decoding on every request, streamed over a WebSocket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specserve.core.errors import SpecserveError
from specserve.core.openmp import bound_spinning
from specserve.core.sampling import SamplingParams

if TYPE_CHECKING:
    from specserve.llm import LLM

__all__ = ["LLM", "SamplingParams", "SpecserveError"]
__version__ = "0.1.0"

bound_spinning()


def __getattr__(name: str) -> Any:
    # Loaded on first use: the server's and the command line's processes need no torch.
    if name == "LLM":
        from specserve.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
