# SPDX-License-Identifier: Apache-2.0
"""bev_pool: the operator contract, upstream's own numbers, and what a tolerance might hide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from muspace_bevpool import bev_pool, bev_pool_plan
from muspace_bevpool._spec import BEV_POOL
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.cases import Arguments
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.golden import GoldenCase, data_root, golden_cases, golden_marks, golden_parameters
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "bev_pool_oracle")
inputs = load_sibling(__file__, "bev_pool_inputs")
contract = load_sibling(__file__, "pool_contract")
call = on_backend(bev_pool)
ROOT = data_root(__file__)
GOLDEN = golden_cases("bev_pool", ROOT)
SIZES = ("B", "D", "H", "W")
golden = pytest.mark.parametrize("case", golden_parameters(GOLDEN, pytest.mark.emu_budget(1_000_000)))


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return oracle.forward(**arguments), oracle.backward(grad_output, **arguments)


class TestBevPool(contract.PoolContract):
    spec = BEV_POOL
    operator = staticmethod(bev_pool)
    oracle = staticmethod(_oracle)
    plan = staticmethod(lambda t, **k: bev_pool_plan(t["coords"], t["B"], t["D"], t["H"], t["W"], **k))
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("feats",)
    saved = ()
    indices = ("coords",)
    optional = ("coords",)
    forms = {  # noqa: RUF012 - data of the contract
        "int64 coordinates": lambda t: t | {"coords": t["coords"].long()},
    }
    strangers = {  # noqa: RUF012 - data of the contract
        **{axis: (lambda a, axis=axis: a | {axis: a[axis] + 1}) for axis in SIZES},
        "same product": lambda a: a | {"H": a["W"], "W": a["H"]},
        "fewer points": lambda a: a | {k: a[k][:-1] for k in ("feats", "coords")},
    }


# ---- upstream ------------------------------------------------------------------------------------------------------
class TestGolden:
    pytestmark = golden_marks(ROOT)

    def test_the_index_has_cases(self) -> None:
        assert {c.name for c in GOLDEN} >= {"b1_c4", "one_cell", "single_points", "integers", "sparse_n1"}

    @golden
    def test_operator(self, case: GoldenCase, backend: str, device: str) -> None:
        arrays, sizes = case.arrays(), [case.entry["params"][k] for k in SIZES]
        feats = torch.from_numpy(arrays["in"]["feats"]).to(device).requires_grad_()
        coords = torch.from_numpy(arrays["in"]["coords"]).to(device)
        output = call(backend, feats, coords, *sizes)
        exact = case.name == "integers"
        assert_close(output, arrays["out"]["output"], 1e-30 if exact else case.tolerance("out/output", 2e-6), "output")
        output.backward(torch.from_numpy(arrays["in"]["grad_out"]).to(device))
        assert feats.grad is not None
        assert_bits_equal(feats.grad.cpu(), torch.from_numpy(arrays["grad"]["feats"]), "a gradient is a copy")

    @golden
    def test_oracle(self, case: GoldenCase) -> None:
        arrays, sizes = case.arrays(), [case.entry["params"][k] for k in SIZES]
        given = (arrays["in"]["feats"], arrays["in"]["coords"], *sizes)
        assert_close(oracle.forward(*given), arrays["out"]["output"], case.tolerance("out/output", 2e-6))
        found = oracle.backward(arrays["in"]["grad_out"], *given)["feats"]
        assert (found == arrays["grad"]["feats"]).all()


# ---- special cases -------------------------------------------------------------------------------------------------
def _tensors(arguments: Arguments, device: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    feats, coords, *sizes = as_tensors(arguments, device).values()
    return feats, coords, sizes


def test_axes(backend: str, device: str) -> None:
    """One row (h, w, d, b) = (1, 2, 0, 1) lands there and nowhere else, in a contiguous [B, C, D, H, W]."""
    feats, coords = torch.tensor([[5.0, 7.0]], device=device), torch.tensor([[1, 2, 0, 1]], device=device)
    output = call(backend, feats, coords, 2, 1, 3, 4)
    assert output.shape == (2, 2, 1, 3, 4) and output.is_contiguous()
    assert output[1, :, 0, 1, 2].tolist() == [5.0, 7.0] and float(output.sum()) == 12.0


def test_sizes_as_tensors(backend: str, device: str) -> None:
    """What BEVFusion passes: 0-dim tensors."""
    feats, coords, sizes = _tensors(inputs.pooling("sizes"), device)
    wanted = call(backend, feats, coords, *sizes)
    for kind in (torch.int64, torch.int32):
        given = [torch.tensor(n, dtype=kind, device=device) for n in sizes]
        assert_bits_equal(call(backend, feats, coords, *given), wanted)
        assert_bits_equal(call(backend, feats, coords, sizes[0], *given[1:]), wanted)


def test_the_order_of_rows_is_free(backend: str, device: str) -> None:
    """Sums of integers are exact in any order; every row gets the gradient of its own cell."""
    feats, coords, sizes = _tensors(inputs.pooling("order", points=90), device)
    feats = (feats * 8).round()
    wanted = call(backend, feats, coords, *sizes)
    order = torch.from_numpy(np.random.default_rng(2).permutation(90)).to(device)
    shuffled = feats[order].clone().requires_grad_()
    found = call(backend, shuffled, coords[order], *sizes)
    assert torch.equal(found, wanted)
    (gradient,) = torch.autograd.grad(found, shuffled, torch.ones_like(found) * 3)
    inside = ((coords >= 0) & (coords < torch.tensor([3, 4, 1, 2], device=device))).all(1)[order]
    assert torch.equal(gradient, 3.0 * inside[:, None].expand_as(gradient))


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("number", [-1, -(2**31), 2**31 - 1, 2**31, 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63), "size"])
def test_a_coordinate_outside_drops_the_row(column: int, number: Any, backend: str, device: str) -> None:
    """The row's NaN reaches nothing, and numbers beyond 32 bits do not wrap into the grid."""
    sizes = (2, 1, 3, 4)
    limits = (3, 4, 1, 2)
    bad = limits[column] if number == "size" else number
    coords = torch.zeros(3, 4, dtype=torch.int64, device=device)
    coords[1, column] = bad
    feats = torch.ones(3, 5, device=device)
    feats[1] = float("nan")
    for kind in (torch.int64, torch.int32):
        if kind == torch.int32 and not -(2**31) <= bad < 2**31:
            continue
        live = feats.clone().requires_grad_()
        output = call(backend, live, coords.to(kind), *sizes)
        assert output[0, :, 0, 0, 0].tolist() == [2.0] * 5 and float(output.detach().sum()) == 10.0
        (gradient,) = torch.autograd.grad(output, live, torch.ones_like(output))
        assert gradient.tolist() == [[1.0] * 5, [0.0] * 5, [1.0] * 5]


