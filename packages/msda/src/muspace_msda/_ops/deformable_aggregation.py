# SPDX-License-Identifier: Apache-2.0
"""deformable_aggregation: checks in the caller's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from muspace_core import checks

from muspace_msda import _autograd, _reference, _scales

_DISPATCHER = _autograd.DISPATCHERS["deformable_aggregation"]


def deformable_aggregation(
    mc_ms_feat: torch.Tensor,
    spatial_shape: torch.Tensor | Sequence[Any],
    scale_start_index: torch.Tensor | Sequence[Any],
    sampling_location: torch.Tensor,
    weights: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Deformable aggregation of Sparse4D and SparseDrive: features of an anchor from its points in all cameras and scales.

    .. math:: out[b,a,c] = \sum_{p,cam,s} w[b,a,p,cam,s,\lfloor c / (C/G) \rfloor]\;
              \mathrm{bilinear}(feat_{cam,s}[b,:,c],\; x\,w_s - 0.5,\; y\,h_s - 0.5)

    A (point, camera) counts iff ``0 < x < 1`` and ``0 < y < 1``, strictly and before any scale is looked at (other than
    ``multi_scale_deformable_attn``, which also takes the half-pixel rim); corners outside a map are zero. Pixel
    coordinates, bilinear weights and sums are fp32 for 16-bit and fp32 features, fp64 for fp64.

    Args:
        mc_ms_feat: ``[B, F, C]``, the rows of all cameras and scales: camera-major, then scale, row-major pixels; float32,
            bfloat16, float16, or float64 (cpu). Decides the dtype of the result.
        spatial_shape: ``[cams, scales, 2]`` rows ``(h, w)``; int32 or int64 tensor, or nested lists.
        scale_start_index: ``[cams, scales]`` first row of every map; int32 or int64 tensor, or nested lists.
        sampling_location: ``[B, A, P, cams, 2]``, last axis ``(x, y)`` in units of the image; its own dtype.
        weights: ``[B, A, P, cams, scales, G]``, used as they are; ``C`` is a multiple of ``G``; its own dtype.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, A, C]`` in the dtype of ``mc_ms_feat``. Differentiable once in ``mc_ms_feat``, ``sampling_location`` and
        ``weights``; at an integer pixel coordinate the right-hand derivative is used.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size or device, ``C`` not a multiple of ``G``; maps that do not fit ``mc_ms_feat`` (cpu
            always, device tensors under ``MUSPACE_CHECK=1``; otherwise a map that does not fit contributes zero).
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: the forward is bit-reproducible. The backward is on cpu; on a GPU the feature gradient ends in fp32
    atomics unless ``torch.use_deterministic_algorithms(True)`` held when the forward ran.

    Example:
        >>> import torch
        >>> from muspace_msda import deformable_aggregation
        >>> feat, shape, starts = torch.randn(1, 20, 8), [[(4, 4), (2, 2)]], [[0, 16]]
        >>> deformable_aggregation(feat, shape, starts, torch.rand(1, 3, 5, 1, 2), torch.rand(1, 3, 5, 1, 2, 4)).shape
        torch.Size([1, 3, 8])
    """
    checks.tensors(mc_ms_feat=mc_ms_feat, sampling_location=sampling_location, weights=weights)
    checks.rank("mc_ms_feat", mc_ms_feat, "B F C")
    checks.storage("mc_ms_feat", mc_ms_feat)
    shapes, starts = _scales.as_tensors(mc_ms_feat, spatial_shape, scale_start_index)
    _check_arguments(mc_ms_feat, shapes, sampling_location, weights)
    arguments = (mc_ms_feat, shapes, starts, sampling_location, weights)
    return _DISPATCHER.run(
        backend,
        mc_ms_feat,
        _autograd.deformable_aggregation,
        _reference.deformable_aggregation,
        arguments,
        (mc_ms_feat.shape, weights.shape, mc_ms_feat.dtype),
    )


def _check_arguments(
    mc_ms_feat: torch.Tensor, shapes: torch.Tensor, sampling_location: torch.Tensor, weights: torch.Tensor
) -> None:
    batch, _, channels = mc_ms_feat.shape
    cameras, scales, _ = shapes.shape
    checks.rank("sampling_location", sampling_location, "B A P cams 2")
    checks.rank("weights", weights, "B A P cams scales G")
    anchors, points = sampling_location.shape[1:3]
    groups = weights.shape[5]
    checks.shape("sampling_location", sampling_location, "B A P cams 2", (batch, anchors, points, cameras, 2))
    checks.shape("weights", weights, "B A P cams scales G", (batch, anchors, points, cameras, scales, groups))
    if groups == 0 or channels % groups:
        raise checks.fail("weights", f"a number of groups G that divides C = {channels}", f"G = {groups}")
    checks.companion("sampling_location", sampling_location, "mc_ms_feat", mc_ms_feat)
    checks.companion("weights", weights, "mc_ms_feat", mc_ms_feat)
