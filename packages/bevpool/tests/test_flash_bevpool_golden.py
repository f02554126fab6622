# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool against arrays that the upstream CUDA kernel computed: forward only, upstream's depth gradient is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_bevpool import flash_bevpool
from muspace_core.testing.calls import on_backend, represented
from muspace_core.testing.compare import assert_mismatch_ratio, peak
from muspace_core.testing.golden import GoldenCase, data_root, golden_cases, golden_marks, golden_parameters
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "flash_bevpool_oracle")
ROOT = data_root(__file__)
GOLDEN = golden_cases("flash_bevpool", ROOT)
#: Peak-relative; a sample on a border or at the threshold may flip, so cells are counted instead of the tolerance widened.
OUTPUT, FLIPPED = 1e-5, 0.005
TENSORS = ("image_feats", "depth_params", "projection_matrices")

pytestmark = golden_marks(ROOT)
# Upstream's sizes are given; the largest takes this much in the emulation.
CASES = golden_parameters(GOLDEN, pytest.mark.emu_budget(20_000_000))


def _cells(found: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest difference of every cell, and what it is to be compared with: the peak."""
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max(-1), np.zeros(wanted.shape[:-1])


def _assert_cells(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    difference, nothing = _cells(found, wanted)
    # The comparator measures against the peak of its reference, which is the upstream array's.
    scale = peak(wanted)
    stretched = np.append(difference.reshape(-1), scale), np.append(nothing.reshape(-1), scale)
    assert_mismatch_ratio(*stretched, tolerance, FLIPPED, "cells")


def test_the_index_has_cases() -> None:
    assert {c.name for c in GOLDEN} >= {"gauss_b1", "nonsquare_b2", "threshold", "one_height_c33", "one_camera"}


@pytest.mark.parametrize("four_rows", [False, True], ids=["3x4", "4x4"])
@pytest.mark.parametrize("case", CASES)
def test_upstream(case: GoldenCase, four_rows: bool, backend: str, device: str) -> None:
    if four_rows and backend == "emu":
        pytest.skip("4x4 projections: the exact tests do that with less emulation")
    arrays, parameters = case.arrays(), case.entry["params"]
    feats, depth, projections = (torch.from_numpy(arrays["in"][name]).to(device) for name in TENSORS)
    if four_rows:
        projections = torch.nn.functional.pad(projections, (0, 0, 0, 1))
    output = on_backend(flash_bevpool)(
        backend, feats, depth, projections, torch.from_numpy(arrays["in"]["feature_size"]).to(device),
        tuple(arrays["in"]["image_size"].tolist()), tuple(parameters["roi_range"]), tuple(parameters["grid_size"]), 0,
        True, True, False, False, parameters["epsilon"], parameters["depth_weight_threshold"],
    )  # fmt: skip
    assert output.dtype == torch.float32
    _assert_cells(represented(output), arrays["out"]["output"].astype(np.float64), OUTPUT)


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_agrees_with_upstream(case: GoldenCase) -> None:
    arrays, parameters = case.arrays(), case.entry["params"]
    view = oracle.View.of(parameters | {"image_size": arrays["in"]["image_size"], "depth_distribution": oracle.GAUSSIAN})
    output, count = oracle.forward(*[arrays["in"][name] for name in TENSORS], view)
    _assert_cells(output, arrays["out"]["output"].astype(np.float64), OUTPUT)
    seen = (arrays["out"]["output"] != 0).any(-1)
    assert abs(float((count > 0).mean()) - float(seen.mean())) < FLIPPED
