# SPDX-License-Identifier: Apache-2.0
"""What the formula of flash_bevpool_sca promises and a tolerance might hide: strict hits, absent arguments, odd numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from muspace_core.testing.calls import as_tensors, upstream_gradient
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.routes import assert_routes_agree

oracle = load_sibling(__file__, "flash_bevpool_sca_oracle")
inputs = load_sibling(__file__, "flash_bevpool_sca_inputs")
calls = load_sibling(__file__, "flash_calls")

INF, NAN = float("inf"), float("nan")
F, P, S, W = calls.SCA_TENSORS
call = calls.sca
LEAVES = (F, S, W)


def differentiated(
    backend: str, given: dict[str, Any], seed: int | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and the gradients of the tensors that are given, for an upstream gradient of ones or noise."""
    names = [name for name in LEAVES if given[name] is not None]
    live = given | {name: given[name].detach().requires_grad_() for name in names}
    output = call(backend, live)
    upstream = torch.ones_like(output) if seed is None else upstream_gradient(output, seed)
    return output.detach(), dict(zip(names, torch.autograd.grad(output, [live[n] for n in names], upstream), strict=True))


# ---- which camera sees which pillar --------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [0, 1], ids=["u", "v"])
def test_the_image_is_open_at_its_edges(axis: int, backend: str, device: str) -> None:
    """Exactly 0 and exactly the image's size do not hit; half a pixel inside hits, and the zeros outside take half."""
    features = np.array([1.0, 2.0, 4.0, 8.0])
    along, across = (-0.25, 4.25, 9), (0.0, 1.0, 1)
    shape, ranges = ((1, 4, 1), (along, across)) if axis == 0 else ((4, 1, 1), (across, along))
    output, gradients = differentiated(backend, as_tensors(inputs.flat(features.reshape(shape), *ranges), device))
    x = 0.5 * np.arange(9)
    expected = np.where((x > 0) & (x < 4), np.interp(x - 0.5, range(-1, 5), [0, 1, 2, 4, 8, 0]), 0)
    assert output.reshape(-1).tolist() == expected.tolist()
    assert gradients[F].reshape(-1).tolist() == [1.5, 2.0, 2.0, 1.5]


@pytest.mark.parametrize("edge", [0.0, 1.0])
@pytest.mark.parametrize("inward", [True, False])
def test_the_nearest_numbers_to_the_edge(inward: bool, edge: float, backend: str, device: str) -> None:
    """One float decides; the place is the matrix' constant on an image of one pixel, so it is exact."""
    step = np.float32(0.5)
    place = np.nextafter(np.float32(edge), step) if inward else np.float32(edge)
    if inward and edge == 0:
        place = np.float32(2.0**-60)
    matrix = np.array([[0, 0, 0, place], [0, 0, 0, 0.5], [0, 0, 0, 1]], np.float32)
    output, _ = differentiated(backend, as_tensors(inputs.flat(np.full((1, 1, 1), 2.0), (0, 1, 1), (0, 1, 1), matrix), device))
    assert (output.item() != 0) == inward
    if inward:
        assert_close(output.reshape(-1), [1.0], 1e-6)


def test_the_least_depth_is_strict(backend: str, device: str) -> None:
    """A depth of exactly eps does not hit; the next float does."""
    for depth, hits in (
        (2.0**-10, False),
        (np.nextafter(np.float32(2.0**-10), np.float32(1)), True),
        (-1.0, False),
        (0.0, False),
    ):
        matrix = np.array([[0, 0, 0, 2.0**-11], [0, 0, 0, 2.0**-11], [0, 0, 0, depth]], np.float32)
        output, _ = differentiated(
            backend, as_tensors(inputs.flat(np.full((1, 1, 1), 3.0), (0, 1, 1), (0, 1, 1), matrix), device)
        )
        assert (output.item() != 0) == hits, depth


