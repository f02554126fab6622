# SPDX-License-Identifier: Apache-2.0
"""Camera images -> the `value` tensor of deformable attention: colour and validity at 1/4, 1/8 and 1/16 of the image."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

STRIDES = (4, 8, 16)
CHANNELS = 4  # red, green, blue, validity: one 16-byte vector for each pixel and head


@dataclass(frozen=True)
class Pyramid:
    """value [cameras, S, 1, 4] float32; shapes: (h, w) of each level; extent: (height, width) in image pixels."""

    value: torch.Tensor
    shapes: tuple[tuple[int, int], ...]
    extent: tuple[int, int]

    def heads(self, count: int) -> torch.Tensor:
        """The value tensor repeated for `count` heads, [cameras, S, count, 4], contiguous."""
        return self.value.expand(-1, -1, count, -1).contiguous()

    def features(self, stride: int) -> torch.Tensor:
        """The level of a stride as channels-last maps [cameras, h, w, 4], contiguous."""
        level = STRIDES.index(stride)
        sizes = [h * w for h, w in self.shapes]
        rows = self.value.split(sizes, 1)[level]
        return rows.reshape(-1, *self.shapes[level], CHANNELS).contiguous()


def build(images: list[np.ndarray], device: torch.device | str = "cpu") -> Pyramid:
    """Average the images (uint8 [h, w, 3], one size) over 4, 8 and 16 pixels.

    The images are padded at the right and below to a multiple of 16. Padding has validity 0 and colour 0, so a sample at
    the border of an image returns colour times validity, and their quotient is the colour without a dark seam.
    """
    import torch

    height, width = images[0].shape[:2]
    last = STRIDES[-1]
    extent = (-(-height // last) * last, -(-width // last) * last)
    planes = torch.zeros((len(images), CHANNELS, *extent), dtype=torch.float32)
    for k, image in enumerate(images):
        planes[k, :3, :height, :width] = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        planes[k, 3, :height, :width] = 1.0
    level = torch.nn.functional.avg_pool2d(planes, STRIDES[0])
    levels = [level]
    for finer, stride in pairwise(STRIDES):
        levels.append(torch.nn.functional.avg_pool2d(levels[-1], stride // finer))
    value = torch.cat([x.flatten(2).transpose(1, 2) for x in levels], 1).unsqueeze(2).contiguous()
    return Pyramid(value.to(device), tuple((int(x.shape[2]), int(x.shape[3])) for x in levels), extent)
