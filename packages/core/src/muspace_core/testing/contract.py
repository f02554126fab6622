# SPDX-License-Identifier: Apache-2.0
"""The contract every operator keeps.  A family writes data and an oracle; the tests are inherited.

    class TestMultiScaleDeformableAttn(OpContract):
        spec = MULTI_SCALE_DEFORMABLE_ATTN
        operator = staticmethod(multi_scale_deformable_attn)
        oracle = staticmethod(oracle)
        cases = CASES
        storage = ("value",)
        geometry = ("sampling_locations", "attention_weights")

The backend under test is that of ``pytest --backend``; nothing here knows an operator.
"""

from __future__ import annotations

from muspace_core.testing.cases import FLOATING, Arguments, Case, EmptyCase, ErrorCase, Subject
from muspace_core.testing.derivatives import DerivativeContract
from muspace_core.testing.dispatching import DispatchContract
from muspace_core.testing.memory import MemoryContract
from muspace_core.testing.numerics import NumericContract
from muspace_core.testing.paths import OperatorLog, PathContract
from muspace_core.testing.runtime import RuntimeContract

__all__ = ["FLOATING", "Arguments", "Case", "EmptyCase", "ErrorCase", "OpContract", "OperatorLog", "Subject"]


class OpContract(NumericContract, PathContract, DispatchContract, RuntimeContract, DerivativeContract, MemoryContract):
    """Values and gradients, direct and registered paths, dispatch, runtime, refused derivatives, memory."""
