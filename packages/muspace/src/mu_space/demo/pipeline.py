# SPDX-License-Identifier: Apache-2.0
"""From a frame to the fused pictures: pyramid, view transform, comparison with the truth and with attention's picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import agreement, fuse, pyramid, truth, view_transform
from .frame import Frame
from .grid import Grid
from .view import View


@dataclass(frozen=True)
class Result:
    """The two pictures and what they were compared with.

    baseline: the road as the default view transform shows it, where another one was asked for; agreement: with that.
    """

    view_transform: str
    ground: View
    pillars: View
    comparison: truth.Comparison | None
    true_view: np.ndarray | None
    baseline: View | None
    agreement: agreement.Agreement | None
    seconds: dict[str, float]

    @property
    def calls(self) -> tuple[fuse.Call, ...]:
        """The operator calls of the view transform; one may have made both pictures."""
        return (self.ground.call,) if self.pillars.call is self.ground.call else (self.ground.call, self.pillars.call)


class _Clock:
    """Seconds of each stage by name, and its announcement."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()
        self.progress = progress

    def __call__(self, done: str, following: str) -> None:
        """The stage `done` ends here; `following` is what begins, in words."""
        now = time.perf_counter()
        self.seconds[done] = now - self.last
        self.last = now
        if following:
            self.progress(following)


def fuse_frame(
    frame: Frame,
    device: str = "cpu",
    backend: str = "auto",
    reach: float = 25.0,
    cell: float = 0.1,
    progress: Callable[[str], None] = lambda text: None,
    transform: str = view_transform.NAMES[0],
) -> Result:
    """Fuse the cameras of `frame` over a square of +-`reach` metres with cells of `cell` metres."""
    chosen = view_transform.module(transform)
    stage = _Clock(progress)
    progress("averaging the pyramid")
    levels = pyramid.build([c.image for c in frame.cameras], device)
    grid = Grid((-reach, reach), (-reach, reach), cell)
    ground, pillars = chosen.fuse(frame, grid, levels, backend, stage)
    baseline = agreed = comparison = true_view = None
    if transform != view_transform.NAMES[0]:
        progress("fusing the road by attention, to compare")
        baseline = view_transform.module(view_transform.NAMES[0]).road(frame, grid, levels, backend)
        agreed = agreement.compare(frame, ground, baseline)
        stage("baseline", "")
    if frame.truth is not None:
        comparison = truth.compare(frame, grid, ground.colour.reshape(-1, 3), ground.weight.reshape(-1))
        true_view = truth.top_view(frame, grid).reshape(*grid.shape, 3)
    stage("comparison", "")
    return Result(transform, ground, pillars, comparison, true_view, baseline, agreed, stage.seconds)
