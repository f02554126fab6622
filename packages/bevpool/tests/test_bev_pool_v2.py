# SPDX-License-Identifier: Apache-2.0
"""bev_pool_v2: the operator contract, upstream's own numbers, faulty indices, and the ranks of a frustum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from muspace_bevpool import bev_pool_v2, bev_pool_v2_plan, bev_pool_v2_ranks
from muspace_bevpool._spec import BEV_POOL_V2
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.cases import Arguments, ErrorCase
from muspace_core.testing.compare import assert_close
from muspace_core.testing.golden import GoldenCase, data_root, golden_cases, golden_marks, golden_parameters
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "bev_pool_v2_oracle")
inputs = load_sibling(__file__, "bev_pool_v2_inputs")
contract = load_sibling(__file__, "pool_contract")
call = on_backend(bev_pool_v2)
ROOT = data_root(__file__)
GOLDEN = golden_cases("bev_pool_v2", ROOT)
ARGUMENTS = ("depth", "feat", *inputs.RANKS, "bev_feat_shape", *inputs.INTERVALS)
golden = pytest.mark.parametrize("case", golden_parameters(GOLDEN, pytest.mark.emu_budget(1_000_000)))


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return oracle.forward(**arguments), oracle.backward(grad_output, **arguments)


def _plan(tensors: Arguments, **keywords: Any) -> Any:
    given = [tensors[k] for k in ("ranks_depth", "ranks_feat", "ranks_bev", "bev_feat_shape", *inputs.INTERVALS)]
    return bev_pool_v2_plan(*given, depth_shape=tuple(tensors["depth"].shape), **keywords)


class TestBevPoolV2(contract.PoolContract):
    spec = BEV_POOL_V2
    operator = staticmethod(bev_pool_v2)
    oracle = staticmethod(_oracle)
    plan = staticmethod(_plan)
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("feat",)
    geometry = ("depth",)
    saved = ("depth", "feat")
    indices = inputs.INDICES
    optional = inputs.INDICES
    forms = {  # noqa: RUF012 - data of the contract
        "shape as a list": lambda t: t | {"bev_feat_shape": list(t["bev_feat_shape"])},
        "shape as a torch.Size": lambda t: t | {"bev_feat_shape": torch.Size(t["bev_feat_shape"])},
    }
    strangers = {  # noqa: RUF012 - data of the contract
        "grid": lambda a: a | {"bev_feat_shape": (2, 1, 4, 4, 4)},
        "same cells": lambda a: a | {"bev_feat_shape": (2, 1, 4, 3, 4)},
        "items": lambda a: a | {"bev_feat_shape": (3, 1, 3, 4, 4)},
        "bins": lambda a: a | {"depth": np.concatenate([a["depth"], a["depth"][:, :, :1]], 2)},
        "cameras": lambda a: a | {k: np.concatenate([a[k], a[k][:, :1]], 1) for k in ("depth", "feat")},
    }  # fmt: skip


# ---- upstream ------------------------------------------------------------------------------------------------------
class TestGolden:
    pytestmark = golden_marks(ROOT)

    def test_the_index_has_cases(self) -> None:
        assert {c.name for c in GOLDEN} >= {
            "b2_n3_c8", "c5_nonsquare", "single_point_intervals", "duplicate_points", "all_points_z3",
        }  # fmt: skip

    @staticmethod
    def _given(case: GoldenCase) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        arrays = case.arrays()
        stored = arrays["in"] | {"bev_feat_shape": tuple(case.entry["params"]["bev_feat_shape"])}
        return arrays, {name: stored[name] for name in ARGUMENTS}

    @staticmethod
    def _compare(case: GoldenCase, arrays: Any, output: Any, of_depth: Any, of_feat: Any) -> None:
        assert_close(output, arrays["out"]["output"], case.tolerance("out/output", 2e-6), "output")
        assert_close(of_feat, arrays["grad"]["feat"], case.tolerance("grad/feat", 1e-5), "gradient of feat")
        # Upstream assigns where a depth number is used twice; the sum is right.
        used = np.bincount(arrays["in"]["ranks_depth"], minlength=arrays["in"]["depth"].size)
        assert (case.name == "duplicate_points") == (used > 1).any()
        once = (used <= 1).reshape(arrays["in"]["depth"].shape)
        assert_close(of_depth, arrays["grad"]["depth"], case.tolerance("grad/depth", 1e-5), "gradient of depth", once)

    @golden
    def test_operator(self, case: GoldenCase, backend: str, device: str) -> None:
        arrays, given = self._given(case)
        tensors = as_tensors(given, device)
        leaves = [tensors["depth"].requires_grad_(), tensors["feat"].requires_grad_()]
        output = call(backend, *tensors.values())
        gradients = torch.autograd.grad(output, leaves, torch.from_numpy(arrays["in"]["grad_out"]).to(device))
        self._compare(case, arrays, output, *gradients)

    @golden
    def test_oracle(self, case: GoldenCase) -> None:
        arrays, given = self._given(case)
        gradients = oracle.backward(arrays["in"]["grad_out"], **given)
        self._compare(case, arrays, oracle.forward(**given), gradients["depth"], gradients["feat"])


def test_the_published_example(backend: str, device: str) -> None:
    """The numbers of upstream's own check: eight depths, features of ones, two cells of two points."""
    depth = torch.tensor([0.3, 0.4, 0.2, 0.1, 0.7, 0.6, 0.8, 0.9], device=device).view(1, 1, 2, 2, 2).requires_grad_()
    feat = torch.ones(1, 1, 2, 2, 2, device=device, requires_grad=True)
    pairs = {"rd": [0, 4, 1, 6], "rf": [0, 0, 1, 2], "rb": [0, 0, 1, 1], "starts": [0, 2], "lengths": [2, 2]}
    rd, rf, rb, starts, lengths = (torch.tensor(v, dtype=torch.int32, device=device) for v in pairs.values())
    output = call(backend, depth, feat, rd, rf, rb, (1, 1, 2, 2, 2), starts, lengths)
    assert output.shape == (1, 2, 1, 2, 2)
    total = output.sum()
    total.backward()
    torch.testing.assert_close(total.detach().cpu(), torch.tensor(4.4))
    assert depth.grad is not None and feat.grad is not None
    torch.testing.assert_close(depth.grad.reshape(-1).cpu(), torch.tensor([2.0, 2, 0, 0, 2, 0, 2, 0]))
    torch.testing.assert_close(feat.grad.reshape(-1).cpu(), torch.tensor([1.0, 1, 0.4, 0.4, 0.8, 0.8, 0, 0]))


