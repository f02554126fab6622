# SPDX-License-Identifier: Apache-2.0
"""Gradients of flash_bevpool: numerical check in fp64, autograd of the reference, both backward routes, 16-bit bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from muspace_core.testing.calls import as_tensors, represented, upstream_gradient
from muspace_core.testing.compare import assert_bits_equal, assert_close, assert_unbiased
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.routes import assert_routes_agree

oracle = load_sibling(__file__, "flash_bevpool_oracle")
inputs = load_sibling(__file__, "flash_bevpool_inputs")
_call = load_sibling(__file__, "flash_calls").flash
F, D, P = "image_feats", "depth_params", "projection_matrices"
BOTH = pytest.mark.parametrize("distribution", [0, 1], ids=["gaussian", "laplace"])
#: The project's own goal for fp32, below what the spec allows.
OUTPUT, GRADIENT = 1e-5, 5e-5


def _tensors(arguments: dict[str, Any], dtype: torch.dtype, device: str, depth: torch.dtype | None = None) -> dict[str, Any]:
    made = as_tensors(arguments, device, dtype, **{D: depth or dtype})
    made[F].requires_grad_(), made[D].requires_grad_()
    return made


def _exact(given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    return *(represented(given[k]) for k in (F, D, P)), oracle.View.of(given)


@pytest.mark.backends("cpu", "reference")
@BOTH
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_gradcheck(channels: int, distribution: int, backend: str) -> None:
    arguments = inputs.lift(
        f"check{channels}", size=(3, 4), channels=channels, grid=(3, 3, 2), distribution=distribution, threshold=1e-3
    )
    given = _tensors(arguments, torch.float64, "cpu")
    # A step of the check must cross neither the threshold nor the kink.
    assert oracle.close_calls(*_exact(given)[1:], slack=1e-5) == 0
    torch.autograd.gradcheck(
        lambda f, d: _call(backend, given | {F: f, D: d}), (given[F], given[D]), eps=1e-6, atol=1e-6, rtol=1e-4, nondet_tol=0.0
    )


@pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")
@BOTH
def test_against_autograd_of_the_reference(distribution: int, backend: str, device: str) -> None:
    """The reference is a composition of torch operators: its gradient owes nothing to a formula of ours."""
    name = "laplace" if distribution else "threshold"
    arguments = next(c for c in inputs.CASES if c.name == name).build()
    dtype = torch.float64 if backend == "cpu" else torch.float32
    given = _tensors(arguments, dtype, device)
    output = _call(backend, given)
    grad_output = upstream_gradient(output)
    found = torch.autograd.grad(output, [given[F], given[D]], grad_output)
    exact = _tensors(arguments, dtype, "cpu")
    exact = exact | {k: exact[k].detach().double().requires_grad_() for k in (F, D)}
    wanted = _call("reference", exact)
    assert_close(output, wanted, 1e-12 if backend == "cpu" else OUTPUT, "output")
    gradients = torch.autograd.grad(wanted, [exact[F], exact[D]], grad_output.cpu().double())
    for name, left, right in zip((F, D), found, gradients, strict=True):
        assert_close(left, right, 1e-11 if backend == "cpu" else GRADIENT, f"gradient of {name}")
    # Mean and sigma are told apart (upstream gives both the same number).
    assert float((found[1][..., 0] - found[1][..., 1]).abs().max()) > 0.1 * float(found[1].abs().max())


@pytest.mark.warp_sensitive
@pytest.mark.emu_budget(1_000_000)
@pytest.mark.parametrize("name", ["tiny", "laplace", "c33", "pairs_80", "threshold", "rectangular", "one_row", "one_pixel"])
def test_both_routes_meet_the_goal(name: str, backend: str, device: str) -> None:
    """The bit-reproducible backward and the default one are the same sums, tighter than the spec's tolerances."""
    case = next(c for c in inputs.CASES if c.name == name)

    def forward() -> tuple[torch.Tensor, list[torch.Tensor]]:
        given = _tensors(case.build(), torch.float32, device)
        return _call(backend, given), [given[F], given[D]]

    runs = assert_routes_agree(forward, upstream_gradient, backend)
    exact = _exact(_tensors(case.build(), torch.float32, "cpu"))
    wanted = oracle.backward(represented(upstream_gradient(runs[0][0])), *exact)
    for output, gradients in runs:
        assert_bits_equal(output, runs[0][0])
        assert_close(output, wanted[0], OUTPUT, "output")
        for what, left, right in zip((F, D), gradients, wanted[1:], strict=True):
            assert_close(left, right, GRADIENT, f"gradient of {what}")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_no_bias(dtype: torch.dtype, distribution: int, backend: str, device: str) -> None:
    """16-bit features with fp32 depths: a factor slightly wrong shows in the mean of the signed differences."""
    grid = (5, 4, 2) if backend == "emu" else (12, 10, 3)
    given = _tensors(inputs.lift("bias", channels=8, grid=grid, distribution=distribution), dtype, device, depth=torch.float32)
    output = _call(backend, given)
    grad_output = upstream_gradient(output)
    found = torch.autograd.grad(output, [given[F], given[D]], grad_output)
    wanted = oracle.backward(represented(grad_output), *_exact(given))
    for gradient, expected in zip(found, wanted[1:], strict=True):
        assert_unbiased(gradient, expected, 1e-5 if gradient.dtype == torch.float32 else 1e-3)


