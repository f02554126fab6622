# SPDX-License-Identifier: Apache-2.0
"""voxel_pooling_train and voxel_pooling_inference: checks in the caller's words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from muspace_core import checks

from muspace_bevpool import _autograd, _host, _reference
from muspace_bevpool._native.bev_pool import POINTS
from muspace_bevpool._native.voxel_pooling_inference import frustum
from muspace_bevpool._native.voxel_pooling_train import rule
from muspace_bevpool._ops import planning
from muspace_bevpool._plan import PointMap, PoolPlan, check_counts

_DISPATCHERS = _autograd.DISPATCHERS
#: The arguments that points and cells follow from.
_NAMED = ("geom_xyz", "voxel_num")
VoxelNum = torch.Tensor | Sequence[int]


def voxel_pooling_train(
    geom_xyz: torch.Tensor | None,
    input_features: torch.Tensor,
    voxel_num: VoxelNum,
    *,
    plan: PoolPlan | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Sum of frustum features per bird's-eye-view cell (BEVDepth's ``voxel_pooling_train``).

    .. math:: out[b,:,y,x] = \sum_{p:\ geom_{b,p} = (x,y,z),\ 0 \leq z < Z} features[b,p,:]

    The height only filters; points out of range are dropped. Sums are fp32 for 16-bit and fp32 features (upstream adds halves
    in half), fp64 for fp64.

    Args:
        geom_xyz: ``[B, ..., 3]`` int32 (int64 is accepted), last axis (x, y, z); may be ``None`` with a plan.
        input_features: ``[B, ..., C]`` with as many points; float32, bfloat16, float16, or float64 (cpu).
        voxel_num: ``(X, Y, Z)``; a tensor in device memory is read once, which waits for the device.
        plan: from ``voxel_pooling_train_plan`` with the same geometry; saves the sort of every call.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, C, Y, X]``, as upstream a view of a ``[B, Y, X, C]`` buffer. Differentiable once in ``input_features``.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size or device; a plan of another operator, size, device or backend.
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: bit-reproducible forward and backward (upstream's forward is not).

    Example:
        >>> import torch
        >>> from muspace_bevpool import voxel_pooling_train
        >>> geom = torch.tensor([[[1, 0, 0], [1, 0, 0], [0, 0, 7]]], dtype=torch.int32)
        >>> voxel_pooling_train(geom, torch.ones(1, 3, 2), (2, 1, 1))[0, 0]
        tensor([[0., 2.]])
    """
    checks.tensors(input_features=input_features)
    checks.storage("input_features", input_features)
    if input_features.dim() < 2:
        raise checks.fail("input_features", "shape [B, ..., C]", list(input_features.shape))
    planning.check_plan(plan)
    X, Y, Z = _host.sizes("voxel_num", voxel_num, 3)
    batch, points = input_features.shape[0], input_features.shape[1:-1].numel()
    channels, cells = input_features.shape[-1], batch * Y * X
    if plan is None:
        geom_xyz = planning.check_coordinates("geom_xyz", geom_xyz, "B ... 3", "input_features", input_features.device)
        if geom_xyz.shape[0] != batch or geom_xyz.shape[1:-1].numel() != points:
            expected = f"{points} points for each of {batch} batch items, those of input_features"
            raise checks.fail("geom_xyz", expected, f"shape {list(geom_xyz.shape)}")
        check_counts("geom_xyz", batch * points, "voxel_num", cells)
        place = geom_xyz
    else:
        plan.check("voxel_pooling_train", (batch, points, X, Y, Z), input_features.device)
        place = plan.row_entries  # empty, in the place of the coordinates

    def native(selected: str, deterministic: bool) -> torch.Tensor:
        keys, entries = planning.held(plan, selected, input_features)
        return _autograd.voxel_pooling_train(place, input_features, keys, entries, X, Y, Z, selected, deterministic)

    def reference() -> torch.Tensor:
        key = _reference.keys(place, None, rule(batch, points, X, Y, Z)) if plan is None else plan.plain_keys()
        total = _reference.pool(input_features.reshape(batch * points, channels), None, key, cells, POINTS)
        return total.view(batch, Y, X, channels).to(input_features.dtype).permute(0, 3, 1, 2)

    return _DISPATCHERS["voxel_pooling_train"].run(backend, input_features, native, reference, (), (plan is not None, "gather"))


