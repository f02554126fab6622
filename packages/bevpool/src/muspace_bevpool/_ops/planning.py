# SPDX-License-Identifier: Apache-2.0
"""What the operators with a plan share: making one, and handing it to the registered operator."""

from __future__ import annotations

import torch
from muspace_core import checks
from muspace_core.register import outside_graphs
from muspace_core.scratch import absent
from torch._guards import detect_fake_mode

from muspace_bevpool import _autograd, _reference
from muspace_bevpool._native import cell_pool
from muspace_bevpool._plan import KeyRule, PointMap, PoolPlan, check_counts

INDEX_DTYPES = (torch.int32, torch.int64)


def require(argument: str, value: object) -> None:
    """TypeError for anything but a tensor; what is missing altogether could be a plan."""
    if value is None:
        raise TypeError(f"{argument}: expected a torch.Tensor, or a plan in its place, got None")
    checks.tensors(**{argument: value})


def check_coordinates(argument: str, coords: torch.Tensor | None, axes: str, owner: str, device: torch.device) -> torch.Tensor:
    """``coords``, an integer tensor of the shape ``axes``, whose last one is a number, on the device of ``owner``.

    Axes are names separated by blanks; ``...`` stands for any number of them.
    """
    require(argument, coords)
    assert coords is not None
    checks.layout(**{argument: coords})
    names = axes.split()
    open_ended = "..." in names
    few = coords.dim() < len(names) - 1 if open_ended else coords.dim() != len(names)
    if few or coords.shape[-1] != int(names[-1]):
        raise checks.fail(argument, f"shape [{', '.join(names)}]", list(coords.shape))
    checks.dtype(argument, coords, INDEX_DTYPES)
    checks.same_device(argument, coords, owner, device)
    checks.plain_memory(argument, coords)
    return coords


def check_contents(argument: str, tensor: torch.Tensor) -> None:
    """ValueError for a fake or meta tensor: a plan is made of numbers."""
    if tensor.is_meta or detect_fake_mode((tensor,)) is not None:
        kind = "a meta tensor" if tensor.is_meta and type(tensor) is torch.Tensor else "a fake one"
        raise checks.fail(argument, "a tensor with contents (a plan is made before tracing)", kind)


def check_plan(plan: object) -> None:
    """TypeError for anything but a plan or ``None``."""
    if plan is not None and not isinstance(plan, PoolPlan):
        raise TypeError(f"plan: expected a PoolPlan or None, got {type(plan).__name__}")


def held(plan: PoolPlan | None, selected: str, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and entries of a plan that ``selected`` can read, or two empty tensors."""
    if plan is None:
        empty = absent(like)
        return empty, empty
    plan.check_backend(selected)
    return plan.keys, plan.entries


@outside_graphs
def make_plan(
    operator: str,
    sizes: tuple[int, ...],
    coords: torch.Tensor,
    mask: torch.Tensor | None,
    rule: KeyRule,
    points: PointMap,
    named: tuple[str, str],
    requested: str,
) -> PoolPlan:
    """The plan of coordinates under a rule, on the backend that a call with ``requested`` would take.

    ``named`` are the caller's arguments that points and cells follow from.
    """
    check_contents(named[0], coords)
    if mask is not None:
        check_contents("mask", mask)
    count = coords.numel() // max(coords.shape[-1], 1)
    check_counts(named[0], count, named[1], rule.cells)
    selected = _autograd.DISPATCHERS[operator].choose(requested, coords.device, torch.float32).backend
    with torch.inference_mode(False):  # a plan serves training too, wherever it was made
        empty = absent(coords)
        if selected == "reference" or not count or not rule.cells:
            key, entries = _reference.keys(coords, mask, rule).int(), empty
        else:
            key = cell_pool.keys(named[0], coords, mask, rule, selected)
            entries = cell_pool.plan(key, rule.cells, points, selected)
    return PoolPlan(operator, sizes, count, selected, key, entries, empty)
