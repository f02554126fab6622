# SPDX-License-Identifier: Apache-2.0
"""The library's own exports, without the Python layer: it re-checks its arguments and drops what does not fit.

A device never tells the host what a level's shape is, so the kernels themselves must refuse to leave value's memory.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from muspace_core.device import launch_context
from muspace_core.loader import NativeLibrary
from muspace_core.testing.calls import as_tensors, represented
from muspace_core.testing.compare import assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_msda._spec import MULTI_SCALE_DEFORMABLE_ATTN

oracle = load_sibling(__file__, "oracle")
inputs = load_sibling(__file__, "inputs")

LIBRARY = NativeLibrary("muspace_msda", "msda")
FORWARD = "multi_scale_deformable_attn_forward"
BACKWARD = "multi_scale_deformable_attn_backward"
WORKSPACE = "multi_scale_deformable_attn_workspace"
#: forward route, backward route
ROUTES = {"general": (0, 0), "fast": (1, 1), "ordered": (0, 2)}

pytestmark = pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")


@pytest.fixture(params=ROUTES)
def routes(request: pytest.FixtureRequest) -> tuple[int, int]:
    return ROUTES[request.param]


def _call(
    backend: str, tensors: list[torch.Tensor], routes: tuple[int, int], grad_output: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Output and the three gradients, into memory that held NaN before."""
    value, shapes, _, locations, weights = tensors
    batch, queries, heads = locations.shape[:3]
    context = launch_context(backend, value.device)
    output = torch.full((batch, queries, heads * value.shape[3]), float("nan"), dtype=value.dtype, device=value.device)
    LIBRARY.function(backend, FORWARD)(output, *tensors, routes[0], context)
    grad_output = torch.ones_like(output) if grad_output is None else grad_output
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    gradients = [torch.full(t.shape, float("nan"), dtype=d, device=t.device) for t, d in (
        (value, wide), (locations, locations.dtype), (weights, weights.dtype))]  # fmt: skip
    size = LIBRARY.function(backend, WORKSPACE)(
        batch, value.shape[1], heads, value.shape[3], queries, shapes.shape[0], locations.shape[4], routes[1]
    )
    workspace = torch.empty(size, dtype=torch.uint8, device=value.device)
    LIBRARY.function(backend, BACKWARD)(*gradients, grad_output, *tensors, workspace, routes[1], context)
    return (output, *gradients)


def _tensors(device: str, **changes: Any) -> list[torch.Tensor]:
    arguments = inputs.attention("native", queries=4, channels=32, shapes=((4, 5), (2, 3)), points=4) | changes
    return list(as_tensors(arguments, device).values())


def test_abi_info(backend: str, device: str) -> None:
    fields = dict(field.split("=", 1) for field in LIBRARY.abi_info(backend).split(";"))
    assert fields["muspace-abi"] == "1" and fields["family"] == "msda" and fields["backend"] == backend
    assert fields["ffi"] and "arch" in fields


def test_every_route_matches_the_oracle(routes: tuple[int, int], backend: str, device: str) -> None:
    tensors = _tensors(device)
    grad_output = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 4, 64))).float().to(device)
    found = _call(backend, tensors, routes, grad_output)
    wanted = oracle.backward(represented(grad_output), *[represented(t) for t in tensors])
    for array, expected in zip(
        found, (wanted.output, wanted.grad_value, wanted.grad_locations, wanted.grad_weights), strict=True
    ):
        assert_close(array, expected, 1e-5)


def test_no_starts_means_the_running_sum(routes: tuple[int, int], backend: str, device: str) -> None:
    tensors = _tensors(device)
    wanted = _call(backend, tensors, routes)
    tensors[2] = torch.empty(0, dtype=torch.int64, device=device)
    for found, expected in zip(_call(backend, tensors, routes), wanted, strict=True):
        assert_close(found, expected, 1e-6)


BIG = 1 << 32
BAD_LEVELS = {
    "negative height": ([[-4, 5], [2, 3]], [0, 20]),
    "both negative": ([[-4, -5], [2, 3]], [0, 20]),
    "zero width": ([[4, 0], [2, 3]], [0, 20]),
    "beyond the end": ([[4, 5], [2, 3]], [7, 20]),
    "just beyond the end": ([[4, 5], [2, 3]], [7, 20]),
    "far beyond the end": ([[4000, 5000], [2, 3]], [0, 20]),
    "negative start": ([[4, 5], [2, 3]], [-1, 20]),
    "very negative start": ([[4, 5], [2, 3]], [-(1 << 62), 20]),
    "very late start": ([[4, 5], [2, 3]], [(1 << 63) - 1, 20]),
    "32-bit wrap": ([[(1 << 31) + 1, 1], [2, 3]], [0, 20]),
    "product wraps to zero": ([[BIG, BIG], [2, 3]], [0, 20]),
    "product wraps to a small number": ([[BIG + 4, BIG], [2, 3]], [0, 20]),
    "largest": ([[(1 << 63) - 1, (1 << 63) - 1], [2, 3]], [0, 20]),
}


