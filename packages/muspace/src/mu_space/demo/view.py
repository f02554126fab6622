# SPDX-License-Identifier: Apache-2.0
"""A fused picture and how sums over samples become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .fuse import Call
from .grid import Grid


@dataclass(frozen=True)
class View:
    """A fused picture on `grid`, cells [nx, ny].

    colour [nx, ny, 3] in 0..1; openness [nx, ny] in 0..1 (small: hidden behind something, or in no camera);
    weight [nx, ny]: the sum of weights that the colour is divided by, in the unit of the view transform.
    """

    grid: Grid
    colour: np.ndarray
    openness: np.ndarray
    weight: np.ndarray
    call: Call


class Views(NamedTuple):
    """The road plane, and what stands on it where something stands."""

    ground: View
    pillars: View


def of_sums(grid: Grid, sums: np.ndarray, least: float, full: float, call: Call) -> View:
    """The picture of sums [nx, ny, 4] of (colour * weight, weight).

    A weight below `least` is nothing; one of `full` and more is seen openly.
    """
    weight = np.where(sums[..., 3] >= least, sums[..., 3], 0.0)
    colour = np.where(weight[..., None] > 0, sums[..., :3] / np.maximum(weight, least)[..., None], 0.0)
    return View(grid, np.clip(colour, 0, 1), np.clip(weight / full, 0, 1), weight, call)