def test_all_anchors_of_a_hit_camera_contribute(backend: str, device: str) -> None:
    """d = z: behind the camera the division is by eps; such an anchor hits nothing alone, and counts beside one that does."""
    matrix = np.array([[0, 0, 0, 1], [0, 0, 0, 0.5], [0, 0, 1, 0]])
    given = inputs.flat(np.array([[[1.0], [3.0]]]), (0, 1, 1), (0, 1, 1), matrix, z_anchors=(2.0, -1.0), eps=1.0)
    wanted = oracle.backward(np.ones((1, 1, 1)), given[F], given[P], None, None, oracle.View.of(given))
    output, gradients = differentiated(backend, as_tensors(given, device))
    assert_close(output, wanted.output, 2e-6)
    assert_close(gradients[F], wanted.grad_feats, 2e-6)
    # In front X = 0 and Y = -0.25; behind both divide by 1 and X = 0.5, Y = 0; they share the weight.
    assert output.item() == 0.5 * 0.75 * 1.0 + 0.5 * 2.0
    hidden = call(backend, as_tensors(given | {"z_anchors": (-1.5, -1.0)}, device))
    assert hidden.item() == 0


def test_pillars_that_no_camera_sees(backend: str, device: str) -> None:
    """Exact zeros, and exactly no gradient for their offsets and weights, even if those are infinite."""
    given = as_tensors(inputs.attend("unseen", batch=2, cameras=2, grid=(5, 4)), device)
    seen = torch.from_numpy(oracle.hits(given[P].cpu().numpy(), oracle.View.of(given))).any(1).to(device)
    assert seen.any() and not seen.all()
    for name in (S, W):
        given[name] = torch.where(seen.view(2, 20, *[1] * (given[name].dim() - 2)), given[name], INF)
    output, gradients = differentiated(backend, given)
    assert (output[~seen] == 0).all() and (output[seen] != 0).any(-1).all()
    for name in LEAVES:
        assert torch.isfinite(gradients[name]).all(), name
    for name in (S, W):
        assert (gradients[name][~seen] == 0).all() and (gradients[name][seen] != 0).any(), name


# ---- numbers that are none -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("axis", [0, 1], ids=["x", "y"])
def test_an_offset_that_is_no_number(axis: int, bad: float, backend: str, device: str) -> None:
    """Its sample contributes nothing and gets no gradient; the others are as if its weight were zero."""
    given = as_tensors(inputs.attend("bad offset", grid=(4, 4)), device)
    spoiled = given[S].clone()
    spoiled[:, :, 0, 1, 2, axis] = bad
    silenced = given[W].clone()
    silenced[:, :, 0, 1, 2] = 0
    output, gradients = differentiated(backend, given | {S: spoiled}, seed=1)
    wanted, expected = differentiated(backend, given | {W: silenced}, seed=1)
    assert_close(output, wanted, 1e-6)
    assert (gradients[S][:, :, 0, 1, 2] == 0).all() and (gradients[W][:, :, 0, 1, 2] == 0).all()
    assert_close(gradients[F], expected[F], 1e-6)
    for name in (S, W):
        kept = torch.ones_like(gradients[name], dtype=torch.bool)
        kept[:, :, 0, 1, 2] = False
        assert_close(gradients[name], expected[name], 1e-6, name, mask=kept.cpu().numpy())


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_projection_that_is_no_number(bad: float, row: int, backend: str, device: str) -> None:
    """That camera sees nothing; the other one goes on as if it were alone."""
    given = as_tensors(inputs.attend("bad projection"), device)
    wanted, expected = differentiated(backend, given | {name: given[name][:, 1:] for name in (F, P)})
    spoiled = given[P].clone()
    spoiled[:, 0, row, 3] = bad
    output, gradients = differentiated(backend, given | {P: spoiled})
    assert_bits_equal(output, wanted)
    assert (gradients[F][:, 0] == 0).all()
    assert_close(gradients[F][:, 1:], expected[F], 1e-6)
    for name in (S, W):
        assert_close(gradients[name], expected[name], 1e-6, name)


