# SPDX-License-Identifier: Apache-2.0
"""Registration of the operators of this wheel with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from muspace_core.dispatch import Dispatcher
from muspace_core.register import register

from muspace_bevpool import _spec
from muspace_bevpool._native import (
    LIBRARY,
    bev_pool as _bev_pool,
    bev_pool_v2 as _bev_pool_v2,
    cell_pool as _cell_pool,
    flash_bevpool as _flash,
    flash_bevpool_sca as _sca,
    voxel_pool_depth as _voxel_pool_depth,
    voxel_pooling_inference as _voxel_inference,
    voxel_pooling_train as _voxel_train,
)


def _like(*tensors: torch.Tensor) -> Any:
    """Fake gradients: dense, with the shapes and dtypes of the tensors."""
    made = tuple(tensor.new_empty(tensor.shape) for tensor in tensors)
    return made[0] if len(made) == 1 else made


def _bird_view(features: torch.Tensor, batch: Any, X: Any, Y: Any, channels: Any) -> torch.Tensor:
    return features.new_empty(batch, Y, X, channels).permute(0, 3, 1, 2)


bev_pool = register(
    _spec.BEV_POOL,
    forward=_bev_pool.forward,
    backward=_bev_pool.backward,
    fake_forward=lambda feats, _c, _k, _p, B, D, H, W, *_: feats.new_empty(B, feats.shape[1], D, H, W),
    fake_backward=lambda _g, feats, *_: _like(feats),
    tensor_count=4,
    differentiable=(0,),
    unread=(0,),
)
bev_pool_v2 = register(
    _spec.BEV_POOL_V2,
    forward=_bev_pool_v2.forward,
    backward=_bev_pool_v2.backward,
    fake_forward=lambda _d, feat, *rest: feat.new_empty(rest[8], feat.shape[4], *rest[9:12]),
    fake_backward=lambda _g, depth, feat, *_: _like(depth, feat),
    tensor_count=10,
    differentiable=(0, 1),
)
voxel_pooling_train = register(
    _spec.VOXEL_POOLING_TRAIN,
    forward=_voxel_train.forward,
    backward=_voxel_train.backward,
    fake_forward=lambda _x, feats, _k, _p, X, Y, *_: _bird_view(feats, feats.shape[0], X, Y, feats.shape[-1]),
    fake_backward=lambda _g, _x, feats, *_: _like(feats),
    tensor_count=4,
    differentiable=(1,),
    unread=(1,),
)
voxel_pooling_inference = register(
    _spec.VOXEL_POOLING_INFERENCE,
    forward=_voxel_inference.forward,
    backward=_voxel_inference.backward,
    fake_forward=lambda _x, _d, context, _k, _p, batch, X, Y, *_: _bird_view(context, batch, X, Y, context.shape[1]),
    fake_backward=lambda _g, _x, depth, context, *_: _like(depth, context),
    tensor_count=5,
    differentiable=(1, 2),
)


def _fake_voxel_pool_depth(feats: torch.Tensor, depth: torch.Tensor, *rest: Any) -> torch.Tensor:
    cameras, X, Y, Z, reduce_cams = rest[4:9]
    dtype = torch.promote_types(feats.dtype, depth.dtype)
    return feats.new_empty(feats.shape[0], 1 if reduce_cams else cameras, X, Y, Z, feats.shape[2], dtype=dtype)


voxel_pool_depth = register(
    _spec.VOXEL_POOL_DEPTH,
    forward=_voxel_pool_depth.forward,
    backward=_voxel_pool_depth.backward,
    fake_forward=_fake_voxel_pool_depth,
    fake_backward=lambda _g, feats, depth, *_: _like(feats, depth),
    tensor_count=6,
    differentiable=(0, 1),
)
flash_bevpool = register(
    _spec.FLASH_BEVPOOL,
    forward=_flash.forward,
    backward=_flash.backward,
    fake_forward=lambda feats, _d, _p, _i, _r, grid, *_: feats.new_empty(feats.shape[0], grid[1], grid[0], feats.shape[4]),
    fake_backward=lambda _g, feats, depth, *_: _like(feats, depth),
    tensor_count=3,
    differentiable=(0, 1),
)
flash_bevpool_sca = register(
    _spec.FLASH_BEVPOOL_SCA,
    forward=_sca.forward,
    backward=_sca.backward,
    fake_forward=lambda feats, *rest: feats.new_empty(feats.shape[0], rest[6][0] * rest[6][1], feats.shape[3]),
    fake_backward=lambda _g, feats, _p, offsets, weights, *_: _like(feats, offsets, weights),
    tensor_count=4,
    differentiable=(0, 2, 3),
)

_ROUTES: dict[str, Callable[..., str]] = {"flash_bevpool": _flash.route, "flash_bevpool_sca": _sca.route}
#: By operator name.
DISPATCHERS = {spec.name: Dispatcher(spec, LIBRARY, _ROUTES.get(spec.name, _cell_pool.route)) for spec in _spec.SPECS}
