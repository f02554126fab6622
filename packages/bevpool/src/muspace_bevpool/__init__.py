# SPDX-License-Identifier: Apache-2.0
"""Bird's-eye-view pooling and fused view transforms, native on CPU, CUDA, HIP and MUSA."""

from muspace_bevpool._plan import PoolPlan
from muspace_bevpool._spec import SPECS
from muspace_bevpool.ops import (
    bev_pool,
    bev_pool_plan,
    bev_pool_v2,
    bev_pool_v2_plan,
    bev_pool_v2_ranks,
    flash_bevpool,
    flash_bevpool_sca,
    voxel_pool_depth,
    voxel_pool_depth_plan,
    voxel_pooling_inference,
    voxel_pooling_inference_plan,
    voxel_pooling_train,
    voxel_pooling_train_plan,
    why_not,
)

__version__ = "0.1.0"

__all__ = [
    "SPECS",
    "PoolPlan",
    "bev_pool",
    "bev_pool_plan",
    "bev_pool_v2",
    "bev_pool_v2_plan",
    "bev_pool_v2_ranks",
    "flash_bevpool",
    "flash_bevpool_sca",
    "voxel_pool_depth",
    "voxel_pool_depth_plan",
    "voxel_pooling_inference",
    "voxel_pooling_inference_plan",
    "voxel_pooling_train",
    "voxel_pooling_train_plan",
    "why_not",
]