def test_nothing_outside_a_level_is_touched(backend: str, device: str) -> None:
    """The rows before and behind a level, and the other camera's map, hold no numbers; half-pixel samples miss them all."""
    given = inputs.flat(np.zeros((1, 2, 4)), (0, 2, 2), (0, 1, 1), spatial_shapes=((1, 2), (1, 2), (1, 2)))
    feats = np.full((1, 2, 6, 4), INF)
    feats[0, 0, 2:4] = 2.0
    given[F] = feats
    away = inputs.FLAT - np.array([[0, 0, 0, 9]] * 2 + [[0] * 4], np.float32)
    given[P] = np.stack([inputs.FLAT, away])[None]
    # Quarter steps outwards from the two pixel centres, and far outside: corners left, right, above and below.
    moves = [(-0.75, 0.0), (0.75, 0.0), (0.0, -0.75), (0.0, 0.75), (-0.5, -0.5), (0.5, 0.5), (1e6, 0.0)]
    offsets = np.full((1, 2, 1, 3, len(moves), 2), 1e9)
    offsets[:, :, :, 1] = moves
    weights = np.full(offsets.shape[:-1], INF)
    weights[:, :, :, 1] = 1.0
    weights[:, :, :, 1, -1] = NAN
    output, gradients = differentiated(backend, as_tensors(given | {S: offsets, W: weights}, device))
    clean = given | {F: np.where(np.isfinite(feats), feats, 0.0)}
    silent = np.where(np.isfinite(weights), weights, 0.0)
    wanted = oracle.backward(np.ones((1, 2, 4)), clean[F], given[P], offsets, silent, oracle.View.of(given))
    assert_close(output, wanted.output, 1e-6)
    for name, expected in ((F, wanted.grad_feats), (S, wanted.grad_offsets)):
        assert_close(gradients[name], expected, 1e-6, name)
    assert torch.isfinite(gradients[W]).all()


# ---- absent arguments and forms ------------------------------------------------------------------------------------
def test_absent_offsets_are_zeros(backend: str, device: str) -> None:
    """Zeros of one head, if the weights say so; the result is that of explicit zeros."""
    given = as_tensors(inputs.attend("no offsets", heads=1, offsets=False, batch=2), device)
    output, gradients = differentiated(backend, given)
    explicit = given | {S: torch.zeros(*given[W].shape, 2, device=device)}
    wanted, expected = differentiated(backend, explicit)
    assert_bits_equal(output, wanted)
    assert_bits_equal(gradients[W], expected[W])
    assert_close(gradients[F], expected[F], 1e-6)


def test_absent_weights_are_equal_shares(backend: str, device: str) -> None:
    """1 / (levels * points) for every head; with offsets absent as well, one point per anchor and one head."""
    given = as_tensors(inputs.attend("no weights", weights=False, batch=2), device)
    output, gradients = differentiated(backend, given)
    explicit = given | {W: torch.full(given[S].shape[:-1], 1 / 8, device=device)}
    wanted, expected = differentiated(backend, explicit)
    assert_close(output, wanted, 1e-6)
    for name in (F, S):
        assert_close(gradients[name], expected[name], 1e-6, name)
    neither = given | {S: None}
    one = torch.full((2, 12, 1, 2, 2), 1 / 4, device=device)
    assert_close(
        call(backend, neither), call(backend, neither | {S: torch.zeros(2, 12, 1, 2, 2, 2, device=device), W: one}), 1e-6
    )


def test_heads_of_weights_alone(backend: str, device: str) -> None:
    """Offsets absent and weights of two heads: two heads of zero offsets, or a refusal in words."""
    given = as_tensors(inputs.attend("weights alone", offsets=False), device)
    explicit = given | {S: torch.zeros(*given[W].shape, 2, device=device)}
    try:
        output = call(backend, given)
    except ValueError as error:
        assert str(error).startswith(W)
    else:
        assert_bits_equal(output, call(backend, explicit))


def test_one_map_is_one_level(backend: str, device: str) -> None:
    """[B,N,H,W,C] is [B,N,S,C] with one level; the gradient has the argument's shape."""
    given = as_tensors(inputs.attend("one map", levels=(5, 7)), device)
    output, gradients = differentiated(backend, given)
    flattened = given | {F: given[F].flatten(2, 3), "spatial_shapes": ((5, 7),)}
    wanted, expected = differentiated(backend, flattened)
    assert_bits_equal(output, wanted)
    assert gradients[F].shape == given[F].shape
    assert_close(gradients[F].flatten(2, 3), expected[F], 1e-6)


