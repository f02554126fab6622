# SPDX-License-Identifier: Apache-2.0
"""Calls of the library for flash_bevpool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from muspace_core.checks import readable, sum_dtype
from muspace_core.device import launch_context
from muspace_core.scratch import workspace

from muspace_bevpool._native import LIBRARY

#: Route codes of the library, which takes ``general`` where a better one does not reach.
BACKWARD_ROUTES = ("general", "block_sorted", "ordered")
BLOCK_SORTED, ORDERED = 1, 2


def route(
    module: Any,
    backend: str,
    image_feats: torch.Size,
    grid_size: tuple[int, ...],
    dtype: torch.dtype,
    deterministic: bool,
    gradient: bool,
) -> str:
    """Name of the route of a call: ``<forward>`` or, if a gradient was recorded, ``<forward>+<backward>``."""
    if not gradient:
        return "fused"
    if backend == "cpu":
        return "fused+ordered"
    wanted = ORDERED if deterministic else BLOCK_SORTED
    code = module.get_function("flash_bevpool_route")(*image_feats, *grid_size, int(dtype is torch.float64), wanted)
    return f"fused+{BACKWARD_ROUTES[code]}"


def forward(
    image_feats: torch.Tensor,
    depth_params: torch.Tensor,
    projection_matrices: torch.Tensor,
    image_size: Sequence[float],
    roi_range: Sequence[float],
    grid_size: Sequence[int],
    depth_distribution: int,
    epsilon: float,
    depth_weight_threshold: float,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """``[B, Y, X, C]``; ``deterministic`` matters to the backward only."""
    size = (image_feats.shape[0], grid_size[1], grid_size[0], image_feats.shape[4])
    output = torch.empty(size, dtype=image_feats.dtype, device=image_feats.device)
    LIBRARY.function(backend, "flash_bevpool_forward")(
        output,
        readable("image_feats", image_feats),
        readable("depth_params", depth_params),
        readable("projection_matrices", projection_matrices),
        *image_size,
        *roi_range,
        *grid_size,
        depth_distribution,
        epsilon,
        depth_weight_threshold,
        launch_context(backend, image_feats.device),
    )
    return output


def backward(
    grad_output: torch.Tensor,
    image_feats: torch.Tensor,
    depth_params: torch.Tensor,
    projection_matrices: torch.Tensor,
    image_size: Sequence[float],
    roi_range: Sequence[float],
    grid_size: Sequence[int],
    depth_distribution: int,
    epsilon: float,
    depth_weight_threshold: float,
    backend: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of features and depth parameters in the dtypes of those tensors."""
    wanted, device = ORDERED if deterministic else BLOCK_SORTED, image_feats.device
    grad_feats = torch.empty(image_feats.shape, dtype=sum_dtype(image_feats.dtype), device=device)
    grad_depth = torch.empty(depth_params.shape, dtype=sum_dtype(image_feats.dtype), device=device)
    numbers = (*image_feats.shape, *grid_size, int(image_feats.dtype is torch.float64), wanted)
    LIBRARY.function(backend, "flash_bevpool_backward")(
        grad_feats,
        grad_depth,
        readable("grad_output", grad_output),
        readable("image_feats", image_feats),
        readable("depth_params", depth_params),
        readable("projection_matrices", projection_matrices),
        *image_size,
        *roi_range,
        *grid_size,
        depth_distribution,
        epsilon,
        depth_weight_threshold,
        workspace(LIBRARY, backend, "flash_bevpool", device, *numbers),
        wanted,
        launch_context(backend, device),
    )
    return grad_feats.to(image_feats.dtype), grad_depth.to(depth_params.dtype)
