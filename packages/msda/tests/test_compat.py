# SPDX-License-Identifier: Apache-2.0
"""The names by which upstream code calls this operator: mmcv's function, helper and module, Deformable-DETR's function."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from muspace_core import get_last_dispatch_report
from muspace_core.testing.calls import as_tensors, represented
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_msda import compat, multi_scale_deformable_attn
from muspace_msda.modules import MultiScaleDeformableAttention

oracle = load_sibling(__file__, "oracle")
inputs = load_sibling(__file__, "inputs")

pytestmark = pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")


def _tensors(device: str, **sizes: int) -> list[torch.Tensor]:
    return list(as_tensors(inputs.attention("compat", **sizes), device).values())


# ---- functions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["MultiScaleDeformableAttnFunction", "MSDeformAttnFunction"])
def test_six_positional_arguments(name: str, backend: str, device: str) -> None:
    arguments = _tensors(device, batch=3)
    function = getattr(compat, name)
    wanted = multi_scale_deformable_attn(*arguments)
    assert_bits_equal(function.apply(*arguments, 64), wanted)
    assert_bits_equal(function.apply(*arguments, 2), wanted, "a step that does not divide the batch")
    live = [t.clone().requires_grad_() if t.is_floating_point() else t for t in arguments]
    function.apply(*live, 64).sum().backward()
    assert all(t.grad is not None and torch.isfinite(t.grad).all() for t in live if t.is_floating_point())
    report = get_last_dispatch_report()
    assert report is not None and report.selected_backend == backend


def test_a_batch_of_96_with_a_step_of_64(backend: str, device: str) -> None:
    arguments = _tensors(device, batch=96, queries=1, heads=1, channels=2, points=1)
    output = compat.MultiScaleDeformableAttnFunction.apply(*arguments, 64)
    exact = [represented(t) for t in arguments]
    assert_close(output, oracle.forward(*exact), 2e-6)


def test_the_four_argument_helper(backend: str, device: str) -> None:
    value, shapes, level_starts, locations, weights = _tensors(device)
    wanted = multi_scale_deformable_attn(value, shapes, level_starts, locations, weights)
    assert_bits_equal(compat.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights), wanted)
    by_name = compat.multi_scale_deformable_attn_pytorch(
        value=value, value_spatial_shapes=shapes, sampling_locations=locations, attention_weights=weights
    )
    assert_bits_equal(by_name, wanted, "by upstream's argument names")
    report = get_last_dispatch_report()
    assert report is not None and report.selected_backend == backend, "the helper runs natively, that is its point"


def test_upstream_argument_names() -> None:
    parameters = inspect.signature(compat.multi_scale_deformable_attn_pytorch).parameters
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == [
        "value", "value_spatial_shapes", "sampling_locations", "attention_weights",
    ]  # fmt: skip
    _only_the_alias_is_ours(parameters)


def _only_the_alias_is_ours(parameters: Mapping[str, inspect.Parameter]) -> None:
    """What upstream does not have is by keyword only, so that no positional call changes its meaning."""
    ours = {k: p.default for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert ours == {"legacy_level_alias": False}


@pytest.mark.parametrize(
    "function",
    [
        lambda v, s, _starts, *rest, **k: compat.multi_scale_deformable_attn_pytorch(v, s, *rest, **k),
        compat.MultiScaleDeformableAttnFunction.apply,
        compat.MSDeformAttnFunction.apply,
    ],
    ids=["multi_scale_deformable_attn_pytorch", "MultiScaleDeformableAttnFunction", "MSDeformAttnFunction"],
)
def test_functions_pass_the_alias_on(function: Callable[..., torch.Tensor], backend: str, device: str) -> None:
    """One level in the shapes, two in the locations: old checkpoints were trained so."""
    value, shapes, level_starts, locations, weights = _tensors(device)
    arguments = (value[:, :20], shapes[:1], level_starts[:1], locations, weights)
    wanted = multi_scale_deformable_attn(*arguments, legacy_level_alias=True)
    assert_bits_equal(function(*arguments, legacy_level_alias=True), wanted)
    for keywords in ({}, {"legacy_level_alias": False}):
        with pytest.raises(ValueError, match="legacy_level_alias=True"):
            function(*arguments, **keywords)


def test_half_value_with_float_locations(backend: str, device: str) -> None:
    """What autocast hands to upstream's function, which refuses it or rounds the locations."""
    arguments = _tensors(device)
    arguments[0] = arguments[0].half()
    output = compat.MultiScaleDeformableAttnFunction.apply(*arguments, 64)
    assert output.dtype == torch.float16
    exact = [represented(t) for t in arguments]
    assert_close(output, oracle.forward(*exact), 5e-4)


