# SPDX-License-Identifier: Apache-2.0
"""The cases that families bring: they load, their inputs are the published ones, and what they count is right."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

np = pytest.importorskip("numpy")
pytest.importorskip("muspace_msda")

from muspace_core.bench import collect  # noqa: E402

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("MUSPACE_TEST_DATA") or ROOT.parent / "shared")
ARGUMENTS = {
    "value": "value",
    "spatial_shapes": "shapes",
    "level_start_index": "starts",
    "sampling_locations": "loc",
    "attention_weights": "attn",
}


@pytest.fixture(scope="module")
def msda() -> ModuleType:
    return collect.cases_module("muspace_msda").multi_scale_deformable_attn


@pytest.fixture(scope="module")
def aggregation() -> ModuleType:
    return collect.cases_module("muspace_msda").deformable_aggregation


@pytest.fixture(scope="module")
def bevpool() -> ModuleType:
    pytest.importorskip("muspace_bevpool")
    return collect.cases_module("muspace_bevpool")


@pytest.fixture(scope="module")
def published() -> ModuleType:
    file = DATA / "bench" / "inputs.py"
    if not file.is_file():
        pytest.skip(f"{file} is not there (MUSPACE_TEST_DATA)")
    spec = importlib.util.spec_from_file_location("published_bench_inputs", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _case(msda: ModuleType, name: str):
    return next(case for case in msda.CASES if case.name == name)


@pytest.mark.parametrize("name", ["tsa_base", "sca_base", "bev_dec", "ddetr_enc", "ddetr_dec"])
def test_inputs_are_bit_for_bit_the_published_ones(msda: ModuleType, published: ModuleType, name: str) -> None:
    ours, theirs = msda.arrays(name), published.msda(name)
    for argument, key in ARGUMENTS.items():
        assert ours[argument].dtype == theirs[key].dtype and ours[argument].shape == theirs[key].shape
        assert np.array_equal(ours[argument], theirs[key]), argument
    published.msda.cache_clear()
    msda.arrays.cache_clear()


def test_every_case_names_an_operator_with_a_spec_and_tolerances(bevpool: ModuleType) -> None:
    for family in collect.load(["muspace_bevpool", "muspace_msda"]):
        assert family.overheads and {case.operator for case in family.cases} == set(family.specs)
        names = [(case.operator, case.name) for case in family.cases]
        assert len(names) == len(set(names))
        for case in family.cases:
            spec = family.specs[case.operator]
            assert case.family == family.name and set(case.dtypes) <= set(spec.tolerances)
            assert all(dtype in case.dtypes and pass_ in case.passes for dtype, pass_ in case.bars)
            assert all(pass_ in case.passes for _, pass_ in case.speedups)
            assert "cuda" in case.device_types or case.speedups


def test_every_operator_has_rows_on_a_gpu_and_on_a_cpu(bevpool: ModuleType) -> None:
    families = collect.load(["muspace_bevpool", "muspace_msda"])
    operators = {name for family in families for name in family.specs}
    for device in ("cuda", "cpu"):
        rows = collect.selected(families, device, [], [], [])
        found = {(case.operator, pass_) for _, case, _, pass_ in rows}
        assert found >= {(name, pass_) for name in operators for pass_ in ("fwd", "bwd")}


def test_compulsory_bytes_of_the_published_shape(msda: ModuleType) -> None:
    """194.56 MB forward, 307.2 MB backward for value (2, 40000, 8, 32) in fp32, and half of the value's share in 16 bit."""
    case = _case(msda, "tsa_base")
    inputs = case.inputs(torch.float32, CPU)
    assert case.work(inputs, "fwd").compulsory_bytes == 194_560_000
    assert case.work(inputs, "bwd").compulsory_bytes == 307_200_000
    narrow = {**inputs, "value": inputs["value"].bfloat16()}
    assert case.work(narrow, "fwd").compulsory_bytes == 194_560_000 - 81_920_000
    assert case.work(narrow, "bwd").launches == case.work(inputs, "bwd").launches + 1
    msda.arrays.cache_clear()