# ---- special cases -------------------------------------------------------------------------------------------------
def _tensors(device: str, arguments: Arguments | None = None) -> Arguments:
    return as_tensors(arguments or inputs.CASES[0].build(), device)


def test_axes(backend: str, device: str) -> None:
    """Cell ((b*Dz + z)*Dy + y)*Dx + x in a contiguous [B, C, Dz, Dy, Dx]."""
    depth, feat = torch.full((2, 1, 1, 1, 1), 2.0, device=device), torch.tensor([[1.0, 2.0], [3.0, 5.0]], device=device)
    cell = ((1 * 2 + 1) * 3 + 2) * 4 + 1
    ranks = [torch.tensor([n], dtype=torch.int32, device=device) for n in (1, 1, cell, 0, 1)]
    output = call(backend, depth, feat.view(2, 1, 1, 1, 2), *ranks[:3], (2, 2, 3, 4, 2), *ranks[3:])
    assert output.shape == (2, 2, 2, 3, 4) and output.is_contiguous()
    assert output[1, :, 1, 2, 1].tolist() == [6.0, 10.0] and float(output.sum()) == 16.0


def test_feat_as_a_permuted_view(backend: str, device: str) -> None:
    """What the models pass: channels-first features with the axes turned, no copy asked of the caller."""
    tensors = _tensors(device)
    wanted = call(backend, *tensors.values())
    turned = tensors["feat"].permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2)
    assert not turned.is_contiguous()
    assert torch.equal(call(backend, *(tensors | {"feat": turned}).values()), wanted)


@pytest.mark.parametrize("kinds", [("int64",) * 5, ("int64", "int32", "int32", "int64", "int32")], ids=["all", "some"])
def test_indices_of_64_bits(kinds: tuple[str, ...], backend: str, device: str) -> None:
    tensors = _tensors(device)
    wanted = call(backend, *tensors.values())
    wide = tensors | {n: tensors[n].to(getattr(torch, k)) for n, k in zip(inputs.INDICES, kinds, strict=True)}
    assert torch.equal(call(backend, *wide.values()), wanted)
    assert torch.equal(call(backend, *wide.values(), plan=_plan(wide)), wanted) or backend == "reference"


