# SPDX-License-Identifier: Apache-2.0
"""The comparators refuse what they should: a comparator that passes everything hides every fault."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_core.testing import compare

NAN, INF = float("nan"), float("inf")


def test_close_is_relative_to_the_peak() -> None:
    compare.assert_close([100.0, 1e-9], [100.0, 0.0], 1e-6)
    with pytest.raises(AssertionError, match=r"at \(1,\): expected .*0.0.*, got .*0.01"):
        compare.assert_close([100.0, 0.01], [100.0, 0.0], 1e-6, "output")


@pytest.mark.parametrize("found", [[NAN, 1.0], [INF, 1.0], [-INF, 1.0]])
def test_close_refuses_a_non_finite_result(found: list[float]) -> None:
    with pytest.raises(AssertionError, match="finite on one side"):
        compare.assert_close(found, [1.0, 1.0], 1e30)
    with pytest.raises(AssertionError, match="finite on one side"):
        compare.assert_close([1.0, 1.0], found, 1e30)


def test_close_demands_exact_zeros_of_a_zero_reference() -> None:
    compare.assert_close([0.0, -0.0], [0.0, 0.0], 0.5)
    with pytest.raises(AssertionError):
        compare.assert_close([1e-30, 0.0], [0.0, 0.0], 0.5)


def test_close_compares_shapes_and_empties() -> None:
    compare.assert_close(np.zeros((0, 3)), np.zeros((0, 3)), 0.0)
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_close(np.zeros((3, 1)), np.zeros((1, 3)), 1.0)
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_close(np.zeros((0, 3)), np.zeros((3, 0)), 1.0)


def test_close_excuses_only_what_the_mask_says() -> None:
    compare.assert_close([1.0, 9.0], [1.0, 2.0], 1e-6, mask=np.array([True, False]))
    with pytest.raises(AssertionError):
        compare.assert_close([1.5, 9.0], [1.0, 2.0], 1e-6, mask=np.array([True, False]))


def test_close_reads_every_floating_tensor() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        compare.assert_close(torch.tensor([0.5, 2.0], dtype=dtype, requires_grad=True), [0.5, 2.0], 0.0)


def test_rounded_once() -> None:
    exact = np.array([1.0, 1e-3, 3.0])
    compare.assert_rounded_once(torch.tensor(exact, dtype=torch.bfloat16), exact, 0.0)
    wrong = torch.tensor(exact, dtype=torch.bfloat16)
    wrong[1] *= 1.02  # 7e-6 of the peak: no peak-relative tolerance of 16 bits sees it
    compare.assert_close(wrong, exact, 4e-3)
    with pytest.raises(AssertionError, match="one rounding"):
        compare.assert_rounded_once(wrong, exact, 0.0)
    with pytest.raises(AssertionError):
        compare.assert_rounded_once(torch.tensor([NAN], dtype=torch.float16), np.array([1.0]), 0.0)


def test_same_support_sees_a_dropped_row() -> None:
    wanted = np.array([[1000.0, 1000.0], [0.01, 0.01], [0.0, 0.0]])
    compare.assert_same_support(wanted * 1.001, wanted)
    dropped = wanted.copy()
    dropped[1] = 0
    compare.assert_close(dropped, wanted, 1e-4)
    with pytest.raises(AssertionError, match="dropped, first"):
        compare.assert_same_support(dropped, wanted)
    invented = wanted.copy()
    invented[2] = 1e-9
    with pytest.raises(AssertionError, match="invented"):
        compare.assert_same_support(invented, wanted)


def test_unbiased_sees_a_wrong_factor() -> None:
    wanted = np.random.default_rng(0).standard_normal(4000)
    noisy = wanted + np.random.default_rng(1).standard_normal(4000) * 5e-3
    compare.assert_unbiased(noisy, wanted, 1e-3)
    with pytest.raises(AssertionError, match="bias"):
        compare.assert_unbiased(noisy * 1.005, wanted, 1e-3)
    compare.assert_unbiased(np.zeros(0), np.zeros(0), 0.0)


def test_mismatch_ratio() -> None:
    wanted = np.ones(100)
    found = wanted.copy()
    found[:2] = 5
    compare.assert_mismatch_ratio(found, wanted, 1e-6, 0.02)
    found[2] = NAN
    with pytest.raises(AssertionError, match=r"3\.0000%"):
        compare.assert_mismatch_ratio(found, wanted, 1e-6, 0.02)


def test_bits() -> None:
    compare.assert_bits_equal(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]))
    compare.assert_bits_equal(torch.zeros(0, 2), torch.zeros(0, 2))
    compare.assert_bits_equal(np.array([1.5]), np.array([1.5]))
    compare.assert_bits_equal(torch.ones(3, 2).t(), torch.ones(2, 3))
    for other in (torch.tensor([-0.0]), torch.tensor([0.0], dtype=torch.float64), torch.zeros(2), torch.tensor([1e-45])):
        with pytest.raises(AssertionError):
            compare.assert_bits_equal(other, torch.tensor([0.0]))
    with pytest.raises(AssertionError, match="1 of 1"):
        compare.assert_bits_equal(np.array([-0.0]), np.array([0.0]))


def test_peak_relative_error() -> None:
    assert compare.peak_relative_error([1.0, 2.1], [1.0, 2.0]) == pytest.approx(0.05)
    assert compare.peak_relative_error([NAN], [1.0]) == INF
    assert compare.peak_relative_error([1.0], [0.0]) == INF and compare.peak_relative_error([0.0], [0.0]) == 0.0
