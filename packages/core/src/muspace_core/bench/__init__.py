# SPDX-License-Identifier: Apache-2.0
"""Benchmark kit: cases as data, correctness gate, timer, floors, result schema, table and plot.  Knows no operator."""

from muspace_core.bench.case import GPU, H200, Bar, BenchCase, Work, host_allowance_us
from muspace_core.bench.overhead import OverheadCase

__all__ = ["GPU", "H200", "Bar", "BenchCase", "OverheadCase", "Work", "host_allowance_us"]
