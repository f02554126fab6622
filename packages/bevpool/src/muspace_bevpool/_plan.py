# SPDX-License-Identifier: Apache-2.0
"""Which cell a frustum point falls into, and the plan that a fixed calibration computes once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from muspace_core import checks

#: Keys, ranks and places are 32-bit on every backend.
MOST = (1 << 31) - 1


@dataclass(frozen=True)
class KeyRule:
    """Cell of a point from its row of integer coordinates and its place.

    ``key = sum(coords[i, j] * strides[j]) + (i // run % count) * run_stride``, or none unless every ``coords[i, j]`` lies in
    ``[0, bounds[j])``. A column that only filters has stride 0; ``run`` points in a row share the image or batch item that
    ``run_stride`` stands for.
    """

    bounds: tuple[int, ...]
    strides: tuple[int, ...]
    cells: int
    run: int = 1
    count: int = 1
    run_stride: int = 0

    def numbers(self) -> tuple[int, ...]:
        """The rule as the library takes it: four bounds, four strides, run, count, run_stride, cells."""
        pad = (0,) * (4 - len(self.bounds))
        return (*self.bounds, *pad, *self.strides, *pad, max(self.run, 1), max(self.count, 1), self.run_stride, self.cells)


@dataclass(frozen=True)
class PointMap:
    """How a point finds its feature row and weight: by place in a frustum, by rank tensors, or itself (no weights)."""

    depth_bins: int = 0
    pixels: int = 0
    rows: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    @property
    def weighted(self) -> bool:
        return self.rows is not None or self.depth_bins > 0


@dataclass(frozen=True, eq=False, repr=False)
class PoolPlan:
    """Where the points of one calibration fall, computed once and handed to every call with ``plan=``.

    Made by the ``*_plan`` functions; opaque but for ``nbytes``, ``device`` and ``kept()``. A plan serves one operator, one
    set of sizes and one backend; features, depths and their dtypes may change from call to call, forward and backward. Calls
    with a plan neither sort nor read anything on the host, so they can be captured in a CUDA graph. ``torch.save`` keeps one;
    ``torch.load`` opens it once ``muspace_bevpool`` is imported.

    >>> import torch
    >>> from muspace_bevpool import bev_pool, bev_pool_plan
    >>> coords = torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0], [2, 2, 0, 0]])  # (h, w, d, b)
    >>> plan = bev_pool_plan(coords, 1, 1, 3, 3)
    >>> bev_pool(torch.ones(3, 2), None, 1, 1, 3, 3, plan=plan)[0, :, 0, 0, 1]
    tensor([2., 2.])
    >>> plan.kept()
    3
    """

    operator: str
    sizes: tuple[int, ...]
    points: int
    backend: str
    keys: torch.Tensor
    entries: torch.Tensor
    row_entries: torch.Tensor
    ranks: tuple[torch.Tensor, ...] = ()
    unique: bool = True

    def __repr__(self) -> str:
        return f"PoolPlan({self.operator}, {self.points} points, backend {self.backend}, {self.nbytes} bytes on {self.device})"

    @property
    def device(self) -> torch.device:
        """Device of the tensors, that of every call with this plan."""
        return self.keys.device

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.entries, self.row_entries, *self.ranks))

    def kept(self) -> int:
        """Number of points that fall into a cell; reads the device."""
        checks.memory("plan", self.keys)
        return int((self.keys >= 0).sum())

    def plain_keys(self) -> torch.Tensor:
        """The cell of every point as int64, for plain PyTorch, which would crash on tensors whose memory was freed."""
        for tensor in (self.keys, *self.ranks):
            checks.memory("plan", tensor)
        return self.keys.long()

    def check(self, operator: str, sizes: tuple[int, ...], device: torch.device) -> None:
        """ValueError unless the plan is one of ``operator`` for these sizes on this device."""
        if self.operator != operator:
            raise checks.fail("plan", f"a plan of {operator}", f"one of {self.operator}")
        if self.sizes != sizes:
            raise checks.fail("plan", f"one for the sizes {list(sizes)} of this call", f"one for {list(self.sizes)}")
        if self.keys.device != device:
            raise checks.fail("plan", f"one on {device}", f"one on {self.keys.device}")

    def check_backend(self, backend: str) -> None:
        """ValueError unless ``backend`` can read the plan; the reference reads every plan."""
        if backend not in (self.backend, "reference"):
            raise checks.fail("plan", f"one built for backend {backend}", f"one built for {self.backend}")


if hasattr(torch.serialization, "add_safe_globals"):  # torch.load then opens a saved plan as it opens tensors
    torch.serialization.add_safe_globals([PoolPlan])


def check_counts(point_argument: str, points: int, cell_argument: str, cells: int) -> None:
    """ValueError unless points and cells can be counted in 31 bits; the arguments are those that they follow from."""
    if points > MOST:
        raise checks.fail(point_argument, f"at most {MOST} points", points)
    if cells > MOST:
        raise checks.fail(cell_argument, f"a grid of at most {MOST} cells", cells)
