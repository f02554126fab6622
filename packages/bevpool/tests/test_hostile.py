# SPDX-License-Identifier: Apache-2.0
"""Any integers as indices: what does not fit is dropped or refused, the rest is exact, and no memory beyond is touched.

Features and depths are small integers, so every sum is exact and one wrong row shows.  On the emulation these tests also run
under the address sanitizer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from muspace_core.testing.calls import represented
from muspace_core.testing.cases import Arguments
from muspace_core.testing.compare import assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.properties import budget

calls = load_sibling(__file__, "pool_calls")
v2_inputs = load_sibling(__file__, "bev_pool_v2_inputs")
v2_oracle = load_sibling(__file__, "bev_pool_v2_oracle")

PROPERTY = budget(100, emulated=25)
SEEDS = st.integers(0, 2**32 - 1)
CHANNELS = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 31, 32, 33])
KINDS = st.sampled_from([np.int32, np.int64])
#: How many of the indices are hostile.
SHARES = st.sampled_from([0.0, 0.05, 0.3, 1.0])
INDEX_NAMES = (*v2_inputs.INDICES, "coords", "geom_xyz", "voxel_coords")


def hostile(random: np.random.Generator, shape: tuple[int, ...], limit: int, kind: type, share: float) -> np.ndarray:
    """Numbers inside [0, limit), and a share of others: next to the borders, at the ends of the type, wrapping ones, any."""
    inside = random.integers(0, max(limit, 1), shape)
    ends = np.iinfo(kind)
    near = np.array([-1, limit, limit + 1, -limit, -limit - 1, 2 * limit])
    far = np.array([ends.min, ends.min + 1, ends.max, ends.max - 1, ends.max - limit, ends.min + limit])
    if kind is np.int64:
        # Inside the grid if only the low 32 bits are looked at.
        far = np.concatenate([far, [2**31, -(2**31) - 1, 2**32, -(2**32), 2**33 + limit - 1, 2**62, 5 * 2**32 + limit // 2]])
    anything = random.integers(ends.min, ends.max, shape, dtype=np.int64, endpoint=True)
    strange = np.stack([random.choice(near, shape), random.choice(far, shape), anything])
    chosen = np.take_along_axis(strange, random.integers(0, 3, (1, *shape)), 0)[0]
    return np.where(random.random(shape) < share, chosen, inside).astype(kind)


def whole(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(-4, 5, shape).astype(np.float64)


def check(pooling: Any, arguments: Arguments, backend: str, device: str, **keywords: Any) -> None:
    """Output and gradients are the oracle's, exactly; by a plan too."""
    tensors = pooling.tensors(arguments, device)
    runs = {"direct": pooling.run(backend, tensors, **keywords)}
    runs["planned"] = pooling.run(backend, tensors, plan=pooling.plan(backend, tensors, **keywords), **keywords)
    wanted = pooling.forward(**arguments, **keywords)
    gradients = pooling.backward(represented(pooling.whole_gradient(runs["direct"][0])), **arguments, **keywords)
    for way, (output, found) in runs.items():
        assert_close(output, wanted, 1e-30, f"output, {way}")
        for name, gradient in found.items():
            assert_close(gradient, gradients[name], 1e-30, f"gradient of {name}, {way}")


@PROPERTY
@given(seed=SEEDS, channels=CHANNELS, kind=KINDS, share=SHARES, points=st.integers(0, 70))
def test_bev_pool(seed: int, channels: int, kind: type, share: float, points: int, backend: str, device: str) -> None:
    random = np.random.default_rng(seed)
    B, D, H, W = (int(n) for n in random.integers(1, [4, 4, 7, 7]))
    coords = np.stack([hostile(random, (points,), n, kind, share) for n in (H, W, D, B)], 1)
    check(
        calls.BEV_POOL, {"feats": whole(random, (points, channels)), "coords": coords, "B": B, "D": D, "H": H, "W": W},
        backend, device,
    )  # fmt: skip


