# SPDX-License-Identifier: Apache-2.0
"""multi_scale_deformable_attn: checks in the caller's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from muspace_core import checks

from muspace_msda import _autograd, _levels, _reference

_DISPATCHER = _autograd.DISPATCHERS["multi_scale_deformable_attn"]


def multi_scale_deformable_attn(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor | Sequence[Sequence[int]],
    level_start_index: Any = None,
    sampling_locations: Any = None,
    attention_weights: Any = None,
    im2col_step: int = 64,
    *,
    backend: str = "auto",
    legacy_level_alias: bool = False,
) -> torch.Tensor:
    r"""Multi-scale deformable attention: a weighted sum of bilinear samples of a feature pyramid.

    .. math:: out[b,q,h,:] = \sum_{l,p} A[b,q,h,l,p]\; \mathrm{bilinear}(value_l[b,:,h,:],\; x\,w_l - 0.5,\; y\,h_l - 0.5)

    A sample counts iff ``-1 < x*w-0.5 < w`` and ``-1 < y*h-0.5 < h``; corners outside the map are zero, a NaN or infinite
    location contributes zero and receives zero gradient. Pixel coordinates, bilinear weights and sums are fp32 for 16-bit and
    fp32 ``value``, fp64 for fp64; coordinates are never rounded to the storage dtype.

    Args:
        value: ``[B, S, H, D]``, ``S`` the sum of ``h*w`` over the levels, rows of a level in row-major order; float32,
            bfloat16, float16, or float64 (not on musa). Decides the dtype of the result.
        spatial_shapes: ``[L, 2]`` rows ``(h, w)``; int64 or int32 tensor on the device of ``value``, or a list.
        level_start_index: ``[L]`` first row of each level; tensor, list, or ``None`` for the running sum of ``h*w``.
        sampling_locations: ``[B, Q, H, L, P, 2]``, last axis ``(x, y)`` in units of the map; its own dtype (float32,
            bfloat16, float16; float64 or float32 with a float64 ``value``).
        attention_weights: ``[B, Q, H, L, P]``, used as they are (not normalised); its own dtype as above.
        im2col_step: accepted for compatibility, ignored; any batch size works.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.
        legacy_level_alias: reproduces checkpoints trained with fewer levels in ``spatial_shapes`` than in
            ``sampling_locations``, where the upstream kernel read the first ``B*Q*H*L`` groups of ``P`` points.

    The four-argument form ``(value, spatial_shapes, sampling_locations, attention_weights)`` is accepted too. Lists are
    constants of the call; sides of a level go up to 2^24.

    Returns:
        ``[B, Q, H*D]`` in the dtype of ``value``. Differentiable once in ``value``, ``sampling_locations`` and
        ``attention_weights``; at an integer pixel coordinate the right-hand derivative is used.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size, level count or device; levels that do not fit ``value`` (lists and cpu tensors always,
            device tensors under ``MUSPACE_CHECK=1``; otherwise a level that does not fit contributes zero).
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.
        NotImplementedError, RuntimeError: forward-mode and second derivatives, which do not exist.

    Determinism: the forward is bit-reproducible. The backward is on cpu; on a GPU the value gradient ends in fp32 atomics
    unless ``torch.use_deterministic_algorithms(True)`` held when the forward ran.

    Example:
        >>> import torch
        >>> from muspace_msda import multi_scale_deformable_attn
        >>> value = torch.randn(1, 20, 2, 8)
        >>> out = multi_scale_deformable_attn(
        ...     value, [(4, 4), (2, 2)], None, torch.rand(1, 3, 2, 2, 4, 2), torch.full((1, 3, 2, 2, 4), 1 / 8))
        >>> out.shape
        torch.Size([1, 3, 16])
    """
    if attention_weights is None and isinstance(level_start_index, torch.Tensor) and level_start_index.is_floating_point():
        # the four-argument form, by position
        level_start_index, sampling_locations, attention_weights = None, level_start_index, sampling_locations
    tensor = torch.Tensor
    if not (isinstance(value, tensor) and isinstance(sampling_locations, tensor) and isinstance(attention_weights, tensor)):
        checks.tensors(value=value, sampling_locations=sampling_locations, attention_weights=attention_weights)
    if value.dim() != 4:
        checks.rank("value", value, "B S H D")
    shapes, starts = _levels.as_tensors(value, spatial_shapes, level_start_index)
    if legacy_level_alias and sampling_locations.dim() == 6:
        _check_arguments(value, sampling_locations.shape[3], sampling_locations, attention_weights)
        sampling_locations, attention_weights = _alias_levels(shapes.shape[0], sampling_locations, attention_weights)
    _check_arguments(value, shapes.shape[0], sampling_locations, attention_weights)
    arguments = (value, shapes, starts, sampling_locations, attention_weights)
    return _DISPATCHER.run(
        backend,
        value,
        _autograd.multi_scale_deformable_attn,
        _reference.multi_scale_deformable_attn,
        arguments,
        (value.shape, sampling_locations.shape, value.dtype),
    )


def _check_arguments(
    value: torch.Tensor, levels: int, sampling_locations: torch.Tensor, attention_weights: torch.Tensor
) -> None:
    shape = sampling_locations.shape
    if len(shape) != 6 or shape[5] != 2:
        raise checks.fail("sampling_locations", "shape [B, Q, H, L, P, 2]", list(shape))
    batch, queries, heads, given, points, _ = shape
    if given != levels:
        hint = " (legacy_level_alias=True reproduces checkpoints trained so)" if given > levels else ""
        rows = f"L = {levels} levels, the rows of spatial_shapes"
        raise checks.fail("sampling_locations", rows, f"L = {given} levels{hint}")
    wanted_batch, _, wanted_heads, _ = value.shape
    if batch != wanted_batch or heads != wanted_heads:
        expected = (wanted_batch, queries, wanted_heads, levels, points, 2)
        checks.shape("sampling_locations", sampling_locations, "B Q H L P 2", expected)
    if attention_weights.shape != (batch, queries, heads, given, points):
        checks.shape("attention_weights", attention_weights, "B Q H L P", shape[:5])
    if value.layout is not torch.strided or value.dtype not in checks.STORAGE_DTYPES:
        checks.storage("value", value)
    accepted, device = checks.COMPANION_DTYPES[value.dtype], value.device
    for_all = sampling_locations.dtype in accepted and attention_weights.dtype in accepted
    if not (for_all and sampling_locations.device == device and attention_weights.device == device) or (
        sampling_locations.layout is not torch.strided or attention_weights.layout is not torch.strided
    ):  # the words for it cost calls, of which the common case has none
        checks.companion("sampling_locations", sampling_locations, "value", value)
        checks.companion("attention_weights", attention_weights, "value", value)


def _alias_levels(
    levels: int, sampling_locations: torch.Tensor, attention_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The points that a kernel with the wrong level count reads: the flat buffers cut into ``levels`` instead of ``L``."""
    batch, queries, heads, given, points, _ = sampling_locations.shape
    if given < levels:
        raise checks.fail("sampling_locations", f"at least {levels} levels with legacy_level_alias", f"{given} levels")
    wanted, there = batch * queries * heads * levels, batch * queries * heads * given
    locations = sampling_locations.reshape(there, points, 2)[:wanted].view(batch, queries, heads, levels, points, 2)
    return locations, attention_weights.reshape(there, points)[:wanted].view(batch, queries, heads, levels, points)
