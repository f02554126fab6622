# SPDX-License-Identifier: Apache-2.0
"""Gradients: numerical check in fp64, fp32 against it, zero rows, and agreement of the backward routes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_core import get_last_dispatch_report
from muspace_core.testing.calls import as_tensors, on_backend, represented, upstream_gradient
from muspace_core.testing.compare import assert_close, assert_unbiased
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.routes import assert_routes_agree
from muspace_msda import multi_scale_deformable_attn

oracle = load_sibling(__file__, "oracle")
inputs = load_sibling(__file__, "inputs")
_call = on_backend(multi_scale_deformable_attn)


def _tensors(arguments: dict[str, np.ndarray], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return list(as_tensors(arguments, device, dtype).values())


@pytest.mark.backends("cpu", "emu", "cuda", "hip", "reference")
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 30, 32])
def test_gradcheck(channels: int, backend: str, device: str) -> None:
    small = channels > 4 or backend == "emu"
    arguments = inputs.attention(
        f"check{channels}", batch=1 if small else 2, queries=1 if small else 2, heads=1 if small else 2, channels=channels,
        shapes=((2, 2),) if small else ((3, 2), (2, 2)), points=1 if backend == "emu" and channels > 4 else 2,
    )  # fmt: skip
    # A step of the check must not cross a cell boundary.
    assert not oracle.near_boundary(arguments["sampling_locations"], arguments["spatial_shapes"], 1e-5).any()
    value, shapes, level_starts, locations, weights = _tensors(arguments, torch.float64, device)
    leaves = tuple(t.requires_grad_() for t in (value, locations, weights))
    torch.autograd.gradcheck(
        lambda v, at, w: _call(backend, v, shapes, level_starts, at, w), leaves, eps=1e-6, atol=1e-6, rtol=1e-4,
        nondet_tol=0.0 if backend in ("cpu", "reference") else 1e-12,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_no_bias(dtype: torch.dtype, backend: str, device: str) -> None:
    """A factor slightly wrong passes a loose 16-bit tolerance but not the mean of the signed differences."""
    arguments = inputs.attention("bias", queries=6 if backend == "emu" else 60, channels=16, shapes=((7, 9),), points=4)
    given = _tensors(arguments, dtype, device)
    leaves = [given[i].requires_grad_() for i in (0, 3, 4)]
    output = _call(backend, *given)
    grad_output = upstream_gradient(output, 4)
    found = torch.autograd.grad(output, leaves, grad_output)
    exact = [represented(t) for t in given]
    wanted = oracle.backward(represented(grad_output), *exact)
    for gradient, expected in zip(found, (wanted.grad_value, wanted.grad_locations, wanted.grad_weights), strict=True):
        assert_unbiased(gradient, expected, 1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.warp_sensitive
@pytest.mark.parametrize("channels", [8, 32])
def test_rows_without_upstream_gradient(channels: int, backend: str, device: str) -> None:
    """Whole queries with a zero gradient (padding of a re-batched camera) cost nothing and change nothing."""
    arguments = inputs.attention("padding", queries=9, channels=channels, shapes=((5, 6),), points=4)
    given = _tensors(arguments, torch.float32, device)
    leaves = [given[i].requires_grad_() for i in (0, 3, 4)]
    output = _call(backend, *given)
    grad_output = torch.zeros_like(output)
    kept = [0, 4, 8]
    grad_output[:, kept] = torch.from_numpy(np.random.default_rng(6).standard_normal((1, 3, 2 * channels))).to(output)
    found = torch.autograd.grad(output, leaves, grad_output)
    exact = [represented(t) for t in given]
    wanted = oracle.backward(represented(grad_output), *exact)
    for gradient, expected in zip(found, (wanted.grad_value, wanted.grad_locations, wanted.grad_weights), strict=True):
        assert_close(gradient, expected, 1e-5)
    silent = [q for q in range(9) if q not in kept]
    assert (found[1][:, silent] == 0).all() and (found[2][:, silent] == 0).all()


@pytest.mark.warp_sensitive
@pytest.mark.parametrize("name", ["tiny", "d32", "d30_h3", "one_cell", "self_attention", "d128"])
def test_the_ordered_route_agrees(name: str, backend: str, device: str) -> None:
    """The bit-reproducible backward and the default one are the same sums."""
    case = next(c for c in inputs.CASES if c.name == name)

    def forward() -> tuple[torch.Tensor, list[torch.Tensor]]:
        given = _tensors(case.build(), torch.float32, device)
        leaves = [given[i].requires_grad_() for i in (0, 3, 4)]
        return _call(backend, *given), leaves

    assert_routes_agree(forward, torch.ones_like, backend)


@pytest.mark.backends("emu", "cuda", "hip", "musa")
@pytest.mark.parametrize(
    ("dtype", "channels", "route"),
    [
        (torch.float32, 32, "block_sorted"),
        (torch.bfloat16, 32, "block_sorted"),
        (torch.float16, 64, "block_sorted"),
        (torch.float32, 136, "general"),
        (torch.float64, 32, "general"),
    ],
    ids=str,
)
def test_backward_route(dtype: torch.dtype, channels: int, route: str, backend: str, device: str) -> None:
    """Block-sorted sums up to 128 channels in the three storage types; plain atomics elsewhere."""
    if dtype == torch.float64 and backend == "musa":
        pytest.skip("musa has no float64")
    given = _tensors(inputs.attention("route", queries=2, heads=1, channels=channels, shapes=((3, 3),)), dtype, device)
    given[0].requires_grad_()
    _call(backend, *given)
    report = get_last_dispatch_report()
    assert report is not None and report.route.partition("+")[2] == route


def test_gradient_of_a_batch_is_that_of_its_items(backend: str, device: str) -> None:
    arguments = inputs.attention("items", batch=3, channels=8)
    value, shapes, level_starts, locations, weights = _tensors(arguments, torch.float32, device)
    together = [t.clone().requires_grad_() for t in (value, locations, weights)]
    _call(backend, together[0], shapes, level_starts, together[1], together[2]).sum().backward()
    for b in range(3):
        alone = [t[b : b + 1].clone().requires_grad_() for t in (value, locations, weights)]
        _call(backend, alone[0], shapes, level_starts, alone[1], alone[2]).sum().backward()
        for left, right in zip(together, alone, strict=True):
            assert_close(left.grad[b : b + 1], right.grad, 1e-6)