def test_default_anchors_are_cell_centres(backend: str, device: str) -> None:
    roi = (-5.0, 5.0, -4.0, 4.0, -1.0, 2.0)
    given = as_tensors(inputs.attend("centres", z_anchors=None, grid=(4, 3, 3), roi=roi), device)
    wanted = call(backend, given | {"z_anchors": (-0.5, 0.5, 1.5)})
    assert_bits_equal(call(backend, given), wanted)
    assert_bits_equal(call(backend, given | {"z_anchors": torch.tensor([-0.5, 0.5, 1.5])}), wanted, "a tensor")
    assert_bits_equal(
        call(backend, given | {"z_anchors": (-0.5, 0.5, 1.5), "roi_range": roi[:4], "grid_size": (4, 3)}),
        wanted,
        "four numbers",
    )


def test_points_take_anchors_in_turn(backend: str, device: str) -> None:
    """u = z: weight on one point at a time names the anchor, k % A and not k // points."""
    matrix = np.array([[0, 0, 1, 0], [0, 0, 0, 0.5], [0, 0, 0, 1]])
    given = inputs.flat(np.array([1.0, 10.0, 100.0]).reshape(1, 3, 1), (0, 1, 1), (0, 1, 1), matrix, z_anchors=(0.5, 1.5, 2.5))
    found = []
    for k in range(6):
        weights = np.zeros((1, 1, 1, 1, 6))
        weights[..., k] = 1.0
        found.append(call(backend, as_tensors(given | {W: weights}, device)).item())
    assert_close(np.array(found), np.array([1, 10, 100, 1, 10, 100]), 1e-6)


@pytest.mark.parametrize("average", ["hit_cameras", "none"])
def test_the_mean_over_cameras(average: str, backend: str, device: str) -> None:
    """Two cameras hit and a third looks away: a mean over two, or the plain sum."""
    given = inputs.flat(np.full((1, 1, 1), 2.0), (0, 1, 1), (0, 1, 1), average=average)
    away = inputs.FLAT - np.array([[0, 0, 0, 9]] * 2 + [[0] * 4], np.float32)
    given[F] = np.array([2.0, 6.0, 100.0]).reshape(1, 3, 1, 1, 1)
    given[P] = np.stack([inputs.FLAT, inputs.FLAT, away])[None]
    output, gradients = differentiated(backend, as_tensors(given, device))
    share = 0.5 if average == "hit_cameras" else 1.0
    assert output.item() == 8.0 * share and gradients[F].reshape(-1).tolist() == [share, share, 0.0]


def test_offsets_are_pixels_of_their_level(backend: str, device: str) -> None:
    """One pixel of offset is one pixel on a map of eight and on a map of four; its gradient has no factor of the size."""
    features = np.concatenate([np.arange(8.0), 100 * np.arange(4.0)]).reshape(1, 1, 12, 1)
    given = inputs.flat(np.zeros((1, 8, 1)), (0, 8, 1), (0, 1, 1), spatial_shapes=((1, 8), (1, 4)))
    given |= {F: features, W: np.ones((1, 1, 1, 2, 1)), S: np.zeros((1, 1, 1, 2, 1, 2))}
    for move, expected in ((0.0, 153.5), (1.0, 254.5), (0.25, 178.75)):
        given[S][..., 0] = move
        output, gradients = differentiated(backend, as_tensors(given, device))
        assert output.item() == expected
        assert gradients[S][..., 0].reshape(-1).tolist() == [1.0, 100.0]


def test_queries_are_rows_of_y(backend: str, device: str) -> None:
    """q = y * X + x: a camera whose pixel is the pillar gives the image back."""
    image = np.arange(1.0, 13).reshape(3, 4, 1)
    output = call(backend, as_tensors(inputs.flat(image, (0.0, 4.0, 4), (0.0, 3.0, 3)), device))
    assert_close(output, image.reshape(1, 12, 1), 1e-6)


