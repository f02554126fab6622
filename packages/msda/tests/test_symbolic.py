# SPDX-License-Identifier: Apache-2.0
"""Level sizes that are symbols of a graph: a list made from a feature map's own shape must not freeze that shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_msda import multi_scale_deformable_attn
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")

#: Height and width of the finer map; the coarser one is half of it.  The first differ from every other size of the call, since
#: equal sizes become one symbol.
SIZES = ((12, 20), (14, 18), (26, 10), (16, 16))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class OneMap(torch.nn.Module):
    """One level, sizes as a list, starts derived."""

    def forward(self, fine: torch.Tensor, _coarse: Any, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes = [(fine.shape[1], fine.shape[2])]
        value = fine.flatten(1, 2)
        return multi_scale_deformable_attn(value, sizes, None, locations[:, :, :, :1], weights[:, :, :, :1]) * 2


class TwoMaps(torch.nn.Module):
    """Two levels, sizes and starts as lists."""

    def forward(self, fine: torch.Tensor, coarse: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes = [(fine.shape[1], fine.shape[2]), (coarse.shape[1], coarse.shape[2])]
        value = torch.cat((fine.flatten(1, 2), coarse.flatten(1, 2)), 1)
        return multi_scale_deformable_attn(value, sizes, [0, fine.shape[1] * fine.shape[2]], locations, weights) * 2


MODELS = pytest.mark.parametrize("model", [OneMap(), TwoMaps()], ids=["one map", "two maps"])


def _inputs(size: tuple[int, int], device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(size[0] * 100 + size[1])
    height, width = size
    fine, coarse = torch.randn(1, height, width, 2, 4), torch.randn(1, height // 2, width // 2, 2, 4)
    return tuple(t.to(device) for t in (fine, coarse, torch.rand(1, 3, 2, 2, 2, 2), torch.rand(1, 3, 2, 2, 2)))


@MODELS
def test_one_graph_serves_every_size(model: torch.nn.Module, backend: str, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for size in SIZES:
        given = _inputs(size, device)
        plain, live = (tuple(t.clone().requires_grad_() for t in given) for _ in range(2))
        wanted, found = model(*plain), compiled(*live)
        assert_bits_equal(found, wanted, f"output at {size}")
        wanted.sum().backward()
        found.sum().backward()
        for left, right in zip(live, plain, strict=True):
            assert (left.grad is None) == (right.grad is None)
            if right.grad is not None:
                assert_close(left.grad, right.grad, 1e-5, f"gradient at {size}")
        assert counter.frame_count == 1, f"compiled again at {size}"


@MODELS
def test_sizes_found_dynamic_on_the_second_call(model: torch.nn.Module, backend: str, device: str) -> None:
    """The default of torch.compile: the first size is a constant, the second makes it a symbol, no third graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in SIZES:
        given = _inputs(size, device)
        assert_bits_equal(compiled(*given), model(*given), f"output at {size}")
    assert counter.frame_count <= 2, f"{counter.frame_count} graphs for {len(SIZES)} sizes"


@MODELS
@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_sizes_open(strict: bool, model: torch.nn.Module, backend: str, device: str) -> None:
    """A size that became a constant would be a violated constraint here."""
    given = _inputs(SIZES[0], device)
    height, width = torch.export.Dim("height", min=2, max=64), torch.export.Dim("width", min=2, max=64)
    coarse: dict[int, Any] = {1: height, 2: width}
    fine: dict[int, Any] = {1: 2 * height, 2: 2 * width}
    names = ({"fine": fine}, {"_coarse" if isinstance(model, OneMap) else "coarse": coarse})
    shapes = names[0] | names[1] | {"locations": None, "weights": None}
    program = torch.export.export(model, given, dynamic_shapes=shapes, strict=strict).module()
    for size in SIZES:
        given = _inputs(size, device)
        assert_bits_equal(program(*given), model(*given), f"exported, at {size}")


@pytest.mark.parametrize("level_starts", [None, [0]])
def test_a_wrong_size_is_refused_when_compiled_too(level_starts: list[int] | None, backend: str, device: str) -> None:
    """What eager checks of a list is checked while the graph is made."""
    fine, _, locations, weights = _inputs(SIZES[0], device)

    def wrong(maps: torch.Tensor) -> torch.Tensor:
        sizes = [(maps.shape[1] + 1, maps.shape[2])]
        value = maps.flatten(1, 2)
        return multi_scale_deformable_attn(value, sizes, level_starts, locations[:, :, :, :1], weights[:, :, :, :1])

    with pytest.raises(ValueError):
        wrong(fine)
    with pytest.raises(Exception, match=r"value|level_start_index"):
        torch.compile(wrong, backend="aot_eager", dynamic=True)(fine)
