# SPDX-License-Identifier: Apache-2.0
"""Gradients of deformable_aggregation: numerical check in fp64, both backward routes, anchors that see nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_core.testing.calls import as_tensors, on_backend, represented, upstream_gradient
from muspace_core.testing.compare import assert_bits_equal, assert_close, assert_unbiased
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.routes import assert_routes_agree
from muspace_msda import deformable_aggregation

oracle = load_sibling(__file__, "deformable_aggregation_oracle")
inputs = load_sibling(__file__, "deformable_aggregation_inputs")
_call = on_backend(deformable_aggregation)
LEAVES = (0, 3, 4)


def _tensors(arguments: dict[str, np.ndarray], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return list(as_tensors(arguments, device, dtype).values())


@pytest.mark.backends("cpu", "reference")
@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (4, 2), (6, 3), (8, 8), (12, 1), (32, 4)])
def test_gradcheck(channels: int, groups: int, backend: str) -> None:
    small = channels > 8
    arguments = inputs.aggregation(
        f"check{channels}", batch=1 if small else 2, anchors=2, points=1 if small else 2, channels=channels, groups=groups,
        maps=(((2, 2),), ((1, 2),)) if small else inputs.TWO_CAMERAS,
    )  # fmt: skip
    # A step of the check must cross neither a cell boundary nor the border of the window.
    locations = arguments["sampling_location"]
    assert not oracle.near_cell_boundary(locations, arguments["spatial_shape"], 1e-4).any()
    assert (np.abs(locations) > 1e-4).all() and (np.abs(locations - 1) > 1e-4).all()
    feat, shapes, starts, at, weights = _tensors(arguments, torch.float64, "cpu")
    leaves = tuple(t.requires_grad_() for t in (feat, at, weights))
    torch.autograd.gradcheck(
        lambda f, a, w: _call(backend, f, shapes, starts, a, w), leaves, eps=1e-6, atol=1e-6, rtol=1e-4, nondet_tol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_no_bias(dtype: torch.dtype, backend: str, device: str) -> None:
    """A factor slightly wrong passes a loose 16-bit tolerance but not the mean of the signed differences."""
    arguments = inputs.aggregation("bias", anchors=4 if backend == "emu" else 40, points=5, channels=16, groups=4)
    given = _tensors(arguments, dtype, device)
    leaves = [given[i].requires_grad_() for i in LEAVES]
    output = _call(backend, *given)
    grad_output = upstream_gradient(output, 4)
    found = torch.autograd.grad(output, leaves, grad_output)
    exact = [represented(t) for t in given]
    wanted = oracle.backward(represented(grad_output), *exact)
    for gradient, expected in zip(found, (wanted.grad_feat, wanted.grad_location, wanted.grad_weights), strict=True):
        assert_unbiased(gradient, expected, 1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.warp_sensitive
@pytest.mark.emu_budget(2_000_000)
@pytest.mark.parametrize(
    "name", ["tiny", "c256_g8", "c1_g1", "c33_g3", "c136_g2", "one_cell", "ring", "border", "points_67", "nothing_seen"]
)
def test_the_ordered_route_agrees(name: str, backend: str, device: str) -> None:
    """The bit-reproducible backward and the default one are the same sums; both match the oracle elsewhere."""
    case = next(c for c in inputs.CASES if c.name == name)

    def forward() -> tuple[torch.Tensor, list[torch.Tensor]]:
        given = _tensors(case.build(), torch.float32, device)
        leaves = [given[i].requires_grad_() for i in LEAVES]
        return _call(backend, *given), leaves

    (_, default), (_, ordered), _ = assert_routes_agree(forward, torch.ones_like, backend)
    # Locations and weights are summed in a fixed order by either route.
    for position in (1, 2):
        if backend != "reference":
            assert_bits_equal(ordered[position], default[position], "gradient without the features' atomics")


@pytest.mark.warp_sensitive
def test_anchors_that_see_nothing(backend: str, device: str) -> None:
    """Their output and every gradient of theirs are exact zeros, whatever their neighbours do."""
    arguments = inputs.aggregation("blind", anchors=6, points=3, channels=32, groups=4, locations=inputs.inside)
    blind = [1, 2, 5]
    arguments["sampling_location"][:, blind] += 1.0
    given = _tensors(arguments, torch.float32, device)
    leaves = [given[i].requires_grad_() for i in LEAVES]
    output = _call(backend, *given)
    assert (output[:, blind] == 0).all() and (output[:, [0, 3, 4]] != 0).all()
    of_feat, of_location, of_weights = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert (of_location[:, blind] == 0).all() and (of_weights[:, blind] == 0).all()
    kept = [0, 3, 4]
    alone = [t.detach() if i not in (3, 4) else t.detach()[:, kept] for i, t in enumerate(given)]
    alone_leaves = [alone[i].requires_grad_() for i in LEAVES]
    (wanted,) = torch.autograd.grad(_call(backend, *alone).sum(), [alone_leaves[0]])
    assert_close(of_feat, wanted, 1e-6)


def test_gradient_of_a_batch_is_that_of_its_items(backend: str, device: str) -> None:
    arguments = inputs.aggregation("items", batch=3, channels=8)
    given = _tensors(arguments, torch.float32, device)
    together = [given[i].requires_grad_() for i in LEAVES]
    output = _call(backend, *given)
    output.sum().backward()
    for b in range(3):
        alone = [t.detach()[b : b + 1].clone() if i in LEAVES else t for i, t in enumerate(given)]
        leaves = [alone[i].requires_grad_() for i in LEAVES]
        single = _call(backend, *alone)
        assert_bits_equal(single, output[b : b + 1])
        single.sum().backward()
        for left, right in zip(together, leaves, strict=True):
            assert_close(left.grad[b : b + 1], right.grad, 1e-6)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_weight_gradient_is_summed_over_its_group(groups: int, backend: str, device: str) -> None:
    """Features of one, upstream gradient of small integers: each weight gets the exact sum over its channels."""
    arguments = inputs.aggregation("sum", anchors=1, points=1, channels=16, groups=groups, maps=(((3, 3),),))
    arguments["mc_ms_feat"][:] = 1.0
    arguments["sampling_location"][:] = 0.5
    given = _tensors(arguments, torch.float32, device)
    leaf = given[4].requires_grad_()
    upstream = torch.arange(16.0, device=device).reshape(1, 1, 16)
    (gradient,) = torch.autograd.grad(_call(backend, *given), [leaf], upstream)
    assert gradient.reshape(-1).tolist() == upstream.reshape(groups, -1).sum(-1).tolist()


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("name", ["ring", "one_cell", "many"])
def test_cpu_gradients_repeat_for_every_thread_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in inputs.CASES if c.name == name)
    found = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("MUSPACE_NUM_THREADS", threads)
        given = _tensors(case.build(), torch.float32, "cpu")
        leaves = [given[i].requires_grad_() for i in LEAVES]
        found.append(torch.autograd.grad(_call("cpu", *given).square().sum(), leaves))
    for other in found[1:]:
        for left, right in zip(other, found[0], strict=True):
            assert_bits_equal(left, right)
