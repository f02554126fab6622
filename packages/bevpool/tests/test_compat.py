# SPDX-License-Identifier: Apache-2.0
"""The names by which BEVFusion, BEVDet/FlashOcc, BEVDepth and Qwen-Drive call the pooling operators, and their conventions."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from muspace_bevpool import bev_pool, bev_pool_v2, compat, voxel_pool_depth, voxel_pooling_inference, voxel_pooling_train
from muspace_bevpool.compat import flashocc
from muspace_core import get_last_dispatch_report
from muspace_core.testing.calls import represented
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling

calls = load_sibling(__file__, "pool_calls")
v2_oracle = load_sibling(__file__, "bev_pool_v2_oracle")
voxel_oracle = load_sibling(__file__, "voxel_pooling_oracle")

pytestmark = pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")


def _tensors(name: str, device: str, **sizes: Any) -> dict[str, Any]:
    pooling = calls.POOLINGS[name]
    return pooling.tensors(pooling.inputs.pooling("compat", **sizes), device)


def _natively(backend: str) -> None:
    report = get_last_dispatch_report()
    assert report is not None and report.selected_backend == backend


def test_every_name() -> None:
    """Those of the model code, its autograd functions and its compiled modules."""
    for name in (
        "bev_pool", "QuickCumsum", "QuickCumsumCuda", "bev_pool_ext", "bev_pool_v2", "TRTBEVPoolv2", "bev_pool_v2_ext",
        "voxel_pooling_prepare_v2", "voxel_pooling_train", "VoxelPoolingTrain", "voxel_pooling_train_ext",
        "voxel_pooling_inference", "VoxelPoolingInference", "voxel_pooling_inference_ext", "voxel_pool_depth",
    ):  # fmt: skip
        assert name in compat.__all__ and hasattr(compat, name)
    assert compat.QuickCumsumCuda is not flashocc.QuickCumsumCuda, "two origins, one name"


# ---- BEVFusion -----------------------------------------------------------------------------------------------------
def _sorted_rows(device: str) -> dict[str, Any]:
    """Rows inside, sorted by upstream's rank, with the intervals that its wrapper computes."""
    t = _tensors("bev_pool", device, points=50, place=calls.BEV_POOL.inputs.inside)
    B, D, H, W = (t[k] for k in "BDHW")
    h, w, d, b = t["coords"].long().T
    ranks = h * (W * D * B) + w * (D * B) + d * B + b
    order = ranks.argsort(stable=True)
    ranks = ranks[order]
    starts = torch.nonzero(torch.cat([torch.ones(1, dtype=torch.bool, device=device), ranks[1:] != ranks[:-1]]))[:, 0].int()
    lengths = torch.diff(torch.cat([starts, torch.tensor([50], dtype=torch.int32, device=device)]))
    return {"x": t["feats"][order], "geom": t["coords"][order], "ranks": ranks, "starts": starts, "lengths": lengths,
            "sizes": (B, D, H, W)}  # fmt: skip


def test_bev_pool_function(backend: str, device: str) -> None:
    t = _tensors("bev_pool", device)
    wanted = bev_pool(*t.values())
    assert_bits_equal(compat.bev_pool(*t.values()), wanted)
    sizes = [torch.tensor(t[k], device=device) for k in "BDHW"]
    assert_bits_equal(compat.bev_pool(t["feats"], t["coords"].long(), *sizes), wanted, "sizes as 0-dim tensors")
    _natively(backend)


def test_quick_cumsum_cuda(backend: str, device: str) -> None:
    """[B, D, H, W, C] of rows sorted by rank, with a gradient."""
    t = _sorted_rows(device)
    x = t["x"].clone().requires_grad_()
    output = compat.QuickCumsumCuda.apply(x, t["geom"], t["ranks"], *t["sizes"])
    wanted = bev_pool(t["x"], t["geom"], *t["sizes"])
    assert_bits_equal(output.permute(0, 4, 1, 2, 3).contiguous(), wanted)
    output.sum().backward()
    assert x.grad is not None and (x.grad == 1).all()
    _natively(backend)


