# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of voxel_pooling_train and voxel_pooling_inference: BEVDepth R50, one and four samples."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from muspace_bevpool import (
    voxel_pooling_inference,
    voxel_pooling_inference_plan,
    voxel_pooling_train,
    voxel_pooling_train_plan,
)
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, draw

from . import lift
from .lift import CAMERAS, FAMILY, LIFTS

TRAIN, INFERENCE = "voxel_pooling_train", "voxel_pooling_inference"
GEOMETRY: Final = LIFTS["bevdepth_r50"]
POINTS: Final = CAMERAS * GEOMETRY.bins * GEOMETRY.height * GEOMETRY.width


def _geometry(batch: int, device: torch.device) -> torch.Tensor:
    """``[B, cameras, D, h, w, 3]`` int32 cells, the same calibration for every sample."""
    cells = torch.from_numpy(lift.cells("bevdepth_r50")).to(device)
    return cells.expand(batch, *cells.shape).contiguous()


def _train_inputs(batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    shape = (batch, *GEOMETRY.points, GEOMETRY.channels)
    return {"geom_xyz": _geometry(batch, device), "input_features": draw.normal("features", shape, device, dtype)}


def _inference_inputs(batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    images, (_, bins, height, width) = batch * CAMERAS, GEOMETRY.points
    return {
        "geom_xyz": _geometry(batch, device),
        "depth_features": draw.depth_distribution("bevdepth", images, bins, height, width, device).to(dtype),
        "context_features": draw.normal("context", (images, GEOMETRY.channels, height, width), device, dtype),
    }


def _train(inputs: dict[str, Any], backend: str) -> torch.Tensor:
    geometry, plan = inputs.get("geom_xyz"), inputs.get("plan")
    return voxel_pooling_train(geometry, inputs["input_features"], GEOMETRY.grid, plan=plan, backend=backend)


def _inference(inputs: dict[str, Any], backend: str) -> torch.Tensor:
    tensors = (inputs.get("geom_xyz"), inputs["depth_features"], inputs["context_features"])
    return voxel_pooling_inference(*tensors, GEOMETRY.grid, plan=inputs.get("plan"), backend=backend)


def _without_geometry(inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "geom_xyz"} | more


def _train_plan(inputs: dict[str, Any], backend: str) -> dict[str, Any]:
    return _without_geometry(inputs, plan=voxel_pooling_train_plan(inputs["geom_xyz"], GEOMETRY.grid, backend=backend))


def _inference_plan(inputs: dict[str, Any], backend: str) -> dict[str, Any]:
    return _without_geometry(inputs, plan=voxel_pooling_inference_plan(inputs["geom_xyz"], GEOMETRY.grid, backend=backend))


def _kept(geometry: torch.Tensor) -> torch.Tensor:
    return ((geometry >= 0) & (geometry < torch.tensor(GEOMETRY.grid, device=geometry.device))).all(-1)


def _cells(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Place and cell of every point inside the grid."""
    geometry = inputs["geom_xyz"]
    X, Y, _ = GEOMETRY.grid
    place = _kept(geometry).view(-1).nonzero()[:, 0]
    x, y, _ = geometry.view(-1, 3).index_select(0, place).unbind(1)
    return place, (place // POINTS * Y + y) * X + x


def _with_cells(inputs: dict[str, Any]) -> dict[str, Any]:
    return _without_geometry(inputs, cells=torch.stack(_cells(inputs)))


def _train_index_add(batch: int, inputs: dict[str, Any]) -> torch.Tensor:
    X, Y, _ = GEOMETRY.grid
    place, cell = inputs["cells"] if "cells" in inputs else _cells(inputs)
    total = lift.sum_rows(inputs["input_features"].view(-1, GEOMETRY.channels), cell, batch * Y * X, place)
    return total.view(batch, Y, X, -1).permute(0, 3, 1, 2)


def _inference_index_add(batch: int, inputs: dict[str, Any]) -> torch.Tensor:
    X, Y, _ = GEOMETRY.grid
    context, depth = inputs["context_features"], inputs["depth_features"]
    place, cell = inputs["cells"] if "cells" in inputs else _cells(inputs)
    rows = context.permute(0, 2, 3, 1).reshape(-1, GEOMETRY.channels)
    total = lift.sum_rows(rows, cell, batch * Y * X, lift.pixel_row(GEOMETRY, place), depth.view(-1), place)
    return total.view(batch, Y, X, -1).permute(0, 3, 1, 2)


def _work(batch: int, planned: bool, inputs: dict[str, Any], pass_: str) -> Work:
    """Points outside the grid are neither read nor added; train's gradient of them is written."""
    X, Y, _ = GEOMETRY.grid
    kept = int(_kept(inputs["geom_xyz"]).sum())
    train = "input_features" in inputs
    element = (inputs["input_features"] if train else inputs["context_features"]).element_size()
    gathered = kept * GEOMETRY.channels * element
    output = batch * Y * X * GEOMETRY.channels * element
    features = [tensor for name, tensor in inputs.items() if name != "geom_xyz"]
    # A plan holds an int32 per kept point in the order of the cells, its gradient one per point.
    index = (4 if train else 8) * kept if planned else inputs["geom_xyz"].nbytes
    read = gathered if train else sum(tensor.nbytes for tensor in features)
    flops = kept * GEOMETRY.channels * (1 if train else 2)
    if pass_ == "fwd":
        launches = (1 if planned else 7) + (0 if train else 1)
        return Work(read + index, output, flops=flops, gathered_bytes=gathered, launches=launches)
    index = 4 * batch * POINTS if planned else inputs["geom_xyz"].nbytes
    written = sum(tensor.nbytes for tensor in features)
    read = output + index + (0 if train else read)
    launches = (1 if train else 2) + (not planned)
    return Work(read, written, flops=0 if train else 2 * flops, gathered_bytes=gathered, launches=launches)


_PEERS: Final = {
    (TRAIN, 1, "float32"): 89,
    (TRAIN, 4, "float32"): 264,
    (TRAIN, 1, "float16"): 419,
    (TRAIN, 4, "float16"): 1167,
    (INFERENCE, 1, "float32"): 124,
    (INFERENCE, 4, "float32"): 421,
    (INFERENCE, 1, "float16"): 303,
    (INFERENCE, 4, "float16"): 835,
}
#: (operator, samples, dtype) → goal µs with a plan, and without.
_GOALS: Final = {
    (TRAIN, 1, "float32"): (30, 66),
    (TRAIN, 4, "float32"): (95, 168),
    (TRAIN, 1, "float16"): (20, 52),
    (TRAIN, 4, "float16"): (60, 130),
    **dict.fromkeys([(INFERENCE, 1, "float32"), (INFERENCE, 1, "float16")], (18, 50)),
    **dict.fromkeys([(INFERENCE, 4, "float32"), (INFERENCE, 4, "float16")], (52, 118)),
}


def _bars(operator: str, batch: int, planned: bool) -> dict[tuple[str, str], tuple[Bar, ...]]:
    return {
        (dtype, "fwd"): (Bar(H200, _GOALS[operator, batch, dtype][not planned], _PEERS[operator, batch, dtype], "BEVDepth"),)
        for dtype in ("float32", "float16")
    }


def _case(operator: str, batch: int, planned: bool) -> BenchCase:
    train = operator == TRAIN
    call, plain = (_train, _train_index_add) if train else (_inference, _inference_index_add)
    plain = functools.partial(plain, batch)
    layout = "channels last" if train else "depth and context apart"
    cpu = ("cpu",) if batch == 1 else ()
    return BenchCase(
        family=FAMILY,
        operator=operator,
        name=f"bevdepth_b{batch}_{'plan' if planned else 'sort'}",
        shape=f"{batch} × {POINTS:,} points ({GEOMETRY.kept:,} in the grid), C {GEOMETRY.channels}, {layout}, grid 128×128",
        source=f"BEVDepth R50 256×704, {'plan of the calibration' if planned else 'sort included'}",
        device_types=(*GPU, *cpu),
        dtypes=("float32", "float16"),
        # The gradient with and without a plan differs by the search of the keys only.
        passes=("fwd", "bwd") if planned or batch == 1 else ("fwd",),
        inputs=functools.partial(_train_inputs if train else _inference_inputs, batch),
        call=call,
        reference=plain,
        work=functools.partial(_work, batch, planned),
        differentiable=("input_features",) if train else ("depth_features", "context_features"),
        baseline=plain if planned else functools.partial(call, backend="reference"),
        baseline_name="torch index_add" if planned else "PyTorch reference",
        prepare=(_train_plan if train else _inference_plan) if planned else None,
        prepare_baseline=_with_cells if planned else None,
        most_sets=3,
        reproducible_backward=True,
        bars=_bars(operator, batch, planned),
        speedups={("cpu", "fwd"): 3.0, ("cpu", "bwd"): 3.0} if cpu else {},
    )


CASES: Final = tuple(
    _case(operator, batch, planned) for operator in (TRAIN, INFERENCE) for batch in (1, 4) for planned in (True, False)
)


def _one_point(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "geom_xyz": torch.zeros(1, 1, 1, 1, 1, 3, dtype=torch.int32, device=device),
        "input_features": draw.normal("row", (1, 1, 64), device, dtype),
        "depth_features": torch.ones(1, 1, 1, 1, device=device),
        "context_features": draw.normal("pixel", (1, 64, 1, 1), device, dtype),
    }


def _bind_train(inputs: dict[str, Any], backend: str) -> functools.partial[torch.Tensor]:
    plan = voxel_pooling_train_plan(inputs["geom_xyz"].view(1, 1, 3), (1, 1, 1), backend=backend)
    return functools.partial(voxel_pooling_train, None, inputs["input_features"], (1, 1, 1), plan=plan, backend=backend)


def _bind_inference(inputs: dict[str, Any], backend: str) -> functools.partial[torch.Tensor]:
    plan = voxel_pooling_inference_plan(inputs["geom_xyz"], (1, 1, 1), backend=backend)
    tensors = (None, inputs["depth_features"], inputs["context_features"], (1, 1, 1))
    return functools.partial(voxel_pooling_inference, *tensors, plan=plan, backend=backend)


_ONE: Final = "one point, C 64, one cell, with a plan"
OVERHEADS: Final = (
    OverheadCase(FAMILY, TRAIN, _ONE, _one_point, _bind_train, ("input_features",)),
    OverheadCase(FAMILY, INFERENCE, _ONE, _one_point, _bind_inference, ("depth_features", "context_features")),
)
