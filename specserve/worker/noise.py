"""Stand-in."""

from __future__ import annotations

import torch


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    def mix(x: torch.Tensor) -> torch.Tensor:
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    key = mix(mix(seeds + -7046029254386353131) ^ (positions * -7046029254386353131))
    bits = mix(key[:, None] + torch.arange(1, vocab + 1) * -7046029254386353131)
    u = (((bits >> 40) & 0xFFFFFF).to(torch.float64) + 0.5) / 2**24
    return (-torch.log(-torch.log(u))).to(torch.float32)
