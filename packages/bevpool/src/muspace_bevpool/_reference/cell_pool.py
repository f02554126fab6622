# SPDX-License-Identifier: Apache-2.0
"""The operators that sum rows per cell in plain differentiable PyTorch: keys of the points, then one ``index_add``."""

from __future__ import annotations

import torch

from muspace_bevpool._plan import KeyRule, PointMap


def keys(coords: torch.Tensor, mask: torch.Tensor | None, rule: KeyRule) -> torch.Tensor:
    """int64 cell of every point of ``coords [..., columns]``, -1 where it has none."""
    flat = coords.reshape(-1, len(rule.bounds)).long()
    place = torch.arange(flat.shape[0], device=flat.device)
    kept = torch.ones_like(place, dtype=torch.bool) if mask is None else mask.reshape(-1).bool()
    key = place // max(rule.run, 1) % max(rule.count, 1) * rule.run_stride
    for column, (bound, stride) in enumerate(zip(rule.bounds, rule.strides, strict=True)):
        kept = kept & (flat[:, column] >= 0) & (flat[:, column] < bound)
        key = key + flat[:, column] * stride
    return torch.where(kept, key, -1)


def interval_keys(ranks_bev: torch.Tensor, interval_starts: torch.Tensor, interval_lengths: torch.Tensor) -> torch.Tensor:
    """int64 cell of every point that an interval covers, -1 elsewhere; reads the intervals on the host."""
    key = torch.full(ranks_bev.shape, -1, dtype=torch.int64, device=ranks_bev.device)
    starts = interval_starts.long()
    owner = torch.repeat_interleave(torch.arange(starts.shape[0], device=starts.device), interval_lengths.long())
    before = torch.cumsum(interval_lengths.long(), 0) - interval_lengths.long()
    points = starts[owner] + torch.arange(owner.shape[0], device=starts.device) - before[owner]
    first_rank = ranks_bev.long()[starts[owner]]
    key[points] = torch.where(ranks_bev.long()[points] == first_rank, first_rank, -1)
    return key


def pool(rows: torch.Tensor, weights: torch.Tensor | None, key: torch.Tensor, cells: int, points: PointMap) -> torch.Tensor:
    """``[cells, C]`` in fp32 (fp64 for fp64): the sum per cell of ``weights * rows``, points in ascending order."""
    dtype = torch.float64 if rows.dtype is torch.float64 else torch.float32
    kept = (key >= 0) & (key < cells)
    place = torch.arange(key.shape[0], device=key.device)
    if points.rows is not None and points.weights is not None:
        row, weight = points.rows.long(), points.weights.long()
        count = 0 if weights is None else weights.shape[0]
        # Faulty ranks raise where the host may look at them; in a graph their points are dropped, as on a device.
        kept = kept & (row >= 0) & (row < rows.shape[0]) & (weight >= 0) & (weight < count)
        row, weight = torch.where(kept, row, 0), torch.where(kept, weight, 0)
    elif points.depth_bins:
        row = place // (points.depth_bins * points.pixels) * points.pixels + place % points.pixels
        weight = place
    else:
        row = weight = place
    if rows.shape[0] == 0 or (weights is not None and weights.shape[0] == 0):
        # Nothing can be read. The sums of nothing give the result its path back to the inputs.
        nothing = rows[:0].sum() + (0 if weights is None else weights[:0].sum())
        return rows.new_zeros((cells, rows.shape[1]), dtype=dtype) + nothing
    # Points without a cell go to one beyond the last, so that shapes do not depend on the data. They are replaced before the
    # product: behind it a NaN would still reach the gradients of the others.
    terms = torch.where(kept[:, None], rows.to(dtype)[row], 0.0)
    if weights is not None:
        terms = terms * torch.where(kept, weights.to(dtype)[weight], 0.0)[:, None]
    total = rows.new_zeros((cells + 1, rows.shape[1]), dtype=dtype)
    return total.index_add(0, torch.where(kept, key, cells), terms)[:cells]
