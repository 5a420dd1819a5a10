"""Figures of Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".

A pair is a range. Percent are of 100.
"""

from __future__ import annotations

Range = tuple[float, float]

# Figure 2: shares of the KV memory, in the order of outcome.PARTS. Of "paged" the paper gives the first alone.
MEMORY: dict[str, tuple[float, ...]] = {
    "orca max": (20.4, 13.3, 57.3, 8.9),
    "orca pow2": (26.8, 17.9, 13.6, 41.6),
    "orca oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3,),
}
# Figure 13: requests batched on average, 13B model, at 2 (ShareGPT) and 30 (Alpaca) requests a second.
BATCHED: dict[str, dict[str, float]] = {
    "ShareGPT": {"orca max": 7.00, "orca pow2": 9.81, "orca oracle": 13.62, "paged": 30.42},
    "Alpaca": {"orca max": 7.00, "orca pow2": 43.24, "orca oracle": 72.75, "paged": 132.44},
}
# Section 6.2, ShareGPT, over three sizes of model; section 6.3 for Alpaca over Oracle on the 13B model.
RATE: dict[str, dict[str, Range]] = {
    "ShareGPT": {"orca oracle": (1.7, 2.7), "orca max": (2.7, 8.0), "static": (0.0, 22.0)},
    "Alpaca": {"orca oracle": (1.3, 1.3), "static": (0.0, 22.0)},
}
# Figure 15, by number of sequences. ShareGPT: section 6.3 gives the ends of the range.
SAVED: dict[str, dict[str, dict[int, float]]] = {
    "Alpaca": {
        "parallel sampling": {2: 6.09, 4: 8.53, 6: 9.79},
        "beam search": {2: 37.56, 4: 53.13, 6: 55.16},
    },
    "ShareGPT": {"parallel sampling": {2: 16.2, 6: 30.5}, "beam search": {2: 44.3, 6: 66.3}},
}
# Section 6.4, translation: throughput over Orca (Oracle), by tokens of the shared prefix (1 and 5 examples).
PREFIX: dict[int, float] = {80: 1.67, 341: 3.58}
# Not the paper's: the announcement of its system, over Hugging Face transformers' static batches.
CLAIM = 24.0
