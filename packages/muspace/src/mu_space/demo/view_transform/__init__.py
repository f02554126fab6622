# SPDX-License-Identifier: Apache-2.0
"""The ways from camera images to a bird's-eye view that the demo shows, a module each; importing this one imports neither.

A module has `OPERATOR` and `FAMILY` (the wheel muspace-<family>), `SIZE` (what the sizes of its calls mean),
`default_cell(reach)` in metres, and `fuse(frame, grid, levels, backend, stage) -> Views`, which announces its stages.
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = ("msda", "bev_pool_v2", "flash_bevpool")


def module(name: str) -> ModuleType:
    """The module of a view transform; raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"view_transform: expected one of {', '.join(NAMES)}; got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
