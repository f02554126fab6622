# SPDX-License-Identifier: Apache-2.0
"""Argument checks with one message shape: ``<argument>: expected <what>, got <what came>``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
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


def plain_memory(argument: str, value: torch.Tensor) -> None:
    """``memory`` for an eager tensor; fake, traced and transformed ones have none to be asked for."""
    if torch.compiler.is_compiling() or type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        return
    if not torch._C._functorch.is_functorch_wrapped_tensor(value):
        memory(argument, value)


def rank(argument: str, value: torch.Tensor, axes: str) -> None:
    """Number of dimensions; ``axes`` names them, as in ``"B S H D"``."""
    if value.dim() != len(axes.split()):
        raise fail(argument, f"shape [{', '.join(axes.split())}]", f"{list(value.shape)}")


def shape(argument: str, value: torch.Tensor, axes: str, expected: Sequence[int]) -> None:
    """Exact shape; the message names the axes."""
    if value.shape != tuple(expected):
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


#: Storage dtypes of the operators, and what a tensor with a dtype of its own may have beside them.
STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPANION_DTYPES = {
    **dict.fromkeys(STORAGE_DTYPES[:3], STORAGE_DTYPES[:3]),
    torch.float64: (torch.float64, torch.float32),
}


def storage(argument: str, value: torch.Tensor) -> None:
    """A strided floating tensor that carries the dtype of the result."""
    if value.dtype in STORAGE_DTYPES and value.layout is torch.strided:
        return
    layout(**{argument: value})
    dtype(argument, value, STORAGE_DTYPES)


def sum_dtype(features: torch.dtype) -> torch.dtype:
    """In what features of a dtype are summed, and geometry beside them is computed: float64 for float64, else float32."""
    return features if features is torch.float64 else torch.float32


def companion(argument: str, value: torch.Tensor, owner: str, owned: torch.Tensor) -> None:
    """A floating tensor beside ``owned``, with a dtype of its own: 16 or 32 bits, 64 or 32 beside float64."""
    accepted = COMPANION_DTYPES[owned.dtype]
    if value.dtype in accepted and value.device == owned.device and value.layout is torch.strided:
        return
    layout(**{argument: value})
    dtype(argument, value, accepted)
    same_device(argument, value, owner, owned.device)


def dense(argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a library can read; it refuses a dense tensor without memory itself, torch would crash on copying another."""
    lazy = tensor.is_neg() or tensor._is_zerotensor()  # a negation shares the memory of what it negates, a zero has none
    if not lazy and tensor.is_contiguous():
        return tensor
    if not tensor._is_zerotensor():
        memory(argument, tensor)
    return (tensor.clone() if lazy else tensor).contiguous()


def readable(argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """``dense``, with memory, at an address that kernels can read 16 bytes at a time: a view may begin anywhere."""
    tensor = dense(argument, tensor)
    address = tensor.data_ptr()
    if address == 0:
        memory(argument, tensor)
    return tensor.clone() if address % 16 else tensor


def reader(backend: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """How a tensor is made ready for ``backend``; the cpu reads any address, and its calls are too short to look at them."""
    return dense if backend == "cpu" else readable


def _integer(number: Any) -> Any:
    if type(number) is int or isinstance(number, torch.SymInt):  # a symbolic size must stay one, not a constant of the graph
        return number
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)


def integers(argument: str, numbers: Sequence[Any], depth: int = 1) -> tuple[Any, ...]:
    """Nested tuples of integers; TypeError for anything that is not an exact integer."""
    try:
        if depth == 1:
            return tuple(_integer(number) for number in numbers)
        return tuple(integers(argument, row, depth - 1) for row in numbers)
    except TypeError:
        raise TypeError(f"{argument}: expected a tensor or a list of integers, got {numbers!r}") from None