@PROPERTY
@given(seed=SEEDS, channels=CHANNELS, share=SHARES, points=st.integers(0, 40))
def test_voxel_pooling_train(seed: int, channels: int, share: float, points: int, backend: str, device: str) -> None:
    random = np.random.default_rng(seed)
    batch = int(random.integers(1, 4))
    voxel_num = tuple(int(n) for n in random.integers(1, [7, 7, 4]))
    geom = np.stack([hostile(random, (batch, points), n, np.int32, share) for n in voxel_num], -1)
    arguments = {"geom_xyz": geom, "input_features": whole(random, (batch, points, channels)), "voxel_num": voxel_num}
    check(calls.TRAIN, arguments, backend, device)


@PROPERTY
@given(seed=SEEDS, channels=CHANNELS, share=SHARES)
def test_voxel_pooling_inference(seed: int, channels: int, share: float, backend: str, device: str) -> None:
    random = np.random.default_rng(seed)
    batch, cameras, bins, height, width = (int(n) for n in random.integers(1, [3, 4, 5, 4, 4]))
    voxel_num = tuple(int(n) for n in random.integers(1, [7, 7, 4]))
    geom = np.stack([hostile(random, (batch, cameras, bins, height, width), n, np.int32, share) for n in voxel_num], -1)
    arguments = {
        "geom_xyz": geom, "depth_features": whole(random, (batch * cameras, bins, height, width)),
        "context_features": whole(random, (batch * cameras, channels, height, width)), "voxel_num": voxel_num,
    }  # fmt: skip
    check(calls.INFERENCE, arguments, backend, device)


@PROPERTY
@given(seed=SEEDS, channels=CHANNELS, kind=KINDS, share=SHARES, summed=st.booleans(), masked=st.sampled_from([0.0, 0.5, 1.0]))
def test_voxel_pool_depth(
    seed: int, channels: int, kind: type, share: float, summed: bool, masked: float, backend: str, device: str
) -> None:
    random = np.random.default_rng(seed)
    batch, sweeps, cameras, bins, height, width = (int(n) for n in random.integers(1, [3, 3, 4, 4, 3, 4]))
    X, Y, Z = (int(n) for n in random.integers(1, [6, 6, 4]))
    extent = (batch, sweeps, cameras, bins, height, width)
    images = sweeps * cameras
    arguments = {
        "img_feats": whole(random, (batch, images, channels, height, width)),
        "img_depth": whole(random, (batch * images, bins, height, width)),
        "voxel_coords": np.stack([hostile(random, extent, n, kind, share) for n in (batch, X, Y, Z)], -1),
        "mask": random.random(extent) < masked, "B": batch, "X": X, "Y": Y, "Z": Z,
    }  # fmt: skip
    check(calls.DEPTH, arguments, backend, device, reduce_cams=summed)


