# SPDX-License-Identifier: Apache-2.0
"""Drawn calls of flash_bevpool and flash_bevpool_sca against the oracles: any size, and places exactly on every border.

Two kinds of geometry.  A rig of pinholes is compared where fp32 and fp64 decide alike.  A flat camera, whose pixels are
dyadic fractions and therefore exact in fp32, is compared on the borders themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from muspace_core.testing.calls import as_tensors, represented, upstream_gradient
from muspace_core.testing.compare import assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.properties import budget

oracle = load_sibling(__file__, "flash_bevpool_oracle")
inputs = load_sibling(__file__, "flash_bevpool_inputs")
sca_oracle = load_sibling(__file__, "flash_bevpool_sca_oracle")
sca_inputs = load_sibling(__file__, "flash_bevpool_sca_inputs")
calls = load_sibling(__file__, "flash_calls")

PROPERTY = budget(80, emulated=25)
pytestmark = pytest.mark.emu_budget(2_000_000)
F, D, P = "image_feats", "depth_params", "projection_matrices"
SCA_LEAVES = (F, "sampling_offsets", "attention_weights")
CHANNELS = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64])


def _largest_summands(arguments: dict[str, Any], g: np.ndarray) -> tuple[float, float, float]:
    """A quarter of the largest summand of the output and of both gradients: a drawn call may cancel to almost nothing."""
    largest, feats, upstream = np.zeros(3), np.abs(arguments[F]).max(initial=0), np.abs(g).max(initial=0)
    for s in oracle.samples(arguments[D], arguments[P], oracle.View.of(arguments)):
        if s.counts.any():
            weight = s.weight[s.counts]
            slope = weight / s.spread[s.counts] * (1 + s.score[s.counts] ** 2) * arguments[F].shape[-1] ** 0.5
            summands = [weight.max() * feats, weight.max() * upstream, slope.max() * feats * upstream]
            largest = np.maximum(largest, summands)
    return tuple(0.25 * largest)


def _check_flash(arguments: dict[str, Any], backend: str, device: str, deterministic: bool) -> None:
    live = as_tensors(arguments, device)
    leaves = [live[name].requires_grad_() for name in (F, D)]
    torch.use_deterministic_algorithms(deterministic)
    output = calls.flash(backend, live)
    torch.use_deterministic_algorithms(False)
    upstream = upstream_gradient(output)
    found = torch.autograd.grad(output, leaves, upstream)
    exact = arguments | {name: represented(live[name]) for name in (F, D)}
    g = represented(upstream)
    wanted = oracle.backward(g, exact[F], exact[D], exact[P], oracle.View.of(arguments))
    scales = _largest_summands(exact, g)
    for what, left, right, scale, tolerance in zip(
        ("output", F, D), (output, *found), wanted, scales, (1e-5, 5e-5, 5e-5), strict=True
    ):
        assert torch.isfinite(left).all(), what
        assert_close(left, right, tolerance, what, scale=scale)


@st.composite
def rigs(draw: Any) -> dict[str, Any]:
    lows = draw(st.tuples(*[st.integers(-6, 2)] * 2))
    spans = draw(st.tuples(*[st.integers(2, 9)] * 2))
    return inputs.lift(
        f"property{draw(st.integers(0, 2**32 - 1))}", batch=draw(st.integers(1, 2)), cameras=draw(st.integers(1, 4)),
        size=draw(st.tuples(st.integers(1, 6), st.integers(1, 9))), channels=draw(CHANNELS),
        grid=draw(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))),
        roi=(lows[0], lows[0] + spans[0], lows[1], lows[1] + spans[1], -1.5, draw(st.sampled_from([0.5, 1.5]))),
        distribution=draw(st.integers(0, 1)), epsilon=draw(st.sampled_from([1e-6, 0.125])),
        threshold=draw(st.sampled_from([0.0, 1e-6, 0.05, 0.2])),
    )  # fmt: skip


@PROPERTY
@given(arguments=rigs(), deterministic=st.booleans())
def test_flash_bevpool_of_a_rig(arguments: Any, deterministic: bool, backend: str, device: str) -> None:
    exact = arguments[D].astype(np.float32).astype(np.float64)
    assume(oracle.close_calls(exact, arguments[P], oracle.View.of(arguments)) == 0)
    _check_flash(arguments, backend, device, deterministic)


@st.composite
def flat_calls(draw: Any) -> dict[str, Any]:
    """Cells on pixels, between them and on every border: sizes are powers of two, places multiples of a quarter."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    h, w, cameras = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([3, 2, 1]))
    channels = draw(CHANNELS)
    columns, rows = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    pitch = draw(st.sampled_from([0.25, 0.5, 1.0]))
    start = draw(st.tuples(*[st.integers(-12, 8)] * 2))
    low = [s / 4 - pitch / 2 for s in start]
    features, depth = random.standard_normal((cameras, h, w, channels)), random.uniform(0.5, 2.0, (cameras, h, w, 2))
    arguments = inputs.flat(
        features[0], depth[0], (low[0], low[0] + pitch * columns, columns), (low[1], low[1] + pitch * rows, rows),
        depth_distribution=draw(st.integers(0, 1)), epsilon=0.125,
    )  # fmt: skip
    arguments |= {F: features[None], D: depth[None]}
    matrices = np.repeat(arguments[P], cameras, 1)
    for n in range(1, cameras):  # other cameras stand a quarter pixel or more apart; some look from behind
        matrices[0, n, :2, 3] = random.integers(-8, 8, 2) / 4
        matrices[0, n, 2, 3] = depth_of_all = draw(st.sampled_from([1.0, 0.0, -1.0]))
        if depth_of_all <= 0:  # divided by epsilon, so that the places would be in the image
            matrices[0, n, :2] *= arguments["epsilon"]
    return arguments | {P: matrices}


