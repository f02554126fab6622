# SPDX-License-Identifier: Apache-2.0
"""The names by which SparseDrive and Sparse4D call deformable_aggregation: function class, wrapper, map format, extension."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from muspace_core import get_last_dispatch_report
from muspace_core.testing.calls import as_tensors, represented
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_msda import compat, deformable_aggregation

oracle = load_sibling(__file__, "deformable_aggregation_oracle")
inputs = load_sibling(__file__, "deformable_aggregation_inputs")

EXTENSION = compat.deformable_aggregation_ext

pytestmark = pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")


def _tensors(device: str, **sizes) -> list[torch.Tensor]:
    return list(as_tensors(inputs.aggregation("compat", **sizes), device).values())


def _maps(device: str, cameras: int = 3, batch: int = 2, sizes=((4, 6), (2, 3), (1, 2))) -> list[torch.Tensor]:
    """What a neck returns: one tensor [B, cams, C, h, w] per scale."""
    torch.manual_seed(2)
    return [torch.randn(batch, cameras, 8, h, w).to(device) for h, w in sizes]


@pytest.mark.parametrize("name", ["DeformableAggregationFunction.apply", "deformable_aggregation_function"])
def test_functions(name: str, backend: str, device: str) -> None:
    arguments = _tensors(device, batch=2)
    function = compat
    for part in name.split("."):
        function = getattr(function, part)
    wanted = deformable_aggregation(*arguments)
    assert_bits_equal(function(*arguments), wanted)
    integers = [t if t.is_floating_point() else t.int() for t in arguments]
    assert_bits_equal(function(*integers), wanted, "the kernel's own int32 tables")
    live = [t.clone().requires_grad_() if t.is_floating_point() else t for t in arguments]
    function(*live).sum().backward()
    assert all(t.grad is not None and torch.isfinite(t.grad).all() for t in live if t.is_floating_point())
    report = get_last_dispatch_report()
    assert report is not None and report.selected_backend == backend and report.operator == "deformable_aggregation"


def test_upstream_argument_names(device: str) -> None:
    names = list(inspect.signature(compat.deformable_aggregation_function).parameters)
    assert names[:5] == ["feature_maps", "spatial_shape", "scale_start_index", "sampling_location", "weights"]
    arguments = _tensors(device)
    named = dict(zip(names, arguments, strict=False))
    assert_bits_equal(compat.deformable_aggregation_function(**named), deformable_aggregation(*arguments))
    assert list(inspect.signature(compat.feature_maps_format).parameters)[:2] == ["feature_maps", "inverse"]


def test_as_the_model_calls_it(backend: str, device: str) -> None:
    """Maps of a neck, formatted once, splatted into the call with points and weights behind them."""
    maps = _maps(device)
    formatted = compat.feature_maps_format(maps)
    torch.manual_seed(3)
    points, weights = torch.rand(2, 5, 4, 3, 2).to(device), torch.rand(2, 5, 4, 3, 3, 2).to(device)
    output = compat.deformable_aggregation_function(*formatted, points, weights)
    wanted = torch.zeros(2, 5, 8, device=device)
    for camera in range(3):
        for scale, feat in enumerate(maps):
            found = torch.nn.functional.grid_sample(feat[:, camera], points[:, :, :, camera] * 2 - 1, align_corners=False)
            wanted += torch.einsum("bcap,bapc->bac", found, weights[:, :, :, camera, scale].repeat_interleave(4, -1))
    assert_close(output, wanted, 1e-6)


def test_feature_maps_format(device: str) -> None:
    """Camera-major, then scale, then row-major pixels; channels last; tables in int64 on the maps' device."""
    maps = _maps(device)
    feat, shapes, starts = compat.feature_maps_format(maps)
    assert feat.shape == (2, 3 * 32, 8) and feat.dtype == maps[0].dtype
    assert shapes.tolist() == [[[4, 6], [2, 3], [1, 2]]] * 3 and shapes.dtype == torch.int64
    assert starts.tolist() == [[0, 24, 30], [32, 56, 62], [64, 88, 94]] and starts.dtype == torch.int64
    assert shapes.device == starts.device == feat.device == maps[0].device
    for camera in range(3):
        for scale, (h, w) in enumerate(shapes[camera].tolist()):
            start = int(starts[camera, scale])
            rows = feat[:, start : start + h * w].reshape(2, h, w, 8)
            assert_bits_equal(rows.permute(0, 3, 1, 2), maps[scale][:, camera], f"camera {camera}, scale {scale}")


