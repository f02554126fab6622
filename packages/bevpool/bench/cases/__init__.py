# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of this wheel, a module per operator; ``muspace_bevpool._bench_cases`` once built.  No timing here."""

from . import bev_pool, bev_pool_v2, flash_bevpool, flash_bevpool_sca, voxel_pool_depth, voxel_pooling

FAMILY = "bevpool"
CASES = (
    *bev_pool.CASES,
    *bev_pool_v2.CASES,
    *voxel_pooling.CASES,
    *voxel_pool_depth.CASES,
    *flash_bevpool.CASES,
    *flash_bevpool_sca.CASES,
)
OVERHEADS = (*bev_pool.OVERHEADS, *flash_bevpool.OVERHEADS)