@PROPERTY
@given(arguments=flat_calls(), deterministic=st.booleans())
def test_flash_bevpool_on_its_borders(arguments: Any, deterministic: bool, backend: str, device: str) -> None:
    _check_flash(arguments, backend, device, deterministic)


# ---- spatial cross-attention ---------------------------------------------------------------------------------------
def _check_sca(arguments: dict[str, Any], backend: str, device: str, deterministic: bool, mask: Any = None) -> None:
    live = as_tensors(arguments, device)
    leaves = [live[name].requires_grad_() for name in SCA_LEAVES]
    torch.use_deterministic_algorithms(deterministic)
    output = calls.sca(backend, live)
    torch.use_deterministic_algorithms(False)
    upstream = upstream_gradient(output)
    found = torch.autograd.grad(output, leaves, upstream)
    exact = [represented(live[name]) for name in calls.SCA_TENSORS]
    g = represented(upstream)
    wanted = sca_oracle.backward(g, *exact, sca_oracle.View.of(arguments))
    feats, weights, most = np.abs(exact[0]).max(), np.abs(exact[3]).max(), np.abs(g).max()
    scales = (feats * weights, weights * most, feats * weights * most, feats * most)
    pairs = zip((output, *found), (wanted.output, wanted.grad_feats, wanted.grad_offsets, wanted.grad_weights), strict=True)
    for what, (left, right), scale in zip(("output", *SCA_LEAVES), pairs, scales, strict=True):
        assert torch.isfinite(left).all(), what
        assert_close(left, right, 2e-5, what, mask=mask if what == "sampling_offsets" else None, scale=0.25 * scale)


@st.composite
def attentions(draw: Any) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    anchors = draw(st.integers(1, 4))
    return sca_inputs.attend(
        f"property{draw(st.integers(0, 2**32 - 1))}", batch=draw(st.integers(1, 2)), cameras=draw(st.integers(1, 4)),
        levels=draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4)),
        channels=heads * draw(st.sampled_from([1, 2, 4, 5, 8, 32])), heads=heads, points=draw(st.integers(1, 3)),
        grid=draw(st.tuples(st.integers(1, 5), st.integers(1, 4))), z_anchors=tuple(np.linspace(-1.0, 1.5, anchors)),
        average=draw(st.sampled_from(["hit_cameras", "none"])), reach=draw(st.sampled_from([0.5, 3.0])),
    )  # fmt: skip


@PROPERTY
@given(arguments=attentions(), deterministic=st.booleans())
def test_sca_of_a_rig(arguments: Any, deterministic: bool, backend: str, device: str) -> None:
    view = sca_oracle.View.of(arguments)
    assume((sca_oracle.hits(arguments[P], view, 1e-4) == sca_oracle.hits(arguments[P], view, -1e-4)).all())
    offsets = arguments["sampling_offsets"].astype(np.float32).astype(np.float64)
    near = sca_oracle.near_cell_boundary(arguments[P], offsets, sca_oracle.levels_of(arguments[F], view), view, 3e-5)
    _check_sca(arguments, backend, device, deterministic, ~near[..., None] & np.ones(2, bool))


@st.composite
def flat_attentions(draw: Any) -> dict[str, Any]:
    """Pillars on the image's edge and beside it, samples on pixel centres and on the rims of the map, all exact."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    h, w, cameras = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([3, 2, 1]))
    heads, points = draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    columns, rows = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    start = [draw(st.integers(-6, 6)) / 4 for _ in range(2)]
    arguments = sca_inputs.flat(
        np.zeros((h, w, heads * 2)), (start[0] - 0.25, start[0] - 0.25 + columns / 2, columns),
        (start[1] - 0.25, start[1] - 0.25 + rows / 2, rows), average=draw(st.sampled_from(["hit_cameras", "none"])),
    )  # fmt: skip
    matrices = np.repeat(arguments[P], cameras, 1)
    for n in range(1, cameras):
        matrices[0, n, :2, 3] = random.integers(-8, 8, 2) / 4
        matrices[0, n, 2, 3] = depth_of_all = draw(st.sampled_from([1.0, arguments["eps"], 0.0, -1.0]))
        if depth_of_all < 1:  # divided by eps, so that the places would be in the image
            matrices[0, n, :2] *= arguments["eps"]
    extent = (1, rows * columns, heads, 1, points)
    return arguments | {
        F: random.standard_normal((1, cameras, h, w, heads * 2)), P: matrices,
        "sampling_offsets": random.integers(-12, 13, (*extent, 2)) / 4, "attention_weights": random.uniform(-0.5, 1.0, extent),
    }  # fmt: skip


@PROPERTY
@given(arguments=flat_attentions(), deterministic=st.booleans())
def test_sca_on_its_borders(arguments: Any, deterministic: bool, backend: str, device: str) -> None:
    _check_sca(arguments, backend, device, deterministic)
