# SPDX-License-Identifier: Apache-2.0
"""voxel_pool_depth: the operator contract, its two switches, the sum over cameras, and which column picks the batch item."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from muspace_bevpool import voxel_pool_depth, voxel_pool_depth_plan
from muspace_bevpool._spec import VOXEL_POOL_DEPTH
from muspace_core.testing.calls import as_tensors, on_backend, represented, upstream_gradient
from muspace_core.testing.cases import FLOATING, Arguments
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "voxel_pool_depth_oracle")
inputs = load_sibling(__file__, "voxel_pool_depth_inputs")
contract = load_sibling(__file__, "pool_contract")
call = on_backend(voxel_pool_depth)
LAUNCH, WARP = "MUSPACE_VOXEL_POOL_DEPTH_LAUNCH", "MUSPACE_VOXEL_POOL_DEPTH_DEPTH_WARP"


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    # The upstream gradient has the shape of the output, so it says whether cameras were summed.
    summed = grad_output.shape[1] == 1
    return oracle.forward(**arguments, reduce_cams=summed), oracle.backward(grad_output, **arguments, reduce_cams=summed)


def _plan(tensors: Arguments, **keywords: Any) -> Any:
    return voxel_pool_depth_plan(*[tensors[k] for k in ("voxel_coords", "mask", "B", "X", "Y", "Z")], **keywords)


def _other(name: str, axes: dict[str, int]) -> Any:
    """The first slice along an axis once more, in every argument that has it."""
    return lambda a: a | {k: np.concatenate([a[k], np.take(a[k], [0], axis)], axis) for k, axis in axes.items()}


class TestVoxelPoolDepth(contract.PoolContract):
    spec = VOXEL_POOL_DEPTH
    operator = staticmethod(voxel_pool_depth)
    oracle = staticmethod(_oracle)
    plan = staticmethod(_plan)
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("img_feats",)
    geometry = ("img_depth",)
    saved = ("img_feats", "img_depth")
    indices = ("voxel_coords", "mask")
    forms = {  # noqa: RUF012 - data of the contract
        "int32 coordinates": lambda t: t | {"voxel_coords": t["voxel_coords"].int()},
    }
    strangers = {  # noqa: RUF012 - data of the contract
        **{axis: (lambda a, axis=axis: a | {axis: a[axis] + 1}) for axis in ("X", "Y", "Z")},
        "same cells": lambda a: a | {"X": a["Y"], "Y": a["X"]},
        "bins": _other("bins", {"img_depth": 1, "voxel_coords": 3, "mask": 3}),
        "rows": _other("rows", {"img_feats": 3, "img_depth": 2, "voxel_coords": 4, "mask": 4}),
    }

    def output_dtype(self, tensors: Arguments) -> torch.dtype:
        return torch.promote_types(tensors["img_feats"].dtype, tensors["img_depth"].dtype)

    def test_a_plan_of_kept_cameras_does_not_sum_them(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        for summed in (False, True):
            plan = self.planned(tensors, backend, reduce_cams=summed)
            with pytest.raises(ValueError, match=r"^plan: expected "):
                self.call(tensors, backend, plan=plan, reduce_cams=not summed)


# ---- special cases -------------------------------------------------------------------------------------------------
def _tensors(arguments: Arguments, device: str, feats: str = "float32", depth: str = "float32") -> Arguments:
    return as_tensors(arguments, device, img_feats=FLOATING[feats], img_depth=FLOATING[depth])


def _run(backend: str, tensors: Arguments, **keywords: Any) -> tuple[torch.Tensor, ...]:
    live = tensors | {k: tensors[k].detach().requires_grad_() for k in ("img_feats", "img_depth")}
    output = call(backend, *live.values(), **keywords)
    leaves = [live["img_feats"], live["img_depth"]]
    return (output.detach(), *torch.autograd.grad(output, leaves, upstream_gradient(output)))


def test_axes(backend: str, device: str) -> None:
    """One point of item 1, sweep 1, camera 2, bin 1, pixel (0, 2): image (b*S + s)*N + n, cell (cb, n, x, y, z)."""
    b, s, n, d, h, w = 1, 1, 2, 1, 0, 2
    feats = torch.arange(2 * 6 * 2 * 2 * 3, device=device).float().view(2, 6, 2, 2, 3)
    depth = torch.arange(12 * 2 * 2 * 3, device=device).float().view(12, 2, 2, 3) / 8
    coords = torch.zeros(2, 2, 3, 2, 2, 3, 4, dtype=torch.int64, device=device)
    mask = torch.zeros(2, 2, 3, 2, 2, 3, dtype=torch.bool, device=device)
    coords[b, s, n, d, h, w] = torch.tensor([1, 4, 2, 1])
    mask[b, s, n, d, h, w] = True
    output = call(backend, feats, depth, coords, mask, 2, 5, 3, 2)
    assert output.shape == (2, 3, 5, 3, 2, 2) and output.is_contiguous()
    wanted = feats[b, s * 3 + n, :, h, w] * depth[(b * 2 + s) * 3 + n, d, h, w]
    assert output[1, n, 4, 2, 1].tolist() == wanted.tolist() and int((output != 0).sum()) == 2
    summed = call(backend, feats, depth, coords, mask, 2, 5, 3, 2, reduce_cams=True)
    assert summed.shape == (2, 1, 5, 3, 2, 2) and summed[1, 0, 4, 2, 1].tolist() == wanted.tolist()


@pytest.mark.parametrize("feats", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("depth", ["float32", "bfloat16", "float16"])
def test_output_dtype_is_promoted(feats: str, depth: str, backend: str, device: str) -> None:
    tensors = _tensors(inputs.CASES[0].build(), device, feats, depth)
    output, of_feats, of_depth = _run(backend, tensors)
    wanted = torch.promote_types(FLOATING[feats], FLOATING[depth])
    assert output.dtype == wanted and (of_feats.dtype, of_depth.dtype) == (FLOATING[feats], FLOATING[depth])
    given = {k: represented(v) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
    tolerance = VOXEL_POOL_DEPTH.tolerances[str(wanted).removeprefix("torch.")].output
    assert_close(output, oracle.forward(**given), tolerance)


@pytest.mark.warp_sensitive
@pytest.mark.parametrize("case", ["tiny", "sweeps", "three_cameras", "one_cell"])
def test_reduce_cams_is_the_sum_over_cameras(case: str, backend: str, device: str) -> None:
    tensors = _tensors(next(c for c in inputs.CASES if c.name == case).build(), device)
    kept, summed = call(backend, *tensors.values()), call(backend, *tensors.values(), reduce_cams=True)
    assert summed.shape == (kept.shape[0], 1, *kept.shape[2:])
    assert_close(summed, kept.sum(1, keepdim=True), 2e-6)
    # The gradient of a sum over cameras is that of every camera.
    live = [tensors[k].clone().requires_grad_() for k in ("img_feats", "img_depth")]
    rest = list(tensors.values())[2:]
    weights = torch.linspace(-1, 1, summed.numel(), device=device).view(summed.shape)
    found = torch.autograd.grad((call(backend, *live, *rest, reduce_cams=True) * weights).sum(), live)
    wanted = torch.autograd.grad((call(backend, *live, *rest) * weights).sum(), live)
    for left, right in zip(found, wanted, strict=True):
        assert_close(left, right, 1e-5)


SWITCHED = ("tiny", "c3", "c8", "c32", "c33", "c64", "sweeps", "one_cell")


@pytest.mark.warp_sensitive
@pytest.mark.parametrize("case", SWITCHED)
def test_the_switches_change_no_number(case: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch shapes and the warp reduction of the depth gradient are matters of speed."""
    tensors = _tensors(next(c for c in inputs.CASES if c.name == case).build(), device)
    wanted = _run(backend, tensors)
    settings = [(LAUNCH, text) for text in ("auto", "linear", "2d", "packed")] + [(WARP, text) for text in ("1", "0")]
    for name, text in settings:
        monkeypatch.setenv(name, text)
        if text == "packed" and tensors["img_feats"].shape[2] % 4 and backend not in ("cpu", "reference"):
            with pytest.raises(ValueError, match=rf"^{name}=packed: expected "):
                _run(backend, tensors)
            monkeypatch.delenv(name)
            continue
        for what, left, right in zip(("output", "img_feats", "img_depth"), _run(backend, tensors), wanted, strict=True):
            assert_close(left, right, 2e-6 if what == "output" else 1e-5, f"{what} under {name}={text}")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("name", "text"), [(LAUNCH, "cubic"), (LAUNCH, "2D "), (WARP, "yes"), (WARP, "2")])
