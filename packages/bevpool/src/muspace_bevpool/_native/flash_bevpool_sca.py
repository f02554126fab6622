# SPDX-License-Identifier: Apache-2.0
"""Calls of the library for flash_bevpool_sca."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from muspace_core.checks import readable, sum_dtype
from muspace_core.device import launch_context
from muspace_core.scratch import workspace

from muspace_bevpool._native import LIBRARY
from muspace_bevpool._native.flash_bevpool import BACKWARD_ROUTES, BLOCK_SORTED, ORDERED


def _sizes(
    image_feats: torch.Size, levels: int, anchors: int, heads: int, points: int, grid_size: Sequence[int], dtype: torch.dtype
) -> tuple[int, ...]:
    """The integers with which the library answers questions about a call."""
    batch, cameras, rows, channels = image_feats
    wide = int(dtype is torch.float64)
    return (batch, cameras, rows, channels, heads, levels, points, anchors, *grid_size, wide)


def route(
    module: Any,
    backend: str,
    image_feats: torch.Size,
    levels: int,
    anchors: int,
    heads: int,
    points: int,
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
    sizes = _sizes(image_feats, levels, anchors, heads, points, grid_size, dtype)
    return f"fused+{BACKWARD_ROUTES[module.get_function('flash_bevpool_sca_route')(*sizes, wanted)]}"


# Serves training and inference: a tensor made under inference_mode could never be saved for a backward.
@functools.lru_cache(maxsize=64)
def _anchors(heights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(heights, dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)
def _level_array(level_sizes: tuple[int, ...]) -> Any:
    """The level table as the library takes it; building one costs more than the rest of a small call."""
    import tvm_ffi

    return tvm_ffi.convert(level_sizes)


def forward(
    image_feats: torch.Tensor,
    projection_matrices: torch.Tensor,
    sampling_offsets: torch.Tensor,
    attention_weights: torch.Tensor,
    level_sizes: Sequence[int],
    image_size: Sequence[float],
    roi_range: Sequence[float],
    grid_size: Sequence[int],
    z_anchors: Sequence[float],
    heads: int,
    points: int,
    eps: float,
    average: bool,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """``[B, Y*X, C]``; ``deterministic`` matters to the backward only."""
    size = (image_feats.shape[0], grid_size[0] * grid_size[1], image_feats.shape[3])
    output = torch.empty(size, dtype=image_feats.dtype, device=image_feats.device)
    LIBRARY.function(backend, "flash_bevpool_sca_forward")(
        output,
        readable("image_feats", image_feats),
        readable("projection_matrices", projection_matrices),
        _anchors(tuple(z_anchors), projection_matrices.dtype, image_feats.device),
        readable("sampling_offsets", sampling_offsets),
        readable("attention_weights", attention_weights),
        _level_array(tuple(level_sizes)),
        heads,
        points,
        *roi_range,
        *grid_size,
        *image_size,
        eps,
        int(average),
        launch_context(backend, image_feats.device),
    )
    return output


def backward(
    grad_output: torch.Tensor,
    image_feats: torch.Tensor,
    projection_matrices: torch.Tensor,
    sampling_offsets: torch.Tensor,
    attention_weights: torch.Tensor,
    level_sizes: Sequence[int],
    image_size: Sequence[float],
    roi_range: Sequence[float],
    grid_size: Sequence[int],
    z_anchors: Sequence[float],
    heads: int,
    points: int,
    eps: float,
    average: bool,
    backend: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of features, offsets and weights in the dtypes of those tensors; empty for what was not given."""
    wanted, device = ORDERED if deterministic else BLOCK_SORTED, image_feats.device
    grad_feats = torch.empty(image_feats.shape, dtype=sum_dtype(image_feats.dtype), device=device)
    grad_offsets = torch.empty(sampling_offsets.shape, dtype=sampling_offsets.dtype, device=device)
    grad_weights = torch.empty(attention_weights.shape, dtype=attention_weights.dtype, device=device)
    sizes = _sizes(image_feats.shape, len(level_sizes) // 2, len(z_anchors), heads, points, grid_size, image_feats.dtype)
    LIBRARY.function(backend, "flash_bevpool_sca_backward")(
        grad_feats,
        grad_offsets,
        grad_weights,
        readable("grad_output", grad_output),
        readable("image_feats", image_feats),
        readable("projection_matrices", projection_matrices),
        _anchors(tuple(z_anchors), projection_matrices.dtype, device),
        readable("sampling_offsets", sampling_offsets),
        readable("attention_weights", attention_weights),
        _level_array(tuple(level_sizes)),
        heads,
        points,
        *roi_range,
        *grid_size,
        *image_size,
        eps,
        int(average),
        workspace(LIBRARY, backend, "flash_bevpool_sca", device, *sizes, wanted),
        wanted,
        launch_context(backend, device),
    )
    return grad_feats.to(image_feats.dtype), grad_offsets, grad_weights
