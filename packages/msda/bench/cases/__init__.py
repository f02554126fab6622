# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of this wheel, a module per operator; ``muspace_msda._bench_cases`` once built.  No timing here."""

from . import deformable_aggregation, multi_scale_deformable_attn

FAMILY = "msda"
_OPERATORS = (multi_scale_deformable_attn, deformable_aggregation)
CASES = tuple(case for operator in _OPERATORS for case in operator.CASES)
OVERHEADS = tuple(overhead for operator in _OPERATORS for overhead in operator.OVERHEADS)
