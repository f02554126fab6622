# SPDX-License-Identifier: Apache-2.0
"""What the operators of this wheel mean, in plain differentiable PyTorch: the fallback, and the yardstick of the bench."""

from muspace_bevpool._reference.cell_pool import interval_keys, keys, pool
from muspace_bevpool._reference.flash_bevpool import flash_bevpool
from muspace_bevpool._reference.flash_bevpool_sca import flash_bevpool_sca

__all__ = ["flash_bevpool", "flash_bevpool_sca", "interval_keys", "keys", "pool"]
