# SPDX-License-Identifier: Apache-2.0
"""Comparators that say where and how far two arrays part, instead of ``allclose``'s yes or no.

Operators that sum with cancellation are compared relative to the peak of the reference, never element by element.
Every comparator takes NumPy arrays or torch tensors and raises ``AssertionError`` with the worst element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Largest relative error of one rounding to a 16-bit type, and the smallest step near zero.
_ROUNDING = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


def as_float64(array: Any) -> np.ndarray:
    """A float64 (or complex128) NumPy copy of a tensor or array of any floating dtype, bfloat16 included."""
    if hasattr(array, "detach"):
        array = array.detach()
        if array.dtype.is_floating_point:
            array = array.double()
        array = array.cpu().numpy()
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def peak(reference: Any) -> float:
    """Largest finite magnitude of ``reference``; 0 for an empty array."""
    reference = as_float64(reference)
    finite = np.abs(reference[np.isfinite(reference)])
    return float(finite.max(initial=0.0))


def peak_relative_error(actual: Any, reference: Any, mask: np.ndarray | None = None) -> float:
    """Largest absolute difference divided by the peak of ``reference`` (where ``mask`` is true, if given)."""
    actual, reference = as_float64(actual), as_float64(reference)
    if actual.shape != reference.shape:
        raise AssertionError(f"shape: expected {reference.shape}, got {actual.shape}")
    chosen = np.isfinite(reference) if mask is None else np.isfinite(reference) & mask
    difference = np.abs(actual - reference)[chosen]
    if np.isnan(difference).any():
        return float("inf")
    largest = float(difference.max(initial=0.0))
    scale = peak(reference)
    return largest / scale if scale > 0 else (0.0 if largest == 0 else float("inf"))


def assert_close(
    actual: Any,
    reference: Any,
    tolerance: float,
    what: str = "result",
    mask: np.ndarray | None = None,
    scale: float | None = None,
) -> None:
    """Peak-relative equality.  Non-finite places must agree; a reference that is zero everywhere demands exact zeros.

    ``mask`` excuses elements (false = not compared), for results that may legally differ there.  ``scale`` replaces the peak
    where it is larger: the magnitude of the summands, for inputs that may cancel to almost nothing.
    """
    found, wanted = as_float64(actual), as_float64(reference)
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: expected shape {wanted.shape}, got {found.shape}")
    chosen = np.ones(wanted.shape, bool) if mask is None else np.broadcast_to(mask, wanted.shape)
    strange = chosen & (np.isfinite(found) != np.isfinite(wanted))
    if strange.any():
        where = tuple(int(i) for i in np.argwhere(strange)[0])
        raise AssertionError(
            f"{what}: {int(strange.sum())} elements finite on one side only, first at {where}: "
            f"expected {wanted[where]}, got {found[where]}"
        )
    if found.size == 0:
        return
    finite = chosen & np.isfinite(wanted)
    difference = np.where(finite, np.abs(np.where(finite, found, 0) - np.where(finite, wanted, 0)), 0.0)
    scale = max(peak(wanted), scale or 0.0) if peak(wanted) > 0 else 0.0
    # Half of the smallest step of a 16-bit result: below it nothing can be told from zero.
    floor = _ROUNDING.get(str(getattr(actual, "dtype", "")).removeprefix("torch."), (0.0, 0.0))[1]
    if difference.max(initial=0.0) <= tolerance * scale + floor:
        return
    where = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    raise AssertionError(
        f"{what}: largest difference {difference[where]:.3e} is {difference[where] / max(scale, 1e-300):.3e} of the peak "
        f"{scale:.3e}, allowed {tolerance:.1e}; at {where}: expected {wanted[where]!r}, got {found[where]!r}; "
        f"{int((difference > tolerance * scale).sum())} of {difference.size} elements beyond"
    )


def assert_rounded_once(actual: Any, reference: Any, sum_error: float, what: str = "result") -> None:
    """A 16-bit result is an fp32 result rounded at the end: every element is within half a unit of itself.

    Much sharper than a peak-relative tolerance for the small elements, which is where sums kept in 16 bits show.
    ``sum_error`` is the peak-relative error allowed to the fp32 sum.  Says nothing about other dtypes.
    """
    rounding = _ROUNDING.get(str(actual.dtype).removeprefix("torch."))
    if rounding is None:
        return
    found, wanted = as_float64(actual), as_float64(reference)
    relative, smallest = rounding
    slack = sum_error * peak(wanted)
    allowed = relative * (np.abs(wanted) + slack) + slack + smallest
    beyond = np.isfinite(wanted) & ~(np.abs(found - wanted) <= allowed)
    if beyond.any():
        where = tuple(int(i) for i in np.argwhere(beyond)[0])
        raise AssertionError(
            f"{what}: {int(beyond.sum())} of {beyond.size} elements are further from the reference than one rounding to "
            f"{str(actual.dtype).removeprefix('torch.')}, first at {where}: expected {wanted[where]!r}, got {found[where]!r}"
        )


def assert_same_support(actual: Any, reference: Any, what: str = "gradient", mask: np.ndarray | None = None) -> None:
    """Rows (last axis) that are zero in one array are zero in the other.

    Catches a backward that drops a whole row, which a peak-relative tolerance forgives where the row is small.
    """
    found, wanted = as_float64(actual), as_float64(reference)
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: expected shape {wanted.shape}, got {found.shape}")
    if found.size == 0:
        return
    # Below this a value may underflow in the storage dtype or cancel to zero; neither is a dropped row.
    threshold = 1e-6 * peak(wanted)
    lost = (np.abs(wanted) > threshold).any(-1) & (found == 0).all(-1)
    invented = (wanted == 0).all(-1) & (found != 0).any(-1)
    if mask is not None:
        lost, invented = lost & mask, invented & mask
    for rows, verb in ((lost, "dropped"), (invented, "invented")):
        if rows.any():
            where = tuple(int(i) for i in np.argwhere(rows)[0])
            raise AssertionError(f"{what}: {int(rows.sum())} of {rows.size} rows {verb}, first {where}")


def assert_unbiased(actual: Any, reference: Any, limit: float, what: str = "gradient") -> None:
    """Mean signed difference relative to the mean magnitude: a wrong factor stays visible under a loose tolerance."""
    found, wanted = as_float64(actual), as_float64(reference)
    scale = float(np.abs(wanted).mean()) if wanted.size else 0.0
    if scale == 0.0:
        return
    bias = float(((found - wanted) * np.sign(wanted)).mean()) / scale
    if abs(bias) > limit:
        raise AssertionError(f"{what}: signed bias {bias:.3e} of the mean magnitude {scale:.3e}, allowed {limit:.1e}")


def assert_mismatch_ratio(actual: Any, reference: Any, tolerance: float, ratio: float, what: str = "result") -> None:
    """At most ``ratio`` of the elements differ by more than ``tolerance`` of the peak: for results that may flip at borders."""
    found, wanted = as_float64(actual), as_float64(reference)
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: expected shape {wanted.shape}, got {found.shape}")
    if found.size == 0:
        return
    wrong = ~(np.abs(found - wanted) <= tolerance * peak(wanted))
    if wrong.mean() > ratio:
        raise AssertionError(
            f"{what}: {wrong.mean():.4%} of the elements beyond {tolerance:.1e} of the peak, allowed {ratio:.4%}"
        )


def assert_bits_equal(actual: Any, reference: Any, what: str = "result") -> None:
    """Same dtype, shape and bits; a NaN equals a NaN of the same bits, +0 differs from -0."""
    if hasattr(actual, "detach"):
        import torch

        left, right = actual.detach().cpu().contiguous(), reference.detach().cpu().contiguous()
        if left.dtype != right.dtype or left.shape != right.shape:
            raise AssertionError(f"{what}: expected {right.dtype} {tuple(right.shape)}, got {left.dtype} {tuple(left.shape)}")
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        if left.is_complex():
            left, right = torch.view_as_real(left), torch.view_as_real(right)
            integer = {4: torch.int32, 8: torch.int64}[left.element_size()]
        differs = left.reshape(-1).view(integer) != right.reshape(-1).view(integer)
        count, total = int(differs.sum()), differs.numel()
    else:
        left_array, right_array = np.ascontiguousarray(actual), np.ascontiguousarray(reference)
        if left_array.dtype != right_array.dtype or left_array.shape != right_array.shape:
            raise AssertionError(
                f"{what}: expected {right_array.dtype} {right_array.shape}, got {left_array.dtype} {left_array.shape}"
            )
        unequal = left_array.reshape(-1).view(np.uint8) != right_array.reshape(-1).view(np.uint8)
        size = left_array.dtype.itemsize
        unequal = unequal.reshape(-1, size).any(-1) if unequal.size else unequal
        count, total = int(unequal.sum()), int(unequal.size)
    if count:
        raise AssertionError(f"{what}: {count} of {total} elements differ in their bits")
