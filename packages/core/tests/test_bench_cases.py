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
    return collect.cases_module("muspace_msda")


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


def test_every_case_names_an_operator_with_a_spec_and_tolerances() -> None:
    for family in collect.load(["muspace_msda"]):
        assert family.name == "msda" and family.overheads
        names = [case.name for case in family.cases]
        assert len(names) == len(set(names))
        for case in family.cases:
            spec = family.specs[case.operator]
            assert set(case.dtypes) <= set(spec.tolerances)
            assert all(dtype in case.dtypes and pass_ in case.passes for dtype, pass_ in case.bars)


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
    (package / "_bench_cases.py").write_text("FAMILY = 'toy'\nCASES = ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (family,) = collect.load(["muspace_brought"])
    assert family == collect.Family("toy", "muspace_brought", (), (), {})


def test_package_without_cases_says_what_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "src" / "muspace_bare"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    with pytest.raises(FileNotFoundError, match=r"muspace_bare has neither muspace_bare\._bench_cases nor .*bench/cases\.py"):
        collect.cases_module("muspace_bare")
    sys.modules.pop("muspace_bare", None)


def test_goal_table_covers_the_h200(msda: ModuleType) -> None:
    rows = {(case.name, dtype, pass_): bars[0] for case in msda.CASES for (dtype, pass_), bars in case.bars.items()}
    assert dataclasses.astuple(rows["tsa_base", "float32", "fwd"]) == ("NVIDIA H200", 90, 145, "DCNv4", "graph", 0.0)
    assert rows["sca_base", "bfloat16", "bwd"].goal_us == rows["sca_base", "float16", "bwd"].goal_us == 1320
    ordered = rows["ddetr_enc", "float32", "bwd_ordered"]
    assert (ordered.goal_us, ordered.peer_us, ordered.met_by) == (1000, None, "wall")
