# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of deformable_aggregation: SparseDrive-S on six cameras of 256 by 704, detection and map anchors.

Anchors stand at random around the car, their points around them or along them; the points are projected into every camera,
so that most (point, camera) pairs see nothing, as in the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, draw, host_allowance_us, rig
from muspace_msda import deformable_aggregation

FAMILY: Final = "msda"
OPERATOR: Final = "deformable_aggregation"
IMAGE: Final = (256, 704)
MAPS: Final = tuple((IMAGE[0] // stride, IMAGE[1] // stride) for stride in (4, 8, 16, 32))
CAMERAS, CHANNELS, GROUPS = 6, 256, 8
DIFFERENTIABLE: Final = ("mc_ms_feat", "sampling_location", "weights")
_ARGUMENTS: Final = ("mc_ms_feat", "spatial_shape", "scale_start_index", "sampling_location", "weights")
#: name → (anchors, points of each)
ANCHORS: Final = {"det": (900, 13), "map": (100, 300)}
#: fp32 pixel coordinates are off by at most half an ulp of 176, 7.6e-6; closer to a pixel centre line the derivative is open.
_KINK: Final = 2e-5


def _points(name: str, random: np.random.Generator) -> np.ndarray:
    """``[A, P, 3]`` metres: clouds around boxes, or 20 samples of a polyline with five heights and three copies each."""
    anchors, points = ANCHORS[name]
    ground = random.uniform(-50, 50, (anchors, 2))
    height = random.uniform(-0.5, 2.5, (anchors, 1))
    if name == "det":
        centres = np.concatenate([ground, height], 1)
        return centres[:, None] + random.normal(0, 1, (anchors, points, 3)) * np.array([1.2, 1.2, 0.5])
    direction = random.normal(0, 1, (anchors, 1, 2))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    along = np.linspace(-10, 10, 20).repeat(15)[:, None] * direction
    lift = np.broadcast_to(np.tile([0.0, 0.5, -0.5, 1.0, -1.0], 60)[:, None], (anchors, points, 1))
    return np.concatenate([ground[:, None] / 2 + along, height[:, None] + lift], -1)


@functools.lru_cache(maxsize=2)
def locations(name: str) -> np.ndarray:
    """``[1, A, P, cameras, 2]`` fp32 places in units of the image; what lies behind a camera is left of and above it."""
    random = np.random.default_rng([draw.SEED, sum(map(ord, name))])
    points = _points(name, random)
    homogeneous = np.concatenate([points, np.ones((*points.shape[:2], 1))], -1)
    projected = np.einsum("cij,apj->apci", rig.projections(*IMAGE), homogeneous)
    depth = projected[..., 2:]
    place = projected[..., :2] / np.maximum(depth, 1e-5) / np.array(IMAGE[::-1])
    return np.where(depth > 1e-5, place, -1.0).clip(-4, 4).astype(np.float32)[None]


def _inputs(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Features in ``dtype``; locations and weights stay fp32, as the model casts them."""
    anchors, points = ANCHORS[name]
    areas = [height * width for height, width in MAPS]
    first = torch.tensor([0, *areas[:-1]]).cumsum(0)
    logits = draw.normal(f"{name} weights", (1, anchors, points * CAMERAS * len(MAPS), GROUPS), device)
    return {
        "mc_ms_feat": draw.normal("features", (1, CAMERAS * sum(areas), CHANNELS), device, dtype),
        "spatial_shape": torch.tensor(MAPS).expand(CAMERAS, -1, -1).contiguous().to(device),
        "scale_start_index": (torch.arange(CAMERAS)[:, None] * sum(areas) + first).to(device),
        "sampling_location": torch.from_numpy(locations(name)).to(device),
        "weights": logits.softmax(2).view(1, anchors, points, CAMERAS, len(MAPS), GROUPS),
    }


def _call(inputs: Mapping[str, torch.Tensor], backend: str) -> torch.Tensor:
    feat, shapes, starts, places, weights = (inputs[name] for name in _ARGUMENTS)
    return deformable_aggregation(feat, shapes, starts, places, weights, backend=backend)


def _inside(places: torch.Tensor) -> torch.Tensor:
    """Strictly inside the image on both axes."""
    return ((places > 0) & (places < 1)).all(-1)


def _pixels(places: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per scale: fp64 pixel coordinates (x, y) and the map's (width, height)."""
    for height, width in MAPS:
        size = torch.tensor([width, height], device=places.device)
        yield places.double() * size - 0.5, size


def _undecided(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Locations that lie on a pixel centre line of any scale as far as fp32 can tell."""
    near = [((pixels - pixels.round()).abs() < _KINK).any(-1) for pixels, _ in _pixels(inputs["sampling_location"])]
    return {"sampling_location": torch.stack(near).any(0)[..., None]}


def _corner_count(places: torch.Tensor) -> int:
    """Corners inside their map of all samples that count."""
    total, inside = 0, _inside(places)
    for pixels, size in _pixels(places):
        low = pixels.floor()
        valid = ((low >= 0) & (low < size)).long() + ((low >= -1) & (low < size - 1)).long()
        total += int((valid[..., 0] * valid[..., 1] * inside).sum())
    return total


def _work(inputs: Mapping[str, torch.Tensor], pass_: str) -> Work:
    """Bytes, adds and launches of one call; maps are read only where they are sampled."""
    feat, places, weights = (inputs[name] for name in DIFFERENTIABLE)
    corners = _corner_count(places)
    multiplies = corners * CHANNELS
    gathered = multiplies * feat.element_size()
    output = places.shape[1] * CHANNELS * feat.element_size()
    read = min(feat.nbytes, gathered) + places.nbytes + weights.nbytes
    if pass_ == "fwd":
        return Work(read, output, flops=2 * multiplies, gathered_bytes=gathered)
    narrowing = int(feat.dtype in (torch.float16, torch.bfloat16))
    return Work(
        read_bytes=read + output,
        written_bytes=feat.nbytes + places.nbytes + weights.nbytes,
        flops=5 * multiplies,
        gathered_bytes=gathered,
        scattered_adds=multiplies,
        # Zero fill and scatter; the ordered route counts, scans, places and sums; 16-bit gradients are narrowed at the end.
        launches=(2 if pass_ == "bwd" else 5) + narrowing,
    )


def _unit(places: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Places for ``grid_sample``; from fp64 ones with their pixel coordinates rounded to fp32 as the contract says.

    So the gate sees arithmetic and no geometry; the gradient passes the rounding unchanged.
    """
    if places.dtype is not torch.float64:
        return 2 * places - 1
    size = places.new_tensor([width, height])
    pixels = places * size - 0.5
    rounded = pixels + (pixels.float().double() - pixels).detach()
    return (2 * rounded + 1) / size - 1


def _grid_sample(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The usual plain PyTorch formulation: a ``grid_sample`` per scale over all cameras, masked to the open image."""
    feat, places, weights = (inputs[name] for name in DIFFERENTIABLE)
    anchors, points = places.shape[1:3]
    areas = [height * width for height, width in MAPS]
    maps = feat[0].to(places.dtype).view(CAMERAS, sum(areas), CHANNELS).transpose(1, 2).split(areas, -1)
    by_camera = places[0].permute(2, 0, 1, 3)
    shares = torch.where(_inside(places[0])[..., None, None], weights[0], 0.0).permute(2, 3, 4, 0, 1)
    output = feat.new_zeros(CHANNELS, anchors, dtype=places.dtype)
    for scale, (height, width) in enumerate(MAPS):
        rows = maps[scale].reshape(CAMERAS, CHANNELS, height, width)
        grid = _unit(by_camera, height, width)
        sampled = torch.nn.functional.grid_sample(rows, grid, padding_mode="zeros", align_corners=False)
        grouped = sampled.view(CAMERAS, GROUPS, CHANNELS // GROUPS, anchors, points)
        output = output + (grouped * shares[:, scale, :, None]).sum((0, -1)).view(CHANNELS, anchors)
    return output.t()[None].to(feat.dtype).contiguous()


#: (case, pass) → goal µs, best peer µs; fp32, the peer's only dtype. A forward's goal is one of its kernels.
_BARS: Final = {
    ("det", "fwd"): (36, 552),
    ("det", "bwd"): (200, 1830),
    ("map", "fwd"): (66, 1392),
    ("map", "bwd"): (400, 4338),
}


def _bar(pass_: str, goal_us: float, peer_us: float) -> Bar:
    if pass_ == "fwd":
        return Bar(H200, goal_us, peer_us, "SparseDrive")
    return Bar(H200, goal_us, peer_us, "SparseDrive", "wall", host_allowance_us(pass_, 3))


def _case(name: str, **more: Any) -> BenchCase:
    anchors, points = ANCHORS[name]
    rows = CAMERAS * sum(height * width for height, width in MAPS)
    return BenchCase(
        family=FAMILY,
        operator=OPERATOR,
        name=name,
        shape=f"features (1, {rows}, {CHANNELS}), {anchors} anchors of {points} points, cameras 6, scales 4, groups {GROUPS}",
        source={"det": "SparseDrive-S detection head, 256×704", "map": "SparseDrive-S map head, 256×704"}[name],
        inputs=functools.partial(_inputs, name),
        call=_call,
        reference=_grid_sample,
        work=_work,
        differentiable=DIFFERENTIABLE,
        undecided=_undecided,
        baseline=_grid_sample,
        baseline_name="torch grid_sample",
        bars={("float32", pass_): (_bar(pass_, *bar),) for (case, pass_), bar in _BARS.items() if case == name},
        **more,
    )


_DTYPES: Final = ("float32", "bfloat16", "float16")
CASES: Final = (
    _case(
        "det",
        device_types=(*GPU, "cpu"),
        dtypes=_DTYPES,
        passes=("fwd", "bwd", "bwd_ordered"),
        speedups={("cpu", "fwd"): 3.0, ("cpu", "bwd"): 3.0},
    ),
    _case("map", device_types=GPU, dtypes=_DTYPES, passes=("fwd", "bwd", "bwd_ordered")),
)


def _one_anchor(dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "mc_ms_feat": draw.normal("anchor", (1, 16, 64), device, dtype),
        "spatial_shape": torch.tensor([[[4, 4]]], device=device),
        "scale_start_index": torch.zeros(1, 1, dtype=torch.int64, device=device),
        "sampling_location": draw.uniform("anchor", (1, 1, 4, 1, 2), 0.1, 0.9, device),
        "weights": torch.full((1, 1, 4, 1, 1, GROUPS), 0.25, device=device),
    }


def _bind(inputs: Mapping[str, torch.Tensor], backend: str) -> functools.partial[torch.Tensor]:
    feat, shapes, starts, places, weights = (inputs[name] for name in _ARGUMENTS)
    return functools.partial(deformable_aggregation, feat, shapes, starts, places, weights, backend=backend)


OVERHEADS: Final = (
    OverheadCase(
        family=FAMILY,
        operator=OPERATOR,
        shape="features (1, 16, 64), one anchor of 4 points, one camera, one scale",
        inputs=_one_anchor,
        bind=_bind,
        differentiable=DIFFERENTIABLE,
    ),
)
