# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool and flash_bevpool_sca on the backend under test, called with a table of their arguments."""

from __future__ import annotations

from typing import Any

import torch
from muspace_bevpool import flash_bevpool, flash_bevpool_sca
from muspace_core.testing.calls import on_backend
from muspace_core.testing.cases import Arguments

#: Arguments of flash_bevpool_sca by position; the others are by keyword alone.
SCA_TENSORS = ("image_feats", "projection_matrices", "sampling_offsets", "attention_weights")


def flash(under_test: str, arguments: Arguments, **keywords: Any) -> torch.Tensor:
    return on_backend(flash_bevpool)(under_test, *arguments.values(), **keywords)


def sca(under_test: str, arguments: Arguments, **keywords: Any) -> torch.Tensor:
    named = {name: value for name, value in arguments.items() if name not in SCA_TENSORS}
    return on_backend(flash_bevpool_sca)(under_test, *[arguments[name] for name in SCA_TENSORS], **named, **keywords)
