# SPDX-License-Identifier: Apache-2.0
"""What every muSPACE operator wheel shares: specs, dispatch, loading, registration, checks, test kit and bench kit.

Importing it imports no torch: the pytest plugin is loaded wherever the wheel is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muspace_core.errors import BackendUnavailable, MuspaceError
from muspace_core.spec import OpSpec, Status, Switch, Tolerance

if TYPE_CHECKING:
    from muspace_core.dispatch import DispatchReport, get_last_dispatch_report

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "DispatchReport",
    "MuspaceError",
    "OpSpec",
    "Status",
    "Switch",
    "Tolerance",
    "get_last_dispatch_report",
]


def __getattr__(name: str) -> Any:
    if name not in ("DispatchReport", "get_last_dispatch_report"):
        raise AttributeError(f"module 'muspace_core' has no attribute {name!r}")
    from muspace_core import dispatch

    return getattr(dispatch, name)
