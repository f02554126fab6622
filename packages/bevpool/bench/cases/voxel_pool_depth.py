# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of voxel_pool_depth: Qwen-Drive's volume of 200 × 200 × 16 cells, cameras summed."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from muspace_bevpool import voxel_pool_depth, voxel_pool_depth_plan
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, draw, host_allowance_us

from . import lift
from .lift import CAMERAS, FAMILY, LIFTS

OPERATOR: Final = "voxel_pool_depth"
GEOMETRY: Final = LIFTS["qwen_drive"]
X, Y, Z = GEOMETRY.grid


def _inputs(channels: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    _, bins, height, width = GEOMETRY.points
    cells = torch.from_numpy(lift.cells("qwen_drive")).to(device)
    coords = torch.nn.functional.pad(cells, (1, 0))  # batch item 0 in front
    return {
        "img_feats": draw.normal("features", (1, CAMERAS, channels, height, width), device, dtype),
        "img_depth": draw.depth_distribution("qwen", CAMERAS, bins, height, width, device).to(dtype),
        "voxel_coords": coords[None, None].contiguous(),
        "mask": torch.from_numpy(lift.inside("qwen_drive")).to(device)[None, None],
    }


def _call(inputs: dict[str, Any], backend: str) -> torch.Tensor:
    tensors = (inputs["img_feats"], inputs["img_depth"], inputs.get("voxel_coords"), inputs.get("mask"))
    return voxel_pool_depth(*tensors, 1, X, Y, Z, reduce_cams=True, plan=inputs.get("plan"), backend=backend)


def _features(inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"img_feats": inputs["img_feats"], "img_depth": inputs["img_depth"], **more}


def _plan(inputs: dict[str, Any], backend: str) -> dict[str, Any]:
    coords, mask = inputs["voxel_coords"], inputs["mask"]
    return _features(inputs, plan=voxel_pool_depth_plan(coords, mask, 1, X, Y, Z, reduce_cams=True, backend=backend))


def _cells(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Place and cell of every point that the mask keeps."""
    place = inputs["mask"].view(-1).nonzero()[:, 0]
    _, x, y, z = inputs["voxel_coords"].view(-1, 4).index_select(0, place).unbind(1)
    return place, (x * Y + y) * Z + z


def _with_cells(inputs: dict[str, Any]) -> dict[str, Any]:
    return _features(inputs, cells=torch.stack([index.long() for index in _cells(inputs)]))


def _index_add(inputs: dict[str, Any]) -> torch.Tensor:
    feats, depth = inputs["img_feats"], inputs["img_depth"]
    place, cell = inputs["cells"] if "cells" in inputs else _cells(inputs)
    rows = feats[0].permute(0, 2, 3, 1).reshape(-1, feats.shape[2])
    total = lift.sum_rows(rows, cell, X * Y * Z, lift.pixel_row(GEOMETRY, place), depth.view(-1), place)
    return total.view(1, 1, X, Y, Z, feats.shape[2])


def _work(planned: bool, inputs: dict[str, Any], pass_: str) -> Work:
    feats, depth, mask = (inputs[name] for name in ("img_feats", "img_depth", "mask"))
    kept, row = int(mask.sum()), feats.shape[2] * feats.element_size()
    features = feats.nbytes + depth.nbytes
    geometry = inputs["voxel_coords"].nbytes + mask.nbytes
    flops = 2 * kept * feats.shape[2]
    if pass_ == "fwd":
        index = 8 * kept if planned else geometry
        launches = 2 if planned else 8
        return Work(features + index, X * Y * Z * row, flops=flops, gathered_bytes=kept * row, launches=launches)
    touched = torch.unique(_cells(inputs)[1]).numel()
    index = 4 * mask.numel() if planned else geometry
    # Only cells that points fell into are read.
    read = features + index + touched * row
    return Work(read, features, flops=2 * flops, gathered_bytes=kept * row, launches=3 if planned else 4)


#: pass → goal µs: an estimate for the forward, four times the 35 µs of the DRAM floor at 4.28 TB/s for the backward.
_GOALS: Final = {"fwd": 150.0, "bwd": 140.0}


def _bars() -> dict[tuple[str, str], tuple[Bar, ...]]:
    results = {"fwd": 1, "bwd": 2}
    return {
        ("float16", pass_): (Bar(H200, goal, met_by="wall", allowance_us=host_allowance_us(pass_, results[pass_])),)
        for pass_, goal in _GOALS.items()
    }


def _case(name: str, channels: int, planned: bool, **more: Any) -> BenchCase:
    _, bins, height, width = GEOMETRY.points
    return BenchCase(
        family=FAMILY,
        operator=OPERATOR,
        name=f"{name}_{'plan' if planned else 'sort'}",
        shape=f"6 × {bins}×{height}×{width} points ({GEOMETRY.kept:,} kept), C {channels}, grid {X}×{Y}×{Z}, cameras summed",
        source=f"Qwen-Drive 512×896, {'plan of the calibration' if planned else 'sort included'}",
        passes=("fwd", "bwd"),
        inputs=functools.partial(_inputs, channels),
        call=_call,
        reference=_index_add,
        work=functools.partial(_work, planned),
        differentiable=("img_feats", "img_depth"),
        baseline=_index_add if planned else functools.partial(_call, backend="reference"),
        baseline_name="torch index_add" if planned else "PyTorch reference",
        prepare=_plan if planned else None,
        prepare_baseline=_with_cells if planned else None,
        reproducible_backward=True,
        **more,
    )


_SPEEDUPS: Final = {("cpu", "fwd"): 3.0, ("cpu", "bwd"): 3.0}
CASES: Final = (
    _case("qwen_drive", 256, True, device_types=GPU, dtypes=("float16",), bars=_bars()),
    _case("qwen_drive", 256, False, device_types=GPU, dtypes=("float16",)),
    *(
        _case("qwen_drive_c32", 32, planned, device_types=("cpu",), dtypes=("float32",), speedups=_SPEEDUPS)
        for planned in (True, False)
    ),
)


def _one_point(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "img_feats": draw.normal("pixel", (1, 1, 64, 1, 1), device, dtype),
        "img_depth": torch.ones(1, 1, 1, 1, device=device),
        "voxel_coords": torch.zeros(1, 1, 1, 1, 1, 1, 4, dtype=torch.int32, device=device),
        "mask": torch.ones(1, 1, 1, 1, 1, 1, dtype=torch.bool, device=device),
    }


def _bind(inputs: dict[str, Any], backend: str) -> functools.partial[torch.Tensor]:
    plan = voxel_pool_depth_plan(inputs["voxel_coords"], inputs["mask"], 1, 1, 1, 1, backend=backend)
    tensors = (inputs["img_feats"], inputs["img_depth"], None, None, 1, 1, 1, 1)
    return functools.partial(voxel_pool_depth, *tensors, plan=plan, backend=backend)


OVERHEADS: Final = (
    OverheadCase(FAMILY, OPERATOR, "one point, C 64, one cell, with a plan", _one_point, _bind, ("img_feats", "img_depth")),
)
