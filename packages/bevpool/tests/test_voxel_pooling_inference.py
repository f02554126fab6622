# SPDX-License-Identifier: Apache-2.0
"""voxel_pooling_inference: the operator contract, upstream's own numbers, and agreement with the training form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_bevpool import voxel_pooling_inference, voxel_pooling_inference_plan, voxel_pooling_train
from muspace_bevpool._spec import VOXEL_POOLING_INFERENCE
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.cases import Arguments
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.golden import GoldenCase, data_root, golden_cases, golden_marks, golden_parameters
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "voxel_pooling_oracle")
inputs = load_sibling(__file__, "voxel_pooling_inference_inputs")
contract = load_sibling(__file__, "pool_contract")
call = on_backend(voxel_pooling_inference)
ROOT = data_root(__file__)
GOLDEN = golden_cases("voxel_pooling_inference", ROOT)
TENSORS = ("geom_xyz", "depth_features", "context_features")
golden = pytest.mark.parametrize("case", golden_parameters(GOLDEN, pytest.mark.emu_budget(1_000_000)))


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return oracle.inference(**arguments), oracle.inference_backward(grad_output, **arguments)


def _more(a: Arguments, axis: int) -> Arguments:
    """One camera (axis 1 of geom) or bin (axis 2) more; cameras of the first item only would not fit a batch of two."""
    wider = np.concatenate([a["geom_xyz"], np.take(a["geom_xyz"], [0], axis)], axis)
    if axis == 2:
        return a | {"geom_xyz": wider, "depth_features": np.concatenate([a["depth_features"], a["depth_features"][:, :1]], 1)}
    more = {k: np.concatenate([a[k], a[k][: wider.shape[0] * wider.shape[1] - len(a[k])]]) for k in TENSORS[1:]}
    return a | {"geom_xyz": wider} | more


class TestVoxelPoolingInference(contract.PoolContract):
    spec = VOXEL_POOLING_INFERENCE
    operator = staticmethod(voxel_pooling_inference)
    oracle = staticmethod(_oracle)
    plan = staticmethod(lambda t, **k: voxel_pooling_inference_plan(t["geom_xyz"], t["voxel_num"], **k))
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("context_features",)
    geometry = ("depth_features",)
    saved = ("depth_features", "context_features")
    indices = ("geom_xyz",)
    forms = {  # noqa: RUF012 - data of the contract
        "voxel_num as a list": lambda t: t | {"voxel_num": list(t["voxel_num"])},
    }
    strangers = {  # noqa: RUF012 - data of the contract
        "X": lambda a: a | {"voxel_num": (5, 3, 2)},
        "same plane": lambda a: a | {"voxel_num": (3, 4, 2)},
        "Z": lambda a: a | {"voxel_num": (4, 3, 3)},
        "cameras": lambda a: _more(a, 1),
        "bins": lambda a: _more(a, 2),
        "same points": lambda a: a | {k: np.swapaxes(a[k], i, i + 1).copy() for k, i in zip(TENSORS, (3, 2, 2), strict=True)},
    }


# ---- upstream ------------------------------------------------------------------------------------------------------
class TestGolden:
    pytestmark = golden_marks(ROOT)

    def test_the_index_has_cases(self) -> None:
        assert {c.name for c in GOLDEN} >= {"b1_n2_c16", "c33", "fp16_c32"}

    @golden
    def test_operator(self, case: GoldenCase, backend: str, device: str) -> None:
        arrays, voxel_num = case.arrays(), case.entry["params"]["voxel_num"]
        given = [torch.from_numpy(arrays["in"][k]).to(device) for k in TENSORS]
        output = call(backend, *given, voxel_num)
        half = case.entry["dtype"] == "fp16"
        assert_close(output, arrays["out"]["output"], 2e-2 if half else case.tolerance("out/output", 2e-6), "output")
        if half:  # upstream rounds the products and sums in half; ours is the exact sum, rounded once
            assert_close(output, oracle.inference(*[arrays["in"][k] for k in TENSORS], voxel_num), 5e-4, "exact")

    @golden
    def test_oracle(self, case: GoldenCase) -> None:
        arrays = case.arrays()
        found = oracle.inference(*[arrays["in"][k] for k in TENSORS], case.entry["params"]["voxel_num"])
        assert_close(found, arrays["out"]["output"], 2e-2 if case.entry["dtype"] == "fp16" else 2e-6)


# ---- special cases -------------------------------------------------------------------------------------------------
def test_axes_and_strides(backend: str, device: str) -> None:
    """Image b*N + n, bin d, pixel (h, w) of the context, cell (y, x): each in its own place."""
    geom = torch.full((2, 3, 2, 2, 2, 3), -1, dtype=torch.int32, device=device)
    geom[1, 2, 1, 0, 1] = torch.tensor([3, 1, 0])
    depth = torch.arange(6 * 2 * 2 * 2, device=device).float().view(6, 2, 2, 2)
    context = torch.arange(6 * 2 * 2 * 2, device=device).float().view(6, 2, 2, 2)
    output = call(backend, geom, depth, context, (4, 3, 1))
    assert output.shape == (2, 2, 3, 4) and output.permute(0, 2, 3, 1).is_contiguous()
    assert output[1, :, 1, 3].tolist() == (depth[5, 1, 0, 1] * context[5, :, 0, 1]).tolist()
    assert int((output != 0).sum()) == 2


def test_agrees_with_the_training_form(backend: str, device: str) -> None:
    """The products materialised, as BEVDepth trains."""
    tensors = as_tensors(inputs.CASES[0].build() if backend == "emu" else inputs.CASES[-1].build(), device)
    geom, depth, context, voxel_num = tensors.values()
    products = (depth[:, None] * context[:, :, None]).view(*geom.shape[:2], context.shape[1], *geom.shape[2:5])
    trained = on_backend(voxel_pooling_train)(backend, geom, products.permute(0, 1, 3, 4, 5, 2), voxel_num)
    assert_close(call(backend, *tensors.values()), trained, 2e-6)


def test_a_context_that_is_channels_last(backend: str, device: str) -> None:
    tensors = as_tensors(inputs.CASES[0].build(), device)
    wanted = call(backend, *tensors.values())
    turned = tensors["context_features"].contiguous(memory_format=torch.channels_last)
    assert_bits_equal(call(backend, *(tensors | {"context_features": turned}).values()), wanted)


def test_voxel_num_as_a_tensor(backend: str, device: str) -> None:
    tensors = as_tensors(inputs.CASES[0].build(), device)
    wanted = call(backend, *tensors.values())
    for place in ("cpu", device):
        given = tensors | {"voxel_num": torch.tensor(tensors["voxel_num"], device=place)}
        assert_bits_equal(call(backend, *given.values()), wanted)


def test_a_dropped_point_spreads_nothing(backend: str, device: str) -> None:
    """A NaN depth and an infinite depth outside the grid: no NaN in the output, none in the gradients."""
    tensors = as_tensors(inputs.CASES[0].build(), device)
    geom, depth, context, voxel_num = tensors.values()
    outside = ~((geom >= 0) & (geom < torch.tensor(voxel_num, device=device))).all(-1).view(depth.shape)
    assert bool(outside.any())
    strange = torch.where(outside, torch.tensor([float("nan"), float("inf")] * (depth.numel() // 2), device=device).view(
        depth.shape), depth).requires_grad_()  # fmt: skip
    live = context.clone().requires_grad_()
    output = call(backend, geom, strange, live, voxel_num)
    assert_bits_equal(output, call(backend, geom, depth, context, voxel_num))
    gradients = torch.autograd.grad(output.sum(), [strange, live])
    assert all(bool(torch.isfinite(g).all()) for g in gradients) and bool((gradients[0][outside] == 0).all())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_products_are_not_rounded(kind: torch.dtype, backend: str, device: str) -> None:
    """Half by half is summed in fp32: a thousand products of which each would round to a different number."""
    bins = 40 if backend == "emu" else 1000
    depth = torch.full((1, bins, 1, 1), 1.0 + 2**-7, dtype=kind, device=device)
    context = torch.full((1, 3, 1, 1), 1.0 + 2**-7, dtype=kind, device=device)
    output = call(backend, torch.zeros(1, 1, bins, 1, 1, 3, dtype=torch.int32, device=device), depth, context, (1, 1, 1))
    exact = torch.tensor(bins * (1.0 + 2**-7) ** 2, dtype=torch.float64).to(kind)
    assert output.dtype == kind and (output.cpu() == exact).all()
