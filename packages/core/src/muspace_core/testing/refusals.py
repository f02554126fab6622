# SPDX-License-Identifier: Apache-2.0
"""Builders of the calls that an operator must refuse: how an argument is spoiled, and the message that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from muspace_core.testing.cases import Arguments, ErrorCase

#: Dtypes of an argument that carries the output's, and of one that is no more than fp32.
STORAGE = "dtype float32, bfloat16, float16, float64"
NARROW = "dtype float32, bfloat16, float16"

#: From the argument as it is to the argument as it is refused.
Change = Callable[[Any], Any]


def put(argument: str, change: Change) -> Callable[[Arguments], None]:
    """The change of one argument as a change of the call."""

    def apply(tensors: Arguments) -> None:
        tensors[argument] = change(tensors[argument])

    return apply


def number_at(at: int | tuple[int, ...], number: int) -> Change:
    """A copy of the tensor with another number there."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[at] = number
        return changed

    return change


def wrong_value(name: str, argument: str, change: Change, expected: str, got: str, blamed: str = "") -> ErrorCase:
    """Contents, sizes, numbers that do not fit; ``blamed`` is what the message names, if not the argument that was changed."""
    return ErrorCase(name, put(argument, change), ValueError, f"{blamed or argument}: expected {expected}, got {got}")


def wrong_shape(name: str, argument: str, change: Change, expected: str, got: str, blamed: str = "") -> ErrorCase:
    return wrong_value(name, argument, change, f"shape {expected}", got, blamed)


def wrong_device(name: str, argument: str, first: str) -> ErrorCase:
    """The argument on the meta device, the others where they were; ``first`` is the one whose device counts."""
    return wrong_value(name, argument, lambda t: t.to("meta"), f"device {{device}} (that of {first})", "meta")


def wrong_type(name: str, argument: str, change: Change, expected: str, got: str) -> ErrorCase:
    """A dtype or a Python type that does not fit."""
    return ErrorCase(name, put(argument, change), TypeError, f"{argument}: expected {expected}, got {got}")


class Named(ErrorCase):
    """``message`` is the argument's name: the text begins with it, and the rest is left open."""

    def check(self, call: Callable[[], Any], device: str) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert str(caught.value).startswith(f"{self.message}: expected "), caught.value
        assert caught.type is self.exception, repr(caught.value)


def refused(name: str, argument: str, change: Change, exception: type[Exception] = ValueError) -> Named:
    return Named(name, put(argument, change), exception, argument)