def test_quick_cumsum(device: str) -> None:
    """Sums of the runs of equal ranks, and the coordinates of each run."""
    t = _sorted_rows(device)
    total, geom = compat.QuickCumsum.apply(t["x"].clone().requires_grad_(), t["geom"], t["ranks"])
    assert total.requires_grad and total.shape == (len(t["starts"]), t["x"].shape[1])
    for run, (start, length) in enumerate(zip(t["starts"].tolist(), t["lengths"].tolist(), strict=True)):
        assert_close(total[run], t["x"][start : start + length].double().sum(0), 1e-6)
        assert torch.equal(geom[run], t["geom"][start])


def test_bev_pool_ext(backend: str, device: str) -> None:
    """The compiled module: lengths before starts, channels last, sizes last; the backward gathers."""
    t = _sorted_rows(device)
    output = compat.bev_pool_ext.bev_pool_forward(t["x"], t["geom"], t["lengths"], t["starts"], *t["sizes"])
    B, D, H, W = t["sizes"]
    assert output.shape == (B, D, H, W, t["x"].shape[1]) and output.is_contiguous()
    assert_bits_equal(output.permute(0, 4, 1, 2, 3).contiguous(), bev_pool(t["x"], t["geom"], *t["sizes"]))
    _natively(backend)
    upstream = torch.randn_like(output)
    gradient = compat.bev_pool_ext.bev_pool_backward(upstream, t["geom"], t["lengths"], t["starts"], *t["sizes"])
    h, w, d, b = t["geom"].long().T
    assert_bits_equal(gradient, upstream[b, d, h, w])


# ---- BEVDet and FlashOcc -------------------------------------------------------------------------------------------
def test_bev_pool_v2_function(backend: str, device: str) -> None:
    t = _tensors("bev_pool_v2", device)
    wanted = bev_pool_v2(*t.values())
    assert_bits_equal(compat.bev_pool_v2(*t.values()), wanted)
    assert_bits_equal(compat.bev_pool_v2(*(t | {"bev_feat_shape": list(t["bev_feat_shape"])}).values()), wanted, "shape a list")
    _natively(backend)


def test_quick_cumsum_cuda_of_the_second_pooling(backend: str, device: str) -> None:
    """[B, Z, Y, X, C], as the wrapper permutes it."""
    t = _tensors("bev_pool_v2", device)
    live = [t[k].clone().requires_grad_() for k in ("depth", "feat")]
    output = flashocc.QuickCumsumCuda.apply(*live, *list(t.values())[2:])
    assert output.shape == t["bev_feat_shape"]
    assert_bits_equal(output.permute(0, 4, 1, 2, 3).contiguous(), bev_pool_v2(*t.values()))
    assert all(bool(g.any()) for g in torch.autograd.grad(output.sum(), live))
    _natively(backend)


def test_half_inputs_are_widened(device: str) -> None:
    """Upstream's function casts both to fp32."""
    t = _tensors("bev_pool_v2", device)
    output = flashocc.QuickCumsumCuda.apply(t["depth"].half(), t["feat"].half(), *list(t.values())[2:])
    assert output.dtype == torch.float32


@pytest.mark.parametrize("heights", [1, 3])
def test_trt_bev_pool(heights: int, backend: str, device: str) -> None:
    """Images without a batch axis; [1, Y, X, C] for one height, else [1, C, Z, Y, X]; rectangular grids."""
    t = _tensors("bev_pool_v2", device, views=(1, 3), grid=(heights, 5, 7))
    given = [t["depth"][0], t["feat"][0], *[t[k] for k in ("ranks_depth", "ranks_feat", "ranks_bev")]]
    given += [t["interval_starts"], t["interval_lengths"]]
    output = compat.TRTBEVPoolv2.apply(*given, 5, 7, heights)
    wanted = bev_pool_v2(*t.values())
    if heights == 1:
        assert output.shape == (1, 5, 7, 4)
        assert_bits_equal(output.contiguous(), wanted[:, :, 0].permute(0, 2, 3, 1).contiguous())
    else:
        assert_bits_equal(output, wanted)
    _natively(backend)


