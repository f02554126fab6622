# SPDX-License-Identifier: Apache-2.0
"""multi_scale_deformable_attn keeps the operator contract: see muspace_core.testing.contract for the inherited tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from muspace_core.testing.contract import Arguments, OpContract
from muspace_core.testing.plugin import load_sibling
from muspace_msda import multi_scale_deformable_attn
from muspace_msda._spec import MULTI_SCALE_DEFORMABLE_ATTN

oracle = load_sibling(__file__, "oracle")
inputs = load_sibling(__file__, "inputs")


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, Any]]:
    result = oracle.backward(grad_output, *arguments.values(), geometry=np.float64 if double else np.float32)
    return result.output, {
        "value": result.grad_value,
        "sampling_locations": result.grad_locations,
        "attention_weights": result.grad_weights,
    }


class TestMultiScaleDeformableAttn(OpContract):
    spec = MULTI_SCALE_DEFORMABLE_ATTN
    operator = staticmethod(multi_scale_deformable_attn)
    oracle = staticmethod(_oracle)
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("value",)
    geometry = ("sampling_locations", "attention_weights")
    ordered_route = "ordered"
    forms = {  # noqa: RUF012 - data of the contract, like the tuples above
        "lists": lambda t: t | {k: t[k].tolist() for k in ("spatial_shapes", "level_start_index")},
        "starts derived": lambda t: t | {"level_start_index": None},
        "list, starts derived": lambda t: t | {"spatial_shapes": t["spatial_shapes"].tolist(), "level_start_index": None},
        "int32": lambda t: t | {k: t[k].int() for k in ("spatial_shapes", "level_start_index")},
    }
