# SPDX-License-Identifier: Apache-2.0
"""The operator against arrays that the upstream CUDA kernel computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_core.testing.calls import on_backend
from muspace_core.testing.compare import assert_close
from muspace_core.testing.golden import GoldenCase, data_root, golden_cases, golden_marks, golden_parameters
from muspace_core.testing.plugin import load_sibling
from muspace_msda import multi_scale_deformable_attn

oracle = load_sibling(__file__, "oracle")
ROOT = data_root(__file__)
FP32 = golden_cases("msda", ROOT)
FP16 = golden_cases("msda_fp16", ROOT)
INPUTS = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights")
#: Peak-relative, ours against upstream's fp32 kernel.
OUTPUT, GRADIENT = 2e-6, 1e-5
#: Upstream's half kernel computes coordinates in half as well, which costs it this much.
HALF = 3e-2

pytestmark = golden_marks(ROOT)
# Upstream's sizes are given; the largest takes this much in the emulation.
MARKS = (pytest.mark.warp_sensitive, pytest.mark.emu_budget(2_000_000))
_call = on_backend(multi_scale_deformable_attn)


def test_the_index_has_cases() -> None:
    assert len(FP32) >= 7 and len(FP16) >= 2
    names = {case.name for case in FP32}
    assert {"border", "nonfinite", "d1025"} <= names


@pytest.mark.parametrize("case", golden_parameters(FP32, *MARKS))
def test_fp32(case: GoldenCase, backend: str, device: str) -> None:
    arrays = case.arrays()
    inputs = {name: torch.from_numpy(arrays["in"][name]).to(device) for name in INPUTS}
    leaves = {name: inputs[name].requires_grad_() for name in INPUTS if inputs[name].is_floating_point()}
    output = _call(backend, *inputs.values())
    assert_close(output, arrays["out"]["output"], case.tolerance("out/output", OUTPUT), "output")
    output.backward(torch.from_numpy(arrays["in"]["grad_out"]).to(device))
    for name, leaf in leaves.items():
        assert_close(leaf.grad, arrays["grad"][name], case.tolerance(f"grad/{name}", GRADIENT), f"gradient of {name}")


@pytest.mark.parametrize("case", golden_parameters(FP16, *MARKS))
def test_fp16(case: GoldenCase, backend: str, device: str) -> None:
    arrays = case.arrays()
    inputs = {name: torch.from_numpy(arrays["in"][name]).to(device) for name in INPUTS}
    output = _call(backend, *inputs.values())
    assert_close(output, arrays["out"]["output"], HALF, "output against the half kernel")
    # The sharper check: the same half inputs, exact arithmetic.
    exact = oracle.forward(*[arrays["in"][name] for name in INPUTS])
    assert_close(output, exact, 5e-4, "output against float64")
    wide = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    assert_close(_call(backend, *wide.values()), exact, OUTPUT, "the same inputs in fp32")


@pytest.mark.parametrize("case", golden_parameters(FP32, *MARKS))
def test_the_oracle_agrees_with_upstream(case: GoldenCase) -> None:
    arrays = case.arrays()
    result = oracle.backward(arrays["in"]["grad_out"], *[arrays["in"][name] for name in INPUTS])
    assert_close(result.output, arrays["out"]["output"], OUTPUT, "output")
    for name, gradient in (
        ("value", result.grad_value),
        ("sampling_locations", result.grad_locations),
        ("attention_weights", result.grad_weights),
    ):
        assert_close(gradient, arrays["grad"][name], case.tolerance(f"grad/{name}", GRADIENT), name)
    if case.name == "nonfinite":
        strange = ~np.isfinite(arrays["in"]["sampling_locations"]).all(-1)
        assert strange.any() and (arrays["grad"]["attention_weights"][strange] == 0).all()
