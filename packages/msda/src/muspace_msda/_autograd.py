# SPDX-License-Identifier: Apache-2.0
"""Registration of the operators of this wheel with torch."""

from __future__ import annotations

from typing import Any

import torch
from muspace_core.dispatch import Dispatcher
from muspace_core.register import register

from muspace_msda._native import LIBRARY, deformable_aggregation as aggregation, multi_scale_deformable_attn as attention
from muspace_msda._spec import DEFORMABLE_AGGREGATION, MULTI_SCALE_DEFORMABLE_ATTN


def _fake_attention(value: torch.Tensor, _shapes: Any, _starts: Any, sampling_locations: torch.Tensor, *_: Any) -> torch.Tensor:
    return value.new_empty(value.shape[0], sampling_locations.shape[1], value.shape[2] * value.shape[3])


def _fake_attention_backward(_grad_output: Any, value: torch.Tensor, *rest: Any) -> attention.Gradients:
    _shapes, _starts, sampling_locations, attention_weights, *_ = rest
    return (
        value.new_empty(value.shape),
        sampling_locations.new_empty(sampling_locations.shape),
        attention_weights.new_empty(attention_weights.shape),
    )


multi_scale_deformable_attn = register(
    MULTI_SCALE_DEFORMABLE_ATTN,
    forward=attention.forward,
    backward=attention.backward,
    fake_forward=_fake_attention,
    fake_backward=_fake_attention_backward,
    tensor_count=5,
    differentiable=(0, 3, 4),
)


def _fake_aggregation(mc_ms_feat: torch.Tensor, _shape: Any, _starts: Any, location: torch.Tensor, *_: Any) -> torch.Tensor:
    return mc_ms_feat.new_empty(mc_ms_feat.shape[0], location.shape[1], mc_ms_feat.shape[2])


def _fake_aggregation_backward(_grad_output: Any, mc_ms_feat: torch.Tensor, *rest: Any) -> aggregation.Gradients:
    _shape, _starts, location, weights, *_ = rest
    return (
        mc_ms_feat.new_empty(mc_ms_feat.shape),
        location.new_empty(location.shape),
        weights.new_empty(weights.shape),
    )


deformable_aggregation = register(
    DEFORMABLE_AGGREGATION,
    forward=aggregation.forward,
    backward=aggregation.backward,
    fake_forward=_fake_aggregation,
    fake_backward=_fake_aggregation_backward,
    tensor_count=5,
    differentiable=(0, 3, 4),
)

#: By operator name.
DISPATCHERS = {
    spec.name: Dispatcher(spec, LIBRARY, route)
    for spec, route in ((MULTI_SCALE_DEFORMABLE_ATTN, attention.route), (DEFORMABLE_AGGREGATION, aggregation.route))
}
