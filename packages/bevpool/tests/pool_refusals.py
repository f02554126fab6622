# SPDX-License-Identifier: Apache-2.0
"""Builders of the calls that the pooling operators must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from muspace_core.testing.cases import Arguments, ErrorCase


@dataclass(frozen=True)
class Refusal(ErrorCase):
    """``message`` is the exact text, or the argument's name alone: then the text begins with it."""

    def check(self, call: Callable[[], Any], device: str) -> None:
        if ":" in self.message:
            super().check(call, device)
            return
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert str(caught.value).startswith(f"{self.message}: expected "), caught.value
        assert caught.type is self.exception, repr(caught.value)


def put(argument: str, change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    def apply(tensors: Arguments) -> None:
        tensors[argument] = change(tensors[argument])

    return apply


def wrong_value(name: str, argument: str, change: Callable[[Any], Any], message: str = "") -> Refusal:
    """A shape, size, device or content that does not fit."""
    return Refusal(name, put(argument, change), ValueError, message or argument)


def wrong_type(name: str, argument: str, change: Callable[[Any], Any], message: str = "") -> Refusal:
    """A dtype or a Python type that does not fit."""
    return Refusal(name, put(argument, change), TypeError, message or argument)
