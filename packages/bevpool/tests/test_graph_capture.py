# SPDX-License-Identifier: Apache-2.0
"""Every operator of the family, given a plan where it takes one, can be captured on a side stream and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from muspace_bevpool import flash_bevpool, flash_bevpool_sca
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling

calls = load_sibling(__file__, "pool_calls")

pytestmark = pytest.mark.backends("cuda", "hip")

Call = Callable[..., torch.Tensor]


def _pooling(name: str, summed: bool = False) -> Callable[[str], tuple[Call, list[torch.Tensor]]]:
    def build(device: str) -> tuple[Call, list[torch.Tensor]]:
        pooling = calls.POOLINGS[name]
        tensors = pooling.tensors(pooling.inputs.CASES[-1].build(), device)
        keywords = {"reduce_cams": True} if summed else {}
        plan = pooling.plan("cuda", tensors, **keywords)
        rest = (
            tensors | dict.fromkeys(("coords", *calls.BEV_POOL_V2.inputs.INDICES)) if name.startswith("bev_pool") else tensors
        )
        rest = {k: v for k, v in rest.items() if k in tensors}

        def call(*live: torch.Tensor) -> torch.Tensor:
            return pooling.call("cuda", rest | dict(zip(pooling.floating, live, strict=True)), plan=plan, **keywords)

        return call, [tensors[k] for k in pooling.floating]

    return build


def _projections(device: str, batch: int, cameras: int, image: tuple[int, int]) -> torch.Tensor:
    """Cameras in the middle, turned about the vertical axis, that look at the horizon."""
    height, width = image
    found = np.zeros((batch, cameras, 3, 4))
    for n in range(cameras):
        angle = 2 * np.pi * n / cameras
        forward, right = np.array([np.cos(angle), np.sin(angle), 0]), np.array([np.sin(angle), -np.cos(angle), 0])
        down = np.array([0, 0, -1.0])
        rotation = np.stack([right, down, forward])
        intrinsics = np.array([[width / 2, 0, width / 2], [0, width / 2, height / 2], [0, 0, 1]])
        found[:, n, :, :3] = intrinsics @ rotation
    return torch.from_numpy(found).float().to(device)


def _flash(device: str) -> tuple[Call, list[torch.Tensor]]:
    torch.manual_seed(0)
    feats = torch.randn(2, 3, 6, 10, 16, device=device)
    params = torch.rand(2, 3, 6, 10, 2, device=device) * torch.tensor([10.0, 4.0], device=device) + 1
    projections = _projections(device, 2, 3, (60, 100))

    def call(*live: torch.Tensor) -> torch.Tensor:
        return flash_bevpool(
            *live, projections, None, (60, 100), (-12.0, 12.0, -12.0, 12.0, -2.0, 2.0), (12, 10, 4), depth_weight_threshold=0.0
        )

    return call, [feats, params]


def _flash_sca(device: str) -> tuple[Call, list[torch.Tensor]]:
    torch.manual_seed(0)
    levels, heads, points, anchors, grid = ((6, 10), (3, 5)), 2, 2, 2, (8, 6)
    rows = sum(h * w for h, w in levels)
    feats = torch.randn(1, 3, rows, 16, device=device)
    extent = (1, grid[0] * grid[1], heads, len(levels), points * anchors)
    offsets, weights = torch.randn(*extent, 2, device=device), torch.rand(extent, device=device)
    projections = _projections(device, 1, 3, (60, 100))

    def call(*live: torch.Tensor) -> torch.Tensor:
        return flash_bevpool_sca(
            live[0], projections, live[1], live[2], spatial_shapes=levels, image_size=(60, 100),
            roi_range=(-12.0, 12.0, -12.0, 12.0), grid_size=grid, z_anchors=(-0.5, 0.5),
        )  # fmt: skip

    return call, [feats, offsets, weights]


OPERATORS: dict[str, Callable[[str], tuple[Call, list[torch.Tensor]]]] = {
    **{name: _pooling(name) for name in calls.POOLINGS},
    "voxel_pool_depth, cameras summed": _pooling("voxel_pool_depth", summed=True),
    "flash_bevpool": _flash,
    "flash_bevpool_sca": _flash_sca,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_capture_and_replay(name: str, device: str) -> None:
    """Forward and backward in one graph; new numbers are copied into its inputs and the replay follows them."""
    call, given = OPERATORS[name](device)
    static = [t.clone().requires_grad_() for t in given]
    grad_output = torch.empty_like(call(*static)).normal_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(call(*static), static, grad_output)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        output = call(*static)
        gradients = torch.autograd.grad(output, static, grad_output)
    exact = name.partition(",")[0] in calls.POOLINGS
    for scale in (1.0, -2.0, 0.5):
        # The depth of flash_bevpool stays positive.
        fresh = [t * abs(scale) if name == "flash_bevpool" else t * scale for t in given]
        with torch.no_grad():
            for tensor, value in zip(static, fresh, strict=True):
                tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        live = [t.clone().requires_grad_() for t in fresh]
        wanted = call(*live)
        assert bool(wanted.any()), "the case says nothing"
        assert_bits_equal(output, wanted, f"output at {scale}")
        for position, (found, expected) in enumerate(
            zip(gradients, torch.autograd.grad(wanted, live, grad_output), strict=True)
        ):
            what = f"gradient {position} at {scale}"
            assert_bits_equal(found, expected, what) if exact else assert_close(found, expected, 1e-5, what)


@pytest.mark.parametrize("name", OPERATORS)
def test_no_synchronise(name: str, device: str) -> None:
    """A planned call never waits for the device."""
    call, given = OPERATORS[name](device)
    live = [t.clone().requires_grad_() for t in given]
    call(*live).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*live).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", OPERATORS)
def test_on_a_side_stream(name: str, device: str) -> None:
    """The work is queued behind what the caller's current stream already holds."""
    call, given = OPERATORS[name](device)
    wanted = call(*given)
    late = [torch.zeros_like(t) for t in given]
    torch.cuda.synchronize()
    stream: Any = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for tensor, value in zip(late, given, strict=True):
            tensor.copy_(value)
        output = call(*late)
    stream.synchronize()
    assert_bits_equal(output, wanted, "on a side stream")
