# SPDX-License-Identifier: Apache-2.0
"""Sparse4D's and SparseDrive's ``projects/mmdet3d_plugin/ops``: the aggregation, its extension and the format of its maps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from muspace_core import checks

from muspace_msda.ops import deformable_aggregation


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
        checks.layout(**named)
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

    Raises:
        TypeError: not a sequence of tensors.
        ValueError: levels that differ in more than height and width; with ``inverse``, sizes that do not add up to the rows.
    """
    if not isinstance(feature_maps, (list, tuple)) or not feature_maps:
        raise TypeError(f"feature_maps: expected a list of maps or of lists of maps, got {_named(feature_maps)}")
    if inverse:
        return _unformat(feature_maps)
    if isinstance(feature_maps[0], (list, tuple)):
        groups = [feature_maps_format(group) for group in feature_maps]
        for place, group in enumerate(groups):
            _check_like(f"feature_maps[{place}]", group[0], groups[0][0], (0, 2))
        shape = groups[0][1].shape
        if any(group[1].shape[1] != shape[1] for group in groups):
            raise checks.fail("feature_maps", f"{shape[1]} levels in every group", [group[1].shape[1] for group in groups])
        rows, shapes = torch.cat([group[0] for group in groups], 1), torch.cat([group[1] for group in groups])
    else:
        _check_levels(feature_maps)
        rows = torch.cat([level.flatten(3) for level in feature_maps], 3).transpose(2, 3).flatten(1, 2)
        sizes = torch.tensor([tuple(level.shape[-2:]) for level in feature_maps], device=rows.device)
        shapes = sizes.expand(feature_maps[0].shape[1], *sizes.shape).contiguous()
    areas = shapes.prod(-1).flatten()
    return [rows, shapes, (torch.cumsum(areas, 0) - areas).view(shapes.shape[:2])]


def _named(value: object) -> str:
    return "an empty list" if isinstance(value, (list, tuple)) else type(value).__name__


def _check_levels(levels: Sequence[Any]) -> None:
    for place, level in enumerate(levels):
        argument = f"feature_maps[{place}]"
        checks.tensors(**{argument: level})
        checks.rank(argument, level, "B cams C h w")
        checks.layout(**{argument: level})
        checks.plain_memory(argument, level)
        _check_like(argument, level, levels[0], (0, 1, 2))


def _check_like(argument: str, tensor: torch.Tensor, first: torch.Tensor, axes: tuple[int, ...]) -> None:
    """Equal to ``first`` in dtype, device and the sizes of ``axes``."""
    found, wanted = ([t.shape[axis] for axis in axes] for t in (tensor, first))
    if found != wanted:
        raise checks.fail(argument, f"sizes {wanted} of feature_maps[0] along axes {list(axes)}", found)
    checks.dtype(argument, tensor, (first.dtype,))
    checks.same_device(argument, tensor, "feature_maps[0]", first.device)


def _unformat(feature_maps: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Neighbouring cameras of the same sizes form one group."""
    if len(feature_maps) != 3:
        raise checks.fail("feature_maps", "[rows, spatial_shape, scale_start_index]", f"{len(feature_maps)} entries")
    rows, spatial_shape, _ = feature_maps
    checks.tensors(**{"feature_maps[0]": rows, "feature_maps[1]": spatial_shape})
    checks.rank("feature_maps[0]", rows, "B F C")
    checks.rank("feature_maps[1]", spatial_shape, "cams scales 2")
    checks.layout(**{"feature_maps[0]": rows, "feature_maps[1]": spatial_shape})
    checks.dtype("feature_maps[1]", spatial_shape, (torch.int64, torch.int32))
    checks.plain_memory("feature_maps[0]", rows)
    checks.plain_memory("feature_maps[1]", spatial_shape)
    shapes, groups, first = spatial_shape.tolist(), [], 0
    if any(side < 0 for sizes in shapes for size in sizes for side in size):
        raise checks.fail("feature_maps[1]", "sizes of at least 0", shapes)
    total = sum(height * width for sizes in shapes for height, width in sizes)
    if total != rows.shape[1]:
        raise checks.fail("feature_maps[0]", f"F = sum of h * w over spatial_shape = {total}", f"F = {rows.shape[1]}")
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
