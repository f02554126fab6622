# SPDX-License-Identifier: Apache-2.0
"""Argument checks with one message shape: ``<argument>: expected <what>, got <what came>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def fail(argument: str, expected: str, got: object) -> ValueError:
    """The ValueError of a bad argument, to be raised by the caller."""
    return ValueError(f"{argument}: expected {expected}, got {got}")


def tensors(**arguments: Any) -> None:
    """TypeError for the first argument that is not a tensor."""
    for argument, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{argument}: expected a torch.Tensor, got {type(value).__name__}")


def layout(**arguments: torch.Tensor) -> None:
    """ValueError for the first tensor that is sparse, mkldnn or of another layout than strided."""
    for argument, value in arguments.items():
        if value.layout is not torch.strided:
            raise fail(argument, "a strided tensor", f"layout {str(value.layout).removeprefix('torch.')}")


def memory(argument: str, value: torch.Tensor) -> None:
    """ValueError for a tensor whose storage was freed; to be asked before torch copies or converts it, which would crash."""
    if value.numel() and not value.untyped_storage().nbytes():
        raise fail(argument, "a tensor with memory", "none")


def rank(argument: str, value: torch.Tensor, axes: str) -> None:
    """Number of dimensions; ``axes`` names them, as in ``"B S H D"``."""
    if value.dim() != len(axes.split()):
        raise fail(argument, f"shape [{', '.join(axes.split())}]", f"{list(value.shape)}")


def shape(argument: str, value: torch.Tensor, axes: str, expected: Sequence[int]) -> None:
    """Exact shape; the message names the axes."""
    if tuple(value.shape) != tuple(expected):
        raise fail(argument, f"shape [{', '.join(axes.split())}] = {list(expected)}", f"{list(value.shape)}")


def dtype(argument: str, value: torch.Tensor, accepted: Sequence[torch.dtype]) -> None:
    """One of the accepted dtypes, else TypeError."""
    if value.dtype not in accepted:
        names = ", ".join(str(kind).removeprefix("torch.") for kind in accepted)
        raise TypeError(f"{argument}: expected dtype {names}, got {str(value.dtype).removeprefix('torch.')}")


def same_device(argument: str, value: torch.Tensor, owner: str, device: torch.device) -> None:
    """On the device of the argument named ``owner``."""
    if value.device != device:
        raise fail(argument, f"device {device} (that of {owner})", value.device)
