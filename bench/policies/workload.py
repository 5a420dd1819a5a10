"""Synthetic requests with the length statistics of the PagedAttention paper, and Poisson arrivals.

Kwon et al. 2023, section 6.1: lengths are those of ShareGPT and Alpaca, arrival times a Poisson process. The data sets
themselves are not needed here: only the lengths matter to a memory manager. Each length is lognormal, clipped, and
fitted so that the mean after clipping is the paper's.

The width of ShareGPT's outputs follows from the paper's figure 2: of what Orca (Oracle) reserves, 38.2 / (38.2 + 25.2)
holds token states. With outputs `o` after prompts `p` that share is (p + x/2) / (p + x), x = E[o^2] / E[o], on average
over time, so x = 644, which a lognormal of mean 338 has, once clipped, with sigma 0.88. The other widths are estimates
from the shapes in figure 11.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
MAX_TOKENS = 2048  # prompt and output together: the context of OPT and LLaMA
MAX_PROMPT = 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of one data set, in tokens.

    Attributes:
        mean_prompt, mean_output: means, clipping included.
        sigma_prompt, sigma_output: standard deviations of the logarithms before clipping.
        max_tokens: prompt and output together at most.
        prefix: tokens before each prompt that all requests share.
    """

    name: str
    mean_prompt: float
    mean_output: float
    sigma_prompt: float
    sigma_output: float
    max_tokens: int = MAX_TOKENS
    prefix: int = 0

    def scaled(self, divisor: int) -> Workload:
        """The same shape with every length divided, for a small model on a small machine."""
        return Workload(
            f"{self.name} / {divisor}",
            self.mean_prompt / divisor,
            self.mean_output / divisor,
            self.sigma_prompt,
            self.sigma_output,
            self.max_tokens // divisor,
        )

    def lengths(self, count: int, seed: int) -> tuple[Lengths, Lengths]:
        """Prompt lengths and output lengths of `count` requests: int64 [count] each, at least 1.

        The shared prefix is not part of the prompt lengths.
        """
        rng = np.random.default_rng(seed)
        return self._clip(rng.standard_normal(count), rng.standard_normal(count))

    def _clip(self, prompt: npt.NDArray[np.float64], output: npt.NDArray[np.float64]) -> tuple[Lengths, Lengths]:
        """Lengths of standard normal variables, with means fitted on a sample of its own."""
        most = min(self.max_tokens // 2, MAX_PROMPT)
        rng = np.random.default_rng(0)
        sample = rng.standard_normal((2, 20_000))
        shift = _fit(sample[0], self.sigma_prompt, self.mean_prompt, np.full(20_000, most))
        fitted = _draw(sample[0], self.sigma_prompt, shift, np.full(20_000, most))
        prompts = _draw(prompt, self.sigma_prompt, shift, np.full(len(prompt), most))
        room = self.max_tokens - self.prefix
        shift = _fit(sample[1], self.sigma_output, self.mean_output, room - fitted)
        return prompts, _draw(output, self.sigma_output, shift, room - prompts)


SHAREGPT = Workload("ShareGPT", 161.31, 337.99, 1.1, 0.88)
ALPACA = Workload("Alpaca", 19.31, 58.45, 0.5, 0.8)
# WMT16 English to German: a sentence is some 34 tokens on each side (5 examples take 341 tokens, 1 takes 80).
TRANSLATION = Workload("translation", 34.0, 34.0, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace.

    Attributes:
        arrival: seconds after the start.
        prompt, output: tokens; the shared prefix is part of the prompt.
    """

    arrival: float
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


def backlog(workload: Workload, count: int, seed: int) -> list[Job]:
    """`count` requests that are all there at the start: what the memory holds is then all that limits the batch."""
    prompts, outputs = workload.lengths(count, seed)
    return [Job(0.0, workload.prefix + int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def poisson(workload: Workload, rate: float, seconds: float, seed: int) -> list[Job]:
    """Arrivals at `rate` requests a second for `seconds`.

    The same seed gives the same requests in the same order at every rate, only closer together, so that rates and
    policies are compared on the same draw.
    """
    count = math.ceil(rate * seconds + 6 * math.sqrt(rate * seconds) + 10)
    gaps = np.random.default_rng(seed + 1).exponential(size=count)
    arrivals = np.cumsum(gaps) / rate
    # Lengths come from generators of their own, in the order of the requests: a longer trace begins as a shorter one.
    prompt = np.random.default_rng(seed + 2).standard_normal(count)
    output = np.random.default_rng(seed + 3).standard_normal(count)
    prompts, outputs = workload._clip(prompt, output)
    return [
        Job(float(t), workload.prefix + int(p), int(o))
        for t, p, o in zip(arrivals, prompts, outputs, strict=True)
        if t <= seconds
    ]


def _draw(normal: npt.NDArray[np.float64], sigma: float, shift: float, most: Lengths) -> Lengths:
    return np.clip(np.rint(np.exp(shift + sigma * normal)).astype(np.int64), 1, most)


def _fit(normal: npt.NDArray[np.float64], sigma: float, mean: float, most: Lengths) -> float:
    """The shift at which clipped lengths have the mean, by bisection."""
    low, high = math.log(mean) - 3, math.log(mean) + 3
    for _ in range(50):
        middle = (low + high) / 2
        if float(_draw(normal, sigma, middle, most).mean()) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
