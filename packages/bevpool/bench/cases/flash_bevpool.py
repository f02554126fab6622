# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of flash_bevpool: FlashBEV's grid of 400 × 400 × 12 over six cameras of 256 by 704, 64 channels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch
from muspace_bevpool import flash_bevpool
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, draw, rig
from muspace_core.spec import Tolerance

from .lift import CAMERAS, FAMILY

OPERATOR: Final = "flash_bevpool"
IMAGE: Final = (256, 704)
HEIGHT, WIDTH, CHANNELS = 16, 44, 64
ROI: Final = (-50.0, 50.0, -50.0, 50.0, -4.0, 2.0)
EPSILON = THRESHOLD = 1e-6
#: name → (X, Y, Z)
GRIDS: Final = {"400x400x12": (400, 400, 12), "100x100x12": (100, 100, 12)}
#: How far fp32 may be off, with room to spare: pixels of the feature map, metres, and weights relative to the threshold.
_PIXEL, _METRE, _WEIGHT = 1e-3, 1e-3, 1e-3


def _inputs(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Features in ``dtype``; depth parameters and projections stay fp32."""
    size = (1, CAMERAS, HEIGHT, WIDTH, 1)
    mean = draw.uniform("mean", size, 4, 45, device)
    scale = draw.uniform("scale", size, 0.5, 3, device)
    return {
        "image_feats": draw.normal("features", (*size[:4], CHANNELS), device, dtype),
        "depth_params": torch.cat([mean, scale], -1),
        "projection_matrices": torch.from_numpy(rig.projections(*IMAGE)).float().to(device)[None],
    }


def _call(grid: tuple[int, int, int], inputs: dict[str, Any], backend: str) -> torch.Tensor:
    feats, depth, projections = (inputs[name] for name in ("image_feats", "depth_params", "projection_matrices"))
    return flash_bevpool(feats, depth, projections, None, IMAGE, ROI, grid, backend=backend)


# --------------------------------------------------------------------------------------------------------- plain PyTorch
@dataclass(frozen=True)
class _Samples:
    """The samples that may count, flat: cell, image, pixel coordinates, depth and weight."""

    cell: torch.Tensor
    camera: torch.Tensor
    u: torch.Tensor
    v: torch.Tensor
    depth: torch.Tensor

    def __getitem__(self, chosen: torch.Tensor) -> _Samples:
        return _Samples(*(value[chosen] for value in (self.cell, self.camera, self.u, self.v, self.depth)))

    def interpolated(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n, k]`` of ``rows [cameras*h*w, k]``: pixel centres on integers, the far corner clamped to the border."""
        left, top = self.u.floor().clamp(0, WIDTH - 1), self.v.floor().clamp(0, HEIGHT - 1)
        along, down = self.u - left, self.v - top
        total: Any = 0
        for line, share_v in ((top, 1 - down), ((top + 1).clamp(max=HEIGHT - 1), down)):
            for column, share_u in ((left, 1 - along), ((left + 1).clamp(max=WIDTH - 1), along)):
                place = ((self.camera * HEIGHT + line) * WIDTH + column).long()
                total = total + rows.index_select(0, place) * (share_u * share_v)[:, None]
        return total

    def weight(self, params: torch.Tensor) -> torch.Tensor:
        """How likely the depth is under the Gaussian of ``params [n, 2]``."""
        scale = params[:, 1] + EPSILON
        z = (self.depth - params[:, 0]) / scale
        return torch.exp(-z * z / 2) / scale


def _samples(grid: tuple[int, int, int], projections: torch.Tensor, pixel: float = 0.0, metre: float = 0.0) -> _Samples:
    """Samples on a map in front of its camera; the margins widen (or, negative, narrow) what counts as that."""
    kind = {"dtype": projections.dtype, "device": projections.device}
    axes = []
    for low, high, cells in zip(ROI[::2], ROI[1::2], grid, strict=True):
        axes.append((torch.arange(cells, **kind) + 0.5) * ((high - low) / cells) + low)
    z, y, x = torch.meshgrid(*reversed(axes), indexing="ij")
    matrix = projections[0][..., None, None, None]  # [cameras, 3, 4, 1, 1, 1]

    def along(row: int) -> torch.Tensor:
        return matrix[:, row, 0] * x + matrix[:, row, 1] * y + matrix[:, row, 2] * z + matrix[:, row, 3]

    depth = along(2)
    divisor = depth.clamp(min=EPSILON)
    u, v = along(0) / divisor / IMAGE[1] * WIDTH, along(1) / divisor / IMAGE[0] * HEIGHT
    seen = (depth > -metre) & (u >= -pixel) & (u < WIDTH + pixel) & (v >= -pixel) & (v < HEIGHT + pixel)
    camera, height, line, column = seen.nonzero(as_tuple=True)
    chosen = (camera, height, line, column)
    return _Samples(line * grid[0] + column, camera, u[chosen], v[chosen], depth[chosen])


def _rows(inputs: dict[str, Any], wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    feats, params = inputs["image_feats"], inputs["depth_params"]
    return feats.to(wide).view(-1, feats.shape[4]), params.to(wide).view(-1, 2)


def _gather(grid: tuple[int, int, int], inputs: dict[str, Any]) -> torch.Tensor:
    """Gathers only the samples that count, in fp32 (fp64 for fp64): the leanest formulation in plain PyTorch."""
    wide = torch.float64 if inputs["image_feats"].dtype is torch.float64 else torch.float32
    rows, params = _rows(inputs, wide)
    samples = _samples(grid, inputs["projection_matrices"].to(wide))
    with torch.no_grad():
        kept = samples.weight(samples.interpolated(params)) >= THRESHOLD
    samples = samples[kept]
    weight = samples.weight(samples.interpolated(params))
    total = rows.new_zeros(grid[0] * grid[1], rows.shape[1])
    total = total.index_add(0, samples.cell, samples.interpolated(rows) * weight[:, None])
    count = total.new_zeros(total.shape[0]).index_add(0, samples.cell, torch.ones_like(samples.u))
    output = total / count.clamp(min=1)[:, None]
    return output.view(1, grid[1], grid[0], -1).to(inputs["image_feats"].dtype)


def _undecided(grid: tuple[int, int, int], inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Cells with a sample so near the border of a map, the camera's plane or the threshold that fp32 may decide either way."""
    projections = inputs["projection_matrices"].double()
    _, params = _rows(inputs, torch.float64)
    counts = []
    for sign in (1, -1):
        samples = _samples(grid, projections, sign * _PIXEL, sign * _METRE)
        kept = samples.weight(samples.interpolated(params)) >= THRESHOLD * (1 - sign * _WEIGHT)
        counts.append(torch.bincount(samples.cell[kept], minlength=grid[0] * grid[1]))
    return {"output": (counts[0] != counts[1]).view(1, grid[1], grid[0], 1)}


# ------------------------------------------------------------------------------------------------------------------ cases
def _work(grid: tuple[int, int, int], inputs: dict[str, Any], pass_: str) -> Work:
    feats, params = inputs["image_feats"], inputs["depth_params"]
    samples = _samples(grid, inputs["projection_matrices"])
    seen = samples.u.numel()
    kept = int((samples.weight(samples.interpolated(_rows(inputs, torch.float32)[1])) >= THRESHOLD).sum())
    channels = feats.shape[4]
    output = grid[0] * grid[1] * channels * feats.element_size()
    read = feats.nbytes + params.nbytes
    gathered = 4 * kept * channels * feats.element_size() + 4 * seen * 2 * params.element_size()
    if pass_ == "fwd":
        return Work(read, output, flops=10 * kept * channels, gathered_bytes=gathered)
    return Work(
        read_bytes=read + output,
        written_bytes=read,
        flops=20 * kept * channels,
        gathered_bytes=gathered,
        scattered_adds=4 * kept * (channels + 2),
        launches=2 if pass_ == "bwd" else 7,
    )


def _case(name: str, source: str, **more: Any) -> BenchCase:
    grid = GRIDS[name]
    return BenchCase(
        family=FAMILY,
        operator=OPERATOR,
        name=name,
        shape=f"features (1, 6, {HEIGHT}, {WIDTH}, {CHANNELS}), grid {grid[0]}×{grid[1]}×{grid[2]}",
        source=source,
        passes=("fwd", "bwd", "bwd_ordered"),
        inputs=_inputs,
        call=functools.partial(_call, grid),
        reference=functools.partial(_gather, grid),
        work=functools.partial(_work, grid),
        differentiable=("image_feats", "depth_params"),
        undecided=functools.partial(_undecided, grid),
        baseline=functools.partial(_gather, grid),
        baseline_name="torch gather of the kept samples",
        # Close to a camera an fp32 projection moves a pixel by 1e-5 of the map and the depth's weight with it.
        tolerances={"float32": Tolerance(output=1e-4, grad=2e-4)},
        most_sets=3,
        **more,
    )


CASES: Final = (
    _case(
        "400x400x12",
        "FlashBEV, 0.25 m cells",
        device_types=GPU,
        dtypes=("float32", "float16"),
        bars={
            ("float32", "fwd"): (Bar(H200, 128, 1807, "FlashBEV"),),
            ("float32", "bwd"): (Bar(H200, 430, 125105, "FlashBEV"),),
        },
    ),
    _case(
        "100x100x12",
        "FlashBEV, 1 m cells",
        device_types=("cpu",),
        dtypes=("float32",),
        speedups={("cpu", "fwd"): 3.0, ("cpu", "bwd"): 3.0},
    ),
)


def _one_pixel(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    camera = torch.tensor([[[[8.0, -8.0, 0.0, 0.0], [8.0, 0.0, -8.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]], device=device)
    return {
        "image_feats": draw.normal("pixel", (1, 1, 1, 1, 64), device, dtype),
        "depth_params": torch.tensor([6.0, 2.0], device=device).view(1, 1, 1, 1, 2),
        "projection_matrices": camera,
    }


def _bind(inputs: dict[str, Any], backend: str) -> functools.partial[torch.Tensor]:
    tensors = (inputs["image_feats"], inputs["depth_params"], inputs["projection_matrices"])
    return functools.partial(flash_bevpool, *tensors, None, (16, 16), (0, 10, -5, 5, -1, 1), (1, 1, 1), backend=backend)


OVERHEADS: Final = (
    OverheadCase(
        FAMILY, OPERATOR, "one pixel of one camera, C 64, one cell", _one_pixel, _bind, ("image_feats", "depth_params")
    ),
)