@pytest.mark.emu_budget(5_000_000)  # upstream's default plane of 128 x 128
def test_trt_bev_pool_defaults(device: str) -> None:
    parameters = list(inspect.signature(compat.TRTBEVPoolv2.apply).parameters.values())
    assert [p.default for p in parameters[7:]] == [128, 128, 1] and len(parameters) == 10
    t = _tensors("bev_pool_v2", device, views=(1, 2))
    given = [t["depth"][0], t["feat"][0], *[t[k] for k in calls.BEV_POOL_V2.inputs.INDICES]]
    assert compat.TRTBEVPoolv2.apply(*given).shape == (1, 128, 128, 4)


def test_bev_pool_v2_ext_forward(backend: str, device: str) -> None:
    """Lengths before starts; fills ``out`` [B, Z, Y, X, C] in place."""
    t = _tensors("bev_pool_v2", device)
    out = torch.zeros(t["bev_feat_shape"], device=device)
    place = out.data_ptr()
    ranks = [t[k] for k in ("ranks_depth", "ranks_feat", "ranks_bev")]
    compat.bev_pool_v2_ext.bev_pool_v2_forward(
        t["depth"], t["feat"], out, *ranks, t["interval_lengths"], t["interval_starts"]
    )  # fmt: skip
    assert out.data_ptr() == place
    assert_bits_equal(out.permute(0, 4, 1, 2, 3).contiguous(), bev_pool_v2(*t.values()))
    _natively(backend)


def test_bev_pool_v2_ext_backward(backend: str, device: str) -> None:
    """As upstream's wrapper calls it: points sorted by feature row, intervals over equal rows; fills both in place."""
    t = _tensors("bev_pool_v2", device)
    order = t["ranks_feat"].long().argsort(stable=True)
    rd, rf, rb = (t[k][order].contiguous() for k in ("ranks_depth", "ranks_feat", "ranks_bev"))
    starts, lengths = (torch.from_numpy(a).to(device) for a in calls.BEV_POOL_V2.inputs.intervals(rf.cpu().numpy()))
    grad_output = torch.from_numpy(np.random.default_rng(0).standard_normal(t["bev_feat_shape"])).float().to(device)
    of_depth, of_feat = torch.zeros_like(t["depth"]), torch.zeros_like(t["feat"])
    compat.bev_pool_v2_ext.bev_pool_v2_backward(
        grad_output, of_depth, of_feat, t["depth"], t["feat"], rd, rf, rb, lengths, starts
    )  # fmt: skip
    given = {k: represented(v) if isinstance(v, torch.Tensor) else v for k, v in t.items()}
    wanted = v2_oracle.backward(represented(grad_output.permute(0, 4, 1, 2, 3)), **given)
    assert_close(of_depth, wanted["depth"], 1e-5)
    assert_close(of_feat, wanted["feat"], 1e-5)
    _natively(backend)


@pytest.mark.backends("cpu", "cuda", "hip", "musa")
def test_voxel_pooling_prepare(device: str) -> None:
    """The view transformer's method: ranks from the coordinates of the frustum, sizes from its buffers."""
    transformer = SimpleNamespace(
        grid_lower_bound=torch.tensor([-4.0, -3.0, -1.0]), grid_interval=torch.tensor([0.5, 1.0, 2.0]),
        grid_size=torch.tensor([16.0, 6.0, 1.0]),
    )  # fmt: skip
    points = np.random.default_rng(0).uniform(-5, 5, (2, 3, 4, 2, 3, 3))
    found = compat.voxel_pooling_prepare_v2(transformer, torch.from_numpy(points).float().to(device))
    wanted = v2_oracle.ranks(points, (-4, -3, -1), (0.5, 1, 2), (16, 6, 1))
    assert [t.tolist() for t in found] == [a.tolist() for a in wanted]
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in found)
    nothing = compat.voxel_pooling_prepare_v2(transformer, torch.full((1, 1, 1, 2, 2, 3), 99.0, device=device))
    assert tuple(nothing) == (None,) * 5, "what upstream's callers test for"


