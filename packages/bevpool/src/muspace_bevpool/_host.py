# SPDX-License-Identifier: Apache-2.0
"""Sizes that callers hold as ints, sequences or tensors, read from a device once per tensor and not once per call."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from muspace_core import checks
from muspace_core.register import takes_direct_path
from torch.utils.weak import WeakTensorKeyDictionary

_INFINITY, _LARGEST, _MOST = float("inf"), sys.float_info.max, (1 << 63) - 1
#: tensor -> (version, numbers); models keep such sizes in buffers, and reading one waits for the device.
_READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _from_tensor(argument: str, value: torch.Tensor) -> list[Any]:
    checks.layout(**{argument: value})
    if value.is_meta:
        raise checks.fail(argument, "a tensor with contents", "a meta tensor")
    if not takes_direct_path((value,)):
        return value.reshape(-1).tolist()
    checks.memory(argument, value)  # torch would crash on reading none
    if value.is_cpu:
        return value.reshape(-1).tolist()
    found = _READ.get(value)
    version = None if value.is_inference() else value._version
    if found is None or version is None or found[0] != version:
        found = _READ[value] = (version, value.reshape(-1).tolist())
    return found[1]


def _ordinary(value: Any, counts: tuple[int, ...], kinds: tuple[type, ...], least: float, most: float) -> bool:
    """Whether ``value`` is a sequence of ordinary numbers in the range, as it is in almost every call."""
    if (type(value) is not tuple and type(value) is not list) or (counts and len(value) not in counts):
        return False
    for item in value:  # noqa: SIM110 - all() over a generator costs three times as much
        if type(item) not in kinds or not least <= item <= most:
            return False
    return True


def _sequence(argument: str, value: Any, counts: tuple[int, ...], kind: str, accept: Callable[[Any], bool]) -> tuple[Any, ...]:
    expected = f"{' or '.join(map(str, counts))} {kind}".strip()
    if isinstance(value, torch.Tensor):
        found: Sequence[Any] = _from_tensor(argument, value)
    elif isinstance(value, (str, bytes, Set, Mapping)) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{argument}: expected {expected}, got {value!r}")
    else:
        found = [item.item() if isinstance(item, torch.Tensor) and item.numel() == 1 else item for item in value]
    if not all(accept(item) for item in found):
        raise TypeError(f"{argument}: expected {expected}, got {found!r}")
    if counts and len(found) not in counts:
        raise checks.fail(argument, expected, list(found))
    return tuple(found)


def _is_integer(item: Any) -> bool:
    return isinstance(item, (numbers.Integral, torch.SymInt)) and not isinstance(item, bool)


def _is_number(item: Any) -> bool:
    return isinstance(item, numbers.Real) and not isinstance(item, bool)


def sizes(argument: str, value: Any, *counts: int) -> tuple[int, ...]:
    """``counts`` non-negative integers (one of several lengths) from a sequence or tensor, in order."""
    if _ordinary(value, counts, (int,), 0, _MOST):
        return tuple(value)
    found = _sequence(argument, value, counts, "integers", _is_integer)
    if any(item < 0 for item in found):
        raise checks.fail(argument, "sizes of at least 0", list(found))
    if any(item > _MOST for item in found):
        raise checks.fail(argument, "sizes of at most 2^63 - 1", list(found))
    # a symbolic size must stay one: int() would make it a constant of the graph
    return tuple(item if isinstance(item, torch.SymInt) else int(item) for item in found)  # type: ignore[misc]


def reals(argument: str, value: Any, *counts: int) -> tuple[float, ...]:
    """``counts`` finite numbers (one of several lengths, any number without one) from a sequence or tensor, in order."""
    if _ordinary(value, counts, (float, int), -_LARGEST, _LARGEST):
        return tuple(map(float, value))
    try:
        found = tuple(map(float, _sequence(argument, value, counts, "numbers", _is_number)))
    except OverflowError:
        raise checks.fail(argument, "finite numbers", "integers beyond every float") from None
    if not all(-_INFINITY < item < _INFINITY for item in found):
        raise checks.fail(argument, "finite numbers", list(found))
    return found


def size(argument: str, value: Any) -> int:
    """One non-negative integer from an int or a 0-dim tensor."""
    if type(value) is int and 0 <= value <= _MOST:
        return value
    if isinstance(value, torch.Tensor):
        found = _from_tensor(argument, value)
        if len(found) != 1:
            raise checks.fail(argument, "an integer", f"shape {list(value.shape)}")
        value = found[0]
    if not _is_integer(value):
        raise TypeError(f"{argument}: expected an integer, got {value!r}")
    if value < 0 or value > _MOST:
        raise checks.fail(argument, "a size of at least 0" if value < 0 else "a size of at most 2^63 - 1", value)
    return value if isinstance(value, torch.SymInt) else int(value)  # type: ignore[return-value]
