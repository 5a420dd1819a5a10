"""Why the figures are not the paper's: printed below the table and kept in the result file."""

from __future__ import annotations

from bench.policies.clock import Machine
from bench.policies.report import Report

TEXTS = (
    "Memory and batches are averages over the steps in which requests wait, so that memory is what limits. The paper "
    "averages over runs at a fixed rate (2 requests/s with ShareGPT's lengths, 30 with Alpaca's). At these, requests "
    "wait for reserved memory on our clock too, and the shares are within a few points of the paper's; they need not "
    "wait for paged memory, so the paper's paged batches are smaller than ours.",
    "Paged: of allocated blocks only the rest of each request's last block is empty, 7.5 of 16 slots on average, "
    "measured when a step is committed and its scratch has been given back. That is less than the paper's 3.7%, which "
    "it does not divide further. What is not allocated is kept free for the growth of the requests that run.",
    "Regions of the contiguous policies are rounded to powers of two by the buddy allocator. The rounding counts as "
    "external fragmentation, since the paper's figure 2 shows no internal fragmentation for Oracle.",
    "Rates: the factors follow from the batches, and from how much longer a step takes with a larger batch. On "
    "ShareGPT paged is at the low end of the paper's ranges, which span models of 13B to 175B; this is the 13B server "
    "alone. On Alpaca the factor over static batches is above the paper's: the batch of the static policy is 7 "
    "whatever the lengths, because each request is given a whole context, and prompts and outputs are padded.",
    "Static against continuous batching: the factor grows with how unequal outputs are and with how many short "
    "requests memory could hold. It is largest for Alpaca. The paper's 22x is the best of several models. The 24x of "
    "its system's announcement is against the generate of transformers, whose own costs of a step add to those of "
    "static batches; here all policies pay the same for a row.",
    "Sharing, samples: full blocks of the prompt alone are shared, so the saving is the prompt's share of all blocks "
    "times 1 - 1/n, all samples of a request being equally long. With ShareGPT's lengths less is saved than in the "
    "paper: prompts and outputs are drawn independently here, so that long answers, which weigh most, stand after "
    "prompts of average length.",
    "Sharing, beams: survivors are simulated. After each step one beam, chosen at random, loses to a second "
    "continuation of another beam. Lines of descent then meet some (width - 1)^2 tokens back, sooner than those of "
    "the paper's model seem to, so more is saved than in the paper, most with ShareGPT's longer answers.",
    "Shared prefix: a row costs the same wherever its KV lies, so leaving out the prefix's rows gains all of their "
    "time. The paper reports 20 to 26% slower attention over blocks, and engines pay for each request in a step, "
    "which this clock does not charge: the paper's gain is smaller than ours.",
)


def explain(report: Report, machine: Machine, limit: float) -> None:
    """What was assumed, and why factors are not the paper's."""
    report.note(
        f"Simulated server: {machine.name}, {machine.slots} slots of KV, context {machine.max_tokens}; a step takes "
        f"{1e3 * machine.base:.1f} ms, {1e6 * machine.per_row:.0f} us a row and {1e6 * machine.per_context:.2f} us a "
        f"token of KV read. Rates are compared at {limit:g} s a token. Lengths are lognormal with the paper's means."
    )
    for text in TEXTS:
        report.note(text)