def _isolated(work: Any, device: str) -> None:
    """In a child where that is possible, so that a wild read ends the child and not the test run."""
    if device != "cpu":
        work()
        return
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"in the child: {type(error).__name__}: {error}")
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), f"ended by signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", BAD_LEVELS)
def test_a_level_that_does_not_fit_contributes_nothing(name: str, routes: tuple[int, int], backend: str, device: str) -> None:
    """Its samples give zero and get zero gradient; the good level is as if alone; nothing outside value is read."""
    shapes, level_starts = BAD_LEVELS[name]
    tensors = _tensors(device, spatial_shapes=np.array(shapes, np.int64), level_start_index=np.array(level_starts, np.int64))
    # value lies in the middle of NaN, so that a stray read shows in the sums.
    guard = torch.full((3, *tensors[0].shape[1:]), float("nan"), device=device)
    guard[1] = tensors[0][0]
    tensors[0] = guard[1:2]

    def work() -> None:
        output, of_value, of_locations, of_weights = (t.cpu() for t in _call(backend, tensors, routes))
        good = [t.cpu() for t in tensors]
        wanted = oracle.backward(
            np.ones(tuple(output.shape)), good[0].double().numpy(), np.array([[2, 3]]), np.array([20]),
            good[3][:, :, :, 1:].double().numpy(), good[4][:, :, :, 1:].double().numpy(),
        )  # fmt: skip
        assert_close(output, wanted.output, 1e-5, "output")
        assert_close(of_value, wanted.grad_value, 1e-5, "gradient of value")
        assert (of_locations[:, :, :, 0] == 0).all() and (of_weights[:, :, :, 0] == 0).all()
        assert_close(of_locations[:, :, :, 1:], wanted.grad_locations, 1e-5, "gradient of sampling_locations")
        assert_close(of_weights[:, :, :, 1:], wanted.grad_weights, 1e-5, "gradient of attention_weights")

    _isolated(work, device)


@pytest.mark.parametrize("axis", ["batch", "queries", "heads", "channels", "points", "levels"])
def test_empty(axis: str, routes: tuple[int, int], backend: str, device: str) -> None:
    """Returns at once with everything it was to write set to zero."""
    case = next(c for c in inputs.EMPTY if c.name == axis)
    arguments = case.shrink(inputs.attention("native", queries=4, channels=8))
    found = _call(backend, list(as_tensors(arguments, device).values()), routes)
    assert all((t == 0).all() for t in found)


def _bad(name: str, tensors: list[torch.Tensor]) -> None:
    value, shapes, _, locations, weights = tensors
    if name == "value rank":
        tensors[0] = value[0]
    elif name == "shapes dtype":
        tensors[1] = shapes.int()
    elif name == "value dtype":
        tensors[0] = value.long()
    elif name == "locations dtype":
        tensors[3] = locations.double()
    elif name == "weights shape":
        tensors[4] = weights[..., :1].contiguous()
    elif name == "locations last axis":
        tensors[3] = torch.cat([locations, locations[..., :1]], -1)
    elif name == "levels":
        tensors[1] = shapes[:1].contiguous()
    elif name == "not contiguous":
        tensors[0] = value.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    "name",
    ["value rank", "shapes dtype", "value dtype", "locations dtype", "weights shape", "locations last axis", "levels",
     "not contiguous"],
)  # fmt: skip
def test_the_library_checks_again(name: str, backend: str, device: str) -> None:
    tensors = _tensors(device)
    output = torch.zeros(1, 4, 64, device=device)
    _bad(name, tensors)
    with pytest.raises((ValueError, TypeError)) as caught:
        LIBRARY.function(backend, FORWARD)(output, *tensors, 0, launch_context(backend, torch.device(device)))
    assert str(caught.value).strip()


@pytest.mark.parametrize("route", [-1, 3, 99])
def test_unknown_route(route: int, backend: str, device: str) -> None:
    if backend == "cpu":
        pytest.skip("cpu has one path and takes every code")
    tensors = _tensors(device)
    output = torch.zeros(1, 4, 64, device=device)
    with pytest.raises((ValueError, RuntimeError)):
        LIBRARY.function(backend, FORWARD)(output, *tensors, route, launch_context(backend, torch.device(device)))


def test_workspace_is_for_the_ordered_route(backend: str, device: str) -> None:
    size = LIBRARY.function(backend, WORKSPACE)
    assert size(2, 26, 2, 32, 3, 2, 4, 0) == 0 and size(2, 26, 2, 32, 3, 2, 4, 1) == 0
    assert size(2, 26, 2, 32, 3, 2, 4, 2) >= 0


def test_the_spec_names_the_files() -> None:
    for backend, status in MULTI_SCALE_DEFORMABLE_ATTN.backends.items():
        path = LIBRARY.path(backend)
        assert path is None or path.name == f"libmsda_{backend}.so"
        assert status.kind in ("run", "emulated", "compiled", "stub-compiled", "absent")
