# SPDX-License-Identifier: Apache-2.0
"""Benchmark kit: cases as data, correctness gate, timer, floors, result schema, table and plot.  Knows no operator."""

from muspace_core.bench.case import Bar, BenchCase, Work
from muspace_core.bench.overhead import OverheadCase

__all__ = ["Bar", "BenchCase", "OverheadCase", "Work"]