def test_corner_count_against_a_plain_loop(msda: ModuleType) -> None:
    draw = np.random.default_rng(3)
    shapes = [(3, 5), (1, 2)]
    locations = draw.uniform(-0.5, 1.5, (2, 7, 2, 2, 3, 2)).astype(np.float32)
    locations[0, 0, 0, 0] = [[0.1, 0.5], [0.3, 0.5], [-0.1, 1 / 6]]
    expected = 0
    for batch, query, head, level, point in np.ndindex(*locations.shape[:5]):
        height, width = shapes[level]
        x, y = (
            float(np.float32(float(v) * n - 0.5))
            for v, n in zip(locations[batch, query, head, level, point], (width, height), strict=True)
        )
        for column in (np.floor(x), np.floor(x) + 1):
            for line in (np.floor(y), np.floor(y) + 1):
                expected += 0 <= column < width and 0 <= line < height
    inputs = {"spatial_shapes": torch.tensor(shapes), "sampling_locations": torch.from_numpy(locations)}
    assert msda._corner_count(inputs) == expected


def test_exact_inputs_keep_the_fp32_pixel_coordinates(msda: ModuleType) -> None:
    inputs = _case(msda, "tsa_2000").inputs(torch.float32, CPU)
    exact = _case(msda, "tsa_2000").exact_inputs(inputs)
    assert exact["value"].dtype is torch.float64 and exact["spatial_shapes"].dtype is torch.int64
    moved = (exact["sampling_locations"] - inputs["sampling_locations"].double()).abs().max()
    assert 0 < moved < 1e-6
    size = exact["spatial_shapes"][0].flip(0).double()
    again = exact["sampling_locations"] * size - 0.5
    assert (again - msda._pixels(inputs).double()).abs().max() < 1e-12
    assert _case(msda, "tsa_2000").undecided(inputs)["sampling_locations"].double().mean() < 1e-3


@pytest.mark.parametrize("name", ["tsa_2000", "ddetr_enc_2778"])
def test_baseline_is_the_operator(msda: ModuleType, name: str) -> None:
    case = _case(msda, name)
    inputs = case.inputs(torch.float32, CPU)
    expected = case.reference(case.exact_inputs(inputs))
    assert (case.baseline(inputs).double() - expected).abs().max() < 1e-5 * expected.abs().max()
    narrow = case.inputs(torch.bfloat16, CPU)
    assert case.baseline(narrow).dtype is torch.bfloat16
    msda.arrays.cache_clear()


def test_inputs_are_the_same_in_every_run(msda: ModuleType) -> None:
    first = msda.arrays("tsa_2000")
    msda.arrays.cache_clear()
    assert all(np.array_equal(first[key], array) for key, array in msda.arrays("tsa_2000").items())