# ---- module --------------------------------------------------------------------------------------------------------
def _expected(layer, query, value, identity, position, mask, reference, shapes):
    """The layer in NumPy, [B, N, C] throughout."""
    weight = {k: v.detach().double().cpu().numpy() for k, v in layer.state_dict().items()}

    def linear(name, x):
        return x @ weight[f"{name}.weight"].T + weight[f"{name}.bias"]

    batch, count, _ = query.shape
    heads, levels, points = layer.num_heads, layer.num_levels, layer.num_points
    asked = query + position
    values = linear("value_proj", value)
    values[mask] = 0
    values = values.reshape(batch, value.shape[1], heads, -1)
    offsets = linear("sampling_offsets", asked).reshape(batch, count, heads, levels, points, 2)
    logits = linear("attention_weights", asked).reshape(batch, count, heads, levels * points)
    attention = np.exp(logits - logits.max(-1, keepdims=True))
    attention = (attention / attention.sum(-1, keepdims=True)).reshape(batch, count, heads, levels, points)
    at = reference[:, :, None, :, None]
    if reference.shape[-1] == 2:
        locations = at + offsets / shapes[None, None, None, :, None, ::-1]
    else:
        locations = at[..., :2] + offsets / points * at[..., 2:] * 0.5
    return linear("output_proj", oracle.forward(values, shapes, None, locations, attention, np.float64)) + identity


def _layer(device: str, **keywords) -> MultiScaleDeformableAttention:
    torch.manual_seed(3)
    layer = MultiScaleDeformableAttention(embed_dims=16, num_heads=2, num_levels=2, num_points=3, **keywords).to(device).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return layer


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_module(ratio: float, batch_first: bool, boxes: bool, backend: str, device: str) -> None:
    random = np.random.default_rng(17)
    shapes = np.array([[3, 4], [2, 2]])
    batch, count, rows = 2, 5, 16
    layer = _layer(device, batch_first=batch_first, value_proj_ratio=ratio)
    arrays = {
        "query": random.standard_normal((batch, count, 16)), "value": random.standard_normal((batch, rows, 16)),
        "identity": random.standard_normal((batch, count, 16)), "query_pos": random.standard_normal((batch, count, 16)),
    }  # fmt: skip
    mask = random.random((batch, rows)) < 0.2
    reference = random.uniform(0.1, 0.9, (batch, count, 2, 4 if boxes else 2))
    expected = _expected(
        layer, arrays["query"], arrays["value"], arrays["identity"], arrays["query_pos"], mask, reference, shapes
    )
    given = {k: torch.from_numpy(v).float().to(device) for k, v in arrays.items()}
    if not batch_first:
        given = {k: v.transpose(0, 1) for k, v in given.items()}
    output = layer(
        given["query"], None, given["value"], given["identity"], given["query_pos"], torch.from_numpy(mask).to(device),
        torch.from_numpy(reference).float().to(device), torch.from_numpy(shapes).to(device),
        torch.tensor([0, 12], device=device),
    )  # fmt: skip
    assert output.shape == given["query"].shape
    assert_close(output if batch_first else output.transpose(0, 1), expected, 1e-5)


