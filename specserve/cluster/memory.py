"""How the KV budget is split between target and draft model."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.core.errors import ConfigError
from specserve.models.info import ModelInfo


@dataclass(frozen=True, slots=True)
class KVSplit:
    """Blocks of each pool: the same number, so that both caches hold as many tokens.

    Attributes:
        num_blocks: of each pool.
        target_bytes, draft_bytes: of each cache; 0 for no draft.
        host_blocks: of host memory for swapped KV, for each pool.
    """

    num_blocks: int
    block_size: int
    target_bytes: int
    draft_bytes: int = 0
    host_blocks: int = 0

    def describe(self) -> str:
        """One line for a log or a terminal."""
        parts = f"target {_mib(self.target_bytes)}"
        if self.draft_bytes:
            parts += f", draft {_mib(self.draft_bytes)}"
        tokens, host = (f"{blocks * self.block_size:,} tokens" for blocks in (self.num_blocks, self.host_blocks))
        return f"KV cache: {tokens} ({parts}), host: {host}"


def split_kv(
    kv_memory: int, block_size: int, target: ModelInfo, draft: ModelInfo | None = None, *, swap_memory: int = 0
) -> KVSplit:
    """Divide `kv_memory` bytes, and `swap_memory` bytes of the host, by bytes a token.

    Host memory that holds no block of each is none.

    Raises:
        ConfigError: not even one block of each fits.
    """
    own = target.kv_bytes_per_block(block_size)
    drafts = draft.kv_bytes_per_block(block_size) if draft is not None else 0
    blocks = kv_memory // (own + drafts)
    if blocks == 0:
        raise ConfigError(
            f"kv_memory: {_mib(kv_memory)} hold no block of {block_size} tokens, which takes {_mib(own + drafts)}",
            param="kv_memory",
        )
    return KVSplit(blocks, block_size, blocks * own, blocks * drafts, swap_memory // (own + drafts))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
