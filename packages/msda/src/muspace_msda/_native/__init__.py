# SPDX-License-Identifier: Apache-2.0
"""The only layer that touches the libraries: allocates results in torch, makes inputs dense, passes routes and stream."""

from __future__ import annotations

from muspace_core.loader import NativeLibrary

LIBRARY = NativeLibrary("muspace_msda", "msda")
