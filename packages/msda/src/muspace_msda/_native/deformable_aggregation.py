# SPDX-License-Identifier: Apache-2.0
"""Calls of the library for deformable_aggregation."""

from __future__ import annotations

from typing import Any

import torch
from muspace_core import environment
from muspace_core.checks import reader, sum_dtype
from muspace_core.device import launch_context
from muspace_core.scratch import workspace

from muspace_msda import _scales
from muspace_msda._native import LIBRARY

#: Route codes of the library, which takes ``general`` where a better one does not reach.
FORWARD_ROUTES = ("general", "fused")
BACKWARD_ROUTES = ("general", "block_sorted", "ordered")
FUSED, BLOCK_SORTED, ORDERED = 1, 1, 2

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _sizes(mc_ms_feat: torch.Size, weights: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
    """The integers with which the library answers questions about a call."""
    _, anchors, points, cameras, scales, groups = weights
    return (*mc_ms_feat, anchors, points, cameras, scales, groups, int(dtype is torch.float64))


def route(
    module: Any,
    backend: str,
    mc_ms_feat: torch.Size,
    weights: torch.Size,
    dtype: torch.dtype,
    deterministic: bool,
    gradient: bool,
) -> str:
    """Name of the route of a call: ``<forward>`` or, if a gradient was recorded, ``<forward>+<backward>``."""
    if backend == "cpu":  # one path, bit-reproducible both ways
        return "native+ordered" if gradient else "native"
    reached = module.get_function("deformable_aggregation_route")
    sizes = _sizes(mc_ms_feat, weights, dtype)
    forward = FORWARD_ROUTES[reached(*sizes, 0, FUSED)]
    if not gradient:
        return forward
    return f"{forward}+{BACKWARD_ROUTES[reached(*sizes, 1, ORDERED if deterministic else BLOCK_SORTED)]}"


def _workspace(
    backend: str, direction: str, mc_ms_feat: torch.Tensor, weights: torch.Tensor, wanted_route: int
) -> torch.Tensor:
    sizes = _sizes(mc_ms_feat.shape, weights.shape, mc_ms_feat.dtype)
    return workspace(LIBRARY, backend, f"deformable_aggregation_{direction}", mc_ms_feat.device, *sizes, wanted_route)


def forward(
    mc_ms_feat: torch.Tensor,
    spatial_shape: torch.Tensor,
    scale_start_index: torch.Tensor,
    sampling_location: torch.Tensor,
    weights: torch.Tensor,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """Native forward on checked arguments; ``deterministic`` matters to the backward only."""
    ready = reader(backend)
    if environment.CHECK.enabled():
        _scales.check_tensors(spatial_shape, scale_start_index, mc_ms_feat.shape[1])
    size = (mc_ms_feat.shape[0], sampling_location.shape[1], mc_ms_feat.shape[2])
    output = torch.empty(size, dtype=mc_ms_feat.dtype, device=mc_ms_feat.device)
    wrong_scales = LIBRARY.function(backend, "deformable_aggregation_forward")(
        output,
        ready("mc_ms_feat", mc_ms_feat),
        ready("spatial_shape", spatial_shape),
        ready("scale_start_index", scale_start_index),
        ready("sampling_location", sampling_location),
        ready("weights", weights),
        _workspace(backend, "forward", mc_ms_feat, weights, FUSED),
        FUSED,
        launch_context(backend, mc_ms_feat.device),
    )
    if wrong_scales:
        _scales.check_tensors(spatial_shape, scale_start_index, mc_ms_feat.shape[1])
    return output


def backward(
    grad_output: torch.Tensor,
    mc_ms_feat: torch.Tensor,
    spatial_shape: torch.Tensor,
    scale_start_index: torch.Tensor,
    sampling_location: torch.Tensor,
    weights: torch.Tensor,
    backend: str,
    deterministic: bool,
) -> Gradients:
    """Native backward: gradients of features, locations and weights in the dtypes of those tensors."""
    ready = reader(backend)
    wanted = ORDERED if deterministic else BLOCK_SORTED
    # 16-bit sums would need compare-and-swap loops and lose bits: the sum is fp32 and is narrowed once.
    grad_feature = torch.empty(mc_ms_feat.shape, dtype=sum_dtype(mc_ms_feat.dtype), device=mc_ms_feat.device)
    grad_location = torch.empty(sampling_location.shape, dtype=sampling_location.dtype, device=mc_ms_feat.device)
    grad_weights = torch.empty(weights.shape, dtype=weights.dtype, device=mc_ms_feat.device)
    LIBRARY.function(backend, "deformable_aggregation_backward")(
        grad_feature,
        grad_location,
        grad_weights,
        ready("grad_output", grad_output),
        ready("mc_ms_feat", mc_ms_feat),
        ready("spatial_shape", spatial_shape),
        ready("scale_start_index", scale_start_index),
        ready("sampling_location", sampling_location),
        ready("weights", weights),
        _workspace(backend, "backward", mc_ms_feat, weights, wanted),
        wanted,
        launch_context(backend, mc_ms_feat.device),
    )
    return grad_feature.to(mc_ms_feat.dtype), grad_location, grad_weights