@pytest.mark.parametrize("case", [c.parameter() for c in inputs.CONTENTS])
def test_faulty_indices(case: ErrorCase, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused on the cpu always, elsewhere where MUSPACE_CHECK asks; otherwise dropped; a plan is never made of them."""
    tensors = _tensors(device)
    case.change(tensors)
    if backend not in ("cpu", "reference"):
        output = call(backend, *tensors.values())
        assert torch.isfinite(output).all()
        if case.message.startswith("ranks"):
            given = {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
            wanted = oracle.forward(**given)
            mask = np.ones(wanted.shape, bool)
            if case.message.startswith("ranks_bev[0]"):
                # The cell of an interval is that of its first point, so here all of them go.
                mask[0, :, 0, 0, 0] = False
            if case.message.startswith("ranks_bev[64]"):
                # The oracle goes by points and adds it to the cell it names; in an interval of another cell it counts nowhere.
                mask[0, :, 0, 1, 1] = False
            assert_close(output, wanted, 2e-6, "the other points", mask)
        monkeypatch.setenv("MUSPACE_CHECK", "1")
    case.check(lambda: call(backend, *tensors.values()), device)
    monkeypatch.delenv("MUSPACE_CHECK", raising=False)
    case.check(lambda: on_backend(_plan)(backend, tensors), device)


@pytest.mark.parametrize("name", inputs.RANKS)
def test_a_rank_beyond_32_bits_does_not_wrap(name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors(device)
    tensors[name] = tensors[name].long()
    tensors[name][2] += 2**32
    monkeypatch.setenv("MUSPACE_CHECK", "1")
    with pytest.raises(ValueError, match=rf"^{name}\[2\]: expected "):
        call(backend, *tensors.values())
    if backend in ("cpu", "reference"):
        return
    monkeypatch.delenv("MUSPACE_CHECK")
    given = {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
    assert_close(call(backend, *tensors.values()), oracle.forward(**given), 2e-6, "the other points")


def test_an_empty_interval(backend: str, device: str) -> None:
    """Of length 0, anywhere: it holds nothing."""
    tensors = _tensors(device)
    wanted = call(backend, *tensors.values())
    for name, numbers in (("interval_starts", [0, 5, 66]), ("interval_lengths", [0, 0, 0])):
        more = torch.tensor(numbers, dtype=torch.int32, device=device)
        tensors[name] = torch.cat([more[:2], tensors[name], more[2:]])
    assert torch.equal(call(backend, *tensors.values()), wanted)


def test_intervals_in_any_order(backend: str, device: str) -> None:
    tensors = _tensors(device)
    wanted = call(backend, *tensors.values())
    tensors |= {name: tensors[name].flip(0) for name in inputs.INTERVALS}
    assert torch.equal(call(backend, *tensors.values()), wanted)


# ---- ranks ---------------------------------------------------------------------------------------------------------
def _ranks(points: Any, lower: Any, interval: Any, grid: Any, device: str) -> list[torch.Tensor]:
    found = bev_pool_v2_ranks(torch.as_tensor(points, dtype=torch.float32).to(device), lower, interval, grid)
    assert len(found) == 5
    for tensor in found:
        assert isinstance(tensor, torch.Tensor) and tensor.dim() == 1 and tensor.dtype == torch.int32
    return [t.cpu() for t in found]


def _same_ranks(found: list[torch.Tensor], wanted: tuple[np.ndarray, ...]) -> None:
    for name, tensor, array in zip(
        ("ranks_bev", "ranks_depth", "ranks_feat", "interval_starts", "interval_lengths"), found, wanted, strict=True
    ):
        assert tensor.tolist() == array.tolist(), name


@pytest.mark.backends("cpu", "cuda", "hip", "musa")
@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_a_frustum(seed: int, device: str) -> None:
    random = np.random.default_rng(seed)
    extent = [(2, 3, 4, 2, 5), (1, 1, 1, 1, 1), (3, 2, 6, 4, 3), (1, 6, 2, 3, 7)][seed]
    points = random.uniform(-12, 12, (*extent, 3))
    lower, interval, grid = (-10.0, -8.0, -5.0), (0.8, 1.6, 10.0), (25, 10, 1)
    _same_ranks(_ranks(points, lower, interval, grid, device), oracle.ranks(points, lower, interval, grid))


@pytest.mark.backends("cpu", "cuda", "hip", "musa")
def test_ranks_truncate_toward_zero(device: str) -> None:
    """Coordinates in (-1, 0) cells fall into cell 0: the first cell of every axis is two cells wide, as in upstream."""
    x = [-2.0, -1.0, -0.999, -0.5, -0.0, 0.0, 0.5, 0.999, 1.0, 3.999, 4.0, 4.5]
    points = np.zeros((1, 1, 1, 1, len(x), 3))
    for axis in range(3):
        moved = points.copy()
        moved[..., axis] = x
        bev, depth, *_ = _ranks(moved, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (4, 4, 4), device)
        stride = (1, 4, 16)[axis]
        assert depth.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
        assert bev.tolist() == [0, 0, 0, 0, 0, 0, stride, 3 * stride]


@pytest.mark.backends("cpu", "cuda", "hip", "musa")
def test_ranks_do_not_collide_beyond_two_to_the_24(device: str) -> None:
    """28 items of 640,000 cells: in float32 the cell 27*640000 + 1 would become 27*640000."""
    points = np.zeros((28, 1, 2, 1, 1, 3)) + 0.5
    points[:, 0, 1, 0, 0, 0] = 1.5
    bev, depth, feat, starts, lengths = _ranks(points, (0, 0, 0), (1, 1, 1), (200, 200, 16), device)
    assert bev.tolist() == [b * 640_000 + x for b in range(28) for x in (0, 1)]
    assert 27 * 640_000 + 1 in bev.tolist() and 27 * 640_000 + 1 > 2**24
    assert starts.tolist() == list(range(56)) and lengths.tolist() == [1] * 56
    assert depth.tolist() == list(range(56)) and feat.tolist() == [b for b in range(28) for _ in (0, 1)]


@pytest.mark.backends("cpu", "cuda", "hip", "musa")
def test_ranks_of_no_number(device: str) -> None:
    """NaN, infinities and numbers beyond every integer are outside."""
    strange = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e9, -3e9, 2.0**63, -(2.0**63)]
    points = np.full((1, 1, len(strange) + 1, 1, 3, 3), 0.5)
    for axis in range(3):
        points[0, 0, 1:, 0, axis, axis] = strange
    bev, depth, *_ = _ranks(points, (0, 0, 0), (1, 1, 1), (2, 2, 2), device)
    assert depth.tolist() == [0, 1, 2] and bev.tolist() == [0, 0, 0]


@pytest.mark.backends("cpu", "cuda", "hip", "musa")
@pytest.mark.parametrize(
    "shape", [(1, 2, 3, 2, 2), (0, 2, 3, 2, 2), (1, 0, 3, 2, 2), (1, 2, 0, 2, 2), (1, 2, 3, 0, 2)], ids=str
)
def test_ranks_of_nothing(shape: tuple[int, ...], device: str) -> None:
    """Empty tensors, which the operator takes: no None to trip over."""
    found = _ranks(np.full((*shape, 3), -50.0), (0, 0, 0), (1, 1, 1), (4, 4, 1), device)
    assert [t.numel() for t in found] == [0] * 5
    bev, depth, feat, starts, lengths = (t.to(device) for t in found)
    if all(shape):
        output = bev_pool_v2(
            torch.ones(shape, device=device, requires_grad=True), torch.ones(1, 2, 2, 2, 3, device=device), depth, feat, bev,
            (1, 1, 4, 4, 3), starts, lengths,
        )  # fmt: skip
        assert (output == 0).all() and output.requires_grad


@pytest.mark.backends("cpu", "cuda", "hip", "musa")
def test_ranks_feed_the_operator(device: str) -> None:
    """Ranks and operator together against a loop over points."""
    random = np.random.default_rng(8)
    points = random.uniform(-1.5, 4.5, (2, 2, 3, 2, 2, 3))
    depth, feat = random.random((2, 2, 3, 2, 2)), random.standard_normal((2, 2, 2, 2, 5))
    wanted = np.zeros((2, 5, 2, 3, 4))
    for b, n, d, h, w in np.ndindex(2, 2, 3, 2, 2):
        x, y, z = (int(v) for v in points[b, n, d, h, w])  # int() truncates toward zero
        if all(v > -1 for v in points[b, n, d, h, w]) and x < 4 and y < 3 and z < 2:
            wanted[b, :, z, y, x] += depth[b, n, d, h, w] * feat[b, n, h, w]
    bev, of_depth, of_feat, starts, lengths = bev_pool_v2_ranks(
        torch.from_numpy(points).float().to(device), (0, 0, 0), (1, 1, 1), (4, 3, 2)
    )
    images = [torch.from_numpy(a).float().to(device) for a in (depth, feat)]
    assert_close(bev_pool_v2(*images, of_depth, of_feat, bev, (2, 2, 3, 4, 5), starts, lengths), wanted, 2e-6)


@pytest.mark.backends("cpu")
def test_ranks_refuse(device: str) -> None:
    points = torch.zeros(1, 1, 1, 1, 1, 3)
    good = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (4, 4, 1))
    for wrong, named, kind in (
        ((points[0], *good), "points", ValueError),
        ((points[..., :2], *good), "points", ValueError),
        ((points.int(), *good), "points", TypeError),
        ((points, (0.0, 0.0), *good[1:]), "lower_bound", ValueError),
        ((points, good[0], (1.0, 0.0, 1.0), good[2]), "interval", ValueError),
        ((points, good[0], (1.0, float("nan"), 1.0), good[2]), "interval", ValueError),
        ((points, *good[:2], (4, 4)), "grid_size", ValueError),
        ((points, *good[:2], (4, -4, 1)), "grid_size", ValueError),
    ):
        with pytest.raises(kind, match=rf"^{named}.*: expected "):
            bev_pool_v2_ranks(*wrong)