def test_module_defaults(backend: str, device: str) -> None:
    """value and identity default to the query, before its position is added; unknown keywords are accepted."""
    layer = _layer(device, batch_first=True)
    query, position = torch.randn(1, 16, 16, device=device), torch.randn(1, 16, 16, device=device)
    common = {
        "reference_points": torch.rand(1, 16, 2, 2, device=device),
        "spatial_shapes": torch.tensor([[3, 4], [2, 2]], device=device),
        "level_start_index": torch.tensor([0, 12], device=device), "query_pos": position,
    }  # fmt: skip
    short = layer(query, **common, img_metas=None, flag="encoder")
    long = layer(query, value=query, identity=query, **common)
    assert_bits_equal(short, long)


def test_state_dict_is_that_of_mmcv() -> None:
    layer = MultiScaleDeformableAttention()
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {
        "sampling_offsets.weight": (256, 256), "sampling_offsets.bias": (256,),
        "attention_weights.weight": (128, 256), "attention_weights.bias": (128,),
        "value_proj.weight": (256, 256), "value_proj.bias": (256,),
        "output_proj.weight": (256, 256), "output_proj.bias": (256,),
    }  # fmt: skip
    narrow = MultiScaleDeformableAttention(64, 4, 2, 3, 64, 0.1, True, None, None, 0.5)
    assert narrow.state_dict()["value_proj.weight"].shape == (32, 64)
    assert narrow.state_dict()["output_proj.weight"].shape == (64, 32)
    assert narrow.state_dict()["sampling_offsets.weight"].shape == (4 * 2 * 3 * 2, 64)


def test_constructor_is_that_of_mmcv() -> None:
    parameters = inspect.signature(MultiScaleDeformableAttention).parameters
    assert {k: p.default for k, p in parameters.items() if p.kind is not p.KEYWORD_ONLY} == {
        "embed_dims": 256, "num_heads": 8, "num_levels": 4, "num_points": 4, "im2col_step": 64, "dropout": 0.1,
        "batch_first": False, "norm_cfg": None, "init_cfg": None, "value_proj_ratio": 1.0,
    }  # fmt: skip
    _only_the_alias_is_ours(parameters)
    forward = list(inspect.signature(MultiScaleDeformableAttention.forward).parameters)
    assert forward == [
        "self", "query", "key", "value", "identity", "query_pos", "key_padding_mask", "reference_points", "spatial_shapes",
        "level_start_index", "kwargs",
    ]  # fmt: skip


def test_attributes_that_models_read() -> None:
    layer = MultiScaleDeformableAttention(64, 4, 2, 3, batch_first=True)
    assert (layer.embed_dims, layer.num_heads, layer.num_levels, layer.num_points) == (64, 4, 2, 3)
    assert layer.batch_first is True and layer.im2col_step == 64
    assert isinstance(layer.dropout, torch.nn.Dropout) and layer.dropout.p == 0.1


def test_initialisation() -> None:
    """Uniform attention; offsets of a head point in one direction, the k-th point k steps out (Chebyshev)."""
    torch.manual_seed(0)
    layer = MultiScaleDeformableAttention(64, 8, 2, 3)
    assert (layer.sampling_offsets.weight == 0).all()
    assert (layer.attention_weights.weight == 0).all() and (layer.attention_weights.bias == 0).all()
    assert (layer.value_proj.bias == 0).all() and (layer.output_proj.bias == 0).all()
    assert layer.value_proj.weight.std() > 0
    bias = layer.sampling_offsets.bias.detach().view(8, 2, 3, 2)
    for head in range(8):
        direction = torch.tensor([math.cos(2 * math.pi * head / 8), math.sin(2 * math.pi * head / 8)])
        direction /= direction.abs().max()
        for point in range(3):
            for level in range(2):
                torch.testing.assert_close(bias[head, level, point], direction * (point + 1), rtol=1e-5, atol=1e-5)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.init_weights()
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items() if "offsets" in k or "attention" in k)


