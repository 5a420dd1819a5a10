"""Blocks saved by sharing on a real engine: parallel samples and beams of the demo model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from bench.policies.real import prompt_ids
from bench.policies.workload import Job
from specserve import LLM, SamplingParams
from specserve.core.errors import SpecserveError

BLOCK_SIZE = 16
KINDS = ("parallel sampling", "beam search")


class NotShared(Exception):
    """The engine does not run several sequences of one request; the message says how that was seen."""


class Watch:
    """Samples the blocks that an engine holds, in a thread, about every millisecond."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[int] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.001):
            used = self._llm.stats().kv_blocks_used
            if used:
                self.samples.append(used)

    @property
    def mean(self) -> float:
        return sum(self.samples) / len(self.samples)


def _params(kind: str, width: int, output: int) -> SamplingParams:
    if kind == "beam search":
        return SamplingParams(beam_width=width, max_tokens=output, ignore_eos=True)
    return SamplingParams(n=width, temperature=1.0, seed=1, max_tokens=output, ignore_eos=True)


def unshared_blocks(job: Job, width: int) -> float:
    """Blocks of `width` sequences without sharing, mean over the steps of one answer."""
    lengths = range(job.prompt + 1, job.tokens)
    return width * sum(-(-n // BLOCK_SIZE) for n in lengths) / len(lengths)


def beam_overhead(llm: LLM, width: int, prompt: int, output: int) -> float:
    """KV that a beam search holds beyond what greedy decoding of the same request does, as a share of the latter."""
    job = Job(0.0, prompt, output)
    with Watch(llm) as watch:
        llm.generate([prompt_ids(job, prompt)], _params("beam search", width, output))
    return watch.mean / unshared_blocks(job, 1) - 1


def measured_saving(llm: LLM, kind: str, width: int, jobs: Sequence[Job], tick: Callable[[], None]) -> float:
    """Memory saved over requests that run one at a time: 1 - blocks held / blocks without sharing, by time.

    Raises:
        NotShared: the engine refuses such requests, or runs one sequence where several are asked for.
    """
    held = unshared = single = 0.0
    for number, job in enumerate(jobs):
        try:
            with Watch(llm) as watch:
                llm.generate([prompt_ids(job, number)], _params(kind, width, job.output))
        except SpecserveError as error:
            raise NotShared(f"{kind} of {width}: {error.message}") from error
        if not watch.samples:
            raise NotShared(f"{kind} of {width}: no sample while request {number} ran")
        # Longer answers count for as much as their steps, as in the simulation.
        held += watch.mean * job.output
        unshared += unshared_blocks(job, width) * job.output
        single += unshared_blocks(job, 1) * job.output
        tick()
    if held <= 1.02 * single:
        raise NotShared(f"{kind} of {width}: the engine held the blocks of one sequence only")
    return 1 - held / unshared
