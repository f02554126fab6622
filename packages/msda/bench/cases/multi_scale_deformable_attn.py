# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of multi_scale_deformable_attn: shapes of real models, seeded inputs, and what one call must move.

The inputs are functions of the case name and ``SEED`` alone.  Locations follow the models: reference points on the query's
own pixel (temporal self-attention, encoders), at random (decoders), or on pillars projected into six cameras (spatial
cross-attention), plus a ring of offsets per head that grows with the point index, plus learned-looking noise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, host_allowance_us, rig
from muspace_msda import _reference, multi_scale_deformable_attn

FAMILY: Final = "msda"
OPERATOR: Final = "multi_scale_deformable_attn"
SEED: Final = 20261130
HEADS, CHANNELS = 8, 32
DIFFERENTIABLE: Final = ("value", "sampling_locations", "attention_weights")

Levels = tuple[tuple[int, int], ...]
_DETR: Final[Levels] = ((100, 167), (50, 84), (25, 42), (13, 21))
_BEV: Final[Levels] = ((200, 200),)
#: name → (levels, batch, points per level)
GEOMETRY: Final[Mapping[str, tuple[Levels, int, int]]] = {
    "tsa_base": (_BEV, 2, 4),
    "sca_base": (((116, 200), (58, 100), (29, 50), (15, 25)), 6, 8),
    "bev_dec": (_BEV, 1, 4),
    "ddetr_enc": (_DETR, 2, 4),
    "ddetr_dec": (_DETR, 2, 4),
    "ddetr_enc_2778": (((100, 167), (50, 84), (25, 42), (13, 21)), 2, 4),
    "tsa_2000": (((200, 200),), 2, 4),
}
#: The cpu cases take every n-th query of the GPU case; the maps are the same.
QUERY_STEP: Final = {"ddetr_enc_2778": 8, "tsa_2000": 20}


# ---------------------------------------------------------------------------------------------------------------- geometry
_IMAGE: Final = (928, 1600)


def _pillars() -> np.ndarray:
    """Reference points of spatial cross-attention, ``[6, Q, 4, 2]``: four heights of every BEV cell that a camera sees.

    The queries of a camera are packed to the front and padded with zeros to the fullest camera, as the model does.
    """
    ground = (np.arange(200) + 0.5) / 200 * 102.4 - 51.2
    heights = (np.array([0.5, 2.5, 4.5, 7.5]) / 8 * 8 - 5.0) + 1.84
    y, x = np.meshgrid(ground, ground, indexing="ij")
    full = (40000, 4)
    columns = [np.broadcast_to(axis, full) for axis in (x.reshape(-1, 1), y.reshape(-1, 1), heights)]
    corners = np.stack([*columns, np.ones(full)], -1)
    seen = []
    for projection in rig.projections(*_IMAGE):
        projected = corners @ projection.T
        depth = projected[..., 2]
        pixel = projected[..., :2] / np.maximum(depth, 1e-5)[..., None] / np.array(_IMAGE[::-1], np.float64)
        visible = (depth > 1e-5) & (pixel > 0).all(-1) & (pixel < 1).all(-1)
        seen.append(pixel[visible.any(1)])
    packed = np.zeros((len(rig.CAMERAS), max(map(len, seen)), 4, 2))
    for camera, pixel in enumerate(seen):
        packed[camera, : len(pixel)] = pixel.clip(-1, 2)
    return packed


def _centres(height: int, width: int) -> np.ndarray:
    """``[h*w, 2]`` pixel centres (x, y) of a map, row-major, in units of the map."""
    x, y = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
    return np.stack([x, y], -1).reshape(-1, 2)


def _reference_points(name: str, draw: np.random.Generator) -> np.ndarray:
    """``[B, Q, 1, 2]``, for spatial cross-attention ``[6, Q, 4, 2]``."""
    levels, batch, _ = GEOMETRY[name]
    if name.startswith("sca"):
        return _pillars()
    if name == "bev_dec":
        return draw.uniform(0.02, 0.98, (batch, 900, 1, 2))
    if name == "ddetr_dec":
        return draw.uniform(0.02, 0.98, (batch, 300, 1, 2))
    own = np.concatenate([_centres(height, width) for height, width in levels])[:: QUERY_STEP.get(name, 1)]
    return np.broadcast_to(own[None, :, None], (batch, len(own), 1, 2))


