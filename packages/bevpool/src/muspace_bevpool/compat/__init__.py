# SPDX-License-Identifier: Apache-2.0
"""The operators under their upstream names: argument translation and in-place output conventions, one module per origin.

Where two origins use one name (``QuickCumsumCuda``), this module has BEVFusion's; the other is in its own module.
"""

from muspace_bevpool.compat.bevdepth import (
    VoxelPoolingInference,
    VoxelPoolingTrain,
    voxel_pooling_inference,
    voxel_pooling_inference_ext,
    voxel_pooling_train,
    voxel_pooling_train_ext,
)
from muspace_bevpool.compat.bevfusion import QuickCumsum, QuickCumsumCuda, bev_pool, bev_pool_ext
from muspace_bevpool.compat.flashbev import FlashBEVPool, flash_bevpool
from muspace_bevpool.compat.flashocc import TRTBEVPoolv2, bev_pool_v2, bev_pool_v2_ext, voxel_pooling_prepare_v2
from muspace_bevpool.ops import voxel_pool_depth

__all__ = [
    "FlashBEVPool",
    "QuickCumsum",
    "QuickCumsumCuda",
    "TRTBEVPoolv2",
    "VoxelPoolingInference",
    "VoxelPoolingTrain",
    "bev_pool",
    "bev_pool_ext",
    "bev_pool_v2",
    "bev_pool_v2_ext",
    "flash_bevpool",
    "voxel_pool_depth",
    "voxel_pooling_inference",
    "voxel_pooling_inference_ext",
    "voxel_pooling_prepare_v2",
    "voxel_pooling_train",
    "voxel_pooling_train_ext",
]
