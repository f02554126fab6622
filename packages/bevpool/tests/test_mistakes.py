# SPDX-License-Identifier: Apache-2.0
"""Calls as a confused user makes them: the right exception, the argument's name, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from muspace_bevpool import (
    bev_pool,
    bev_pool_v2,
    bev_pool_v2_plan,
    bev_pool_v2_ranks,
    compat,
    flash_bevpool,
    flash_bevpool_sca,
    voxel_pool_depth,
    voxel_pooling_train,
)

SHAPE = (1, 1, 2, 2, 3)
CAMERA = torch.tensor([[[[8.0, -8, 0, 0], [8, 0, -8, 0], [1, 0, 0, 0]]]])

pytestmark = pytest.mark.backends("cpu", "reference")


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def lift() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0.25, 0.5]).view(1, 1, 1, 1, 2), torch.ones(1, 1, 1, 2, 3)


LOOK = (torch.ones(1, 1, 4, 4, 3), torch.ones(1, 1, 4, 4, 2), CAMERA)


def flash(**changes: Any) -> torch.Tensor:
    call = {"feature_size": None, "image_size": (16, 16), "roi_range": (0, 10, -5, 5, -1, 1), "grid_size": (2, 2, 1)} | changes
    return flash_bevpool(*LOOK, **call)


def attend(**changes: Any) -> torch.Tensor:
    call = {"image_size": (16, 16), "roi_range": (0, 10, -5, 5, -1, 1), "grid_size": (1, 1, 2)} | changes
    feats = torch.ones(1, 1, 4, 4, 8).flatten(2, 3) if "spatial_shapes" in changes else torch.ones(1, 1, 4, 4, 8)
    return flash_bevpool_sca(feats, CAMERA, **call)


def pooled(ranks_depth: torch.Tensor, starts: torch.Tensor | None = None, **keywords: Any) -> torch.Tensor:
    starts = ints(0) if starts is None else starts
    return bev_pool_v2(*lift(), ranks_depth, ints(0, 1), ints(3, 3), SHAPE, starts, ints(2), **keywords)


FREED: dict[str, Callable[[], Any]] = {
    "points": lambda: bev_pool_v2_ranks(freed(torch.rand(1, 1, 2, 2, 2, 3)), (0, 0, 0), (1, 1, 1), (2, 2, 2)),
    "ranks_depth": lambda: pooled(freed(ints(0, 1))),
    "interval_starts": lambda: pooled(ints(0, 1), freed(ints(0))),
    "coords": lambda: bev_pool(torch.ones(3, 2), freed(torch.zeros(3, 4, dtype=torch.int32)), 1, 1, 2, 2, backend="reference"),
    "feature_size": lambda: flash(feature_size=freed(torch.tensor([4, 4]))),
}
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "a set of sizes": (TypeError, "voxel_num", lambda: voxel_pooling_train(None, torch.ones(1, 1, 2), {1, 2, 3})),
    "an array without axes": (TypeError, "voxel_num", lambda: voxel_pooling_train(None, torch.ones(1, 1, 2), np.array(3))),
    "sizes without contents": (
        ValueError,
        "voxel_num",
        lambda: voxel_pooling_train(None, torch.ones(1, 1, 2), torch.ones(3, dtype=torch.int64, device="meta")),
    ),
    "levels of one number": (ValueError, "spatial_shapes", lambda: attend(spatial_shapes=[[1], [1]])),
    "an epsilon no float holds": (ValueError, "epsilon", lambda: flash(epsilon=10**400)),
    "another feature size": (ValueError, "feature_size", lambda: flash(feature_size=(4, 5))),
    "too many cells": (ValueError, "grid_size", lambda: flash(grid_size=(1, 1, 2**31))),
    "too many anchors": (ValueError, "grid_size", lambda: attend(grid_size=(1, 1, 10**9))),
    "a size no int64 holds": (ValueError, "voxel_num", lambda: voxel_pooling_train(None, torch.ones(1, 1, 2), (2, 2, 2**63))),
    "a number no float holds": (ValueError, "image_size", lambda: flash(image_size=(10**400, 1))),
    "a word for a size": (TypeError, "feature_size", lambda: flash(feature_size="abc")),
    "a word for a number": (TypeError, "eps", lambda: attend(eps="x")),
    "an infinite number": (ValueError, "eps", lambda: attend(eps=float("inf"))),
    "several distributions": (ValueError, "depth_distribution", lambda: flash(depth_distribution=torch.tensor([0, 1]))),
    "no heads": (ValueError, "attention_weights", lambda: attend(attention_weights=torch.ones(1, 1, 3, 1, 2))),
    "a word for a flag": (
        TypeError,
        "reduce_cams",
        lambda: voxel_pool_depth(torch.ones(1, 1, 2, 1, 1), torch.ones(1, 1, 1, 1), None, None, 1, 1, 1, 1, reduce_cams="no"),
    ),
}


@pytest.mark.parametrize("argument", FREED)
def test_freed_memory_is_refused_by_name(argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected a tensor with memory"):
        FREED[argument]()


@pytest.mark.parametrize("mistake", REFUSED)
def test_refused_by_name(mistake: str) -> None:
    exception, argument, call = REFUSED[mistake]
    with pytest.raises(exception, match=f"^{argument}: expected "):
        call()


@pytest.mark.parametrize("ranks_depth", [ints(0, -1), ints(0, 9)], ids=["negative", "beyond"])
def test_a_compiled_reference_drops_what_it_cannot_refuse(ranks_depth: torch.Tensor) -> None:
    compiled = torch.compile(lambda ranks: pooled(ranks, backend="reference"), backend="aot_eager")
    assert compiled(ranks_depth).sum() == 0.75  # the first point alone


@pytest.mark.parametrize(("rank", "named"), [(-5, "-5"), (9, "9"), (2**40, str(2**31 - 1))], ids=["negative", "beyond", "huge"])
def test_a_faulty_rank_is_named_as_it_was_given(rank: int, named: str) -> None:
    """int64 ranks too, up to what 32 bits hold."""
    with pytest.raises(ValueError, match=rf"^ranks_depth\[1\]: expected an index from 0 to 1, got {named}$"):
        pooled(torch.tensor([0, rank]))


def test_a_feature_size_of_plain_numbers_can_be_traced() -> None:
    wanted = flash(feature_size=(4, 4))
    compiled = torch.compile(lambda: flash(feature_size=(4, 4)) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), wanted * 2)
    with torch.device("meta"):  # where torch makes tensors by default says nothing about the caller's numbers
        assert (
            flash_bevpool(*(t.to("cpu") for t in LOOK), [4, 4], (16, 16), (0, 10, -5, 5, -1, 1), (2, 2, 1)).shape
            == wanted.shape
        )


def test_a_plan_knows_the_shape_of_its_depth() -> None:
    ranks = ints(0, 1)
    plan = bev_pool_v2_plan(ranks, ranks, ints(3, 3), SHAPE, ints(0), ints(2), depth_shape=(1, 1, 1, 2, 1))
    with pytest.raises(ValueError, match=r"^plan: expected one for the sizes"):
        bev_pool_v2(*lift(), None, None, None, SHAPE, None, None, plan=plan)


def test_a_refused_extension_call_writes_nothing() -> None:
    geometry, features = torch.zeros(1, 3, 3, dtype=torch.int32), torch.ones(1, 3, 2)
    wrapper = compat.voxel_pooling_train_ext.voxel_pooling_train_forward_wrapper
    out, depth_grad = torch.zeros(1, 2, 2, 2), torch.zeros(1, 1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"^pos_memo: expected shape"):
        wrapper(1, 3, 2, 2, 2, 1, geometry, features, out, torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"^feat_grad: expected shape"):
        ranks = (ints(0, 1), ints(0, 1), ints(3, 3), ints(2), ints(0))
        wrong = torch.zeros(1, 1, 1, 2, 4)
        compat.bev_pool_v2_ext.bev_pool_v2_backward(torch.ones(1, 1, 2, 2, 3), depth_grad, wrong, *lift(), *ranks)
    assert not out.any() and not depth_grad.any()
