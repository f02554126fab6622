# SPDX-License-Identifier: Apache-2.0
"""Argument checks: one message shape, the right exception class."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from muspace_core import checks, environment

ROWS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("attempt", "exception", "message"),
    [
        (lambda: checks.tensors(value=[1]), TypeError, "value: expected a torch.Tensor, got list"),
        (lambda: checks.tensors(weights=ROWS, value=None), TypeError, "value: expected a torch.Tensor, got NoneType"),
        (lambda: checks.tensors(value=np.zeros(2)), TypeError, "value: expected a torch.Tensor, got ndarray"),
        (
            lambda: checks.layout(weights=ROWS, value=ROWS.to_sparse()),
            ValueError,
            "value: expected a strided tensor, got layout sparse_coo",
        ),
        (lambda: checks.rank("value", ROWS, "B S H"), ValueError, "value: expected shape [B, S, H], got [2, 3]"),
        (lambda: checks.shape("value", ROWS, "B S", (2, 4)), ValueError, "value: expected shape [B, S] = [2, 4], got [2, 3]"),
        (
            lambda: checks.dtype("value", ROWS, (torch.float16, torch.bfloat16)),
            TypeError,
            "value: expected dtype float16, bfloat16, got float32",
        ),
        (
            lambda: checks.same_device("weights", ROWS.to("meta"), "value", torch.device("cpu")),
            ValueError,
            "weights: expected device cpu (that of value), got meta",
        ),
    ],
)
def test_messages(attempt: Callable[[], Any], exception: type[Exception], message: str) -> None:
    with pytest.raises(exception) as caught:
        attempt()
    assert str(caught.value) == message and type(caught.value) is exception


def test_right_arguments_pass() -> None:
    checks.tensors(value=ROWS, weights=torch.nn.Parameter(ROWS))
    checks.layout(value=ROWS, weights=torch.nn.Parameter(ROWS))
    checks.rank("value", ROWS, "B S")
    checks.shape("value", ROWS, "B S", (2, 3))
    checks.dtype("value", ROWS, (torch.float32,))
    checks.same_device("value", ROWS, "value", torch.device("cpu"))


@pytest.mark.parametrize(("text", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_switches_are_read_at_every_call(text: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is None:
        monkeypatch.delenv("MUSPACE_CHECK", raising=False)
    else:
        monkeypatch.setenv("MUSPACE_CHECK", text)
    assert environment.CHECK.enabled() is on
    assert environment.CHECK.value() == (text or "")


@pytest.mark.skipif(os.name != "posix", reason="environment variables are text here")
def test_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is bytes: whatever is in it, reading a variable never raises."""
    for variable in environment.VARIABLES:
        monkeypatch.setenv(variable.name, os.fsdecode(b"/srv/caf\xe9"))
        assert os.fsencode(variable.value()) == b"/srv/caf\xe9" and variable.enabled()


def test_every_variable_is_documented() -> None:
    for variable in environment.VARIABLES:
        assert variable.name.startswith("MUSPACE_") and len(variable.effect) > 20
