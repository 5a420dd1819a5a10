"""KVUsage: how full the pools are."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.kv.block_pool import BlockPool
from specserve.kv.host import HostPool


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks in use; free blocks with cached contents are not. Host blocks are of swapped sequences."""

    blocks: int
    blocks_used: int
    draft_blocks: int
    draft_blocks_used: int
    host_blocks: int = 0
    host_blocks_used: int = 0
    draft_host_blocks: int = 0
    draft_host_blocks_used: int = 0


def usage(target: BlockPool, draft: BlockPool | None, host: HostPool | None, draft_host: HostPool | None) -> KVUsage:
    """Figures of the pools; zeros for one that does not exist."""
    figures: list[int] = []
    for pool in (target, draft, host, draft_host):
        figures += (pool.num_blocks, pool.num_used) if pool is not None else (0, 0)
    return KVUsage(*figures)