@pytest.mark.parametrize("inverse_table", ["tensor", "int32"])
def test_the_inverse_gives_the_maps_back(inverse_table: str, device: str) -> None:
    """Cameras of one size form one group; upstream returns a list of groups."""
    maps = _maps(device)
    feat, shapes, starts = compat.feature_maps_format(maps)
    if inverse_table == "int32":
        shapes, starts = shapes.int(), starts.int()
    groups = compat.feature_maps_format([feat, shapes, starts], inverse=True)
    assert len(groups) == 1 and len(groups[0]) == 3
    for found, wanted in zip(groups[0], maps, strict=True):
        assert_bits_equal(found, wanted)


def test_groups_of_cameras_of_different_size(backend: str, device: str) -> None:
    """Two rigs side by side: the rows of the second begin behind those of the first, and so do its starts."""
    wide, narrow = _maps(device), _maps(device, cameras=2, sizes=((2, 2), (1, 2), (1, 1)))
    feat, shapes, starts = compat.feature_maps_format([wide, narrow])
    assert feat.shape == (2, 96 + 14, 8)
    assert shapes[3:].tolist() == [[[2, 2], [1, 2], [1, 1]]] * 2
    assert starts[3:].tolist() == [[96, 100, 102], [103, 107, 109]], "rows of the joint features"
    groups = compat.feature_maps_format([feat, shapes, starts], inverse=True)
    assert [len(g) for g in groups] == [3, 3]
    for group, maps in zip(groups, (wide, narrow), strict=True):
        for found, wanted in zip(group, maps, strict=True):
            assert_bits_equal(found, wanted)


def test_the_format_is_differentiable(device: str) -> None:
    maps = [m.requires_grad_() for m in _maps(device)]
    feat, _, _ = compat.feature_maps_format(maps)
    feat.square().sum().backward()
    for m in maps:
        assert_bits_equal(m.grad, 2 * m.detach())


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda maps: maps[0], TypeError, "feature_maps: expected a list"),
        (lambda maps: [], TypeError, "an empty list"),
        (lambda maps: [maps, []], TypeError, "an empty list"),
        (lambda maps: [maps[0], None], TypeError, r"feature_maps\[1\]: expected a torch.Tensor, got NoneType"),
        (lambda maps: [maps[0][0]], ValueError, r"feature_maps\[0\]: expected shape \[B, cams, C, h, w\]"),
        (lambda maps: [maps[0], maps[1][:, :2]], ValueError, r"feature_maps\[1\]: expected sizes \[2, 3, 8\]"),
        (lambda maps: [maps[0], maps[1].half()], TypeError, r"feature_maps\[1\]: expected dtype float32, got float16"),
        (lambda maps: [maps, maps[:2]], ValueError, "feature_maps: expected 3 levels in every group"),
        (lambda maps: [maps, [m[:1] for m in maps]], ValueError, r"feature_maps\[1\]: expected sizes"),
    ],
)
def test_maps_that_do_not_fit_together_are_refused(spoil: Any, error: type[Exception], text: str, device: str) -> None:
    with pytest.raises(error, match=text):
        compat.feature_maps_format(spoil(_maps(device)))


def test_no_cameras(device: str) -> None:
    feat, shapes, starts = compat.feature_maps_format([m[:, :0] for m in _maps(device)])
    assert feat.shape == (2, 0, 8) and shapes.shape == (0, 3, 2) and starts.shape == (0, 3)


