# SPDX-License-Identifier: Apache-2.0
"""muSPACE: spatial operators of perception models, native on MUSA, CUDA, HIP and CPU.

Importing this package imports no torch, no operator and opens no device; names are resolved when they are first used.

>>> import mu_space
>>> mu_space.__version__
'0.1.0'
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = ("cli", "compatibility", "demo", "families", "ops")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"mu_space.{name}")
    if name == "__all__":  # what a star import takes; the wheels that are installed decide
        return ["get_last_dispatch_report", *importlib.import_module("mu_space.families").star_names()]
    if name.startswith("_"):
        raise AttributeError(f"module 'mu_space' has no attribute {name!r}")
    if name == "get_last_dispatch_report":
        with importlib.import_module("mu_space.families").torch_needed("mu_space.get_last_dispatch_report"):
            found = importlib.import_module("muspace_core").get_last_dispatch_report
    else:
        found = importlib.import_module("mu_space.families").resolve(name, module="mu_space")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    names = importlib.import_module("mu_space.families").public_names()
    return sorted({*globals(), *_SUBMODULES, "get_last_dispatch_report", *names})