def test_cases_are_found_beside_an_installed_package_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, msda: ModuleType
) -> None:
    package = tmp_path / "muspace_brought"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_spec.py").write_text("SPECS = ()\n")
    (package / "_bench_cases").mkdir()
    (package / "_bench_cases" / "__init__.py").write_text("from . import one\nFAMILY, CASES = 'toy', one.CASES\n")
    (package / "_bench_cases" / "one.py").write_text("CASES = ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (family,) = collect.load(["muspace_brought"])
    assert family == collect.Family("toy", "muspace_brought", (), (), {})


def test_package_without_cases_says_what_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "src" / "muspace_bare"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    with pytest.raises(FileNotFoundError, match=r"neither muspace_bare\._bench_cases nor .*bench/cases/__init__\.py"):
        collect.cases_module("muspace_bare")
    sys.modules.pop("muspace_bare", None)


def test_goal_table_covers_the_h200(msda: ModuleType) -> None:
    rows = {(case.name, dtype, pass_): bars[0] for case in msda.CASES for (dtype, pass_), bars in case.bars.items()}
    assert dataclasses.astuple(rows["tsa_base", "float32", "fwd"]) == ("NVIDIA H200", 90, 145, "DCNv4", "graph", 0.0)
    assert rows["sca_base", "bfloat16", "bwd"].goal_us == rows["sca_base", "float16", "bwd"].goal_us == 1320
    ordered = rows["ddetr_enc", "float32", "bwd_ordered"]
    assert (ordered.goal_us, ordered.peer_us, ordered.met_by) == (1000, None, "wall")


# -------------------------------------------------------------------------------------------------- deformable_aggregation
def test_aggregation_places_follow_the_published_rig(aggregation: ModuleType, published: ModuleType) -> None:
    ours, theirs = aggregation.rig.projections(*aggregation.IMAGE), published.ego2img(*aggregation.IMAGE)
    assert np.allclose(ours, theirs, rtol=1e-14, atol=1e-12)
    for name in aggregation.ANCHORS:
        places, theirs = aggregation.locations(name), published.deform_agg(name)["loc"]
        assert places.shape == theirs.shape and places.dtype == theirs.dtype
        seen, wanted = (((locations > 0) & (locations < 1)).all(-1).mean() for locations in (places, theirs))
        assert 0.9 < seen / wanted < 1.1


def test_aggregation_meaning_is_the_reference(aggregation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "MAPS", ((5, 7), (3, 4)))
    monkeypatch.setattr(aggregation, "CHANNELS", 16)
    monkeypatch.setitem(aggregation.ANCHORS, "det", (4, 13))
    aggregation.locations.cache_clear()
    inputs = aggregation._inputs("det", torch.float32, CPU)
    widened = {name: inputs[name].double() for name in aggregation.DIFFERENTIABLE}
    expected = aggregation._call(inputs | widened, "reference")
    assert expected.abs().max() > 0
    for dtype, limit in ((torch.float64, 1e-5), (torch.float32, 1e-5)):
        wide = {**inputs, **{name: inputs[name].to(dtype) for name in aggregation.DIFFERENTIABLE}}
        assert (aggregation._grid_sample(wide).double() - expected).abs().max() < limit * expected.abs().max()
    assert aggregation._undecided(inputs)["sampling_location"].shape == (1, 4, 13, 6, 1)
    assert aggregation._work(inputs, "bwd").scattered_adds == aggregation._corner_count(inputs["sampling_location"]) * 16
    aggregation.locations.cache_clear()


# ----------------------------------------------------------------------------------------------------------------- bevpool
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("bevdet_r50", 138_556),
        ("flashocc_r50", 200_019),
        ("bevdet_stbase", 1_121_334),
        ("bevdepth_r50", 265_140),
        ("bevfusion", 1_684_597),
    ],
)
def test_lift_geometry_is_the_published_one(bevpool: ModuleType, published: ModuleType, name: str, kept: int) -> None:
    lift = bevpool.lift
    theirs = published.pool_geometry(name)
    assert np.array_equal(lift.cells(name).reshape(-1, 3), theirs["all_idx"])
    assert lift.inside(name).sum() == lift.LIFTS[name].kept == kept
    keys = {"ranks_depth": "point", "ranks_feat": "rank_feat", "ranks_bev": "rank"}
    for ours, key in {**keys, "interval_starts": "starts", "interval_lengths": "lengths"}.items():
        assert np.array_equal(lift.ranks(name)[ours], theirs[key]), ours
    published.pool_geometry.cache_clear()
    lift.cells.cache_clear()
    lift.ranks.cache_clear()


def test_kept_points_of_the_voxel_volume(bevpool: ModuleType) -> None:
    assert bevpool.lift.inside("qwen_drive").sum() == bevpool.lift.LIFTS["qwen_drive"].kept
    bevpool.lift.cells.cache_clear()


POOLED = [
    ("bev_pool", "lss_r50"),
    ("bev_pool_v2", "bevdet_r50"),
    ("voxel_pooling_train", "bevdepth_b1"),
    ("voxel_pooling_inference", "bevdepth_b1"),
    ("voxel_pool_depth", "qwen_drive_c32"),
]


