# SPDX-License-Identifier: Apache-2.0
"""What every muSPACE operator wheel shares: specs, dispatch, loading, registration, checks, test kit and bench kit."""

from muspace_core.dispatch import DispatchReport, get_last_dispatch_report
from muspace_core.errors import BackendUnavailable, MuspaceError
from muspace_core.spec import OpSpec, Status, Switch, Tolerance

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
