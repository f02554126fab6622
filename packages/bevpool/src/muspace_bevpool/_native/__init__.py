# SPDX-License-Identifier: Apache-2.0
"""The only layer that touches the libraries: allocates results in torch, makes inputs dense, passes routes and stream."""

from __future__ import annotations

import functools
from typing import Any

import torch
from muspace_core.loader import NativeLibrary

LIBRARY = NativeLibrary("muspace_bevpool", "bevpool")


@functools.lru_cache(maxsize=4096)
def _size(function: Any, *numbers: int) -> int:
    return function(*numbers)


def workspace(backend: str, function: str, device: torch.device, *numbers: int) -> torch.Tensor:
    """Scratch memory of the size that the library names, asked for once per set of sizes."""
    size = _size(LIBRARY.function(backend, f"{function}_workspace"), *numbers)
    return torch.empty(size, dtype=torch.uint8, device=device)


# Serves training and inference: a tensor made under inference_mode could never be saved for a backward.
@functools.lru_cache(maxsize=64)
def nothing(device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The empty tensor that stands for an absent one; never for a fake or traced call."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)
