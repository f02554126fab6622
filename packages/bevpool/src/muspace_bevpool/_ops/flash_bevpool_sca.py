# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool_sca: checks in the caller's words."""

from __future__ import annotations

from typing import Any

import torch
from muspace_core import checks
from muspace_core.scratch import absent

from muspace_bevpool import _autograd, _host, _reference
from muspace_bevpool._ops.flash_bevpool import Numbers, bounds, cell_counts, image_extent, positive, projection_rows

_DISPATCHER = _autograd.DISPATCHERS["flash_bevpool_sca"]
#: The library keeps the level table in registers.
MOST_LEVELS = 8
MOST_ANCHORS = 1 << 12
_HEAD_CHANNELS = 32


def flash_bevpool_sca(
    image_feats: torch.Tensor,
    projection_matrices: torch.Tensor,
    sampling_offsets: torch.Tensor | None = None,
    attention_weights: torch.Tensor | None = None,
    *,
    spatial_shapes: Any = None,
    image_size: Numbers,
    roi_range: Numbers,
    grid_size: Numbers,
    z_anchors: Numbers | None = None,
    eps: float = 1e-5,
    average: str = "hit_cameras",
    backend: str = "auto",
) -> torch.Tensor:
    r"""BEVFormer's spatial cross-attention in one kernel, without the rebatch, its ``nonzero`` and per-camera locations.

    Cell ``q = y*X + x`` is a pillar of ``A`` anchors. A camera sees it if any anchor has ``depth > eps`` and lies strictly
    inside the image; then all its anchors are reference points, and

    .. math:: out[b,q] = \frac{1}{\max(1, hits)} \sum_{n\ \mathrm{sees}\ q} \sum_{l,k} A_{q,h,l,k}\;
              \mathrm{bilinear}(F_{b,n,l,h},\; u_k w_l + o_x - 0.5,\; v_k h_l + o_y - 0.5)

    with point ``k`` on anchor ``k % A``, as ``multi_scale_deformable_attn`` samples. Every batch item has its own mask. The
    projection and sums are fp32 for 16-bit and fp32 features, fp64 for fp64.

    Args:
        image_feats: ``[B, N, H, W, C]`` (one level) or ``[B, N, S, C]`` with ``spatial_shapes``; float32, bfloat16, float16,
            or float64 (cpu). Decides the dtype of the result. Channel ``head*(C/heads) + d``.
        projection_matrices: ``[B, N, 3, 4]`` or ``[B, N, 4, 4]``, ego frame to image pixels.
        sampling_offsets: ``[B, Q, heads, L, PA, 2]`` in pixels of the level, its own dtype; ``None``: zeros, one head.
        attention_weights: ``[B, Q, heads, L, PA]``, used as they are, its own dtype; ``None``: ``1/(L*PA)``.
        spatial_shapes: ``[L, 2]`` rows (h, w), list or tensor (one in device memory is read once); up to 8 levels.
        image_size: ``(h, w)`` of the images that the projections map to.
        roi_range: ``(x_min, x_max, y_min, y_max[, z_min, z_max])`` in metres.
        grid_size: ``(X, Y[, Z])``.
        z_anchors: ``[A]`` heights in metres; ``None``: the Z cell centres of ``roi_range`` and ``grid_size``.
        eps: least depth of a visible anchor and least divisor of the projection.
        average: ``"hit_cameras"`` divides by the number of cameras that see the pillar, ``"none"`` does not divide.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, Y*X, C]``; zero for pillars that no camera sees. Differentiable once in ``image_feats``, ``sampling_offsets`` and
        ``attention_weights``; the geometry receives no gradient.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size, device or number.
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: the forward is bit-reproducible. The backward is on cpu; on a GPU the feature gradient ends in fp32 atomics
    unless ``torch.use_deterministic_algorithms(True)`` held when the forward ran.

    Example:
        >>> import torch
        >>> from muspace_bevpool import flash_bevpool_sca
        >>> camera = torch.tensor([[[[8.0, -8.0, 0.0, 0.0], [8.0, 0.0, -8.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]])  # looks along x
        >>> region = dict(image_size=(16, 16), roi_range=(0, 10, -5, 5), grid_size=(10, 10), z_anchors=[-0.5, 0.5])
        >>> flash_bevpool_sca(torch.ones(1, 1, 4, 4, 8), camera, **region).shape
        torch.Size([1, 100, 8])
    """
    checks.tensors(image_feats=image_feats, projection_matrices=projection_matrices)
    feats, sizes = _levels(image_feats, spatial_shapes)
    checks.storage("image_feats", image_feats)
    batch, cameras, _, channels = feats.shape
    projections = projection_rows(projection_matrices, image_feats, batch, cameras)
    image, roi, grid, anchors = _region(image_size, roi_range, grid_size, z_anchors)
    levels, queries = len(sizes) // 2, grid[0] * grid[1]
    heads, points = _check_attention(sampling_offsets, attention_weights, image_feats, batch, queries, levels, len(anchors))
    if sampling_offsets is None and attention_weights is None and channels % _HEAD_CHANNELS == 0:
        heads = max(1, channels // _HEAD_CHANNELS)  # all heads look the same way then, and the kernels are made for several
    if heads == 0 or channels % heads:
        argument = "attention_weights" if sampling_offsets is None else "sampling_offsets"
        raise checks.fail(argument, f"a number of heads that divides C = {channels}", f"{heads} heads")
    eps = positive("eps", eps, 0)
    if eps == 0:
        raise checks.fail("eps", "a positive number", eps)
    if not isinstance(average, str) or average not in ("hit_cameras", "none"):
        raise checks.fail("average", "'hit_cameras' or 'none'", repr(average))
    scalars = (sizes, image, roi, grid, anchors, heads, points, eps, average == "hit_cameras")

    def native(selected: str, deterministic: bool) -> torch.Tensor:
        given = [absent(feats, feats.dtype) if t is None else t for t in (sampling_offsets, attention_weights)]
        return _autograd.flash_bevpool_sca(feats, projections, *given, *scalars, selected, deterministic)

    def reference() -> torch.Tensor:
        return _reference.flash_bevpool_sca(feats, projections, sampling_offsets, attention_weights, *scalars)

    details = (feats.shape, levels, len(anchors), heads, points, grid, feats.dtype)
    return _DISPATCHER.run(backend, image_feats, native, reference, (), details)


def _levels(image_feats: torch.Tensor, spatial_shapes: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Features ``[B, N, S, C]`` and the flat level table (h0, w0, h1, w1, ...)."""
    if spatial_shapes is None:
        if image_feats.dim() == 4:
            raise checks.fail("spatial_shapes", "the levels of image_feats [B, N, S, C]", None)
        checks.rank("image_feats", image_feats, "B N H W C")
        return image_feats.flatten(2, 3), (image_feats.shape[2], image_feats.shape[3])
    checks.rank("image_feats", image_feats, "B N S C")
    rows = spatial_shapes
    if not isinstance(spatial_shapes, torch.Tensor):
        levels = checks.integers("spatial_shapes", spatial_shapes, 2)
        if any(len(level) != 2 for level in levels):
            raise checks.fail("spatial_shapes", "rows (h, w)", spatial_shapes)
        rows = [side for level in levels for side in level]
    elif spatial_shapes.dim() != 2 or spatial_shapes.shape[1] != 2:
        raise checks.fail("spatial_shapes", "shape [L, 2]", list(spatial_shapes.shape))
    sizes = _host.sizes("spatial_shapes", rows)
    if len(sizes) > 2 * MOST_LEVELS:
        raise checks.fail("spatial_shapes", f"at most {MOST_LEVELS} levels", len(sizes) // 2)
    total = sum(height * width for height, width in zip(sizes[::2], sizes[1::2], strict=True))
    if total != image_feats.shape[2]:
        expected = f"S = sum of h * w over spatial_shapes = {total}"
        raise checks.fail("image_feats", expected, f"S = {image_feats.shape[2]}")
    return image_feats, sizes


def _region(
    image_size: Numbers, roi_range: Numbers, grid_size: Numbers, z_anchors: Numbers | None
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...], tuple[float, ...]]:
    """Image size, (x, y) range, (X, Y) and the anchors' heights."""
    image, roi, grid = image_extent(image_size), bounds(roi_range, 4, 6), cell_counts(grid_size, 2, 3)
    if z_anchors is not None:
        return image, roi[:4], grid[:2], _host.reals("z_anchors", z_anchors)
    if len(roi) != 6 or len(grid) != 3:
        raise checks.fail("z_anchors", "heights, or roi_range and grid_size with a z axis", "neither")
    if grid[2] > MOST_ANCHORS:
        raise checks.fail("grid_size", f"at most {MOST_ANCHORS} heights as anchors", grid[2])
    step = (roi[5] - roi[4]) / max(grid[2], 1)
    return image, roi[:4], grid[:2], tuple(roi[4] + (place + 0.5) * step for place in range(grid[2]))


def _check_attention(
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    image_feats: torch.Tensor,
    batch: int,
    queries: int,
    levels: int,
    anchors: int,
) -> tuple[int, int]:
    """(heads, points) of the two tensors, of which either may be missing."""
    heads, points = 1, anchors
    given = (("sampling_offsets", offsets, "B Q heads L PA 2", (2,)), ("attention_weights", weights, "B Q heads L PA", ()))
    first = True
    for argument, value, axes, last in given:
        if value is None:
            continue
        checks.tensors(**{argument: value})
        checks.rank(argument, value, axes)
        if first:
            heads, points, first = value.shape[2], value.shape[4], False
        checks.shape(argument, value, axes, (batch, queries, heads, levels, points, *last))
        checks.companion(argument, value, "image_feats", image_feats)
        if anchors == 0 or points % anchors:
            raise checks.fail(argument, f"a multiple of the {anchors} anchors as points PA", f"PA = {points}")
    return heads, points
