# SPDX-License-Identifier: Apache-2.0
"""Calls of the library for multi_scale_deformable_attn."""

from __future__ import annotations

from typing import Any

import torch
from muspace_core import environment
from muspace_core.checks import reader, sum_dtype
from muspace_core.device import launch_context
from muspace_core.scratch import workspace

from muspace_msda import _levels
from muspace_msda._native import LIBRARY

#: Route codes of the libraries.  A call asks for the best; the library takes ``general`` where that does not reach.
FORWARD_ROUTES = ("general", "fused")
BACKWARD_ROUTES = ("general", "block_sorted", "ordered")
FUSED, BLOCK_SORTED, ORDERED = 1, 1, 2

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def route(
    module: Any, backend: str, value: torch.Size, locations: torch.Size, dtype: torch.dtype, deterministic: bool, gradient: bool
) -> str:
    """Name of the route of a call: ``<forward>`` or, if a gradient was recorded, ``<forward>+<backward>``."""
    if backend == "cpu":  # one path, bit-reproducible both ways
        return "native+ordered" if gradient else "native"
    reached = module.get_function("multi_scale_deformable_attn_route")
    sizes = (*value, locations[1], locations[3], locations[4], int(dtype is torch.float64))
    forward = FORWARD_ROUTES[reached(*sizes, 0, FUSED)]
    if not gradient:
        return forward
    return f"{forward}+{BACKWARD_ROUTES[reached(*sizes, 1, ORDERED if deterministic else BLOCK_SORTED)]}"


def forward(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """Native forward on checked arguments; ``deterministic`` matters to the backward only."""
    ready = reader(backend)
    if environment.CHECK.enabled():
        _levels.check_tensors(spatial_shapes, level_start_index, value.shape[1])
    batch, _, heads, channels = value.shape
    # torch.empty throughout: new_empty of a lazy negation would copy it first.
    output = torch.empty((batch, sampling_locations.shape[1], heads * channels), dtype=value.dtype, device=value.device)
    wrong_levels = LIBRARY.function(backend, "multi_scale_deformable_attn_forward")(
        output,
        ready("value", value),
        ready("spatial_shapes", spatial_shapes),
        ready("level_start_index", level_start_index),
        ready("sampling_locations", sampling_locations),
        ready("attention_weights", attention_weights),
        FUSED,
        launch_context(backend, value.device),
    )
    if wrong_levels:
        _levels.check_tensors(spatial_shapes, level_start_index, value.shape[1])
    return output


def backward(
    grad_output: torch.Tensor,
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
    backend: str,
    deterministic: bool,
) -> Gradients:
    """Native backward: gradients of value, locations and weights in the dtypes of those tensors."""
    ready = reader(backend)
    wanted = ORDERED if deterministic else BLOCK_SORTED
    # 16-bit sums would need compare-and-swap loops and lose bits: the sum is fp32 and is narrowed once.
    grad_value = torch.empty(value.shape, dtype=sum_dtype(value.dtype), device=value.device)
    grad_locations = torch.empty(sampling_locations.shape, dtype=sampling_locations.dtype, device=value.device)
    grad_weights = torch.empty(attention_weights.shape, dtype=attention_weights.dtype, device=value.device)
    _, queries, _, levels, points, _ = sampling_locations.shape
    numbers = (*value.shape, queries, levels, points, wanted)
    LIBRARY.function(backend, "multi_scale_deformable_attn_backward")(
        grad_value,
        grad_locations,
        grad_weights,
        ready("grad_output", grad_output),
        ready("value", value),
        ready("spatial_shapes", spatial_shapes),
        ready("level_start_index", level_start_index),
        ready("sampling_locations", sampling_locations),
        ready("attention_weights", attention_weights),
        workspace(LIBRARY, backend, "multi_scale_deformable_attn", value.device, *numbers),
        wanted,
        launch_context(backend, value.device),
    )
    return grad_value.to(value.dtype), grad_locations, grad_weights