def test_a_switch_of_another_value_is_refused(
    name: str, text: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "reference":
        pytest.skip("the reference has no launch")
    tensors = _tensors(inputs.CASES[0].build(), device)
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"^{name}: expected "):
        _run(backend, tensors)


def test_the_switches_are_in_the_spec() -> None:
    assert {s.name: s.default for s in VOXEL_POOL_DEPTH.switches} == {LAUNCH: "auto", WARP: "1"}


def test_column_0_picks_the_batch_item(backend: str, device: str) -> None:
    """Points of one item may land in another; each keeps its own features, and gets their gradient."""
    arguments = inputs.pooling("swapped", views=(2, 1, 2), masked=1.0)
    arguments["voxel_coords"] = np.abs(arguments["voxel_coords"]) % np.array([2, 3, 4, 2])
    plain = call(backend, *_tensors(arguments, device).values())
    arguments["voxel_coords"][..., 0] = 1 - arguments["voxel_coords"][..., 0]
    assert_bits_equal(call(backend, *_tensors(arguments, device).values()), plain.flip(0))


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("number", [-1, "size", -(2**31), 2**31 - 1, 2**31, 2**32, -(2**32), 2**63 - 1, -(2**63)])
def test_a_masked_point_outside_is_dropped(column: int, number: Any, backend: str, device: str) -> None:
    arguments = inputs.pooling("dropped", masked=1.0)
    arguments["voxel_coords"] = np.abs(arguments["voxel_coords"]) % np.array([2, 3, 4, 2])
    wanted_of = dict(arguments, mask=arguments["mask"].copy())
    wanted_of["mask"][0, 0, 1, 2, 1, 1] = False
    wanted = _run(backend, _tensors(wanted_of, device))
    arguments["voxel_coords"][0, 0, 1, 2, 1, 1, column] = (2, 3, 4, 2)[column] if number == "size" else number
    tensors = _tensors(arguments, device)
    for found, expected in zip(_run(backend, tensors), wanted, strict=True):
        assert_close(found, expected, 1e-6)
    if number == "size" or -(2**31) <= number < 2**31:
        tensors["voxel_coords"] = tensors["voxel_coords"].int()
        for found, expected in zip(_run(backend, tensors), wanted, strict=True):
            assert_close(found, expected, 1e-6, "int32")


