"""The published limits of a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specserve.core.config import ServerConfig
from specserve.core.sampling import MAX_BEAMS, MAX_CHOICES

MAX_DEPTH = 128  # levels of nested objects and arrays in one message
MAX_STREAM_ID = 128  # characters
MAX_METADATA = 16  # pairs


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may do, and what one prompt may be.

    Attributes:
        message_bytes: largest frame or HTTP body.
        responses: active responses at once on one connection; one of many choices counts once.
        output_buffer_bytes: unsent output held for a client that reads slowly.
        slow_client_seconds: how long that buffer may stay full before the connection is closed.
        heartbeat_seconds: longest silence of a live response.
        model_len: tokens of prompt and output together.
        vocab_size: token ids are below it.
    """

    message_bytes: int
    responses: int
    output_buffer_bytes: int
    slow_client_seconds: float
    heartbeat_seconds: float
    model_len: int
    vocab_size: int

    @classmethod
    def of(cls, config: ServerConfig, model_len: int, vocab_size: int) -> Limits:
        return cls(
            message_bytes=config.max_message_bytes,
            responses=config.max_responses,
            output_buffer_bytes=config.output_buffer_bytes,
            slow_client_seconds=config.slow_client_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            model_len=model_len,
            vocab_size=vocab_size,
        )

    def public(self) -> dict[str, Any]:
        """As the first event of a connection tells them."""
        return {
            "max_message_bytes": self.message_bytes,
            "max_responses": self.responses,
            "max_output_buffer_bytes": self.output_buffer_bytes,
            "slow_client_seconds": self.slow_client_seconds,
            "heartbeat_seconds": self.heartbeat_seconds,
            "max_model_len": self.model_len,
            "max_json_depth": MAX_DEPTH,
            "max_n": MAX_CHOICES,
            "max_beam_width": MAX_BEAMS,
        }
