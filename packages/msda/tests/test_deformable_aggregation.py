# SPDX-License-Identifier: Apache-2.0
"""deformable_aggregation keeps the operator contract: see muspace_core.testing.contract for the inherited tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from muspace_core.testing.contract import Arguments, OpContract
from muspace_core.testing.plugin import load_sibling
from muspace_msda import deformable_aggregation
from muspace_msda._spec import DEFORMABLE_AGGREGATION

oracle = load_sibling(__file__, "deformable_aggregation_oracle")
inputs = load_sibling(__file__, "deformable_aggregation_inputs")


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, Any]]:
    result = oracle.backward(grad_output, *arguments.values(), geometry=np.float64 if double else np.float32)
    return result.output, {
        "mc_ms_feat": result.grad_feat,
        "sampling_location": result.grad_location,
        "weights": result.grad_weights,
    }


class TestDeformableAggregation(OpContract):
    spec = DEFORMABLE_AGGREGATION
    operator = staticmethod(deformable_aggregation)
    oracle = staticmethod(_oracle)
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("mc_ms_feat",)
    geometry = ("sampling_location", "weights")
    ordered_route = "ordered"
    forms = {  # noqa: RUF012 - data of the contract, like the tuples above
        "int32": lambda t: t | {k: t[k].int() for k in ("spatial_shape", "scale_start_index")},
        "lists": lambda t: t | {k: t[k].tolist() for k in ("spatial_shape", "scale_start_index")},
    }
