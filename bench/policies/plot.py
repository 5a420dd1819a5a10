"""The picture of the bench: latency against rate for each policy, and what the KV memory holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.policies.outcome import PARTS
from bench.policies.simulator import POLICIES, Curve

COLOURS = dict(zip(POLICIES, ("#7f7f7f", "#d62728", "#ff7f0e", "#2ca02c", "#1f77b4"), strict=True))
PART_COLOURS = ("#1f77b4", "#9ecae1", "#fdae6b", "#d9d9d9")


def _curves(axes: Axes, workload: str, curves: Mapping[str, Curve], limit: float) -> None:
    for policy, curve in curves.items():
        points = sorted(curve.points.items())
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[policy], label=policy)
    axes.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
    axes.set_ylim(0, 2 * limit)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("normalised latency, s a token")
    axes.set_title(f"{workload}: latency against rate")
    axes.legend(fontsize=8, loc="upper left")


def _memory(axes: Axes, shares: Mapping[str, Mapping[str, float]]) -> None:
    bottoms = [0.0] * len(shares)
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        heights = [100 * s[part] for s in shares.values()]
        axes.bar(list(shares), heights, bottom=bottoms, color=colour, label=part)
        for i, height in enumerate(heights):
            if height > 4:
                axes.text(i, bottoms[i] + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=8)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of the KV memory")
    axes.set_title("ShareGPT: what the KV memory holds while requests wait")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=2)


def draw(
    path: Path,
    curves: Mapping[str, Mapping[str, Curve]],
    shares: Mapping[str, Mapping[str, float]],
    limit: float,
) -> None:
    """Write the PNG.

    Args:
        curves: workload -> policy -> Curve.
        shares: policy -> part of outcome.PARTS -> share of the KV memory, 0 .. 1.
        limit: the latency at which rates are compared, seconds a token.
    """
    figure, axes = plt.subplots(1, len(curves) + 1, figsize=(6 * (len(curves) + 1), 5.5))
    for each, (workload, found) in zip(axes, curves.items(), strict=False):
        _curves(each, workload, found, limit)
    _memory(axes[-1], shares)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
