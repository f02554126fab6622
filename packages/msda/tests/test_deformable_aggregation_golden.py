# SPDX-License-Identifier: Apache-2.0
"""deformable_aggregation against arrays that the upstream CUDA kernel computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_core.testing.calls import on_backend
from muspace_core.testing.compare import assert_close
from muspace_core.testing.golden import GoldenCase, data_root, golden_cases, golden_marks, golden_parameters
from muspace_core.testing.plugin import load_sibling
from muspace_msda import deformable_aggregation

oracle = load_sibling(__file__, "deformable_aggregation_oracle")
inputs = load_sibling(__file__, "deformable_aggregation_inputs")
ROOT = data_root(__file__)
GOLDEN = golden_cases("deformable_aggregation", ROOT)
#: Peak-relative, ours against upstream's fp32 kernel, which sums with float atomics.
OUTPUT, GRADIENT = 3e-6, 2e-5

pytestmark = golden_marks(ROOT)
# Upstream's sizes are given; the ordered backward of the largest takes this much in the emulation.
CASES = golden_parameters(GOLDEN, pytest.mark.warp_sensitive, pytest.mark.emu_budget(4_000_000))


def test_the_index_has_cases() -> None:
    assert {c.name for c in GOLDEN} >= {"inside", "g1", "group_of_one_channel", "c24_g3"}
    places = np.concatenate([c.arrays()["in"]["sampling_location"].reshape(-1) for c in GOLDEN])
    assert (places == 0).any() and (places == 1).any(), "the border itself is among the upstream cases"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_upstream(case: GoldenCase, deterministic: bool, backend: str, device: str) -> None:
    arrays = case.arrays()
    given = {name: torch.from_numpy(arrays["in"][name]).to(device) for name in inputs.ARGUMENTS}
    leaves = {name: given[name].requires_grad_() for name in inputs.ARGUMENTS if given[name].is_floating_point()}
    torch.use_deterministic_algorithms(deterministic)
    output = on_backend(deformable_aggregation)(backend, *given.values())
    assert_close(output, arrays["out"]["output"], case.tolerance("out/output", OUTPUT), "output")
    output.backward(torch.from_numpy(arrays["in"]["grad_out"]).to(device))
    for name, leaf in leaves.items():
        assert_close(leaf.grad, arrays["grad"][name], case.tolerance(f"grad/{name}", GRADIENT), f"gradient of {name}")


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_agrees_with_upstream(case: GoldenCase) -> None:
    arrays = case.arrays()
    result = oracle.backward(arrays["in"]["grad_out"], *[arrays["in"][name] for name in inputs.ARGUMENTS])
    # Ten times below what is asked of the operator: the oracle itself may not use up the tolerance.
    assert_close(result.output, arrays["out"]["output"], OUTPUT / 10, "output")
    for name, gradient in (
        ("mc_ms_feat", result.grad_feat),
        ("sampling_location", result.grad_location),
        ("weights", result.grad_weights),
    ):
        assert_close(gradient, arrays["grad"][name], GRADIENT / 10, f"gradient of {name}")
