# SPDX-License-Identifier: Apache-2.0
"""The cells of a bird's-eye view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grid:
    """Cells of a bird's-eye view: x forward in `x_range`, y left in `y_range`, metres."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    cell: float

    @property
    def shape(self) -> tuple[int, int]:
        """(cells along x, cells along y)."""
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        return round((x1 - x0) / self.cell), round((y1 - y0) / self.cell)

    def centres(self) -> np.ndarray:
        """Cell centres [nx * ny, 2], y running fastest."""
        nx, ny = self.shape
        x = self.x_range[0] + (np.arange(nx) + 0.5) * self.cell
        y = self.y_range[0] + (np.arange(ny) + 0.5) * self.cell
        return np.stack(np.meshgrid(x, y, indexing="ij"), -1).reshape(-1, 2)