def _ring(points: int) -> np.ndarray:
    """``[H, P, 2]`` offsets in pixels: one direction per head on a unit square, point p at distance p + 1."""
    angle = np.arange(HEADS) * (2 * math.pi / HEADS)
    direction = np.stack([np.cos(angle), np.sin(angle)], -1)
    direction /= np.abs(direction).max(-1, keepdims=True)
    return direction[:, None] * (np.arange(points) + 1)[None, :, None]


@functools.lru_cache(maxsize=1)
def arrays(name: str) -> dict[str, np.ndarray]:
    """The inputs of a case in fp32, by argument name."""
    levels, batch, points = GEOMETRY[name]
    tag = f"msda{name}"
    draw = np.random.default_rng([SEED, sum(ord(letter) * (place + 1) for place, letter in enumerate(tag))])
    reference = _reference_points(name, draw)
    queries, count = reference.shape[1], len(levels)
    noise = draw.normal(0, 1.0, (batch, queries, HEADS, count, points, 2))
    offsets = (_ring(points)[:, None] + noise).astype(np.float32)
    size = np.array([[width, height] for height, width in levels], np.float64)[:, None]
    # Points cycle over the pillar's heights; elsewhere a query has one reference point.
    anchors = np.tile(reference, (1, 1, points // 4, 1)) if name.startswith("sca") else reference
    locations = anchors[:, :, None, None] + offsets / size
    weights = draw.normal(0, 1, (batch, queries, HEADS, count * points)).astype(np.float32)
    weights = np.exp(weights - weights.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    areas = [height * width for height, width in levels]
    return {
        "value": draw.standard_normal((batch, sum(areas), HEADS, CHANNELS), dtype=np.float32),
        "spatial_shapes": np.array(levels, np.int64),
        "level_start_index": np.cumsum([0, *areas[:-1]], dtype=np.int64),
        "sampling_locations": np.ascontiguousarray(locations, np.float32),
        "attention_weights": weights.reshape(batch, queries, HEADS, count, points),
    }


def _inputs(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Storage in ``dtype``; locations and weights stay fp32, as training under autocast has them."""
    tensors = {key: torch.from_numpy(array).to(device) for key, array in arrays(name).items()}
    tensors["value"] = tensors["value"].to(dtype)
    return tensors


# -------------------------------------------------------------------------------------------------------------- operator
def _arguments(
    inputs: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In the order of the operator, whatever the order of the mapping."""
    names = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights")
    value, shapes, starts, locations, weights = (inputs[name] for name in names)
    return value, shapes, starts, locations, weights


def _call(inputs: Mapping[str, torch.Tensor], backend: str) -> torch.Tensor:
    return multi_scale_deformable_attn(*_arguments(inputs), backend=backend)


def _meaning(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return _reference.multi_scale_deformable_attn(*_arguments(inputs))


def _pixels(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Pixel coordinates ``fma(location, size, -0.5)`` rounded to fp32 as the contract says, ``[B, Q, H, L, P, 2]``."""
    size = inputs["spatial_shapes"].flip(1)[:, None].double()
    return (inputs["sampling_locations"].double() * size - 0.5).float()


def _exact(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fp64 inputs whose pixel coordinates are the contract's fp32 ones, so that the gate sees arithmetic and no geometry."""
    size = inputs["spatial_shapes"].flip(1)[:, None].double()
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact["sampling_locations"] = (_pixels(inputs).double() + 0.5) / size
    return exact


def _undecided(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Samples exactly on a pixel centre line: the derivative jumps there and fp64 may fall on the other side of it."""
    pixels = _pixels(inputs)
    return {"sampling_locations": (pixels == pixels.round()).any(-1, keepdim=True)}


def _corner_count(inputs: Mapping[str, torch.Tensor]) -> int:
    """Corners of all samples that lie inside their map."""
    low = _pixels(inputs).floor()
    last = inputs["spatial_shapes"].flip(1)[:, None] - 1
    inside = ((low >= 0) & (low <= last)).long() + ((low >= -1) & (low < last)).long()
    return int((inside[..., 0] * inside[..., 1]).sum())


def _work(inputs: Mapping[str, torch.Tensor], pass_: str) -> Work:
    """Bytes, adds and launches of one call; a map that is sampled sparsely is read only where it is sampled."""
    value, weights = inputs["value"], inputs["attention_weights"]
    element = value.element_size()
    corners = _corner_count(inputs)
    gathered = corners * value.shape[3] * element
    value_bytes = value.numel() * element
    output_bytes = weights.shape[0] * weights.shape[1] * value.shape[2] * value.shape[3] * element
    sample_bytes = sum(inputs[name].numel() * inputs[name].element_size() for name in DIFFERENTIABLE[1:])
    read = min(value_bytes, gathered) + sample_bytes
    multiplies = corners * value.shape[3]
    if pass_ == "fwd":
        return Work(read, output_bytes, flops=2 * multiplies, gathered_bytes=gathered)
    narrowing = int(value.dtype in (torch.float16, torch.bfloat16))
    return Work(
        read_bytes=read + output_bytes,
        written_bytes=value_bytes + sample_bytes,
        flops=5 * multiplies,
        gathered_bytes=gathered,
        scattered_adds=multiplies,
        # Zero fill and scatter; the ordered route counts, scans, places and sums; 16-bit gradients are narrowed at the end.
        launches=(2 if pass_ == "bwd" else 5) + narrowing,
    )


def _grid_sample(inputs: Mapping[str, torch.Tensor], levels: Levels) -> torch.Tensor:
    """The usual plain PyTorch formulation: one ``grid_sample`` per level, then a weighted sum."""
    locations, weights = inputs["sampling_locations"], inputs["attention_weights"]
    value = inputs["value"].to(locations.dtype)
    batch, _, heads, channels = value.shape
    queries = locations.shape[1]
    maps = value.permute(0, 2, 3, 1).flatten(0, 1).split([height * width for height, width in levels], -1)
    grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)
    sampled = [
        torch.nn.functional.grid_sample(
            rows.reshape(batch * heads, channels, height, width), grids[:, :, level], padding_mode="zeros", align_corners=False
        )
        for level, (rows, (height, width)) in enumerate(zip(maps, levels, strict=True))
    ]
    shares = weights.transpose(1, 2).reshape(batch * heads, 1, queries, -1)
    output = (torch.cat(sampled, -1) * shares).sum(-1)
    return output.view(batch, heads * channels, queries).transpose(1, 2).to(inputs["value"].dtype).contiguous()


# ------------------------------------------------------------------------------------------------------------------ cases
_DCNV4_HALF: Final = "DCNv4, fp16 locations"
#: (case, storage, pass) → goal µs, best peer µs, peer. Peers were measured on the inputs of this file; storage 16 is bf16 and
#: fp16. DCNv4 takes its locations in the storage dtype: its 16-bit outputs are off by up to 5 % of the peak.
_BARS: Final[Mapping[tuple[str, int, str], tuple[float | None, float | None, str]]] = {
    ("tsa_base", 32, "fwd"): (90, 145, "DCNv4"),
    ("tsa_base", 32, "bwd"): (255, 1027, "DCNv4"),
    ("tsa_base", 16, "fwd"): (64, 110, _DCNV4_HALF),
    ("tsa_base", 16, "bwd"): (325, 1068, _DCNV4_HALF),
    ("sca_base", 32, "fwd"): (340, 676, "DCNv4"),
    ("sca_base", 32, "bwd"): (1030, 6231, "mmcv"),
    ("sca_base", 16, "fwd"): (262, 450, _DCNV4_HALF),
    ("sca_base", 16, "bwd"): (1320, 9703, _DCNV4_HALF),
    ("ddetr_enc", 32, "fwd"): (157, 293, "DCNv4"),
    ("ddetr_enc", 32, "bwd"): (395, 2262, "mmcv"),
    ("ddetr_enc", 16, "fwd"): (111, 165, _DCNV4_HALF),
    ("ddetr_enc", 16, "bwd"): (465, 2891, _DCNV4_HALF),
    ("bev_dec", 32, "fwd"): (14, 31, "DCNv4"),
    ("bev_dec", 32, "bwd"): (31, 50, "DCNv4"),
    ("ddetr_dec", 32, "fwd"): (18, 24, "mmcv"),
    ("ddetr_dec", 32, "bwd"): (37, 73, "mmcv"),
    ("bev_dec", 16, "fwd"): (None, 20, _DCNV4_HALF),
    ("bev_dec", 16, "bwd"): (None, 59, "mmcv, fp16 locations"),
    ("ddetr_dec", 16, "fwd"): (None, 24, "mmcv, fp16 locations"),
    ("ddetr_dec", 16, "bwd"): (None, 94, _DCNV4_HALF),
    ("tsa_base", 32, "bwd_ordered"): (600, None, ""),
    ("sca_base", 32, "bwd_ordered"): (3000, None, ""),
    ("ddetr_enc", 32, "bwd_ordered"): (1000, None, ""),
}
_SOURCES: Final = {
    "tsa_base": "BEVFormer-base temporal self-attention",
    "sca_base": "BEVFormer-base spatial cross-attention, six cameras 928×1600, queries re-batched to the fullest camera",
    "bev_dec": "BEVFormer-base decoder, 900 queries on the BEV map",
    "ddetr_enc": "Deformable-DETR encoder, 800×1333",
    "ddetr_dec": "Deformable-DETR decoder, 300 queries",
    "ddetr_enc_2778": "Deformable-DETR encoder 800×1333, every 8th query",
    "tsa_2000": "BEVFormer-base temporal self-attention, every 20th query",
}
DTYPES: Final = ("float32", "bfloat16", "float16")


def _bars(name: str) -> dict[tuple[str, str], tuple[Bar, ...]]:
    bars: dict[tuple[str, str], tuple[Bar, ...]] = {}
    for (case, storage, pass_), (goal, peer_us, peer) in _BARS.items():
        if case != name:
            continue
        ordered = pass_ == "bwd_ordered"
        bar = Bar(H200, goal, peer_us, peer, "wall", host_allowance_us(pass_, 3)) if ordered else Bar(H200, goal, peer_us, peer)
        for dtype in DTYPES[:1] if storage == 32 else DTYPES[1:]:
            bars[dtype, pass_] = (bar,)
    return bars


def _case(name: str, device_types: Sequence[str], passes: Sequence[str], **more: Any) -> BenchCase:
    levels, batch, points = GEOMETRY[name]
    rows = sum(height * width for height, width in levels)
    return BenchCase(
        family=FAMILY,
        operator=OPERATOR,
        name=name,
        shape=f"value ({batch}, {rows}, {HEADS}, {CHANNELS}), levels {len(levels)}, points {points}",
        source=_SOURCES[name],
        device_types=tuple(device_types),
        dtypes=DTYPES,
        passes=tuple(passes),
        inputs=functools.partial(_inputs, name),
        call=_call,
        reference=_meaning,
        work=_work,
        differentiable=DIFFERENTIABLE,
        exact=_exact,
        undecided=_undecided,
        baseline=functools.partial(_grid_sample, levels=levels),
        baseline_name="torch grid_sample",
        bars=_bars(name),
        **more,
    )


_CPU_SPEEDUPS: Final = {("cpu", "fwd"): 8.0, ("cpu", "bwd"): 7.0}
_PASSES: Final = ("fwd", "bwd", "bwd_ordered")
CASES: Final = (
    *(_case(name, GPU, _PASSES) for name in ("tsa_base", "sca_base", "bev_dec", "ddetr_enc", "ddetr_dec")),
    *(_case(name, ("cpu",), _PASSES[:2], speedups=_CPU_SPEEDUPS) for name in ("ddetr_enc_2778", "tsa_2000")),
)


def _one_query(dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(SEED)
    return {
        "value": torch.randn(1, 16, HEADS, CHANNELS, generator=draw).to(device, dtype),
        "spatial_shapes": torch.tensor([[4, 4]], device=device),
        "level_start_index": torch.zeros(1, dtype=torch.int64, device=device),
        "sampling_locations": torch.rand(1, 1, HEADS, 1, 4, 2, generator=draw).to(device),
        "attention_weights": torch.full((1, 1, HEADS, 1, 4), 0.25, device=device),
    }


def _bind(inputs: Mapping[str, torch.Tensor], backend: str) -> functools.partial[torch.Tensor]:
    return functools.partial(multi_scale_deformable_attn, *_arguments(inputs), backend=backend)


OVERHEADS: Final = (
    OverheadCase(
        family=FAMILY,
        operator=OPERATOR,
        shape=f"value (1, 16, {HEADS}, {CHANNELS}), one query, levels 1, points 4",
        inputs=_one_query,
        bind=_bind,
        differentiable=DIFFERENTIABLE,
    ),
)
