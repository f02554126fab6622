# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of bev_pool: BEVFusion's frustum features, with the sort in the call and with a plan."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import torch
from muspace_bevpool import bev_pool, bev_pool_plan
from muspace_core.bench import GPU, H200, Bar, BenchCase, OverheadCase, Work, draw

from . import lift
from .lift import FAMILY

OPERATOR: Final = "bev_pool"
#: case → geometry
GEOMETRY: Final = {"bevfusion": "bevfusion", "lss_r50": "bevdet_r50"}


def _sizes(name: str) -> tuple[int, int, int, int]:
    """(B, D, H, W); BEVFusion's H axis is x."""
    X, Y, Z = lift.LIFTS[GEOMETRY[name]].grid
    return 1, Z, X, Y


@functools.lru_cache(maxsize=1)
def coordinates(name: str) -> np.ndarray:
    """``[N, 4]`` int64 (x, y, z, batch item) of the points inside the grid, in frustum order as the model passes them."""
    kept = lift.cells(GEOMETRY[name])[lift.inside(GEOMETRY[name])]
    return np.concatenate([kept, np.zeros((len(kept), 1), kept.dtype)], 1).astype(np.int64)


def _inputs(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    coords = torch.from_numpy(coordinates(name)).to(device)
    shape = (coords.shape[0], lift.LIFTS[GEOMETRY[name]].channels)
    return {"feats": draw.normal("feats", shape, device, dtype), "coords": coords}


def _call(name: str, inputs: dict[str, Any], backend: str) -> torch.Tensor:
    return bev_pool(inputs["feats"], inputs.get("coords"), *_sizes(name), plan=inputs.get("plan"), backend=backend)


def _plan(name: str, inputs: dict[str, Any], backend: str) -> dict[str, Any]:
    return {"feats": inputs["feats"], "plan": bev_pool_plan(inputs["coords"], *_sizes(name), backend=backend)}


def _cells(name: str, inputs: dict[str, Any]) -> torch.Tensor:
    _, D, H, W = _sizes(name)
    x, y, z, item = inputs["coords"].unbind(1)
    return ((item * D + z) * H + x) * W + y


def _index_add(name: str, inputs: dict[str, Any]) -> torch.Tensor:
    B, D, H, W = _sizes(name)
    cell = inputs["cell"] if "cell" in inputs else _cells(name, inputs)
    total = lift.sum_rows(inputs["feats"], cell, B * D * H * W)
    return total.view(B, D, H, W, -1).permute(0, 4, 1, 2, 3).contiguous()


def _with_cells(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"feats": inputs["feats"], "cell": _cells(name, inputs)}


def _work(name: str, planned: bool, inputs: dict[str, Any], pass_: str) -> Work:
    B, D, H, W = _sizes(name)
    feats = inputs["feats"]
    output = B * D * H * W * feats.shape[1] * feats.element_size()
    # A plan holds an int32 per point: its place in the order of the cells, or its cell.
    index = 4 * feats.shape[0] if planned else inputs["coords"].nbytes
    if pass_ == "fwd":
        launches = 1 if planned else 7
        return Work(feats.nbytes + index, output, flops=feats.numel(), gathered_bytes=feats.nbytes, launches=launches)
    return Work(output + index, feats.nbytes, gathered_bytes=feats.nbytes, launches=2 if planned else 3)


#: (planned, pass) → goal µs, best peer µs, peer; BEVFusion, fp32.
_BARS: Final = {
    (False, "fwd"): (240, 414, "BEVFusion, its sort included"),
    (True, "fwd"): (155, 171, "BEVFusion"),
    (False, "bwd"): (170, 286, "BEVFusion"),
    (True, "bwd"): (170, 286, "BEVFusion"),
}


def _case(name: str, planned: bool, source: str, **more: Any) -> BenchCase:
    of_peer = name == "bevfusion"
    B, D, H, W = _sizes(name)
    geometry = lift.LIFTS[GEOMETRY[name]]
    return BenchCase(
        family=FAMILY,
        operator=OPERATOR,
        name=f"{name}_{'plan' if planned else 'sort'}",
        shape=f"{geometry.kept:,} rows of {geometry.channels}, B {B}, D {D}, H {H}, W {W}",
        source=f"{source}, {'plan of the calibration' if planned else 'sort included'}",
        passes=("fwd", "bwd"),
        inputs=functools.partial(_inputs, name),
        call=functools.partial(_call, name),
        reference=functools.partial(_index_add, name),
        work=functools.partial(_work, name, planned),
        differentiable=("feats",),
        baseline=functools.partial(_index_add, name) if planned else functools.partial(_call, name, backend="reference"),
        baseline_name="torch index_add" if planned else "PyTorch reference",
        prepare=functools.partial(_plan, name) if planned else None,
        prepare_baseline=functools.partial(_with_cells, name) if planned else None,
        most_sets=3,
        reproducible_backward=True,
        bars={("float32", pass_): (Bar(H200, *bar),) for (flag, pass_), bar in _BARS.items() if of_peer and flag == planned},
        **more,
    )


_DTYPES: Final = ("float32", "float16")
_SPEEDUPS: Final = {("cpu", "fwd"): 3.0, ("cpu", "bwd"): 3.0}
CASES: Final = tuple(
    case
    for planned in (True, False)
    for case in (
        _case("bevfusion", planned, "BEVFusion Swin-T 256×704", device_types=GPU, dtypes=_DTYPES),
        _case("lss_r50", planned, "LSS R50 256×704", device_types=("cpu",), dtypes=_DTYPES[:1], speedups=_SPEEDUPS),
    )
)


def _one_row(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {"feats": draw.normal("row", (1, 64), device, dtype), "coords": torch.zeros(1, 4, dtype=torch.int64, device=device)}


def _bind(inputs: dict[str, Any], backend: str) -> functools.partial[torch.Tensor]:
    plan = bev_pool_plan(inputs["coords"], 1, 1, 1, 1, backend=backend)
    return functools.partial(bev_pool, inputs["feats"], None, 1, 1, 1, 1, plan=plan, backend=backend)


OVERHEADS: Final = (OverheadCase(FAMILY, OPERATOR, "one row of 64, one cell, with a plan", _one_row, _bind, ("feats",)),)
