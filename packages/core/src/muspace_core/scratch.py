# SPDX-License-Identifier: Apache-2.0
"""Tensors that a native call needs beside its arguments and results: workspaces, and stand-ins for what is absent."""

from __future__ import annotations

import functools
from typing import Any

import torch

from muspace_core.loader import NativeLibrary
from muspace_core.register import takes_direct_path


# Serves training and inference: a tensor made under inference_mode could never be saved for a backward.
@functools.lru_cache(maxsize=64)
def nothing(device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The empty tensor that stands for an absent one; never for a fake or traced call."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def absent(like: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The empty tensor that a registered operator takes for an argument that is not there, on the device of ``like``."""
    if takes_direct_path((like,)):
        return nothing(like.device, dtype)
    return torch.empty(0, dtype=dtype, device=like.device)


@functools.lru_cache(maxsize=4096)
def size_of(function: Any, *key: Any) -> int:
    """``function(*key)``, a size that a library names, asked for once per key: a call of it costs as much as three look-ups."""
    return function(*key)


def scratch(size: int, device: torch.device) -> torch.Tensor:
    """``size`` bytes, uninitialised."""
    return torch.empty(size, dtype=torch.uint8, device=device) if size else nothing(device, torch.uint8)


def workspace(library: NativeLibrary, backend: str, operator: str, device: torch.device, *numbers: int) -> torch.Tensor:
    """The scratch memory that ``<operator>_workspace(*numbers)`` of the library asks for."""
    return scratch(size_of(library.function(backend, f"{operator}_workspace"), *numbers), device)
