# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of this wheel, a module per operator; ``muspace_bevpool._bench_cases`` once built.  No timing here."""

from . import bev_pool, bev_pool_v2, flash_bevpool, flash_bevpool_sca, voxel_pool_depth, voxel_pooling

FAMILY = "bevpool"
_OPERATORS = (bev_pool, bev_pool_v2, voxel_pooling, voxel_pool_depth, flash_bevpool, flash_bevpool_sca)
CASES = tuple(case for operator in _OPERATORS for case in operator.CASES)
OVERHEADS = tuple(overhead for operator in _OPERATORS for overhead in operator.OVERHEADS)
