# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of bev_pool_v2: BEVDet and FlashOcc, and BEVFusion's geometry with features and depth kept apart."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from muspace_bevpool import bev_pool_v2, bev_pool_v2_plan
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, draw

from . import lift
from .lift import FAMILY, LIFTS

OPERATOR: Final = "bev_pool_v2"
_RANKS: Final = ("ranks_depth", "ranks_feat", "ranks_bev", "interval_starts", "interval_lengths")
_SOURCES: Final = {
    "bevdet_r50": "BEVDet R50 256×704",
    "flashocc_r50": "FlashOcc R50 (M1) 256×704",
    "bevdet_stbase": "BEVDet STBase 512×1408",
    "bevfusion": "BEVFusion Swin-T 256×704, features and depth kept apart as in CUDA-BEVFusion",
}


def _shape(name: str) -> tuple[int, int, int, int, int]:
    X, Y, Z = LIFTS[name].grid
    return 1, Z, Y, X, LIFTS[name].channels


def _inputs(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    geometry = LIFTS[name]
    cameras, bins, height, width = geometry.points
    depth = draw.depth_distribution(name, cameras, bins, height, width, device)
    return {
        "depth": depth.to(dtype)[None],
        "feat": draw.normal("feat", (1, cameras, height, width, geometry.channels), device, dtype),
        **{key: torch.from_numpy(array).to(device) for key, array in lift.ranks(name).items()},
    }


def _call(name: str, inputs: dict[str, Any], backend: str) -> torch.Tensor:
    depth_rank, feat_rank, bev_rank, starts, lengths = (inputs.get(key) for key in _RANKS)
    plan = inputs.get("plan")
    tensors = (inputs["depth"], inputs["feat"], depth_rank, feat_rank, bev_rank)
    return bev_pool_v2(*tensors, _shape(name), starts, lengths, plan=plan, backend=backend)


def _plan(name: str, inputs: dict[str, Any], backend: str) -> dict[str, Any]:
    depth_rank, feat_rank, bev_rank, starts, lengths = (inputs[key] for key in _RANKS)
    ranks = (depth_rank, feat_rank, bev_rank, _shape(name), starts, lengths)
    plan = bev_pool_v2_plan(*ranks, depth_shape=tuple(inputs["depth"].shape), backend=backend)
    return {"depth": inputs["depth"], "feat": inputs["feat"], "plan": plan}


def _index_add(name: str, inputs: dict[str, Any]) -> torch.Tensor:
    batch, Z, Y, X, channels = _shape(name)
    depth_rank, feat_rank, bev_rank = (inputs[key] for key in _RANKS[:3])
    rows, weights = inputs["feat"].view(-1, channels), inputs["depth"].view(-1)
    total = lift.sum_rows(rows, bev_rank, batch * Z * Y * X, feat_rank, weights, depth_rank)
    return total.view(batch, Z, Y, X, channels).permute(0, 4, 1, 2, 3).contiguous()


def _work(name: str, planned: bool, inputs: dict[str, Any], pass_: str) -> Work:
    depth, feat = inputs["depth"], inputs["feat"]
    batch, Z, Y, X, channels = _shape(name)
    points = inputs["ranks_bev"].numel()
    output = batch * Z * Y * X * channels * feat.element_size()
    # A plan holds two int32 per point: feature row and depth, or cell and depth.
    index = 8 * points if planned else sum(inputs[key].nbytes for key in _RANKS)
    gathered = points * (channels * feat.element_size() + depth.element_size())
    read = depth.nbytes + feat.nbytes + index
    if pass_ == "fwd":
        flops, launches = 2 * points * channels, 1 if planned else 8
        return Work(read, output, flops=flops, gathered_bytes=gathered, launches=launches)
    written, flops = depth.nbytes + feat.nbytes, 4 * points * channels
    return Work(read + output, written, flops=flops, gathered_bytes=gathered, launches=2 if planned else 9)


_PEER: Final = "BEVDet/FlashOcc"
_WITH_SORT: Final = "BEVDet/FlashOcc, its argsort included"
#: (case, planned, dtype, pass) → goal µs, best peer µs, peer. Upstream is fp32 only; in its forward the caller sorts.
_BARS: Final[dict[tuple[str, bool, str, str], tuple[float | None, float | None, str]]] = {
    ("bevdet_r50", True, "float32", "fwd"): (14, 57, _PEER),
    ("flashocc_r50", True, "float32", "fwd"): (19, 40, _PEER),
    ("bevdet_stbase", True, "float32", "fwd"): (60, 172, _PEER),
    ("bevdet_r50", True, "float16", "fwd"): (14, None, ""),
    ("flashocc_r50", True, "float16", "fwd"): (19, None, ""),
    ("bevdet_stbase", True, "float16", "fwd"): (50, None, ""),
    ("bevdet_r50", True, "float32", "bwd"): (14, 1651, _PEER),
    ("flashocc_r50", True, "float32", "bwd"): (19, 2815, _PEER),
    ("bevdet_stbase", True, "float32", "bwd"): (68, 3634, _PEER),
    ("bevdet_r50", False, "float32", "fwd"): (None, 57, _PEER),
    ("flashocc_r50", False, "float32", "fwd"): (None, 40, _PEER),
    ("bevdet_stbase", False, "float32", "fwd"): (None, 172, _PEER),
    ("bevdet_r50", False, "float32", "bwd"): (None, 1933, _WITH_SORT),
    ("flashocc_r50", False, "float32", "bwd"): (None, 3100, _WITH_SORT),
    ("bevdet_stbase", False, "float32", "bwd"): (None, 4007, _WITH_SORT),
    ("bevfusion", True, "float16", "fwd"): (80, 228, "CUDA-BEVFusion"),
}


def _case(name: str, planned: bool, **more: Any) -> BenchCase:
    geometry = LIFTS[name]
    batch, Z, Y, X, channels = _shape(name)
    return BenchCase(
        family=FAMILY,
        operator=OPERATOR,
        name=f"{name}_{'plan' if planned else 'sort'}",
        shape=f"depth {(batch, *geometry.points)}, C {channels}, {geometry.kept:,} points, grid {X}×{Y}×{Z}",
        source=f"{_SOURCES[name]}, {'plan of the calibration' if planned else 'without a plan'}",
        inputs=functools.partial(_inputs, name),
        call=functools.partial(_call, name),
        reference=functools.partial(_index_add, name),
        work=functools.partial(_work, name, planned),
        differentiable=("depth", "feat"),
        baseline=functools.partial(_index_add, name) if planned else functools.partial(_call, name, backend="reference"),
        baseline_name="torch index_add" if planned else "PyTorch reference",
        prepare=functools.partial(_plan, name) if planned else None,
        most_sets=3,
        reproducible_backward=True,
        bars={
            (dtype, pass_): (Bar(H200, *bar),)
            for (case, flag, dtype, pass_), bar in _BARS.items()
            if case == name and flag == planned
        },
        **more,
    )


def _on_gpu(name: str, planned: bool) -> BenchCase:
    return _case(name, planned, device_types=GPU, dtypes=("float32", "float16"), passes=("fwd", "bwd"))


def _everywhere(name: str, planned: bool) -> BenchCase:
    return _case(
        name,
        planned,
        device_types=(*GPU, "cpu"),
        dtypes=("float32", "float16"),
        passes=("fwd", "bwd"),
        speedups={("cpu", "fwd"): 3.0, ("cpu", "bwd"): 3.0},
    )


CASES: Final = (
    *(_everywhere("bevdet_r50", planned) for planned in (True, False)),
    *(_on_gpu(name, planned) for name in ("flashocc_r50", "bevdet_stbase") for planned in (True, False)),
    _case("bevfusion", True, device_types=GPU, dtypes=("float16",), passes=("fwd",)),
)


def _one_point(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {
        "depth": torch.ones(1, 1, 1, 1, 1, device=device),
        "feat": draw.normal("pixel", (1, 1, 1, 1, 64), device, dtype),
        "rank": torch.zeros(1, dtype=torch.int32, device=device),
        "length": torch.ones(1, dtype=torch.int32, device=device),
    }


def _bind(inputs: dict[str, Any], backend: str) -> functools.partial[torch.Tensor]:
    rank, shape = inputs["rank"], (1, 1, 1, 1, 64)
    plan = bev_pool_v2_plan(
        rank, rank, rank, shape, rank, inputs["length"], depth_shape=tuple(inputs["depth"].shape), backend=backend
    )
    tensors = (inputs["depth"], inputs["feat"], None, None, None, shape, None, None)
    return functools.partial(bev_pool_v2, *tensors, plan=plan, backend=backend)


OVERHEADS: Final = (
    OverheadCase(FAMILY, OPERATOR, "one point, C 64, one cell, with a plan", _one_point, _bind, ("depth", "feat")),
)