def voxel_pooling_train_plan(geom_xyz: torch.Tensor, voxel_num: VoxelNum, *, backend: str = "auto") -> PoolPlan:
    """The plan of ``voxel_pooling_train`` for a fixed geometry: the sort that a call would otherwise repeat.

    Args:
        geom_xyz: ``[B, ..., 3]`` int32 or int64, last axis (x, y, z).
        voxel_num: ``(X, Y, Z)``.
        backend: that of the calls it is for.

    Raises:
        TypeError, ValueError: as ``voxel_pooling_train``.

    Example:
        >>> import torch
        >>> from muspace_bevpool import voxel_pooling_train, voxel_pooling_train_plan
        >>> plan = voxel_pooling_train_plan(torch.zeros(1, 5, 3, dtype=torch.int32), (2, 2, 1))
        >>> voxel_pooling_train(None, torch.ones(1, 5, 4), (2, 2, 1), plan=plan)[0, 0, 0, 0]
        tensor(5.)
    """
    checks.tensors(geom_xyz=geom_xyz)
    geom_xyz = planning.check_coordinates("geom_xyz", geom_xyz, "B ... 3", "geom_xyz", geom_xyz.device)
    X, Y, Z = _host.sizes("voxel_num", voxel_num, 3)
    batch, points = geom_xyz.shape[0], geom_xyz.shape[1:-1].numel()
    return planning.make_plan(
        "voxel_pooling_train", (batch, points, X, Y, Z), geom_xyz, None, rule(batch, points, X, Y, Z), POINTS, _NAMED, backend
    )