@pytest.mark.parametrize(("operator", "name"), POOLED)
def test_pooling_cases_mean_the_operator(bevpool: ModuleType, operator: str, name: str) -> None:
    """With a plan and without, the baseline and the reference are what the operator computes."""
    planned, sorted_ = (
        next(case for case in bevpool.CASES if case.operator == operator and case.name == f"{name}_{mode}")
        for mode in ("plan", "sort")
    )
    inputs = sorted_.inputs(torch.float32, CPU)
    expected = sorted_.call(inputs, "reference")
    peak = expected.abs().max()
    ready = planned.prepared(inputs, "reference")
    for found in (
        planned.call(ready, "reference"),
        planned.baseline(planned.prepared_baseline(inputs)),
        sorted_.baseline(inputs),
        sorted_.reference(inputs),
    ):
        assert found.shape == expected.shape and (found - expected).abs().max() < 1e-5 * peak
    assert set(planned.differentiable) <= set(ready) and not {"coords", "geom_xyz", "voxel_coords", "ranks_bev"} & set(ready)
    for case in (planned, sorted_):
        for pass_ in case.passes:
            assert case.work(inputs, pass_).compulsory_bytes > 0
    bevpool.lift.cells.cache_clear()


def test_pooling_floors_are_the_peers(bevpool: ModuleType) -> None:
    """Depth, features, result, ranks and intervals once, as the peers' floors count them."""
    bytes_of = {}
    for case in bevpool.CASES:
        if case.name in ("bevdet_r50_sort", "flashocc_r50_sort"):
            bytes_of[case.name] = case.work(case.inputs(torch.float32, CPU), "fwd").compulsory_bytes
    assert bytes_of == {"bevdet_r50_sort": 8_012_240, "flashocc_r50_sort": 15_343_748}


def test_flash_meaning_is_the_reference(bevpool: ModuleType) -> None:
    flash, grid = bevpool.flash_bevpool, (20, 24, 6)
    inputs = {name: tensor.double() for name, tensor in flash._inputs(torch.float32, CPU).items()}
    expected = flash._call(grid, inputs, "reference")
    assert (flash._gather(grid, inputs) - expected).abs().max() < 1e-12 * expected.abs().max()
    undecided = flash._undecided(grid, inputs)["output"]
    assert undecided.shape == (1, 24, 20, 1) and undecided.double().mean() < 0.01
    # The margins widen and narrow what counts.
    projections = inputs["projection_matrices"]
    counts = [flash._samples(grid, projections, margin, margin).u.numel() for margin in (-1e-1, 0, 1e-1)]
    assert counts == sorted(counts) and counts[0] < counts[2]


def test_cross_attention_meaning_is_the_reference(bevpool: ModuleType) -> None:
    sca = bevpool.flash_bevpool_sca
    scene = sca.Scene((480, 800), ((15, 25), (8, 13)), (12, 10))
    inputs = {name: tensor.double() for name, tensor in sca._inputs(scene, torch.float32, CPU).items()}
    expected = sca._call(scene, inputs, "reference")
    peak = expected.abs().max()
    assert (sca._composed(scene, sca._grid_sample, inputs) - expected).abs().max() < 1e-10 * peak
    assert (sca._composed(scene, sca._our_msda, inputs) - expected).abs().max() < 1e-10 * peak
    undecided = sca._undecided(scene, inputs)
    assert undecided["output"].shape == (1, 120, 1) and undecided["sampling_offsets"].shape == (1, 120, 8, 2, 8, 1)


def test_cross_attention_is_judged_by_the_composition(bevpool: ModuleType) -> None:
    case = next(case for case in bevpool.CASES if case.operator == "flash_bevpool_sca" and "cuda" in case.device_types)
    assert case.speedups["cuda", "fwd"] == case.speedups["cuda", "bwd"] == pytest.approx(1 / 0.6)
    assert case.bar("float32", "bwd", "NVIDIA H200").met_by == "baseline" and "MSDA" in case.baseline_name


def test_bevpool_goal_table(bevpool: ModuleType) -> None:
    rows = {
        (case.operator, case.name, dtype, pass_): (bar.goal_us, bar.peer_us)
        for case in bevpool.CASES
        for (dtype, pass_), (bar,) in case.bars.items()
    }
    assert rows["bev_pool", "bevfusion_sort", "float32", "fwd"] == (240, 414)
    assert rows["bev_pool_v2", "bevdet_stbase_plan", "float16", "fwd"] == (50, None)
    assert rows["voxel_pooling_train", "bevdepth_b4_plan", "float16", "fwd"] == (60, 1167)
    assert rows["voxel_pooling_inference", "bevdepth_b1_sort", "float32", "fwd"] == (50, 124)
    assert rows["flash_bevpool", "400x400x12", "float32", "bwd"] == (430, 125105)
