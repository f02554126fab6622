# SPDX-License-Identifier: Apache-2.0
"""voxel_pool_depth: checks in the caller's words."""

from __future__ import annotations

from typing import Any

import torch
from muspace_core import checks

from muspace_bevpool import _autograd, _host, _reference
from muspace_bevpool._native.voxel_pool_depth import rule
from muspace_bevpool._native.voxel_pooling_inference import frustum
from muspace_bevpool._ops import planning
from muspace_bevpool._plan import PointMap, PoolPlan, check_counts

_DISPATCHER = _autograd.DISPATCHERS["voxel_pool_depth"]
Size = int | torch.Tensor


def voxel_pool_depth(
    img_feats: torch.Tensor,
    img_depth: torch.Tensor,
    voxel_coords: torch.Tensor | None,
    mask: torch.Tensor | None,
    B: Size,
    X: Size,
    Y: Size,
    Z: Size,
    *,
    reduce_cams: bool = False,
    plan: PoolPlan | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Depth-weighted sum of image features per voxel (Qwen-Drive's ``voxel_pool_depth``).

    .. math:: out[b,n,x,y,z,:] = \sum_{s,d,h,w:\ mask,\ coords = (b,x,y,z)} depth[(bS+s)N+n,d,h,w]\; feats[b,sN+n,:,h,w]

    Sweeps are summed, cameras are kept (first case) or summed too (``reduce_cams``), which saves N times the memory where the
    model adds them anyway. Column 0 of the coordinates picks the output's batch item; masked points out of range are dropped.
    Sums are fp32 for 16-bit and fp32 features, fp64 for fp64.

    Args:
        img_feats: ``[B, S*N, C, H, W]``; float32, bfloat16, float16, or float64 (cpu).
        img_depth: ``[B*S*N, D, H, W]``, its own dtype.
        voxel_coords: ``[B, S, N, D, H, W, 4]`` int32 or int64, last axis (b, x, y, z); may be ``None`` with a plan.
        mask: ``[B, S, N, D, H, W]`` bool; may be ``None`` with a plan.
        B, X, Y, Z: sizes, ints or 0-dim tensors.
        reduce_cams: sum over the cameras.
        plan: from ``voxel_pool_depth_plan`` with the same coordinates, mask and ``reduce_cams``.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, N, X, Y, Z, C]``, with ``reduce_cams`` ``[B, 1, X, Y, Z, C]``, contiguous, in the promoted dtype of features and
        depth. Differentiable once in both.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size or device; a plan of another operator, size, device or backend; a word that an
            environment switch does not know.
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: bit-reproducible forward and backward.

    Example:
        >>> import torch
        >>> from muspace_bevpool import voxel_pool_depth
        >>> coords, mask = torch.zeros(1, 1, 2, 3, 1, 1, 4, dtype=torch.int32), torch.ones(1, 1, 2, 3, 1, 1, dtype=torch.bool)
        >>> feats, depth = torch.ones(1, 2, 5, 1, 1), torch.ones(2, 3, 1, 1)
        >>> voxel_pool_depth(feats, depth, coords, mask, 1, 1, 1, 1)[0, :, 0, 0, 0, 0]
        tensor([3., 3.])
        >>> voxel_pool_depth(feats, depth, coords, mask, 1, 1, 1, 1, reduce_cams=True).shape
        torch.Size([1, 1, 1, 1, 1, 5])
    """
    checks.tensors(img_feats=img_feats, img_depth=img_depth)
    checks.rank("img_feats", img_feats, "B S*N C H W")
    checks.rank("img_depth", img_depth, "B*S*N D H W")
    checks.storage("img_feats", img_feats)
    checks.companion("img_depth", img_depth, "img_feats", img_feats)
    planning.check_plan(plan)
    _check_flag(reduce_cams)
    batch, X, Y, Z = (_host.size(name, value) for name, value in (("B", B), ("X", X), ("Y", Y), ("Z", Z)))
    if img_feats.shape[0] != batch:
        raise checks.fail("img_feats", f"B = {batch} batch items", img_feats.shape[0])
    images, channels, height, width = img_feats.shape[1:]
    bins = img_depth.shape[1]
    checks.shape("img_depth", img_depth, "B*S*N D H W", (batch * images, bins, height, width))
    if plan is None:
        sweeps, cameras = _check_geometry(voxel_coords, mask, img_feats.device)
        assert voxel_coords is not None and mask is not None
        expected = (batch, sweeps, cameras, bins, height, width, 4)
        checks.shape("voxel_coords", voxel_coords, "B S N D H W 4", expected)
        place, held_mask = voxel_coords, mask
    else:
        sweeps, cameras = plan.sizes[1:3] if plan.operator == "voxel_pool_depth" else (1, images)
        plan.check(
            "voxel_pool_depth",
            (batch, sweeps, cameras, bins, height, width, X, Y, Z, int(reduce_cams)),
            img_feats.device,
        )
        place = held_mask = plan.row_entries  # empty, in the place of coordinates and mask
    if sweeps * cameras != images:
        raise checks.fail("img_feats", f"S * N = {sweeps} * {cameras} images of voxel_coords", f"{images} images")
    located = rule(batch, cameras, bins * height * width, X, Y, Z, reduce_cams)
    check_counts("voxel_coords", img_depth.numel(), "X", located.cells)

    def native(selected: str, deterministic: bool) -> torch.Tensor:
        keys, entries = planning.held(plan, selected, img_feats)
        tensors = (img_feats, img_depth, place, held_mask, keys, entries)
        return _autograd.voxel_pool_depth(*tensors, cameras, X, Y, Z, reduce_cams, selected, deterministic)

    def reference() -> torch.Tensor:
        key = _reference.keys(place, held_mask, located) if plan is None else plan.plain_keys()
        rows = img_feats.permute(0, 1, 3, 4, 2).reshape(batch * images * height * width, channels)
        total = _reference.pool(rows, img_depth.reshape(-1), key, located.cells, frustum(img_depth))
        shape = (batch, 1 if reduce_cams else cameras, X, Y, Z, channels)
        return total.view(shape).to(torch.promote_types(img_feats.dtype, img_depth.dtype))

    return _DISPATCHER.run(backend, img_feats, native, reference, (), (plan is not None, "frustum"))


def voxel_pool_depth_plan(
    voxel_coords: torch.Tensor,
    mask: torch.Tensor,
    B: Size,
    X: Size,
    Y: Size,
    Z: Size,
    *,
    reduce_cams: bool = False,
    backend: str = "auto",
) -> PoolPlan:
    """The plan of ``voxel_pool_depth`` for fixed coordinates and mask: the sort that a call would otherwise repeat.

    Args:
        voxel_coords, mask, B, X, Y, Z, reduce_cams: as ``voxel_pool_depth`` takes them.
        backend: that of the calls it is for.

    Raises:
        TypeError, ValueError: as ``voxel_pool_depth``.

    Example:
        >>> import torch
        >>> from muspace_bevpool import voxel_pool_depth_plan
        >>> coords, mask = torch.zeros(1, 1, 2, 3, 1, 1, 4, dtype=torch.int32), torch.ones(1, 1, 2, 3, 1, 1, dtype=torch.bool)
        >>> voxel_pool_depth_plan(coords, mask, 1, 1, 1, 1).kept()
        6
    """
    checks.tensors(voxel_coords=voxel_coords, mask=mask)
    _check_flag(reduce_cams)
    _check_geometry(voxel_coords, mask, voxel_coords.device)
    batch, X, Y, Z = (_host.size(name, value) for name, value in (("B", B), ("X", X), ("Y", Y), ("Z", Z)))
    given, sweeps, cameras, bins, height, width, _ = voxel_coords.shape
    if given != batch:
        raise checks.fail("voxel_coords", f"B = {batch} batch items", given)
    located = rule(batch, cameras, bins * height * width, X, Y, Z, reduce_cams)
    sizes = (batch, sweeps, cameras, bins, height, width, X, Y, Z, int(reduce_cams))
    points = PointMap(depth_bins=bins, pixels=height * width)
    named = ("voxel_coords", "X")
    return planning.make_plan("voxel_pool_depth", sizes, voxel_coords, mask, located, points, named, backend)


def _check_flag(reduce_cams: Any) -> None:
    if not isinstance(reduce_cams, bool):
        raise TypeError(f"reduce_cams: expected True or False, got {reduce_cams!r}")


def _check_geometry(voxel_coords: torch.Tensor | None, mask: torch.Tensor | None, device: torch.device) -> tuple[int, int]:
    """(sweeps, cameras) of well-formed coordinates and mask."""
    voxel_coords = planning.check_coordinates("voxel_coords", voxel_coords, "B S N D H W 4", "img_feats", device)
    checks.tensors(mask=mask)
    assert mask is not None
    checks.layout(mask=mask)
    checks.dtype("mask", mask, (torch.bool,))
    checks.shape("mask", mask, "B S N D H W", voxel_coords.shape[:6])
    checks.same_device("mask", mask, "img_feats", device)
    checks.plain_memory("mask", mask)
    return voxel_coords.shape[1], voxel_coords.shape[2]
