# SPDX-License-Identifier: Apache-2.0
"""Offsets beyond 2**31 elements, in memory that is reserved and barely touched."""

from __future__ import annotations

import pytest
import torch
from muspace_core.testing import large
from muspace_msda import multi_scale_deformable_attn

pytestmark = pytest.mark.backends("cpu", "emu", "cuda", "hip")


def _large_value(device: str, batch: int) -> tuple[list, int]:
    """bf16 value of more than 2**31 elements, one row set; a query that looks at exactly this row."""
    side, heads, channels = 1100, 8, 256
    rows = side * side
    if batch > 1:
        side, rows = 700, 700 * 700
    value = large.zeros((batch, rows, heads, channels), torch.bfloat16, device)
    assert value.numel() > 2**31
    value[-1, rows - 1, heads - 1] = 1.0
    locations = torch.full((batch, 2, heads, 1, 1, 2), 0.25, device=device)
    locations[:, 1] = (side - 0.5) / side
    weights = torch.ones(batch, 2, heads, 1, 1, device=device)
    return [value, torch.tensor([[side, side]], device=device), None, locations, weights], channels


@pytest.mark.parametrize("batch", [1, 3])
def test_forward_with_a_large_value(batch: int, backend: str, device: str) -> None:
    large.needs(8, device)
    arguments, channels = _large_value(device, batch)
    output = multi_scale_deformable_attn(*arguments)
    # The other gradients do not need value's; only the samples are touched.
    expected = torch.zeros_like(output)
    expected[-1, 1, -channels:] = 1.0
    # (side - 0.5) / side in fp32 is the last pixel's centre up to the rounding of the quotient.
    assert (output.float() - expected.float()).abs().max() <= 1e-2


@pytest.mark.slow
def test_backward_with_a_large_value(backend: str, device: str) -> None:
    if backend == "emu":
        pytest.skip("the zero-fill alone exceeds an emulated test's budget")
    large.needs(21, device, "5 for value, 10 for its fp32 gradient, 5 for the bf16 one")
    arguments, channels = _large_value(device, 1)
    arguments[0].requires_grad_(), arguments[3].requires_grad_(), arguments[4].requires_grad_()
    output = multi_scale_deformable_attn(*arguments)
    grad_value, grad_locations, grad_weights = torch.autograd.grad(output.sum(), [arguments[i] for i in (0, 3, 4)])
    last = grad_value[0, -1, -1]
    assert (last.float() - 1).abs().max() <= 1e-2
    assert grad_value[0, -2, 0].float().abs().max() <= 1e-2
    assert abs(float(grad_weights[0, 1, -1]) - channels) <= 1
    assert torch.isfinite(grad_locations).all()


@pytest.mark.slow
def test_forward_with_many_locations(backend: str, device: str) -> None:
    """More than 2**31 location numbers: 4.3 GB in fp16, and the last query decides."""
    if backend == "emu":
        pytest.skip("2**30 samples are beyond an emulated test's budget")
    large.needs(10, device)
    queries, points = 2**22 + 8, 256
    locations = large.zeros((1, queries, 1, 1, points, 2), torch.float16, device)
    weights = large.zeros((1, queries, 1, 1, points), torch.float16, device)
    assert locations.numel() > 2**31
    locations[0, -1] = 0.5
    weights[0, -1] = 1 / points
    value = torch.full((1, 4, 1, 1), 3.0, device=device)
    output = multi_scale_deformable_attn(value, [[2, 2]], None, locations, weights)
    assert output[0, -1, 0] == 3.0 and (output[0, :-1] == 0).all()


def test_shapes_beyond_two_to_the_31_under_fake_tensors() -> None:
    """Shape arithmetic alone: nothing is allocated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        value = torch.empty(300, 40000, 8, 32, dtype=torch.bfloat16)
        assert value.numel() > 2**31
        locations = torch.empty(300, 40000, 8, 1, 16, 2)
        assert locations.numel() > 2**31
        value.requires_grad_()
        output = multi_scale_deformable_attn(
            value, torch.empty(1, 2, dtype=torch.int64), torch.empty(1, dtype=torch.int64), locations,
            torch.empty(300, 40000, 8, 1, 16),
        )  # fmt: skip
        assert output.shape == (300, 40000, 256)
        (gradient,) = torch.autograd.grad(output.sum(), [value])
        assert gradient.shape == value.shape and gradient.dtype == torch.bfloat16