def test_what_the_mask_hides_spreads_nothing(backend: str, device: str) -> None:
    """NaN depth and coordinates of any size where the mask is false."""
    tensors = _tensors(inputs.pooling("hidden", masked=0.5), device)
    wanted = _run(backend, tensors)
    hidden = ~tensors["mask"]
    tensors["img_depth"] = torch.where(hidden.view(tensors["img_depth"].shape), float("nan"), tensors["img_depth"])
    tensors["voxel_coords"] = torch.where(hidden[..., None], 2**62, tensors["voxel_coords"])
    found = _run(backend, tensors)
    assert_bits_equal(found[0], wanted[0], "output")
    for name, left, right in zip(("img_feats", "img_depth"), found[1:], wanted[1:], strict=True):
        assert_close(left, right, 1e-6, f"gradient of {name}")


def test_features_that_are_channels_last(backend: str, device: str) -> None:
    tensors = _tensors(inputs.CASES[0].build(), device)
    wanted = call(backend, *tensors.values())
    turned = tensors["img_feats"].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert_bits_equal(call(backend, *(tensors | {"img_feats": turned}).values()), wanted)


def test_every_point_in_one_cell(backend: str, device: str) -> None:
    """216 points of three cameras collide: each camera's sum, and the sum of them."""
    tensors = _tensors(next(c for c in inputs.CASES if c.name == "one_cell").build(), device)
    assert int(tensors["mask"].sum()) == 216
    whole = tensors | {k: (tensors[k] * 4).round() for k in ("img_feats", "img_depth")}
    feats, depth = whole["img_feats"][0].double(), whole["img_depth"].double()
    wanted = torch.einsum("nchw,ndhw->nc", feats, depth)
    output = call(backend, *whole.values())
    assert torch.equal(output[0, :, 6, 6, 1].double(), wanted), "integers: exact"
    assert int((output != 0).sum()) <= wanted.numel()
    assert torch.equal(call(backend, *whole.values(), reduce_cams=True)[0, 0, 6, 6, 1].double(), wanted.sum(0))