def voxel_pooling_inference(
    geom_xyz: torch.Tensor | None,
    depth_features: torch.Tensor,
    context_features: torch.Tensor,
    voxel_num: VoxelNum,
    *,
    plan: PoolPlan | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Depth-weighted sum of image features per cell, without the frustum of features (``voxel_pooling_inference``).

    .. math:: out[b,:,y,x] = \sum_{n,d,h,w:\ geom_{b,n,d,h,w} = (x,y,z),\ 0 \leq z < Z}
              depth[bN+n,d,h,w]\; context[bN+n,:,h,w]

    Sums are fp32 for 16-bit and fp32 context (upstream multiplies and adds halves in half), fp64 for fp64. Unlike upstream
    it has a backward.

    Args:
        geom_xyz: ``[B, N, D, H, W, 3]`` int32 (int64 is accepted), last axis (x, y, z); may be ``None`` with a plan.
        depth_features: ``[B*N, D, H, W]``, its own dtype.
        context_features: ``[B*N, C, H, W]``; float32, bfloat16, float16, or float64 (cpu). Decides the dtype of the result.
        voxel_num: ``(X, Y, Z)``; a tensor in device memory is read once, which waits for the device.
        plan: from ``voxel_pooling_inference_plan`` with the same geometry; saves the sort of every call.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, C, Y, X]``, as upstream a view of a ``[B, Y, X, C]`` buffer. Differentiable once in depth and context.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size or device; a plan of another operator, size, device or backend.
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: bit-reproducible forward and backward.

    Example:
        >>> import torch
        >>> from muspace_bevpool import voxel_pooling_inference
        >>> geom = torch.zeros(1, 1, 2, 1, 1, 3, dtype=torch.int32)
        >>> voxel_pooling_inference(geom, torch.full((1, 2, 1, 1), 0.5), torch.ones(1, 3, 1, 1), (1, 1, 1)).flatten()
        tensor([1., 1., 1.])
    """
    checks.tensors(depth_features=depth_features, context_features=context_features)
    checks.rank("context_features", context_features, "B*N C H W")
    checks.rank("depth_features", depth_features, "B*N D H W")
    checks.storage("context_features", context_features)
    checks.companion("depth_features", depth_features, "context_features", context_features)
    planning.check_plan(plan)
    X, Y, Z = _host.sizes("voxel_num", voxel_num, 3)
    images, channels, height, width = context_features.shape
    bins = depth_features.shape[1]
    checks.shape("depth_features", depth_features, "B*N D H W", (images, bins, height, width))
    if plan is None:
        geom_xyz = planning.check_coordinates("geom_xyz", geom_xyz, "B N D H W 3", "context_features", context_features.device)
        batch, cameras = geom_xyz.shape[:2]
        checks.shape("geom_xyz", geom_xyz, "B N D H W 3", (batch, cameras, bins, height, width, 3))
        if batch * cameras != images:
            raise checks.fail("geom_xyz", f"B * N = {images} images, those of context_features", f"{batch} * {cameras}")
        check_counts("geom_xyz", depth_features.numel(), "voxel_num", batch * Y * X)
        place = geom_xyz
    else:
        batch, cameras = plan.sizes[:2] if plan.operator == "voxel_pooling_inference" else (1, images)
        if batch * cameras != images:
            raise checks.fail("plan", f"one for the {images} images of context_features", f"one for {batch} * {cameras}")
        plan.check("voxel_pooling_inference", (batch, cameras, bins, height, width, X, Y, Z), context_features.device)
        place = plan.row_entries  # empty, in the place of the coordinates
    points = cameras * bins * height * width

    def native(selected: str, deterministic: bool) -> torch.Tensor:
        keys, entries = planning.held(plan, selected, context_features)
        tensors = (place, depth_features, context_features, keys, entries)
        return _autograd.voxel_pooling_inference(*tensors, batch, X, Y, Z, selected, deterministic)

    def reference() -> torch.Tensor:
        key = _reference.keys(place, None, rule(batch, points, X, Y, Z)) if plan is None else plan.plain_keys()
        rows = context_features.permute(0, 2, 3, 1).reshape(images * height * width, channels)
        total = _reference.pool(rows, depth_features.reshape(-1), key, batch * Y * X, frustum(depth_features))
        return total.view(batch, Y, X, channels).to(context_features.dtype).permute(0, 3, 1, 2)

    return _DISPATCHERS["voxel_pooling_inference"].run(
        backend, context_features, native, reference, (), (plan is not None, "frustum")
    )


def voxel_pooling_inference_plan(geom_xyz: torch.Tensor, voxel_num: VoxelNum, *, backend: str = "auto") -> PoolPlan:
    """The plan of ``voxel_pooling_inference`` for a fixed geometry: the sort that a call would otherwise repeat.

    Args:
        geom_xyz: ``[B, N, D, H, W, 3]`` int32 or int64, last axis (x, y, z).
        voxel_num: ``(X, Y, Z)``.
        backend: that of the calls it is for.

    Raises:
        TypeError, ValueError: as ``voxel_pooling_inference``.

    Example:
        >>> import torch
        >>> from muspace_bevpool import voxel_pooling_inference_plan
        >>> voxel_pooling_inference_plan(torch.zeros(1, 2, 3, 4, 5, 3, dtype=torch.int32), (8, 8, 1)).kept()
        120
    """
    checks.tensors(geom_xyz=geom_xyz)
    planning.check_coordinates("geom_xyz", geom_xyz, "B N D H W 3", "geom_xyz", geom_xyz.device)
    X, Y, Z = _host.sizes("voxel_num", voxel_num, 3)
    batch, cameras, bins, height, width, _ = geom_xyz.shape
    points = PointMap(depth_bins=bins, pixels=height * width)
    located = rule(batch, cameras * bins * height * width, X, Y, Z)
    sizes = (batch, cameras, bins, height, width, X, Y, Z)
    return planning.make_plan("voxel_pooling_inference", sizes, geom_xyz, None, located, points, _NAMED, backend)