def test_four_rows_are_three(backend: str, device: str) -> None:
    given = as_tensors(inputs.attend("rows", batch=2, cameras=3), device)
    wanted = call(backend, given)
    for last in (1.0, 0.0, NAN):
        assert_bits_equal(call(backend, given | {P: torch.nn.functional.pad(given[P], (0, 0, 0, 1), value=last)}), wanted)


def test_points_must_be_a_multiple_of_the_anchors(backend: str, device: str) -> None:
    given = as_tensors(inputs.attend("multiple"), device)
    with pytest.raises(
        ValueError, match=r"^(sampling_offsets|z_anchors|attention_weights).*4.*3|^(sampling_offsets|z_anchors).*3.*4"
    ):
        call(backend, given | {"z_anchors": (0.0, 0.5, 1.0)})


def test_channels_must_be_a_multiple_of_the_heads(backend: str, device: str) -> None:
    given = as_tensors(inputs.attend("heads", heads=2), device)
    with pytest.raises(ValueError, match=r"heads.*7|7.*heads"):
        call(backend, given | {F: given[F][..., :7].contiguous()})


@pytest.mark.parametrize("name", inputs.VALUES)
def test_bad_numbers(name: str, backend: str, device: str) -> None:
    argument, value, exception = inputs.VALUES[name]
    given = as_tensors(inputs.attend("tiny0", batch=2), device)
    # Without spatial_shapes, or with such as do not sum to the rows, the features are the ones that look wrong.
    with pytest.raises(exception, match=rf"^({argument}|image_feats)\b.*expected ") as caught:
        call(backend, given | {argument: value})
    assert argument == "spatial_shapes" or str(caught.value).startswith(argument)


# ---- gradients -----------------------------------------------------------------------------------------------------
@pytest.mark.backends("cpu", "reference")
@pytest.mark.parametrize("name", ["one", "two levels"])
def test_gradcheck(name: str, backend: str) -> None:
    levels = ((3, 4),) if name == "one" else ((3, 4), (2, 2))
    arguments = inputs.attend(f"check {name}", channels=4, levels=levels, grid=(2, 2), points=1)
    view = oracle.View.of(arguments)
    assert not oracle.near_cell_boundary(arguments[P], arguments[S], oracle.levels_of(arguments[F], view), view, 1e-5).any()
    given = as_tensors(arguments, "cpu", torch.float64)
    leaves = tuple(given[n].requires_grad_() for n in LEAVES)
    torch.autograd.gradcheck(
        lambda f, o, w: call(backend, given | {F: f, S: o, W: w}), leaves, eps=1e-6, atol=1e-6, rtol=1e-4, nondet_tol=0.0
    )


@pytest.mark.warp_sensitive
@pytest.mark.emu_budget(1_000_000)
@pytest.mark.parametrize("name", ["tiny", "h8_d4", "h1_d33", "pyramid", "one_map", "no_offsets", "no_weights", "neither"])
def test_the_ordered_route_agrees(name: str, backend: str, device: str) -> None:
    """The bit-reproducible backward and the default one are the same sums."""
    case = next(c for c in inputs.CASES if c.name == name)

    def forward() -> tuple[torch.Tensor, list[torch.Tensor]]:
        given = as_tensors(case.build(), device)
        leaves = [given[name].requires_grad_() for name in LEAVES if given[name] is not None]
        return call(backend, given), leaves

    assert_routes_agree(forward, torch.ones_like, backend)


def test_geometry_gets_no_gradient(backend: str, device: str) -> None:
    given = as_tensors(inputs.attend("geometry"), device)
    for name in (*LEAVES, P):
        given[name].requires_grad_()
    output = call(backend, given)
    found = torch.autograd.grad(output.sum(), [given[P]], allow_unused=True, retain_graph=True)[0]
    assert found is None or bool((found == 0).all())
    output.sum().backward()
    assert all(given[name].grad is not None for name in LEAVES)
