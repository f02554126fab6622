# SPDX-License-Identifier: Apache-2.0
"""Registration of the operators of this wheel with torch."""

from __future__ import annotations

from typing import Any

import torch
from muspace_core.dispatch import Dispatcher
from muspace_core.register import register

from muspace_msda import _native
from muspace_msda._spec import MULTI_SCALE_DEFORMABLE_ATTN


def _fake_forward(value: torch.Tensor, _shapes: Any, _starts: Any, sampling_locations: torch.Tensor, *_: Any) -> torch.Tensor:
    return value.new_empty(value.shape[0], sampling_locations.shape[1], value.shape[2] * value.shape[3])


def _fake_backward(_grad_output: Any, value: torch.Tensor, *rest: Any) -> _native.Gradients:
    _shapes, _starts, sampling_locations, attention_weights, *_ = rest
    return (
        value.new_empty(value.shape),
        sampling_locations.new_empty(sampling_locations.shape),
        attention_weights.new_empty(attention_weights.shape),
    )


multi_scale_deformable_attn = register(
    MULTI_SCALE_DEFORMABLE_ATTN,
    forward=_native.forward,
    backward=_native.backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    tensor_count=5,
    differentiable=(0, 3, 4),
)
dispatcher = Dispatcher(MULTI_SCALE_DEFORMABLE_ATTN, _native.LIBRARY, _native.route)