def test_module_refuses(device: str) -> None:
    with pytest.raises(ValueError, match=r"embed_dims.*30.*8|embed_dims.*8.*30"):
        MultiScaleDeformableAttention(embed_dims=30)
    layer = _layer(device, batch_first=True)
    query = torch.randn(1, 16, 16, device=device)
    shapes, level_starts = torch.tensor([[3, 4], [2, 2]], device=device), torch.tensor([0, 12], device=device)
    with pytest.raises(ValueError, match=r"reference_points.*3"):
        layer(
            query,
            reference_points=torch.rand(1, 16, 2, 3, device=device),
            spatial_shapes=shapes,
            level_start_index=level_starts,
        )
    if device == "cpu":
        with pytest.raises((ValueError, AssertionError), match="16"):
            layer(
                query[:, :15], value=query, reference_points=torch.rand(1, 15, 2, 2), spatial_shapes=shapes + 1,
                level_start_index=level_starts,
            )  # fmt: skip


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_module_with_fewer_levels_in_the_shapes(boxes: bool, backend: str, device: str) -> None:
    """A layer of two levels fed with one, as old checkpoints were trained; without the switch it is a mistake."""
    layer = _layer(device, batch_first=True)
    assert layer.legacy_level_alias is False
    query = torch.randn(2, 12, 16, device=device)
    common = {
        "reference_points": torch.rand(2, 12, 1, 4 if boxes else 2, device=device),
        "spatial_shapes": torch.tensor([[3, 4]], device=device), "level_start_index": torch.tensor([0], device=device),
    }  # fmt: skip
    with pytest.raises(ValueError, match="legacy_level_alias=True"):
        layer(query, **common)
    aliased = _layer(device, batch_first=True, legacy_level_alias=True)
    assert aliased.legacy_level_alias is True
    aliased.load_state_dict(layer.state_dict())
    locations, weights = aliased._points(query, common["reference_points"], common["spatial_shapes"])
    assert locations.shape == (2, 12, 2, 2, 3, 2)
    value = aliased.value_proj(query).view(2, 12, 2, 8)
    attended = multi_scale_deformable_attn(value, [[3, 4]], None, locations, weights, legacy_level_alias=True)
    wanted = aliased.output_proj(attended) + query
    assert_bits_equal(aliased(query, **common), wanted)
    layer.legacy_level_alias = True  # read at every call
    assert_bits_equal(layer(query, **common), wanted, "switched on later")


def test_module_trains(backend: str, device: str) -> None:
    """Every parameter gets a gradient, dropout acts in training only, a copy is independent."""
    layer = _layer(device, batch_first=True, dropout=0.5)
    query = torch.randn(2, 16, 16, device=device)
    common = {
        "reference_points": torch.rand(2, 16, 2, 2, device=device),
        "spatial_shapes": torch.tensor([[3, 4], [2, 2]], device=device),
        "level_start_index": torch.tensor([0, 12], device=device),
    }  # fmt: skip
    assert_bits_equal(layer(query, **common), layer(query, **common), "evaluation")
    layer.train()
    assert not torch.equal(layer(query, **common), layer(query, **common))
    layer(query, **common).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    other = copy.deepcopy(layer).eval()
    wanted = other(query, **common)
    with torch.no_grad():
        layer.value_proj.weight.zero_()
    assert_bits_equal(other(query, **common), wanted, "the copy")


def test_names_resolve_from_the_package() -> None:
    import muspace_msda

    for name in ("multi_scale_deformable_attn", "MultiScaleDeformableAttention"):
        assert hasattr(muspace_msda, name) and name in muspace_msda.__all__, name
    for name in ("MultiScaleDeformableAttnFunction", "MSDeformAttnFunction", "multi_scale_deformable_attn_pytorch"):
        assert hasattr(compat, name), name
    assert muspace_msda.MultiScaleDeformableAttention is MultiScaleDeformableAttention
