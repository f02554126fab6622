# SPDX-License-Identifier: Apache-2.0
"""The only layer that touches the libraries: allocates results in torch, makes inputs dense, passes routes and stream."""

from __future__ import annotations

import torch
from muspace_core.loader import NativeLibrary

LIBRARY = NativeLibrary("muspace_bevpool", "bevpool")


def workspace(backend: str, function: str, device: torch.device, *numbers: int) -> torch.Tensor:
    """Scratch memory of the size that the library names."""
    size = LIBRARY.function(backend, f"{function}_workspace")(*numbers)
    return torch.empty(size, dtype=torch.uint8, device=device)
