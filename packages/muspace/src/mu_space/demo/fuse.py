# SPDX-License-Identifier: Apache-2.0
"""The operator calls: time a call, check it against the reference; sample the cameras and add them up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from .lift import Lift
from .pyramid import CHANNELS, Pyramid

if TYPE_CHECKING:
    import torch

REPEATS = 3
CHECKED_QUERIES = 1500  # of each camera
TOLERANCE = 1e-5  # of the peak, float32


class DeviationError(RuntimeError):
    """The backend's result is not the reference's; no picture is made of it."""


@dataclass(frozen=True)
class Call:
    """One operator call: what ran (dispatch report), how long it took, and how far it is from the reference.

    size: the shape in the words of the view transform; checked: how many queries or cells were compared.
    """

    name: str
    shape: dict[str, int]
    size: str
    dispatch: dict[str, Any]
    ms: float
    deviation: float
    checked: int
    limit: float = TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operator": self.dispatch["operator"],
            "backend": self.dispatch["selected_backend"],
            "route": self.dispatch["route"],
            "device": self.dispatch["device"],
            "dtype": self.dispatch["dtype"],
            "library": self.dispatch["library"],
            "fallback": self.dispatch["native_fallback"],
            "reason": self.dispatch["reason"],
            "shape": self.shape,
            "ms": self.ms,
            "deviation": self.deviation,
            "deviation_limit": self.limit,
            "checked_queries": self.checked,
        }


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def timed(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, dict[str, Any], float]:
    """(result, dispatch report, ms) of an operator call: the median of a few calls after one that warms up."""
    from mu_space import get_last_dispatch_report

    out = call()
    dispatch = get_last_dispatch_report().as_dict()
    times = []
    for _ in range(REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        out = call()
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return out, dispatch, median(times)


def check(name: str, dispatch: dict[str, Any], deviation: float, limit: float = TOLERANCE) -> float:
    """The deviation, if it is small enough to draw the result; raises DeviationError."""
    if not deviation <= limit:
        raise DeviationError(
            f"{name}: backend {dispatch['selected_backend']} deviates from the reference by {deviation:.1e} of the peak,"
            f" more than {limit:.0e}"
        )
    return deviation


def sample(name: str, pyramid: Pyramid, lifted: Lift, backend: str) -> tuple[torch.Tensor, Call]:
    """Run the operator: per-camera samples [cameras, Q, heads * 4] and the record of the call.

    The deviation is the largest absolute difference from `backend="reference"` over evenly spaced queries, divided by the
    largest absolute value of the reference.
    """
    import torch

    from mu_space import ops

    device = pyramid.value.device
    cameras, queries, heads, levels, points = lifted.weights.shape
    value = pyramid.heads(heads)
    shapes = torch.tensor(pyramid.shapes, dtype=torch.int64, device=device)
    locations = torch.from_numpy(lifted.locations).to(device)
    weights = torch.from_numpy(lifted.weights).to(device)

    def call() -> torch.Tensor:
        return ops.multi_scale_deformable_attn(value, shapes, None, locations, weights, backend=backend)

    out, dispatch, ms = timed(call, device)
    step = max(1, queries // CHECKED_QUERIES)
    expected = ops.multi_scale_deformable_attn(
        value, shapes, None, locations[:, ::step].contiguous(), weights[:, ::step].contiguous(), backend="reference"
    )
    peak = float(expected.abs().max()) or 1.0
    deviation = check(name, dispatch, float((out[:, ::step] - expected).abs().max()) / peak)
    shape = {"B": cameras, "S": int(value.shape[1]), "H": heads, "D": CHANNELS, "Q": queries, "L": levels, "P": points}
    size = f"{cameras}·{queries}, {heads}×{levels}×{points}"
    return out, Call(name, shape, size, dispatch, ms, deviation, int(expected.shape[0] * expected.shape[1]))


def gather(out: torch.Tensor, lifted: Lift, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum the cameras: colour [cells, heads, 3] in 0..1 and validity [cells, heads]; colour is 0 where nothing is seen."""
    import torch

    heads = lifted.weights.shape[2]
    total = torch.zeros((cells, heads * CHANNELS), dtype=out.dtype)
    samples = out.cpu()
    for k, index in enumerate(lifted.cells):
        total[torch.from_numpy(index)] += samples[k, : len(index)]
    total = total.view(cells, heads, CHANNELS)
    valid = total[..., 3].clamp_min(0)
    colour = torch.where(valid[..., None] > 1e-6, total[..., :3] / valid[..., None].clamp_min(1e-6), 0.0)
    return colour.clamp(0, 1).numpy(), valid.numpy()
