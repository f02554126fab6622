# SPDX-License-Identifier: Apache-2.0
"""From a frame to the fused pictures: pyramid, lift, operator calls, comparison with the truth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import fuse, lift, obstacles, pyramid, truth
from .frame import Frame
from .grid import Grid


@dataclass(frozen=True)
class View:
    """A fused picture: colour [nx, ny, 3] in 0..1, openness [nx, ny] in 0..1 (small: hidden behind something), on `grid`."""

    grid: Grid
    colour: np.ndarray
    openness: np.ndarray
    call: fuse.Call


@dataclass(frozen=True)
class Result:
    ground: View
    pillars: View
    comparison: truth.Comparison | None
    true_view: np.ndarray | None
    seconds: dict[str, float]


def _view(
    name: str, frame: Frame, levels: pyramid.Pyramid, pillars: lift.Pillars, blocked: list | None, backend: str
) -> tuple[View, np.ndarray, np.ndarray]:
    lifted = lift.lift(frame.cameras, levels.extent, pillars, blocked)
    out, call = fuse.sample(name, levels, lifted, backend)
    cells = len(pillars.ground)
    colour, valid = fuse.gather(out, lifted, cells)
    weight = valid.sum(1)
    mean = (colour * valid[..., None]).sum(1) / np.maximum(weight, 1e-6)[:, None]
    # A border of an image weighs FLOOR, an obstructed view HIDDEN times that: scale so that both ends are told apart.
    openness = np.clip(weight / (2 * lift.FLOOR), 0, 1)
    shape = pillars.grid.shape
    return View(pillars.grid, mean.reshape(*shape, 3), openness.reshape(shape), call), mean, weight


def fuse_frame(
    frame: Frame,
    device: str = "cpu",
    backend: str = "auto",
    reach: float = 25.0,
    cell: float = 0.1,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Fuse the cameras of `frame` over a square of +-`reach` metres with cells of `cell` metres."""
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def stage(name: str, text: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name] = now - clock
        clock = now
        if text:
            progress(text)

    progress("averaging the pyramid")
    levels = pyramid.build([c.image for c in frame.cameras], device)
    grid = Grid((-reach, reach), (-reach, reach), cell)
    road = obstacles.ground_height(frame, grid.centres())
    blocked = obstacles.depth_images(frame)
    stage("pyramid", "fusing the road")
    flat = lift.Pillars(grid, road, np.zeros(1), np.ones((len(road), 1), np.float32), side=2)
    ground, colour, weight = _view("ground plane", frame, levels, flat, blocked, backend)
    stage("ground", "fusing pillars")
    share, _ = obstacles.pillar_share(frame, grid)
    standing = lift.Pillars(grid, road, obstacles.HEIGHTS, share)
    pillars, _, _ = _view("pillars of heights", frame, levels, standing, blocked, backend)
    stage("pillars", "")
    comparison = true_view = None
    if frame.truth is not None:
        comparison = truth.compare(frame, grid, colour, weight)
        true_view = truth.top_view(frame, grid).reshape(*grid.shape, 3)
    stage("comparison", "")
    return Result(ground, pillars, comparison, true_view, seconds)
