# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of flash_bevpool_sca: BEVFormer's spatial cross-attention, beside its composition of separate steps.

The composition projects the pillars, gathers the queries of every camera (one ``nonzero`` each), samples with the
multi_scale_deformable_attn of ``muspace-msda`` if that is installed, and scatters the result back to the mean. With a
``grid_sample`` per level in its place it is the meaning that the gate compares with.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from muspace_bevpool import flash_bevpool_sca
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, draw, rig
from muspace_core.spec import Tolerance

from .lift import CAMERAS, FAMILY

OPERATOR: Final = "flash_bevpool_sca"
HEADS, CHANNELS, POINTS = 8, 256, 8
ANCHORS: Final = (-2.66, -0.66, 1.34, 4.34)
ROI: Final = (-51.2, 51.2, -51.2, 51.2)
EPS: Final = 1e-5
#: How far fp32 may be off, with room to spare: units of the image for what a camera sees, metres, and pixels of a level.
_IMAGE_UNIT, _METRE, _PIXEL = 1e-5, 1e-4, 1e-3
#: (value [N, S, heads, D], level sizes, locations [N, Q, heads, L, P, 2], weights [N, Q, heads, L, P]) → [N, Q, C]
Attend = Callable[[torch.Tensor, "tuple[tuple[int, int], ...]", torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """Images, feature levels and grid of one model size."""

    image: tuple[int, int]
    levels: tuple[tuple[int, int], ...]
    grid: tuple[int, int]

    @property
    def rows(self) -> int:
        return sum(height * width for height, width in self.levels)

    @property
    def queries(self) -> int:
        return self.grid[0] * self.grid[1]

    def widths(self, like: torch.Tensor) -> torch.Tensor:
        """``[L, 2]`` (width, height)."""
        return like.new_tensor([[width, height] for height, width in self.levels])


SCENES: Final = {
    "base": Scene((928, 1600), ((116, 200), (58, 100), (29, 50), (15, 25)), (200, 200)),
    "tiny": Scene((480, 800), ((15, 25),), (50, 50)),
}


def _inputs(scene: Scene, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Features in ``dtype``; offsets (a ring per head that grows with the point, and noise) and weights stay fp32."""
    levels, shape = len(scene.levels), (1, scene.queries, HEADS, len(scene.levels), POINTS)
    angle = torch.arange(HEADS, device=device) * (2 * math.pi / HEADS)
    direction = torch.stack([angle.cos(), angle.sin()], -1)
    direction = direction / direction.abs().amax(-1, keepdim=True)
    ring = direction[:, None, None] * (torch.arange(POINTS, device=device) + 1)[:, None]
    logits = draw.normal("logits", (*shape[:3], levels * POINTS), device)
    return {
        "image_feats": draw.normal("value", (1, CAMERAS, scene.rows, CHANNELS), device, dtype),
        "projection_matrices": torch.from_numpy(rig.projections(*scene.image)).float().to(device)[None],
        "sampling_offsets": ring + draw.normal("offsets", (*shape, 2), device),
        "attention_weights": logits.softmax(-1).view(shape),
    }


def _call(scene: Scene, inputs: dict[str, Any], backend: str) -> torch.Tensor:
    names = ("image_feats", "projection_matrices", "sampling_offsets", "attention_weights")
    feats, projections, offsets, weights = (inputs[name] for name in names)
    return flash_bevpool_sca(
        feats, projections, offsets, weights,
        spatial_shapes=scene.levels, image_size=scene.image, roi_range=ROI, grid_size=scene.grid, z_anchors=ANCHORS, eps=EPS,
        backend=backend,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the composition
def _references(scene: Scene, projections: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places ``[cameras, Q, A, 2]`` in units of the image, and depths ``[cameras, Q, A]``, of every pillar's anchors."""
    kind = {"dtype": projections.dtype, "device": projections.device}
    X, Y = scene.grid
    x = (torch.arange(X, **kind) + 0.5) * ((ROI[1] - ROI[0]) / X) + ROI[0]
    y = (torch.arange(Y, **kind) + 0.5) * ((ROI[3] - ROI[2]) / Y) + ROI[2]
    x, y = x.repeat(Y)[:, None], y.repeat_interleave(X)[:, None]
    z = torch.tensor(ANCHORS, **kind)
    matrix = projections[0][..., None, None]

    def along(row: int) -> torch.Tensor:
        return matrix[:, row, 0] * x + matrix[:, row, 1] * y + matrix[:, row, 2] * z + matrix[:, row, 3]

    depth = along(2)
    divisor = depth.clamp(min=EPS)
    return torch.stack([along(0) / divisor / scene.image[1], along(1) / divisor / scene.image[0]], -1), depth


def _hits(places: torch.Tensor, depth: torch.Tensor, unit: float = 0.0, metre: float = 0.0) -> torch.Tensor:
    """``[cameras, Q]``: whether any anchor is visible; the margins widen (or, negative, narrow) what counts as that."""
    return ((depth > EPS - metre) & ((places > -unit) & (places < 1 + unit)).all(-1)).any(-1)


def _locations(scene: Scene, places: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``[..., heads, L, P, 2]`` from the anchors' places ``[..., A, 2]``; point k stands on anchor k modulo A."""
    anchors = places.repeat(*(1,) * (places.dim() - 2), POINTS // len(ANCHORS), 1)
    return anchors[..., None, None, :, :] + offsets / scene.widths(places)[:, None]


def _composed(scene: Scene, attend: Attend, inputs: dict[str, Any]) -> torch.Tensor:
    """Project, rebatch the queries to the cameras that see them, attend, scatter, divide by the number of cameras."""
    feats, offsets, weights = (inputs[name] for name in ("image_feats", "sampling_offsets", "attention_weights"))
    places, depth = _references(scene, inputs["projection_matrices"])
    hit = _hits(places, depth)
    indices = [seen.nonzero()[:, 0] for seen in hit]

    def rebatched(tensor: torch.Tensor) -> torch.Tensor:
        """``[cameras, longest, ...]``: the queries of every camera in front, zeros behind."""
        chosen = [tensor.index_select(0, index) for index in indices]
        return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)

    seen = [place.index_select(0, index) for place, index in zip(places, indices, strict=True)]
    anchors = torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)
    value = feats[0].view(CAMERAS, scene.rows, HEADS, CHANNELS // HEADS)
    sampled = attend(value, scene.levels, _locations(scene, anchors, rebatched(offsets[0])), rebatched(weights[0]))
    slots = sampled.new_zeros(scene.queries, CHANNELS)
    for rows, index in zip(sampled, indices, strict=True):
        slots = slots.index_add(0, index, rows[: len(index)])
    return (slots / hit.sum(0).clamp(min=1)[:, None].to(slots.dtype))[None]


def _grid_sample(
    value: torch.Tensor, levels: tuple[tuple[int, int], ...], locations: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Deformable attention by one ``grid_sample`` per level."""
    images, _, heads, channels = value.shape
    queries = locations.shape[1]
    areas = [height * width for height, width in levels]
    maps = value.to(locations.dtype).permute(0, 2, 3, 1).flatten(0, 1).split(areas, -1)
    grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)
    shares = weights.transpose(1, 2).reshape(images * heads, 1, queries, len(levels), -1)
    total: Any = 0
    for level, (rows, (height, width)) in enumerate(zip(maps, levels, strict=True)):
        image = rows.reshape(images * heads, channels, height, width)
        grid = grids[:, :, level]
        sampled = torch.nn.functional.grid_sample(image, grid, padding_mode="zeros", align_corners=False)
        total = total + (sampled * shares[:, :, :, level]).sum(-1)
    return total.view(images, heads * channels, queries).transpose(1, 2).to(value.dtype)


def _our_msda(
    value: torch.Tensor, levels: tuple[tuple[int, int], ...], locations: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    from muspace_msda import multi_scale_deformable_attn

    return multi_scale_deformable_attn(value, levels, None, locations, weights)


def _undecided(scene: Scene, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Pillars that fp32 may find visible or not, and offsets to a pixel centre line, where the derivative jumps."""
    places, depth = _references(scene, inputs["projection_matrices"].double())
    surely, perhaps = (_hits(places, depth, sign * _IMAGE_UNIT, sign * _METRE) for sign in (-1, 1))
    offsets = inputs["sampling_offsets"]
    kink = torch.zeros(offsets.shape[1:-1], dtype=torch.bool, device=offsets.device)
    size = scene.widths(places)[:, None]
    for camera in range(CAMERAS):
        index = perhaps[camera].nonzero()[:, 0]
        pixels = _locations(scene, places[camera, index], offsets[0, index].double()) * size - 0.5
        near = ((pixels - pixels.round()).abs() < _PIXEL).any(-1)
        kink[index] |= near
    return {"output": (surely != perhaps).any(0)[None, :, None], "sampling_offsets": kink[None, ..., None]}


# ------------------------------------------------------------------------------------------------------------------ cases
def _corner_count(scene: Scene, inputs: dict[str, Any]) -> int:
    """Corners inside their map of all samples of all cameras that see the query."""
    places, depth = _references(scene, inputs["projection_matrices"])
    size, total = scene.widths(places)[:, None], 0
    for place, seen in zip(places, _hits(places, depth), strict=True):
        index = seen.nonzero()[:, 0]
        low = (_locations(scene, place[index], inputs["sampling_offsets"][0, index]) * size - 0.5).floor()
        valid = ((low >= 0) & (low < size)).long() + ((low >= -1) & (low < size - 1)).long()
        total += int((valid[..., 0] * valid[..., 1]).sum())
    return total


def _work(scene: Scene, inputs: dict[str, Any], pass_: str) -> Work:
    value, offsets, weights = (inputs[name] for name in ("image_feats", "sampling_offsets", "attention_weights"))
    multiplies = _corner_count(scene, inputs) * CHANNELS // HEADS
    gathered = multiplies * value.element_size()
    output = scene.queries * CHANNELS * value.element_size()
    read = min(value.nbytes, gathered) + offsets.nbytes + weights.nbytes
    if pass_ == "fwd":
        return Work(read, output, flops=2 * multiplies, gathered_bytes=gathered)
    narrowing = int(value.dtype in (torch.float16, torch.bfloat16))
    return Work(
        read_bytes=read + output,
        written_bytes=value.nbytes + offsets.nbytes + weights.nbytes,
        flops=5 * multiplies,
        gathered_bytes=gathered,
        scattered_adds=multiplies,
        launches=(2 if pass_ == "bwd" else 5) + narrowing,
    )


def _case(name: str, attend: Attend, baseline_name: str, **more: Any) -> BenchCase:
    scene = SCENES[name]
    X, Y = scene.grid
    return BenchCase(
        family=FAMILY,
        operator=OPERATOR,
        name=name,
        shape=f"features (1, 6, {scene.rows}, {CHANNELS}), levels {len(scene.levels)}, queries {Y}×{X}, points {POINTS}",
        source=f"BEVFormer-{name} spatial cross-attention, {scene.image[0]}×{scene.image[1]}",
        passes=("fwd", "bwd", "bwd_ordered"),
        inputs=functools.partial(_inputs, scene),
        call=functools.partial(_call, scene),
        reference=functools.partial(_composed, scene, _grid_sample),
        work=functools.partial(_work, scene),
        differentiable=("image_feats", "sampling_offsets", "attention_weights"),
        undecided=functools.partial(_undecided, scene),
        # On a level 200 pixels wide an fp32 projection is off by 1e-4 pixels close to a camera; the features are white noise.
        tolerances={"float32": Tolerance(output=5e-4, grad=5e-4)},
        baseline=functools.partial(_composed, scene, attend),
        baseline_name=baseline_name,
        **more,
    )


def _estimate(goal_us: float) -> tuple[Bar, ...]:
    return (Bar(H200, goal_us, met_by="baseline"),)


_WITH_MSDA: Final = importlib.util.find_spec("muspace_msda") is not None
#: At most 0.6 of the composition's time, both ways.
_BINDING: Final = {("cuda", "fwd"): 1 / 0.6, ("cuda", "bwd"): 1 / 0.6}
CASES: Final = (
    _case(
        "base",
        _our_msda if _WITH_MSDA else _grid_sample,
        "unfused composition with our MSDA" if _WITH_MSDA else "unfused composition with grid_sample",
        device_types=GPU,
        dtypes=("float32", "bfloat16"),
        bars={
            ("float32", "fwd"): _estimate(310),
            ("bfloat16", "fwd"): _estimate(245),
            ("float32", "bwd"): _estimate(900),
        },
        speedups=_BINDING if _WITH_MSDA else {},
    ),
    _case(
        "tiny",
        _grid_sample,
        "unfused composition with grid_sample",
        device_types=("cpu",),
        dtypes=("float32",),
        speedups={("cpu", "fwd"): 3.0, ("cpu", "bwd"): 3.0},
    ),
)


def _one_query(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    camera = torch.tensor([[[[8.0, -8.0, 0.0, 0.0], [8.0, 0.0, -8.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]], device=device)
    return {
        "image_feats": draw.normal("pixel", (1, 1, 1, 64), device, dtype),
        "projection_matrices": camera,
        "sampling_offsets": torch.zeros(1, 1, 2, 1, 4, 2, device=device),
        "attention_weights": torch.full((1, 1, 2, 1, 4), 0.25, device=device),
    }


def _bind(inputs: dict[str, Any], backend: str) -> functools.partial[torch.Tensor]:
    return functools.partial(
        flash_bevpool_sca,
        **inputs,
        spatial_shapes=((1, 1),),
        image_size=(16, 16),
        roi_range=(0, 10, -5, 5),
        grid_size=(1, 1),
        z_anchors=(-0.5, 0.5),
        backend=backend,
    )


OVERHEADS: Final = (
    OverheadCase(
        FAMILY,
        OPERATOR,
        "one pixel of one camera, C 64, one query, points 4",
        _one_query,
        _bind,
        ("image_feats", "sampling_offsets", "attention_weights"),
    ),
)
