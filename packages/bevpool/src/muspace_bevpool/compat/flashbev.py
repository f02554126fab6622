# SPDX-License-Identifier: Apache-2.0
"""FlashBEV's ``flashbevpool``."""

from __future__ import annotations

from typing import Any

import torch

from muspace_bevpool.ops import flash_bevpool


class FlashBEVPool:
    """The autograd function, depth parameters first: ``FlashBEVPool.apply(depth_params, image_feats, projections, ...)``."""

    @staticmethod
    def apply(depth_params: torch.Tensor, image_feats: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """``[B, Y, X, C]``; the other arguments are those of ``muspace_bevpool.flash_bevpool``, by position."""
        return flash_bevpool(image_feats, depth_params, *arguments)


__all__ = ["FlashBEVPool", "flash_bevpool"]