def test_gradients_are_not_zero(backend: str, device: str) -> None:
    feats, coords, sizes = _tensors(inputs.pooling("nonzero", place=inputs.inside), device)
    feats.requires_grad_()
    call(backend, feats, coords, *sizes).sum().backward()
    assert feats.grad is not None and (feats.grad == 1).all()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_long_cell_is_summed_in_fp32(kind: torch.dtype, backend: str, device: str) -> None:
    """5000 ones: a sum kept in 16 bits would stop at 2048 or 256."""
    count = 600 if backend == "emu" else 5000
    feats = torch.ones(count, 4, dtype=kind, device=device)
    output = call(backend, feats, torch.zeros(count, 4, dtype=torch.int32, device=device), 1, 1, 1, 1)
    assert (output == torch.tensor(float(count)).to(kind).to(device)).all()


def test_sums_do_not_lose_digits(backend: str, device: str) -> None:
    """Prefix sums over all rows and their differences would: here they must not meet numbers of other cells."""
    rows = 300 if backend == "emu" else 100_000
    feats = torch.full((rows, 1), 1e6, device=device)
    coords = torch.zeros(rows, 4, dtype=torch.int32, device=device)
    feats[-3:], coords[-3:, 0] = 1e-3, 1
    output = call(backend, feats, coords, 1, 1, 2, 1)
    assert_close(output[0, 0, 0, 1], np.array([3e-3]), 1e-6)