def test_rows_that_do_not_fit_their_table_are_refused(device: str) -> None:
    feat, shapes, starts = compat.feature_maps_format(_maps(device))
    for given, error, text in (
        ([feat, shapes], ValueError, "got 2 entries"),
        ([feat[:, :-1], shapes, starts], ValueError, "F = sum of h"),
        ([feat[0], shapes, starts], ValueError, r"feature_maps\[0\]: expected shape"),
        ([feat, shapes[0], starts], ValueError, r"feature_maps\[1\]: expected shape"),
        ([feat, shapes.tolist(), starts], TypeError, r"feature_maps\[1\]: expected a torch.Tensor, got list"),
        ([feat, shapes.float(), starts], TypeError, r"feature_maps\[1\]: expected dtype int64, int32, got float32"),
        ([feat, -shapes, starts], ValueError, r"feature_maps\[1\]: expected sizes of at least 0"),
        ([feat, shapes.to_sparse(), starts], ValueError, r"feature_maps\[1\]: expected a strided tensor"),
    ):
        with pytest.raises(error, match=text):
            compat.feature_maps_format(given, inverse=True)


# ---- the extension's two functions ---------------------------------------------------------------------------------
def test_extension_forward(backend: str, device: str) -> None:
    arguments = _tensors(device, batch=2)
    wanted = deformable_aggregation(*arguments)
    tables = [t if t.is_floating_point() else t.int() for t in arguments]
    assert_bits_equal(EXTENSION.deformable_aggregation_forward(*tables), wanted)
    assert not EXTENSION.deformable_aggregation_forward(*tables).requires_grad


@pytest.mark.parametrize("contiguous", [True, False])
def test_extension_backward_fills_its_buffers(contiguous: bool, backend: str, device: str) -> None:
    """Three buffers of zeros come in behind the upstream gradient and hold the gradients afterwards."""
    arguments = _tensors(device, batch=2)
    live = [t.clone().requires_grad_() if t.is_floating_point() else t for t in arguments]
    output = deformable_aggregation(*live)
    grad_output = torch.randn_like(output)
    wanted = torch.autograd.grad(output, [live[i] for i in (0, 3, 4)], grad_output)
    tables = [t if t.is_floating_point() else t.int() for t in arguments]
    buffers = [torch.zeros_like(arguments[i]) for i in (0, 3, 4)]
    if not contiguous:
        buffers = [torch.zeros(*b.shape[:-1], 2 * b.shape[-1], device=device)[..., ::2] for b in buffers]
    addresses = [b.data_ptr() for b in buffers]
    EXTENSION.deformable_aggregation_backward(*tables, grad_output, *buffers)
    assert [b.data_ptr() for b in buffers] == addresses
    for buffer, gradient in zip(buffers, wanted, strict=True):
        assert_close(buffer, gradient, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_become_float(dtype: torch.dtype, backend: str, device: str) -> None:
    """As upstream's wrapper makes them: the result is fp32 of the rounded features, the gradient has the features' dtype."""
    arguments = _tensors(device)
    arguments[0] = arguments[0].to(dtype).requires_grad_()
    output = compat.DeformableAggregationFunction.apply(*arguments)
    assert output.dtype == torch.float32
    exact = [represented(t) for t in arguments]
    assert_close(output, oracle.forward(*exact), 3e-6)
    output.sum().backward()
    assert arguments[0].grad is not None and arguments[0].grad.dtype == dtype


def test_names_resolve_from_the_package() -> None:
    import muspace_msda

    assert muspace_msda.deformable_aggregation is deformable_aggregation and "deformable_aggregation" in muspace_msda.__all__


@pytest.mark.backends("cpu")
def test_the_compat_function_refuses_what_the_operator_refuses() -> None:
    """Tables beyond 32 bits are not wrapped on the way, and a gradient buffer of another shape loses nothing."""
    feat, shapes, starts, location, weights = _tensors("cpu")
    with pytest.raises(ValueError, match=r"^spatial_shape\["):
        compat.deformable_aggregation_function(feat, shapes + 2**32, starts, location, weights)
    buffers = [torch.zeros_like(feat), torch.zeros_like(location), torch.zeros(1)]
    grad_output = torch.ones(feat.shape[0], location.shape[1], feat.shape[2])
    with pytest.raises(ValueError, match=r"^grad_weights: expected shape"):
        backward = compat.deformable_aggregation_ext.deformable_aggregation_backward
        backward(feat, shapes, starts, location, weights, grad_output, *buffers)
    assert not any(buffer.any() for buffer in buffers)
