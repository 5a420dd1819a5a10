"""Blocks saved by sharing: parallel samples and beams of one prompt, forked in this project's own KV manager.

As in Kwon et al. 2023, figure 15: memory saved is the number of blocks that sharing saves over the number that would be
held without, over all steps. What is held is what the pool counts as used when every sequence has written its token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from bench.policies.workload import Job, Workload, backlog
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager, SequenceKV

BLOCK_SIZE = 16
CONCURRENT = 16  # requests at a time; blocks are never shared between them, so this changes nothing but the order
Reshuffle = Callable[[KVManager, list[SequenceKV]], None]


class Saving:
    """Runs requests of `width` sequences each. Sums blocks held, and blocks that unshared sequences would hold.

    Args:
        width: samples or beams of each request.
        reshuffle: called after each step of a request but its last; may replace sequences by forks of others.
    """

    def __init__(self, width: int, reshuffle: Reshuffle | None = None) -> None:
        self.width = width
        self._reshuffle = reshuffle
        self.kv = KVManager(BlockPool(CONCURRENT * width * 2048 // BLOCK_SIZE, BLOCK_SIZE), prefix_cache=False)
        self._live: list[tuple[Job, list[SequenceKV]]] = []
        self.held = 0
        self.unshared = 0

    @property
    def share(self) -> float:
        """Blocks saved over blocks without sharing, 0 .. 1."""
        return 1 - self.held / self.unshared

    def run(self, jobs: Sequence[Job]) -> float:
        waiting = list(reversed(jobs))
        while waiting or self._live:
            while waiting and len(self._live) < CONCURRENT:
                self._start(waiting.pop())
            self._step()
        if not self.kv.baseline():
            raise RuntimeError("KV blocks are left over")
        return self.share

    def _start(self, job: Job) -> None:
        """The prompt is computed once, then all sequences begin on it."""
        tokens = [0] * job.prompt
        first = self.kv.open(tokens, "")
        self._write(first, job.prompt)
        self._live.append((job, [first, *(self.kv.fork(first) for _ in range(self.width - 1))]))

    def _step(self) -> None:
        """One token more for each sequence; those whose output is complete go after it was counted."""
        for _, sequences in self._live:
            for seq in sequences:
                self._write(seq, 1)
        # Before beams are replaced: a fork shares even its last block, but only until it writes its own next token.
        self.held += self.kv.target.num_used
        self.unshared += sum(len(seq.target.block_ids) for _, sequences in self._live for seq in sequences)
        left = []
        for job, sequences in self._live:
            if sequences[0].target.committed < job.tokens - 1:
                if self._reshuffle is not None:
                    self._reshuffle(self.kv, sequences)
                left.append((job, sequences))
                continue
            for seq in sequences:
                self.kv.release(seq)
        self._live = left

    def _write(self, seq: SequenceKV, num_tokens: int) -> None:
        if self.kv.reserve(seq, num_tokens) is None:
            raise RuntimeError("the pool is too small for the bench's own requests")
        self.kv.commit(seq, [0] * (seq.target.committed + num_tokens), num_tokens)
        self.kv.rollback(seq)


def parallel_sampling(workload: Workload, count: int, width: int, seed: int) -> float:
    """Memory saved by `count` requests of `width` samples each, all samples of a request equally long."""
    return Saving(width).run(backlog(workload, count, seed))


def beam_search(workload: Workload, count: int, width: int, seed: int, replaced: float = 1.0) -> float:
    """Memory saved by beams under a model of survival in place of a language model.

    After each step `replaced` beams on average (a whole number and a coin toss for the rest), chosen at random, lose
    to a second continuation of another beam, also chosen at random. (With one a step this is the Moran model of
    population genetics: lines of descent of `width` beams meet (width - 1)^2 steps back on average.)
    """
    rng = random.Random(seed)

    def reshuffle(kv: KVManager, beams: list[SequenceKV]) -> None:
        losers = int(replaced) + (rng.random() < replaced - int(replaced))
        for _ in range(losers if width > 1 else 0):
            loser, winner = rng.sample(range(width), 2)
            kv.release(beams[loser])
            beams[loser] = kv.fork(beams[winner])

    return Saving(width, reshuffle).run(backlog(workload, count, seed))


SHARING = {"parallel sampling": parallel_sampling, "beam search": beam_search}
