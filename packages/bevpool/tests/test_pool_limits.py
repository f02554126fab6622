# SPDX-License-Identifier: Apache-2.0
"""Offsets beyond 2**31 elements, grids beyond 2**31 cells, and a second device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muspace_bevpool import bev_pool, bev_pool_v2, voxel_pool_depth, voxel_pooling_train
from muspace_core.testing import large
from muspace_core.testing.calls import on_backend
from muspace_core.testing.compare import assert_bits_equal
from muspace_core.testing.plugin import load_sibling

calls = load_sibling(__file__, "pool_calls")

NATIVE = pytest.mark.backends("cpu", "cuda", "hip")


@NATIVE
@pytest.mark.slow
def test_many_features(device: str) -> None:
    """N * C beyond 2**31: the last row is found, forward and backward."""
    large.needs(12, device)
    rows, channels = 2**21 + 3, 1024
    feats = large.zeros((rows, channels), torch.bfloat16, device)
    assert feats.numel() > 2**31
    feats[-1], feats[-2] = 1.0, 2.0
    coords = torch.full((rows, 4), -1, dtype=torch.int32, device=device)
    coords[-2:] = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.int32)
    feats.requires_grad_()
    output = bev_pool(feats, coords, 1, 1, 2, 1)
    assert output[0, :, 0, 0, 0].tolist() == [2.0] * channels and output[0, :, 0, 1, 0].tolist() == [1.0] * channels
    (gradient,) = torch.autograd.grad(output, feats, torch.full_like(output, 3.0))
    assert (gradient[-2:] == 3).all() and (gradient[-3] == 0).all()


@NATIVE
@pytest.mark.slow
def test_a_large_volume(device: str) -> None:
    """Output beyond 2**31 elements: two items of eight cameras, as a training run of eight-camera data has."""
    large.needs(16, device)
    cameras, channels, grid = 8, 16, (200, 200, 210)
    feats, depth = torch.ones(2, cameras, channels, 1, 1, device=device).half(), torch.ones(2 * cameras, 1, 1, 1, device=device)
    coords = torch.tensor([0, 199, 199, 209], device=device).repeat(2, 1, cameras, 1, 1, 1, 1)
    coords[1, ..., 0] = 1
    mask = torch.ones(2, 1, cameras, 1, 1, 1, dtype=torch.bool, device=device)
    output = voxel_pool_depth(feats, depth.half(), coords, mask, 2, *grid)
    assert output.numel() > 2**31
    assert (output[:, :, -1, -1, -1] == 1).all() and int((output[:, :, -1, -1, -2] != 0).sum()) == 0
    assert (output[1, -1, 0, 0, 0] == 0).all()


@NATIVE
@pytest.mark.slow
def test_a_large_plane(device: str) -> None:
    """Channels-first output beyond 2**31 elements."""
    large.needs(12, device)
    side, channels = 5800, 64
    coords = torch.tensor([[side - 1, side - 1, 0, 0], [0, 0, 0, 0]], device=device)
    feats = torch.arange(1, 2 * channels + 1, device=device).view(2, channels).bfloat16()
    output = bev_pool(feats, coords, 1, 1, side, side)
    assert output.numel() > 2**31
    assert torch.equal(output[0, :, 0, -1, -1], feats[0]) and torch.equal(output[0, :, 0, 0, 0], feats[1])
    assert (output[0, :, 0, -1, -2] == 0).all()


HUGE = 2**16
BEYOND = {
    "bev_pool": lambda d: bev_pool(
        torch.ones(1, 1, device=d), torch.zeros(1, 4, dtype=torch.int32, device=d), 1, 1, HUGE, HUGE
    ),
    "bev_pool, product wraps to zero": lambda d: bev_pool(
        torch.ones(1, 1, device=d), torch.zeros(1, 4, dtype=torch.int32, device=d), HUGE, HUGE, HUGE, HUGE
    ),
    "bev_pool_v2": lambda d: bev_pool_v2(
        torch.ones(1, 1, 1, 1, 1, device=d), torch.ones(1, 1, 1, 1, 1, device=d),
        *[torch.zeros(1, dtype=torch.int32, device=d)] * 3, (1, HUGE, HUGE, 1, 1),
        torch.zeros(1, dtype=torch.int32, device=d), torch.ones(1, dtype=torch.int32, device=d),
    ),
    "voxel_pooling_train": lambda d: voxel_pooling_train(
        torch.zeros(1, 1, 3, dtype=torch.int32, device=d), torch.ones(1, 1, 1, device=d), (HUGE, HUGE, 1)
    ),
    "voxel_pool_depth": lambda d: voxel_pool_depth(
        torch.ones(1, 1, 1, 1, 1, device=d), torch.ones(1, 1, 1, 1, device=d),
        torch.zeros(1, 1, 1, 1, 1, 1, 4, dtype=torch.int64, device=d),
        torch.ones(1, 1, 1, 1, 1, 1, dtype=torch.bool, device=d), 1, HUGE, HUGE, 1,
    ),
}  # fmt: skip


@pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")
@pytest.mark.parametrize("name", BEYOND)
def test_a_grid_beyond_32_bits_is_refused(name: str, device: str) -> None:
    """Before anything is allocated: 2**32 cells are a mistake in the arguments."""
    with pytest.raises(ValueError, match=r"^(B|D|H|W|X|Y|Z|voxel_num|bev_feat_shape).*: expected "):
        BEYOND[name](device)


def test_z_of_any_size_is_only_a_filter(backend: str, device: str) -> None:
    """The cells of voxel_pooling are those of the plane: a tall grid costs nothing."""
    geom = torch.zeros(1, 2, 3, dtype=torch.int32, device=device)
    geom[0, 1, 2] = 2**31 - 2
    output = on_backend(voxel_pooling_train)(backend, geom, torch.ones(1, 2, 1, device=device), (3, 3, 2**31 - 1))
    assert float(output[0, 0, 0, 0]) == 2.0


def test_shapes_beyond_two_to_the_31_under_fake_tensors() -> None:
    """Shape arithmetic alone: nothing is allocated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        feats = torch.empty(2**23, 512, dtype=torch.bfloat16).requires_grad_()
        output = bev_pool(feats, torch.empty(2**23, 4, dtype=torch.int32), 40, 1, 360, 360)
        assert output.shape == (40, 512, 1, 360, 360) and output.numel() > 2**31
        (gradient,) = torch.autograd.grad(output.sum(), [feats])
        assert gradient.shape == feats.shape and gradient.dtype == torch.bfloat16


@pytest.mark.backends("cuda", "hip")
@pytest.mark.parametrize("pooling", calls.POOLINGS.values(), ids=list(calls.POOLINGS))
def test_on_a_second_device(pooling: Any, backend: str) -> None:
    """The tensors' device decides, not the current one; plans and arguments of another device are refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    arguments = pooling.inputs.CASES[0].build()
    first, second = (pooling.tensors(arguments, f"cuda:{n}") for n in (0, 1))
    wanted, gradients = pooling.run(backend, first)
    output, found = pooling.run(backend, second, plan=pooling.plan(backend, second))
    assert output.device == torch.device("cuda:1")
    assert_bits_equal(output.cpu(), wanted.cpu())
    for name in pooling.floating:
        assert_bits_equal(found[name].cpu(), gradients[name].cpu(), name)
    with pytest.raises(ValueError, match=r"^plan: expected "):
        pooling.call(backend, second, plan=pooling.plan(backend, first))
    index = next(k for k in pooling.planned_by if isinstance(first[k], torch.Tensor))
    with pytest.raises(ValueError, match=rf"^{index}: expected device "):
        pooling.call(backend, first | {index: second[index]})
