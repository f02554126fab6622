# SPDX-License-Identifier: Apache-2.0
"""mmcv's and Deformable-DETR's names of the attention operator."""

from __future__ import annotations

import torch

from muspace_msda.ops import multi_scale_deformable_attn


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
