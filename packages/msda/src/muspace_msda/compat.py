# SPDX-License-Identifier: Apache-2.0
"""The operators under their upstream names: argument translation only."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from muspace_core import checks

from muspace_msda.modules import MultiScaleDeformableAttention
from muspace_msda.ops import deformable_aggregation, multi_scale_deformable_attn


class MultiScaleDeformableAttnFunction:
    """mmcv's autograd function: called as ``MultiScaleDeformableAttnFunction.apply(...)``.

    Unlike upstream, locations and weights keep their own dtype and any batch size works whatever ``im2col_step`` is.

    >>> import torch
    >>> from muspace_msda.compat import MultiScaleDeformableAttnFunction
    >>> shapes, starts = torch.tensor([[4, 4]]), torch.tensor([0])
    >>> locations, weights = torch.rand(1, 3, 2, 1, 4, 2), torch.full((1, 3, 2, 1, 4), 0.25)
    >>> MultiScaleDeformableAttnFunction.apply(torch.randn(1, 16, 2, 8), shapes, starts, locations, weights, 64).shape
    torch.Size([1, 3, 16])
    """

    @staticmethod
    def apply(
        value: torch.Tensor,
        value_spatial_shapes: torch.Tensor,
        value_level_start_index: torch.Tensor,
        sampling_locations: torch.Tensor,
        attention_weights: torch.Tensor,
        im2col_step: int = 64,
        *,
        legacy_level_alias: bool = False,
    ) -> torch.Tensor:
        """Arguments, shapes and errors of ``muspace_msda.multi_scale_deformable_attn``."""
        return multi_scale_deformable_attn(
            value,
            value_spatial_shapes,
            value_level_start_index,
            sampling_locations,
            attention_weights,
            im2col_step,
            legacy_level_alias=legacy_level_alias,
        )


class MSDeformAttnFunction(MultiScaleDeformableAttnFunction):
    """Deformable-DETR's autograd function, the same call under its name."""


def multi_scale_deformable_attn_pytorch(
    value: torch.Tensor,
    value_spatial_shapes: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
    *,
    legacy_level_alias: bool = False,
) -> torch.Tensor:
    """mmcv's Python helper: the call without ``level_start_index``, here on the native backend.

    Arguments, shapes and errors of ``muspace_msda.multi_scale_deformable_attn``.
    """
    return multi_scale_deformable_attn(
        value, value_spatial_shapes, None, sampling_locations, attention_weights, legacy_level_alias=legacy_level_alias
    )


class DeformableAggregationFunction:
    """Sparse4D's and SparseDrive's autograd function, called as ``DeformableAggregationFunction.apply(...)``.

    Casts as upstream: features, locations and weights to fp32.
    """

    @staticmethod
    def apply(
        mc_ms_feat: torch.Tensor,
        spatial_shape: torch.Tensor,
        scale_start_index: torch.Tensor,
        sampling_location: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Arguments, shapes and errors of ``muspace_msda.deformable_aggregation``."""
        named = {"mc_ms_feat": mc_ms_feat, "sampling_location": sampling_location, "weights": weights}
        checks.tensors(**named)
        for argument, tensor in named.items():
            checks.plain_memory(argument, tensor)
        feature, location, shares = (tensor.float() for tensor in named.values())
        return deformable_aggregation(feature, spatial_shape, scale_start_index, location, shares)


def deformable_aggregation_function(
    feature_maps: torch.Tensor,
    spatial_shape: torch.Tensor,
    scale_start_index: torch.Tensor,
    sampling_location: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The function that ``models.blocks`` binds as ``DAF``; see ``DeformableAggregationFunction``."""
    return DeformableAggregationFunction.apply(feature_maps, spatial_shape, scale_start_index, sampling_location, weights)


def feature_maps_format(feature_maps: Sequence[Any], inverse: bool = False) -> list[Any]:
    """Pyramids ``[[B, cams, C, h, w], ...]`` as ``[rows [B, F, C], spatial_shape, scale_start_index]`` and back.

    A list of such pyramids, one for each group of cameras of one image size, is concatenated; ``inverse`` gives that form.
    """
    if inverse:
        return _unformat(*feature_maps)
    if isinstance(feature_maps[0], (list, tuple)):
        groups = [feature_maps_format(group) for group in feature_maps]
        rows, shapes = torch.cat([group[0] for group in groups], 1), torch.cat([group[1] for group in groups])
    else:
        rows = torch.cat([level.flatten(3) for level in feature_maps], 3).transpose(2, 3).flatten(1, 2)
        cameras = feature_maps[0].shape[1]
        shapes = torch.tensor([[tuple(level.shape[-2:]) for level in feature_maps]] * cameras, device=rows.device)
    areas = shapes.prod(-1).flatten()
    return [rows, shapes, (torch.cumsum(areas, 0) - areas).view(shapes.shape[:2])]


def _unformat(rows: torch.Tensor, spatial_shape: torch.Tensor, _starts: torch.Tensor) -> list[list[torch.Tensor]]:
    """Neighbouring cameras of the same sizes form one group."""
    shapes, groups, first = spatial_shape.tolist(), [], 0
    place = 0
    while place < len(shapes):
        sizes, cameras = shapes[place], 1
        while place + cameras < len(shapes) and shapes[place + cameras] == sizes:
            cameras += 1
        areas = [height * width for height, width in sizes]
        part = rows[:, first : first + cameras * sum(areas)].unflatten(1, (cameras, sum(areas)))
        levels = part.split(areas, 2)
        groups.append([level.transpose(2, 3).unflatten(3, size) for level, size in zip(levels, sizes, strict=True)])
        place, first = place + cameras, first + cameras * sum(areas)
    return groups


def _aggregation_backward(
    mc_ms_feat: torch.Tensor,
    spatial_shape: torch.Tensor,
    scale_start_index: torch.Tensor,
    sampling_location: torch.Tensor,
    weights: torch.Tensor,
    grad_output: torch.Tensor,
    grad_mc_ms_feat: torch.Tensor,
    grad_sampling_location: torch.Tensor,
    grad_weights: torch.Tensor,
) -> None:
    buffers = (grad_mc_ms_feat, mc_ms_feat), (grad_sampling_location, sampling_location), (grad_weights, weights)
    for argument, (buffer, like) in zip(("grad_mc_ms_feat", "grad_sampling_location", "grad_weights"), buffers, strict=True):
        if buffer.shape != like.shape:
            raise checks.fail(argument, f"shape {list(like.shape)}", list(buffer.shape))
    leaves = [tensor.detach().requires_grad_() for tensor in (mc_ms_feat, sampling_location, weights)]
    with torch.enable_grad():
        output = deformable_aggregation(leaves[0], spatial_shape, scale_start_index, leaves[1], leaves[2])
    found = torch.autograd.grad(output, leaves, grad_output.to(output.dtype))
    for buffer, grad in zip((grad_mc_ms_feat, grad_sampling_location, grad_weights), found, strict=True):
        buffer.copy_(grad)


#: The extension module: the forward returns, the backward writes the three gradients in place.
deformable_aggregation_ext = SimpleNamespace(
    deformable_aggregation_forward=DeformableAggregationFunction.apply, deformable_aggregation_backward=_aggregation_backward
)

__all__ = [
    "DeformableAggregationFunction",
    "MSDeformAttnFunction",
    "MultiScaleDeformableAttention",
    "MultiScaleDeformableAttnFunction",
    "deformable_aggregation_ext",
    "deformable_aggregation_function",
    "feature_maps_format",
    "multi_scale_deformable_attn_pytorch",
]
