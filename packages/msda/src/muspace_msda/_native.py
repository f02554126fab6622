# SPDX-License-Identifier: Apache-2.0
"""The only file that touches the libraries: allocates results in torch, makes inputs dense, passes routes and stream."""

from __future__ import annotations

import torch
from muspace_core import environment
from muspace_core.device import launch_context
from muspace_core.loader import NativeLibrary

from muspace_msda import _levels

LIBRARY = NativeLibrary("muspace_msda", "msda")

FORWARD_ROUTES = {"native": 0, "general": 0, "fused": 1}
BACKWARD_ROUTES = {"general": 0, "block_sorted": 1, "ordered": 2}
#: Widest head of the fused kernels; a wider one would need more registers than the lanes of a group have.
FUSED_CHANNELS = 128

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward_route(dtype: torch.dtype, channels: int, backend: str) -> str:
    """Name of the forward kernel that ``backend`` uses for a ``value`` of this dtype and head width."""
    if backend == "cpu":
        return "native"
    return "fused" if dtype is not torch.float64 and channels <= FUSED_CHANNELS else "general"


def backward_route(dtype: torch.dtype, channels: int, backend: str, deterministic: bool) -> str:
    """Name of the backward kernel: ``ordered`` is bit-reproducible, the others end in atomics."""
    if backend == "cpu" or deterministic:
        return "ordered"
    return "block_sorted" if dtype is not torch.float64 and channels <= FUSED_CHANNELS else "general"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_neg():  # a lazy negation shares the data pointer of the tensor that it negates
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


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
    if backend in ("cpu", "emu") or environment.CHECK.enabled():
        _levels.check_tensors(spatial_shapes, level_start_index, value.shape[1])
    batch, _, heads, channels = value.shape
    output = torch.empty((batch, sampling_locations.shape[1], heads * channels), dtype=value.dtype, device=value.device)
    LIBRARY.function(backend, "multi_scale_deformable_attn_forward")(
        output,
        _dense(value),
        _dense(spatial_shapes),
        _dense(level_start_index),
        _dense(sampling_locations),
        _dense(attention_weights),
        FORWARD_ROUTES[forward_route(value.dtype, channels, backend)],
        launch_context(backend, value.device),
    )
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
    route = BACKWARD_ROUTES[backward_route(value.dtype, value.shape[3], backend, deterministic)]
    # 16-bit sums would need compare-and-swap loops and lose bits: the sum is fp32 and is narrowed once.
    accumulator = torch.float64 if value.dtype is torch.float64 else torch.float32
    grad_value = torch.empty(value.shape, dtype=accumulator, device=value.device)
    grad_locations = torch.empty(sampling_locations.shape, dtype=sampling_locations.dtype, device=sampling_locations.device)
    grad_weights = torch.empty(attention_weights.shape, dtype=attention_weights.dtype, device=attention_weights.device)
    queries, levels, points = sampling_locations.shape[1], sampling_locations.shape[3], sampling_locations.shape[4]
    size = 0
    if route == BACKWARD_ROUTES["ordered"] and backend != "cpu":
        size = LIBRARY.function(backend, "multi_scale_deformable_attn_workspace")(*value.shape, queries, levels, points, route)
    LIBRARY.function(backend, "multi_scale_deformable_attn_backward")(
        grad_value,
        grad_locations,
        grad_weights,
        _dense(grad_output),
        _dense(value),
        _dense(spatial_shapes),
        _dense(level_start_index),
        _dense(sampling_locations),
        _dense(attention_weights),
        torch.empty(size, dtype=torch.uint8, device=value.device),
        route,
        launch_context(backend, value.device),
    )
    return grad_value.to(value.dtype), grad_locations, grad_weights
