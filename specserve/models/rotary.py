"""RotaryTable: cosines and sines of the rotary position embedding (Su et al. 2021, section 3.4.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TABLE_ROWS = 1024


class RotaryTable:
    """cos and sin float32 [positions, head_dim / 2], grown as positions are met.

    It grows in pieces of one size, so that a row never depends on when it was computed. Angles are float32, as
    transformers has them; their cosines and sines are rounded once, from float64.
    """

    def __init__(self, inv_freq: tuple[float, ...], scale: float) -> None:
        self._inv_freq = np.array(inv_freq, dtype=np.float32)
        self._scale = scale
        self.cos: npt.NDArray[np.float32] = np.empty((0, len(inv_freq)), np.float32)
        self.sin = self.cos

    def ensure(self, positions: int) -> None:
        """Make rows 0..positions-1 present."""
        while self.cos.shape[0] < positions:
            first = self.cos.shape[0]
            at = np.arange(first, first + TABLE_ROWS, dtype=np.float32)
            angle = (at[:, None] * self._inv_freq).astype(np.float64)
            self.cos = np.concatenate((self.cos, (np.cos(angle) * self._scale).astype(np.float32)))
            self.sin = np.concatenate((self.sin, (np.sin(angle) * self._scale).astype(np.float32)))
