# SPDX-License-Identifier: Apache-2.0
"""voxel_pooling_train: the operator contract, upstream's own numbers, and what a tolerance might hide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_bevpool import voxel_pooling_train, voxel_pooling_train_plan
from muspace_bevpool._spec import VOXEL_POOLING_TRAIN
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.cases import Arguments
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.golden import GoldenCase, data_root, golden_cases, golden_marks, golden_parameters
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "voxel_pooling_oracle")
inputs = load_sibling(__file__, "voxel_pooling_train_inputs")
contract = load_sibling(__file__, "pool_contract")
call = on_backend(voxel_pooling_train)
ROOT = data_root(__file__)
GOLDEN = golden_cases("voxel_pooling_train", ROOT)
golden = pytest.mark.parametrize("case", golden_parameters(GOLDEN, pytest.mark.emu_budget(1_000_000)))


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return oracle.train(**arguments), oracle.train_backward(grad_output, **arguments)


class TestVoxelPoolingTrain(contract.PoolContract):
    spec = VOXEL_POOLING_TRAIN
    operator = staticmethod(voxel_pooling_train)
    oracle = staticmethod(_oracle)
    plan = staticmethod(lambda t, **k: voxel_pooling_train_plan(t["geom_xyz"], t["voxel_num"], **k))
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("input_features",)
    saved = ()
    indices = ("geom_xyz",)
    forms = {  # noqa: RUF012 - data of the contract
        "voxel_num as a list": lambda t: t | {"voxel_num": list(t["voxel_num"])},
        "voxel_num as a torch.Size": lambda t: t | {"voxel_num": torch.Size(t["voxel_num"])},
    }
    strangers = {  # noqa: RUF012 - data of the contract
        "X": lambda a: a | {"voxel_num": (5, 3, 2)},
        "same plane": lambda a: a | {"voxel_num": (3, 4, 2)},
        "Z": lambda a: a | {"voxel_num": (4, 3, 1)},
        "batch": lambda a: a | {k: np.concatenate([a[k], a[k]]) for k in inputs.TENSORS},
        "points": lambda a: a | {k: a[k][:, :-1] for k in inputs.TENSORS},
    }


# ---- upstream ------------------------------------------------------------------------------------------------------
class TestGolden:
    pytestmark = golden_marks(ROOT)

    def test_the_index_has_cases(self) -> None:
        assert {c.name for c in GOLDEN} >= {"b2_c80", "one_cell", "all_dropped"}

    @golden
    def test_operator(self, case: GoldenCase, backend: str, device: str) -> None:
        arrays = case.arrays()
        geom, features = (torch.from_numpy(arrays["in"][k]).to(device) for k in inputs.TENSORS)
        output = call(backend, geom, features, case.entry["params"]["voxel_num"])
        assert_close(output, arrays["out"]["output"], case.tolerance("out/output", 2e-6), "output")

    @golden
    def test_oracle(self, case: GoldenCase) -> None:
        arrays, voxel_num = case.arrays(), case.entry["params"]["voxel_num"]
        given = [arrays["in"][k] for k in inputs.TENSORS]
        tolerance = case.tolerance("out/output", 2e-6)
        assert_close(oracle.train(*given, voxel_num), arrays["out"]["output"], tolerance)
        assert (oracle.memo(given[0], voxel_num) == arrays["out"]["pos_memo"]).all()


def test_against_a_loop(backend: str, device: str) -> None:
    """The arrangement of upstream's own check, smaller: points of six cameras, 80 channels, a square plane, a loop."""
    random = np.random.default_rng(0)
    side, channels = (8, 16) if backend == "emu" else (128, 80)
    bins = 2 if backend == "emu" else 10
    geom = random.integers(-side // 8, side + side // 8, (2, 6, bins, 5, 5, 3)).astype(np.int32)
    geom[..., 2] = random.integers(-1, 2, geom.shape[:-1])
    features = random.standard_normal((*geom.shape[:-1], channels)).astype(np.float32)
    wanted = np.zeros((2, channels, side, side))
    for at in np.ndindex(geom.shape[:-1]):
        x, y, z = geom[at]
        if 0 <= x < side and 0 <= y < side and z == 0:
            wanted[at[0], :, y, x] += features[at]
    output = call(backend, torch.from_numpy(geom).to(device), torch.from_numpy(features).to(device), (side, side, 1))
    assert_close(output, wanted, 2e-6)


# ---- special cases -------------------------------------------------------------------------------------------------
def test_axes_and_strides(backend: str, device: str) -> None:
    """(x, y, z) lands in out[b, :, y, x]; the result is a channels-last view of a [B, Y, X, C] buffer."""
    geom = torch.tensor([[[0, 0, 9]], [[3, 1, 1]]], dtype=torch.int32, device=device)
    output = call(backend, geom, torch.tensor([[[1.0, 2.0]], [[5.0, 7.0]]], device=device), (4, 3, 2))
    assert output.shape == (2, 2, 3, 4)
    assert output[1, :, 1, 3].tolist() == [5.0, 7.0] and float(output.sum()) == 12.0
    assert output.permute(0, 2, 3, 1).is_contiguous() and output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("heights", [1, 2, 5])
def test_z_filters_and_is_summed_away(heights: int, backend: str, device: str) -> None:
    z = [-1, 0, 1, 2, 3, 4, 5, -(2**31), 2**31 - 1]
    geom = torch.zeros(1, len(z), 3, dtype=torch.int32, device=device)
    geom[0, :, 2] = torch.tensor(z)
    features = torch.ones(1, len(z), 3, device=device, requires_grad=True)
    output = call(backend, geom, features, (2, 2, heights))
    assert output.shape == (1, 3, 2, 2), "no axis of z"
    assert output[0, :, 0, 0].tolist() == [float(heights)] * 3 and float(output.detach().sum()) == 3.0 * heights
    (gradient,) = torch.autograd.grad(output.sum(), features)
    assert gradient[0, :, 0].tolist() == [float(0 <= n < heights) for n in z]


def test_voxel_num_as_a_tensor(backend: str, device: str) -> None:
    """Upstream passes an int64 or int32 tensor, on the device or not."""
    *given, voxel_num = as_tensors(inputs.pooling("voxels"), device).values()
    wanted = call(backend, *given, voxel_num)
    for kind in (torch.int64, torch.int32):
        for place in ("cpu", device):
            assert_bits_equal(call(backend, *given, torch.tensor(voxel_num, dtype=kind, device=place)), wanted)


def test_middle_axes_are_only_points(backend: str, device: str) -> None:
    *given, voxel_num = as_tensors(inputs.pooling("axes", extent=(2, 3, 2, 2, 5), channels=8), device).values()
    wanted = call(backend, *given, voxel_num)
    flat = [t.flatten(1, -2) for t in given]
    assert_bits_equal(call(backend, *flat, voxel_num), wanted)
    assert_bits_equal(call(backend, given[0], flat[1], voxel_num), wanted, "point counts are equal, the axes are not")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_long_cell_is_summed_in_fp32(kind: torch.dtype, backend: str, device: str) -> None:
    """A sum kept in 16 bits would stop growing at 2048 or 256."""
    count = 600 if backend == "emu" else 5000
    geom = torch.zeros(1, count, 3, dtype=torch.int32, device=device)
    output = call(backend, geom, torch.ones(1, count, 4, dtype=kind, device=device), (1, 1, 1))
    assert output.dtype == kind and (output == torch.tensor(float(count)).to(kind).to(device)).all()


def test_a_second_backward_gives_the_same(backend: str, device: str) -> None:
    """Upstream writes every backward into one buffer made by the forward; here the first result stays what it was."""
    geom, live, voxel_num = as_tensors(inputs.pooling("twice"), device).values()
    live.requires_grad_()
    output = call(backend, geom, live, voxel_num)
    (first,) = torch.autograd.grad(output.sum(), live, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad((output * 3).sum(), live)
    assert torch.equal(first, kept) and torch.equal(second, 3 * kept) and bool(kept.any())