# ---- BEVDepth ------------------------------------------------------------------------------------------------------
def test_voxel_pooling_train_function(backend: str, device: str) -> None:
    t = _tensors("voxel_pooling_train", device, extent=(2, 2, 3, 2, 3))
    given = t | {"voxel_num": torch.tensor(t["voxel_num"], device=device)}
    wanted = voxel_pooling_train(*t.values())
    assert_bits_equal(compat.voxel_pooling_train(*given.values()), wanted)
    live = t["input_features"].clone().requires_grad_()
    output = compat.VoxelPoolingTrain.apply(t["geom_xyz"], live, given["voxel_num"])
    assert_bits_equal(output, wanted)
    output.sum().backward()
    assert live.grad is not None and bool(live.grad.any())
    _natively(backend)


def test_voxel_pooling_train_ext(backend: str, device: str) -> None:
    """Fills out [B, Y, X, C] and the memo [B, N, 3] of (b, y, x) in place, leaves -1 of dropped points, returns 1."""
    t = _tensors("voxel_pooling_train", device, extent=(2, 30), channels=5, voxel_num=(4, 3, 2))
    geom, features, (X, Y, Z) = t.values()
    out, memo = torch.zeros(2, Y, X, 5, device=device), torch.full((2, 30, 3), -1, dtype=torch.int32, device=device)
    pointers = out.data_ptr(), memo.data_ptr()
    done = compat.voxel_pooling_train_ext.voxel_pooling_train_forward_wrapper(2, 30, 5, X, Y, Z, geom, features, out, memo)
    assert done == 1 and (out.data_ptr(), memo.data_ptr()) == pointers
    assert_bits_equal(out.permute(0, 3, 1, 2).contiguous(), voxel_pooling_train(*t.values()).contiguous())
    assert memo.tolist() == voxel_oracle.memo(geom.cpu().numpy(), (X, Y, Z)).tolist()
    _natively(backend)


def test_voxel_pooling_inference_function(backend: str, device: str) -> None:
    t = _tensors("voxel_pooling_inference", device)
    given = t | {"voxel_num": torch.tensor(t["voxel_num"], device=device)}
    wanted = voxel_pooling_inference(*t.values())
    assert_bits_equal(compat.voxel_pooling_inference(*given.values()), wanted)
    assert_bits_equal(compat.VoxelPoolingInference.apply(*given.values()), wanted)
    _natively(backend)


def test_voxel_pooling_inference_ext(backend: str, device: str) -> None:
    """Fills out [B, Y, X, C] in place."""
    t = _tensors("voxel_pooling_inference", device)
    geom, depth, context, (X, Y, Z) = t.values()
    batch, cameras, bins, height, width = geom.shape[:5]
    channels = context.shape[1]
    out = torch.zeros(batch, Y, X, channels, device=device)
    place = out.data_ptr()
    compat.voxel_pooling_inference_ext.voxel_pooling_inference_forward_wrapper(
        batch, cameras, bins, height, width, channels, X, Y, Z, geom, depth, context, out
    )  # fmt: skip
    assert out.data_ptr() == place
    assert_bits_equal(out.permute(0, 3, 1, 2).contiguous(), voxel_pooling_inference(*t.values()).contiguous())
    _natively(backend)


# ---- Qwen-Drive ----------------------------------------------------------------------------------------------------
def test_voxel_pool_depth(backend: str, device: str) -> None:
    """The same function; the model then permutes and sums its output over dim 1."""
    t = _tensors("voxel_pool_depth", device)
    assert compat.voxel_pool_depth is voxel_pool_depth
    output = compat.voxel_pool_depth(*t.values())
    volume = output.permute(0, 1, 5, 4, 3, 2)
    assert volume.shape == (2, 2, 4, 2, 4, 3)
    assert_close(voxel_pool_depth(*t.values(), reduce_cams=True).permute(0, 1, 5, 4, 3, 2)[:, 0], volume.sum(1), 2e-6)
    _natively(backend)
