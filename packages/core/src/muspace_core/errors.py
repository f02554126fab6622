# SPDX-License-Identifier: Apache-2.0
"""Exception classes.  Bad arguments raise the built-in ``ValueError`` and ``TypeError``, so only two classes are ours."""

from __future__ import annotations


class MuspaceError(Exception):
    """Base of every exception that only muSPACE raises."""


class BackendUnavailable(MuspaceError, RuntimeError):
    """The requested backend cannot run this call; the message says why and what would help."""
