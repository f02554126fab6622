# SPDX-License-Identifier: Apache-2.0
"""Attention layers around the operators, with the constructors, calls and state dicts of the layers that models expect."""

from __future__ import annotations

import math
from typing import Any

import torch
from muspace_core import checks
from torch import nn

from muspace_msda.ops import multi_scale_deformable_attn


class MultiScaleDeformableAttention(nn.Module):
    r"""Deformable attention layer with the constructor, positional call and state dict of mmcv's.

    ``identity + dropout(output_proj(attn(value_proj(value), reference + offsets(query), softmax(weights(query)))))``.

    Args:
        embed_dims: channels of query, value and result; a multiple of ``num_heads``.
        num_heads, num_levels, num_points: heads, pyramid levels, points per head and level.
        im2col_step: accepted for compatibility, ignored.
        dropout: dropout probability on the projected result.
        batch_first: inputs are ``[B, N, C]`` instead of ``[N, B, C]``.
        norm_cfg, init_cfg: accepted for compatibility, ignored.
        value_proj_ratio: width of the value projection relative to ``embed_dims``.
        legacy_level_alias: as for ``multi_scale_deformable_attn``.

    Parameters: ``sampling_offsets``, ``attention_weights``, ``value_proj`` and ``output_proj``, all ``nn.Linear``.
    Determinism: that of ``multi_scale_deformable_attn``.

    Example:
        >>> import torch
        >>> from muspace_msda.modules import MultiScaleDeformableAttention
        >>> layer = MultiScaleDeformableAttention(embed_dims=32, num_heads=4, num_levels=1, batch_first=True).eval()
        >>> shapes = torch.tensor([[4, 5]])
        >>> query, reference = torch.randn(2, 20, 32), torch.rand(2, 20, 1, 2)
        >>> layer(query, reference_points=reference, spatial_shapes=shapes, level_start_index=torch.tensor([0])).shape
        torch.Size([2, 20, 32])
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        norm_cfg: Any = None,
        init_cfg: Any = None,
        value_proj_ratio: float = 1.0,
        *,
        legacy_level_alias: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise checks.fail("num_heads", "a positive number", num_heads)
        if embed_dims % num_heads:
            raise checks.fail("embed_dims", f"a multiple of num_heads = {num_heads}", embed_dims)
        self.embed_dims, self.num_heads = embed_dims, num_heads
        self.num_levels, self.num_points = num_levels, num_points
        self.im2col_step, self.batch_first, self.norm_cfg = im2col_step, batch_first, norm_cfg
        self.legacy_level_alias = legacy_level_alias
        value_dims = int(embed_dims * value_proj_ratio)
        self.dropout = nn.Dropout(dropout)
        self.sampling_offsets = nn.Linear(embed_dims, num_heads * num_levels * num_points * 2)
        self.attention_weights = nn.Linear(embed_dims, num_heads * num_levels * num_points)
        self.value_proj = nn.Linear(embed_dims, value_dims)
        self.output_proj = nn.Linear(value_dims, embed_dims)
        self.init_weights()

    def init_weights(self) -> None:
        """Uniform attention over points that lie on one ray per head, the k-th point k pixels out."""
        for layer in (self.sampling_offsets, self.attention_weights):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        for layer in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        angle = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        ray = torch.stack((angle.cos(), angle.sin()), -1)
        ray = ray / ray.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        bias = ray[:, None, None, :] * steps[None, None, :, None]
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(bias.expand(-1, self.num_levels, -1, -1).reshape(-1))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        identity: torch.Tensor | None = None,
        query_pos: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        reference_points: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        level_start_index: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends from ``query`` to ``value``.

        Args:
            query: ``[N, B, C]`` (``[B, N, C]`` with ``batch_first``).
            key: ignored, as in mmcv.
            value: ``[S, B, C]``; ``query`` if omitted.
            identity: residual; ``query`` (before ``query_pos``) if omitted.
            query_pos: added to ``query``.
            key_padding_mask: ``[B, S]`` bool, true rows of ``value`` count as zero.
            reference_points: ``[B, N, L, 2]`` points or ``[B, N, L, 4]`` boxes ``(x, y, w, h)``, in units of the map.
            spatial_shapes: ``[L, 2]`` rows ``(h, w)``; level_start_index: ``[L]``.

        Returns: like ``query``. Raises ValueError for reference points of another width.
        """
        if reference_points is None or spatial_shapes is None:
            raise TypeError("reference_points and spatial_shapes: expected tensors, got None")
        value = query if value is None else value
        identity = query if identity is None else identity
        if query_pos is not None:
            query = query + query_pos
        if not self.batch_first:
            query, value = query.permute(1, 0, 2), value.permute(1, 0, 2)
        batch, rows, _ = value.shape
        projected = self.value_proj(value)
        if key_padding_mask is not None:
            projected = projected.masked_fill(key_padding_mask[..., None], 0.0)
        projected = projected.view(batch, rows, self.num_heads, -1)
        locations, weights = self._points(query, reference_points, spatial_shapes)
        output = multi_scale_deformable_attn(
            projected, spatial_shapes, level_start_index, locations, weights, legacy_level_alias=self.legacy_level_alias
        )
        output = self.output_proj(output)
        if not self.batch_first:
            output = output.permute(1, 0, 2)
        return self.dropout(output) + identity

    def _points(
        self, query: torch.Tensor, reference_points: torch.Tensor, spatial_shapes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampling locations ``[B, N, H, L, P, 2]`` and normalised weights ``[B, N, H, L, P]``."""
        lead = (*query.shape[:2], self.num_heads)
        weights = self.attention_weights(query).view(*lead, -1).softmax(-1)
        weights = weights.view(*lead, self.num_levels, self.num_points)
        offsets = self.sampling_offsets(query).view(*lead, self.num_levels, self.num_points, 2)
        reference = reference_points[:, :, None, :, None, :]
        width = reference_points.shape[-1]
        if width == 2:
            size = spatial_shapes.flip(-1)[None, None, None, :, None, :]
            return reference + offsets / size, weights
        if width == 4:
            return reference[..., :2] + offsets / self.num_points * reference[..., 2:] * 0.5, weights
        raise checks.fail("reference_points", "a last dimension of 2 (points) or 4 (boxes)", width)


__all__ = ["MultiScaleDeformableAttention"]
