# SPDX-License-Identifier: Apache-2.0
"""Plans beyond what every pooling operator's contract holds: across operators, threads, processes; and bad builders."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from muspace_bevpool import PoolPlan, bev_pool_v2_plan
from muspace_bevpool._native import cell_pool
from muspace_bevpool._plan import PointMap
from muspace_core.testing.calls import on_backend
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.process import in_child, in_threads
from torch._subclasses.fake_tensor import FakeTensorMode

calls = load_sibling(__file__, "pool_calls")
every = pytest.mark.parametrize("pooling", calls.POOLINGS.values(), ids=list(calls.POOLINGS))


def _smallest(pooling: Any, device: str) -> dict[str, Any]:
    return pooling.tensors(pooling.inputs.CASES[0].build(), device)


@every
def test_it_is_a_pool_plan(pooling: Any, backend: str, device: str) -> None:
    plan = pooling.plan(backend, _smallest(pooling, device))
    assert isinstance(plan, PoolPlan)
    assert pooling.name in repr(plan)


@pytest.mark.parametrize(
    ("owner", "user"),
    [pytest.param(a, b, id=f"{a.name}-{b.name}") for a, b in itertools.permutations(calls.POOLINGS.values(), 2)],
)
def test_a_plan_of_another_operator(owner: Any, user: Any, backend: str, device: str) -> None:
    """Refused by name; or, where the operators' indices mean the same, the right numbers."""
    plan, tensors = owner.plan(backend, _smallest(owner, device)), _smallest(user, device)
    try:
        found = user.call(backend, tensors, plan=plan)
    except (ValueError, TypeError) as error:
        assert str(error).startswith("plan: expected "), error
    else:
        assert_bits_equal(found, user.call(backend, tensors), "another operator's plan")


@every
def test_a_plan_of_another_calibration_is_what_counts(pooling: Any, backend: str, device: str) -> None:
    """Beside a plan the index tensors are not read again: that is its point."""
    tensors = _smallest(pooling, device)
    plan, wanted = pooling.plan(backend, tensors), pooling.run(backend, tensors)
    index = {k: v for k, v in tensors.items() if isinstance(v, torch.Tensor) and k not in pooling.floating}
    found = pooling.run(backend, tensors | {k: torch.zeros_like(v) for k, v in index.items()}, plan=plan)
    assert_bits_equal(found[0], wanted[0], "output")
    for name in pooling.floating:
        # The upstream gradient is of integers, the features are not.
        assert_close(found[1][name], wanted[1][name], 1e-6, f"gradient of {name}")


@every
def test_two_threads_share_a_plan(pooling: Any, backend: str, device: str) -> None:
    tensors = _smallest(pooling, device)
    plan = pooling.plan(backend, tensors)
    wanted = pooling.run(backend, tensors, plan=plan)

    def work() -> None:
        for _ in range(2 if backend == "emu" else 20):
            output, gradients = pooling.run(backend, tensors, plan=plan)
            assert_bits_equal(output, wanted[0], "output")
            for name, gradient in gradients.items():
                assert_close(gradient, wanted[1][name], 1e-6, f"gradient of {name}")

    in_threads([work, work])


@pytest.mark.backends("cpu", "emu")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@every
def test_a_plan_in_a_forked_child(pooling: Any, backend: str) -> None:
    """Made before the fork, used after it; and made after it."""
    tensors = _smallest(pooling, "cpu")
    plan = pooling.plan(backend, tensors)
    wanted = pooling.call(backend, tensors, plan=plan).contiguous().numpy().tobytes()
    for make in (lambda: plan, lambda: pooling.plan(backend, tensors)):
        assert in_child(lambda make=make: pooling.call(backend, tensors, plan=make()).contiguous().numpy().tobytes()) == wanted  # type: ignore[misc]


@every
def test_empty_plans(pooling: Any, backend: str, device: str) -> None:
    """A plan of no points, no cells, no images serves the empty call."""
    for empty in pooling.inputs.EMPTY:
        tensors = pooling.tensors(empty.shrink(pooling.inputs.CASES[0].build()), device)
        output, gradients = pooling.run(backend, tensors, plan=pooling.plan(backend, tensors))
        assert (output == 0).all() and output.shape == pooling.call(backend, tensors).shape, empty.name
        assert all(bool((g == 0).all()) and g.shape == tensors[k].shape for k, g in gradients.items()), empty.name


@every
def test_a_plan_whose_memory_was_freed(pooling: Any, backend: str, device: str) -> None:
    plan = pooling.plan(backend, _smallest(pooling, device))
    plan.keys.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^plan: expected a tensor with memory, got none$"):
        plan.kept()
    if backend == "reference":
        with pytest.raises(ValueError, match=r"^plan: expected a tensor with memory, got none$"):
            pooling.call(backend, _smallest(pooling, device), plan=plan)


@pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")
@every
def test_entries_of_other_points_are_refused_by_the_library(pooling: Any, backend: str, device: str) -> None:
    """The devices believe what a plan says, so the library takes one of the exact size alone."""
    tensors = _smallest(pooling, device)
    plan = pooling.plan(backend, tensors)
    longer = dataclasses.replace(plan, entries=torch.cat([plan.entries, plan.entries]))
    with pytest.raises(ValueError, match=r"^plan: expected shape"):
        pooling.call(backend, tensors, plan=longer)


@pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")
@pytest.mark.parametrize(
    ("bins", "pixels"), [(1 << 32, 1), (1 << 16, 1 << 16), (3, 1 << 40), (1 << 62, 4), (-1, 1), (1, -1), (1, 0)], ids=str
)
def test_a_frustum_that_nothing_counts_is_refused_by_the_library(bins: int, pixels: int, backend: str, device: str) -> None:
    keys = torch.zeros(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"^(depth_bins|pixels|depth_bins \* pixels): expected "):
        cell_pool.plan(keys, 2, PointMap(depth_bins=bins, pixels=pixels), backend)


@every
def test_a_plan_holds_no_graph(pooling: Any, backend: str, device: str) -> None:
    tensors = _smallest(pooling, device)
    plan = pooling.plan(backend, tensors)
    live = tensors | {k: tensors[k].requires_grad_() for k in pooling.floating}
    for _ in range(2):  # the second would meet a freed graph
        pooling.call(backend, live, plan=plan).sum().backward()
    assert not pooling.call(
        backend, {k: v.detach() if k in pooling.floating else v for k, v in live.items()}, plan=plan
    ).requires_grad


@pytest.mark.skipif(not hasattr(torch.serialization, "add_safe_globals"), reason="this torch loads without asking")
@every
def test_a_saved_plan_loads_as_tensors_do(pooling: Any, backend: str, device: str, tmp_path: Path) -> None:
    tensors = _smallest(pooling, device)
    torch.save(pooling.plan(backend, tensors), tmp_path / "plan.pt")
    loaded = torch.load(tmp_path / "plan.pt", weights_only=True)
    assert_bits_equal(pooling.call(backend, tensors, plan=loaded), pooling.call(backend, tensors), "loaded plan")


# ---- builders ------------------------------------------------------------------------------------------------------
@every
def test_builders_refuse_like_the_operators(pooling: Any, backend: str, device: str) -> None:
    """What the operator says of an index argument, its builder says too."""
    tried = 0
    for case in pooling.inputs.ERRORS:
        named = case.message.partition(":")[0]
        if named not in pooling.planned_by or case.name.endswith(("_meta", "_channels", "_of_four")):
            continue
        tensors = _smallest(pooling, device)
        case.change(tensors)
        try:
            pooling.plan(backend, tensors)
        except (ValueError, TypeError) as error:
            assert type(error) is case.exception and str(error).startswith(f"{named}: expected "), (case.name, error)
            tried += 1
        else:
            # Sizes that only the features know: rows, images, pixels.
            assert case.exception is ValueError, case.name
    assert tried >= 5


@every
def test_builders_refuse_tensors_without_contents(pooling: Any, backend: str, device: str) -> None:
    tensors = _smallest(pooling, device)
    meta = tensors | {name: tensors[name].to("meta") for name in pooling.planned_by if isinstance(tensors[name], torch.Tensor)}
    with pytest.raises(ValueError, match=r": expected a tensor with contents .*, got a meta tensor"):
        pooling.plan(backend, meta)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ValueError, match=r"a tensor with contents .*, got a fake one"),
    ):
        pooling.plan(backend, tensors)


@every
def test_builders_run_outside_compiled_graphs(pooling: Any, backend: str, device: str) -> None:
    """A graph break and no more: nothing of the builder is traced, so nothing of it can be wrong in a graph."""
    tensors = _smallest(pooling, device)
    compiled = torch.compile(lambda: pooling.call(backend, tensors, plan=pooling.plan(backend, tensors)) * 2, backend="eager")
    assert_bits_equal(compiled(), pooling.call(backend, tensors) * 2, "compiled around a builder")


@pytest.mark.parametrize(
    "shape", [(2, 2, 3, 2), (2, 2, 3, 2, 3, 1), (2, -2, 3, 2, 3), (2, 2, 3, 2, 3.0), None, "tensor"], ids=str
)
def test_depth_shape(shape: Any, backend: str, device: str) -> None:
    tensors = _smallest(calls.BEV_POOL_V2, device)
    given = tensors["depth"] if shape == "tensor" else shape
    with pytest.raises((ValueError, TypeError), match=r"^depth_shape: expected "):
        on_backend(bev_pool_v2_plan)(backend, *[tensors[k] for k in calls.BEV_POOL_V2.planned_by], depth_shape=given)


@every
def test_builders_refuse_unknown_backends(pooling: Any, device: str) -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of .*auto.*; got 'tpu'"):
        pooling.plan("cpu", _smallest(pooling, device), backend="tpu")
