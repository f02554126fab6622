# SPDX-License-Identifier: Apache-2.0
"""The five pooling operators as one table: how each is called, planned, and asked of its oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import muspace_bevpool
import numpy as np
import torch
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.cases import Arguments
from muspace_core.testing.plugin import load_sibling

v1 = load_sibling(__file__, "bev_pool_oracle")
v2 = load_sibling(__file__, "bev_pool_v2_oracle")
voxel = load_sibling(__file__, "voxel_pooling_oracle")
depth = load_sibling(__file__, "voxel_pool_depth_oracle")


@dataclass(frozen=True)
class Pooling:
    """An operator; ``planned_by`` names the arguments of its plan builder, in order."""

    name: str
    inputs: ModuleType
    floating: tuple[str, ...]
    planned_by: tuple[str, ...]
    forward: Callable[..., np.ndarray]
    backward: Callable[..., dict[str, np.ndarray]]

    def call(self, backend: str, tensors: Arguments, **keywords: Any) -> torch.Tensor:
        return on_backend(getattr(muspace_bevpool, self.name))(backend, *tensors.values(), **keywords)

    def plan(self, place: str, tensors: Arguments, **keywords: Any) -> Any:
        if self.name == "bev_pool_v2":
            keywords["depth_shape"] = tuple(tensors["depth"].shape)
        builder = on_backend(getattr(muspace_bevpool, f"{self.name}_plan"))
        return builder(place, *[tensors[k] for k in self.planned_by], **keywords)

    def tensors(self, arguments: Arguments, device: str, dtype: torch.dtype = torch.float32) -> Arguments:
        return as_tensors(arguments, device, dtype)

    def run(self, backend: str, tensors: Arguments, **keywords: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Output, and gradients for an upstream gradient of small integers."""
        live = tensors | {k: tensors[k].detach().requires_grad_() for k in self.floating}
        output = self.call(backend, live, **keywords)
        found = torch.autograd.grad(output, [live[k] for k in self.floating], self.whole_gradient(output))
        return output.detach(), dict(zip(self.floating, found, strict=True))

    @staticmethod
    def whole_gradient(output: torch.Tensor) -> torch.Tensor:
        numbers = np.random.default_rng(1).integers(-3, 4, tuple(output.shape))
        return torch.from_numpy(numbers).to(output)


def _pooling(
    name: str, floating: tuple[str, ...], planned_by: tuple[str, ...], forward: Callable[..., Any], backward: Callable[..., Any]
) -> Pooling:
    return Pooling(name, load_sibling(__file__, f"{name}_inputs"), floating, planned_by, forward, backward)


BEV_POOL = _pooling("bev_pool", ("feats",), ("coords", "B", "D", "H", "W"), v1.forward, v1.backward)
BEV_POOL_V2 = _pooling(
    "bev_pool_v2", ("depth", "feat"),
    ("ranks_depth", "ranks_feat", "ranks_bev", "bev_feat_shape", "interval_starts", "interval_lengths"),
    v2.forward, v2.backward,
)  # fmt: skip
TRAIN = _pooling("voxel_pooling_train", ("input_features",), ("geom_xyz", "voxel_num"), voxel.train, voxel.train_backward)
INFERENCE = _pooling(
    "voxel_pooling_inference", ("depth_features", "context_features"), ("geom_xyz", "voxel_num"),
    voxel.inference, voxel.inference_backward,
)  # fmt: skip
DEPTH = _pooling(
    "voxel_pool_depth", ("img_feats", "img_depth"), ("voxel_coords", "mask", "B", "X", "Y", "Z"),
    depth.forward, depth.backward,
)  # fmt: skip
POOLINGS = {p.name: p for p in (BEV_POOL, BEV_POOL_V2, TRAIN, INFERENCE, DEPTH)}