# ---- ranks and intervals -------------------------------------------------------------------------------------------
def _verdict(arguments: Arguments) -> tuple[bool, bool, np.ndarray]:
    """Whether something is surely faulty, whether only the ranks are, and the cells whose sums the contract leaves open.

    Open: cells of an interval that leaves the points, whose first point has no cell, or whose points have several; and of
    points in several intervals.
    """
    depth, feat, *ranks = (arguments[k] for k in ("depth", "feat", *v2_inputs.RANKS))
    cells = int(np.prod(arguments["bev_feat_shape"][:4]))
    limits = (depth.size, feat.size // max(feat.shape[-1], 1), cells)
    points = len(ranks[0])
    inside = np.stack([(r >= 0) & (r < n) for r, n in zip(ranks, limits, strict=True)])
    times, unclear = np.zeros(points, np.int64), np.zeros(points, bool)
    broken = odd = False
    for start, length in zip(arguments["interval_starts"].tolist(), arguments["interval_lengths"].tolist(), strict=True):
        held = v2_oracle.covered([start], [length], points)
        times[held] += 1
        leaves = length < 0 or (length > 0 and (start < 0 or start + length > points))
        odd |= length == 0 and not 0 <= start <= points
        broken |= leaves
        valid = ranks[2][held][inside[2][held]]
        # An interval's cell is that of its first point: with a faulty one the whole interval has none.
        if leaves or (len(valid) and ((valid != valid[0]).any() or not inside[2][held[0]])):
            unclear[held] = True
    unclear |= times > 1
    covered = times > 0
    faulty_rank = bool((~inside[:, covered]).any())
    open_cells = np.zeros(cells, bool)
    open_cells[ranks[2][unclear & inside[2]]] = True
    unsure = bool(unclear.any() or odd or (~inside[:, ~covered]).any())
    return broken or faulty_rank, unsure, open_cells


def _v2_arguments(seed: int, channels: int, kind: type, share: float, spoiled: tuple[str, ...]) -> Arguments:
    random = np.random.default_rng(seed)
    views, map_size = tuple(random.integers(1, 3, 2).tolist()), tuple(random.integers(1, 4, 2).tolist())
    grid = tuple(int(n) for n in random.integers(1, [3, 5, 5]))
    arguments = v2_inputs.pooling(
        str(seed), views=views, bins=int(random.integers(1, 5)), map_size=map_size, channels=channels, grid=grid
    )
    arguments |= {k: whole(random, arguments[k].shape) for k in ("depth", "feat")}
    limits = {
        "ranks_depth": arguments["depth"].size, "ranks_feat": arguments["feat"].size // channels,
        "ranks_bev": int(np.prod(arguments["bev_feat_shape"][:4])),
        "interval_starts": len(arguments["ranks_bev"]), "interval_lengths": len(arguments["ranks_bev"]),
    }  # fmt: skip
    for name in v2_inputs.INDICES:
        found = arguments[name].astype(kind)
        if name in spoiled:
            wrong = random.random(found.shape) < share
            found = np.where(wrong, hostile(random, found.shape, limits[name], kind, 0.8), found)
        arguments[name] = found.astype(kind)
    return arguments


SPOILED = st.lists(st.sampled_from(v2_inputs.INDICES), max_size=3, unique=True).map(tuple)


@PROPERTY
@given(seed=SEEDS, channels=CHANNELS, kind=KINDS, share=SHARES, spoiled=SPOILED)
def test_bev_pool_v2(
    seed: int, channels: int, kind: type, share: float, spoiled: tuple[str, ...], backend: str, device: str
) -> None:
    """Where contents are read (cpu, plans, MUSPACE_CHECK) faults are refused by name; elsewhere they are dropped."""
    arguments = _v2_arguments(seed, channels, kind, share, spoiled)
    tensors = calls.BEV_POOL_V2.tensors(arguments, device)
    surely, unsure, open_cells = _verdict(arguments)
    wanted = v2_oracle.forward(**arguments)
    for plan in (False, True):
        try:
            planned = {"plan": calls.BEV_POOL_V2.plan(backend, tensors)} if plan else {}
            output, gradients = calls.BEV_POOL_V2.run(backend, tensors, **planned)
        except ValueError as error:
            assert surely or unsure, error
            assert plan or backend in ("cpu", "reference"), f"contents were read without being asked: {error}"
            assert str(error).partition(":")[0].partition("[")[0] in INDEX_NAMES, error
            continue
        assert not (surely and (plan or backend in ("cpu", "reference"))), "a faulty index was accepted"
        assert torch.isfinite(output).all()
        mask = np.broadcast_to(~open_cells.reshape(wanted[:, :1].shape), wanted.shape)
        assert_close(output, wanted, 1e-30, "output", mask)
        if not open_cells.any():
            of = v2_oracle.backward(represented(calls.BEV_POOL_V2.whole_gradient(output)), **arguments)
            for name, gradient in gradients.items():
                assert_close(gradient, of[name], 1e-30, f"gradient of {name}")


@budget(40, emulated=10)
@given(seed=SEEDS, spoiled=SPOILED)
def test_bev_pool_v2_under_the_check(seed: int, spoiled: tuple[str, ...], backend: str, device: str) -> None:
    arguments = _v2_arguments(seed, 4, np.int32, 0.2, spoiled)
    tensors = calls.BEV_POOL_V2.tensors(arguments, device)
    surely, unsure, _ = _verdict(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSPACE_CHECK", "1")
        try:
            output = calls.BEV_POOL_V2.call(backend, tensors)
        except ValueError as error:
            assert surely or unsure, error
            assert str(error).partition(":")[0].partition("[")[0] in INDEX_NAMES, error
        else:
            assert not surely, "a faulty index was accepted"
            if not unsure:
                assert_close(output, v2_oracle.forward(**arguments), 1e-30, "output")