def test_geometry_gets_no_gradient(backend: str, device: str) -> None:
    given = _tensors(inputs.lift("geometry"), torch.float32, device)
    given[P].requires_grad_()
    output = _call(backend, given)
    wanted = torch.autograd.grad(output.sum(), [given[F], given[D]], retain_graph=True)
    of_projection = torch.autograd.grad(output.sum(), [given[P]], allow_unused=True, retain_graph=True)[0]
    assert of_projection is None or bool((of_projection == 0).all())
    output.sum().backward()
    for left, right in zip((given[F].grad, given[D].grad), wanted, strict=True):
        assert_close(left, right, 1e-6)
    plain = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    if backend != "reference":
        assert not _call(backend, plain | {P: given[P]}).requires_grad, "nothing that gets a gradient asks for one"


@BOTH
def test_collisions(distribution: int, backend: str, device: str) -> None:
    """Every cell of the grid looks at the same pixel: the worst case of the scatter, in exact numbers."""
    given = inputs.flat(
        np.arange(1.0, 7).reshape(2, 3, 1), np.broadcast_to(np.array([1.0, 0.75]), (2, 3, 2)), (0, 1, 8), (0, 1, 8),
        epsilon=0.25, depth_distribution=distribution,
    )  # fmt: skip
    given[P] = np.array([[[[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1]]]], np.float32)
    weight = 1.0 if distribution == 0 else 0.5
    live = _tensors(given, torch.float32, device)
    output = _call(backend, live)
    assert (output == 5.0 * weight).all()
    of_feats, of_depth = torch.autograd.grad(output.sum(), [live[F], live[D]])
    assert of_feats.reshape(-1).tolist() == [0, 0, 0, 0, 64 * weight, 0]
    assert of_depth.reshape(-1, 2).tolist() == [[0, 0]] * 4 + [[0, -64 * 5 * weight]] + [[0, 0]]


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("name", ["ring", "pairs_80"])
def test_cpu_gradients_repeat_for_every_thread_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in inputs.CASES if c.name == name)
    found = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("MUSPACE_NUM_THREADS", threads)
        given = _tensors(case.build(), torch.float32, "cpu")
        output = _call("cpu", given)
        found.append((output.detach(), *torch.autograd.grad(output.square().sum(), [given[F], given[D]])))
    for other in found[1:]:
        for left, right in zip(other, found[0], strict=True):
            assert_bits_equal(left, right)
