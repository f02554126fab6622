# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of this wheel, a module per operator; ``muspace_msda._bench_cases`` once built.  No timing here."""

from . import deformable_aggregation, multi_scale_deformable_attn

FAMILY = "msda"
CASES = (*multi_scale_deformable_attn.CASES, *deformable_aggregation.CASES)
OVERHEADS = (*multi_scale_deformable_attn.OVERHEADS, *deformable_aggregation.OVERHEADS)
