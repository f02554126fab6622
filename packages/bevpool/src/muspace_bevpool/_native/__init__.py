# SPDX-License-Identifier: Apache-2.0
"""The only layer that touches the libraries: allocates results in torch, makes inputs dense, passes routes and stream."""

from __future__ import annotations

import torch
from muspace_core.loader import NativeLibrary

LIBRARY = NativeLibrary("muspace_bevpool", "bevpool")


def zeros_like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of a call without points; ``torch.zeros_like`` would copy a lazy negation first."""
    return tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)
