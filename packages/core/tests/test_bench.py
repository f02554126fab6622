# SPDX-License-Identifier: Apache-2.0
"""The bench kit on an operator made up here: what is timed, what is refused, and what a result document looks like."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch
from muspace_core.bench import (
    Bar,
    BenchCase,
    OverheadCase,
    Work,
    collect,
    draw,
    floors,
    gate,
    overhead,
    plot,
    runner,
    schema,
    table,
    timer,
)
from muspace_core.bench.floors import CacheModel, Ceilings
from muspace_core.spec import OpSpec, Status, Tolerance

CPU = torch.device("cpu")
SPEC = OpSpec(
    family="toy",
    name="scale",
    summary="twice the input",
    schema="(Tensor x) -> Tensor",
    backward_schema=None,
    backends={"cpu": Status("run")},
    dtypes={"cpu": ("float32", "bfloat16")},
    tolerances={"float32": Tolerance(1e-6, 1e-6), "bfloat16": Tolerance(1e-2, 1e-2)},
    determinism="always",
    forward_routes=("native",),
)


def _inputs(dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 4096, device=device).to(dtype)}


def case_of(call=lambda inputs, backend: inputs["x"] * 2, **changes) -> BenchCase:
    values = {
        "family": "toy",
        "operator": "scale",
        "name": "small",
        "shape": "x (4096,)",
        "source": "made up",
        "device_types": ("cpu",),
        "dtypes": ("float32", "bfloat16"),
        "passes": ("fwd", "bwd"),
        "inputs": _inputs,
        "call": call,
        "reference": lambda inputs: inputs["x"] * 2,
        "work": lambda inputs, pass_: Work(read_bytes=16384, written_bytes=16384, gathered_bytes=32768, scattered_adds=4096),
        "differentiable": ("x",),
        "baseline": lambda inputs: inputs["x"] + inputs["x"],
        "speedups": {("cpu", "fwd"): 1e-6},
    }
    return BenchCase(**{**values, **changes})


def plan_of(**changes) -> runner.Plan:
    ceilings = Ceilings(1e10, CacheModel(1e11, 1e10, 0.0, 0.0, "made up"))
    return runner.Plan(**{"device": CPU, "device_name": "cpu", "l2_bytes": 0, "ceilings": ceilings, "quick": True, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_row_of_a_correct_operator(dtype: str, pass_: str) -> None:
    row = runner.measure(case_of(), SPEC, dtype, pass_, plan_of())
    assert row["correct"] and row["reproducible"] and row["error"] is None
    assert row["wall_us"] > 0 and row["baseline_us"] > 0
    assert row["graph_us"] is None and "cpu" in row["graph_error"]
    assert row["dram_floor_us"] == pytest.approx(3.2768)
    assert row["cache_floor_us"] == pytest.approx(max(32768 / 1e11, 4096 / 1e10) * 1e6)
    assert row["over_dram_floor"] == pytest.approx(row["wall_us"] / row["dram_floor_us"])
    assert set(row["deviations"]) == ({"output"} if pass_ == "fwd" else {"output", "grad_x"})
    assert row["goal_met"] is (True if pass_ == "fwd" else None)


def test_wrong_operator_shows_its_deviation_and_no_speed() -> None:
    row = runner.measure(case_of(lambda inputs, backend: inputs["x"] * 2.01), SPEC, "float32", "fwd", plan_of())
    assert row["correct"] is False
    assert row["deviations"]["output"] == pytest.approx(0.005, rel=1e-3)
    assert [row[key] for key in ("wall_us", "graph_us", "timing", "speedup", "over_dram_floor")] == [None] * 5
    assert "FAILED output 5.0e-03" in " ".join(table.cells(row))
    assert "wall" not in json.dumps(row["timing"])


def test_wrong_gradient_shows_no_speed() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    row = runner.measure(case_of(lambda inputs, backend: Wrong.apply(inputs["x"])), SPEC, "float32", "bwd", plan_of())
    assert not row["correct"] and row["wall_us"] is None
    assert row["deviations"]["output"] == 0 and row["deviations"]["grad_x"] == pytest.approx(0.5, rel=1e-3)


def test_nan_where_the_reference_has_none_fails() -> None:
    row = runner.measure(case_of(lambda inputs, backend: inputs["x"] * float("nan")), SPEC, "float32", "fwd", plan_of())
    assert not row["correct"] and row["deviations"]["output"] == float("inf")


def test_irreproducible_forward_fails() -> None:
    counter = itertools.count()

    def call(inputs, backend):
        return inputs["x"] * (2 + 4e-7 * (next(counter) % 2))

    row = runner.measure(case_of(call), SPEC, "float32", "fwd", plan_of())
    assert row["reproducible"] is False and not row["correct"] and row["wall_us"] is None
    assert "not reproducible" in " ".join(table.cells(row))


def test_an_error_of_the_operator_is_a_row() -> None:
    def call(inputs, backend):
        raise RuntimeError("no library\nsecond line")

    row = runner.measure(case_of(call), SPEC, "float32", "fwd", plan_of())
    assert row["error"] == "RuntimeError: no library" and row["wall_us"] is None


def test_whatever_a_case_raises_is_a_row_and_the_others_run() -> None:
    def broken(inputs, backend):
        raise KeyError("no such key")

    cases = (case_of(broken, name="first"), case_of(name="second"), case_of(operator="unknown", name="third"))
    family = collect.Family("toy", "muspace_core", cases, (), {"scale": SPEC})
    kept = []
    wanted = collect.selected([family], "cpu", [], ["float32"], ["fwd"])
    rows = collect.run(wanted, plan_of(), keep=lambda so_far: kept.append(len(so_far)))
    assert [row["error"] for row in rows] == ["KeyError: 'no such key'", None, "LookupError: toy has no operator unknown"]
    assert rows[1]["wall_us"] > 0 and kept == [1, 2, 3]
    assert schema.faults(collect.document([family], plan_of(), rows, [])) == []


def test_baseline_that_cannot_run_leaves_ours() -> None:
    def baseline(inputs):
        raise RuntimeError("out of memory")

    row = runner.measure(case_of(baseline=baseline), SPEC, "float32", "fwd", plan_of())
    assert row["wall_us"] > 0 and row["error"] is None and row["speedup"] is None and row["goal_met"] is None
    assert row["baseline"] == "PyTorch reference: RuntimeError: out of memory"


def test_what_is_prepared_is_made_once_per_set_and_not_timed() -> None:
    made = []

    def prepare(inputs, backend):
        made.append(backend)
        return {"x": inputs["x"], "factor": 2}

    case = case_of(
        lambda inputs, backend: inputs["x"] * inputs["factor"],
        prepare=prepare,
        prepare_baseline=lambda inputs: {**inputs, "factor": torch.tensor(2.0)},
        baseline=lambda inputs: inputs["x"] * inputs["factor"],
    )
    for pass_ in ("fwd", "bwd"):
        row = runner.measure(case, SPEC, "float32", pass_, plan_of(backend="native"))
        assert row["correct"] and row["wall_us"] > 0 and row["baseline_us"] > 0
        assert row["working_set_bytes"] == 4096 * 4
    assert made == ["native"] * 4  # for the gate and for the timing


def test_undecided_results_are_left_out_with_their_gradients() -> None:
    hole = torch.zeros(4096, dtype=torch.bool).index_fill(0, torch.tensor([7]), True)
    case = case_of(lambda inputs, backend: torch.where(hole, 9.0, 2.0) * inputs["x"], undecided=lambda inputs: {"output": hole})
    row = runner.measure(case, SPEC, "float32", "bwd", plan_of())
    assert row["correct"] and row["deviations"] == {"output": 0, "grad_x": 0}
    assert row["undecided_share"] == pytest.approx(1 / 4096)


def test_backward_must_be_reproducible_where_that_is_promised() -> None:
    counter = itertools.count()

    class Drifting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * (2 + 4e-7 * (next(counter) % 2))

    case = case_of(lambda inputs, backend: Drifting.apply(inputs["x"]))
    assert runner.measure(case, SPEC, "float32", "bwd", plan_of())["correct"]
    promised = dataclasses.replace(case, reproducible_backward=True)
    assert not runner.measure(promised, SPEC, "float32", "bwd", plan_of())["correct"]


def test_a_case_may_bring_its_own_limits() -> None:
    case = case_of(lambda inputs, backend: inputs["x"] * 2.001, tolerances={"float32": Tolerance(1e-3, 1e-3)})
    row = runner.measure(case, SPEC, "float32", "fwd", plan_of())
    assert row["correct"] and row["limits"] == {"output": 1e-3}
    assert runner.measure(case, SPEC, "bfloat16", "fwd", plan_of())["limits"] == {"output": 1e-2}


def test_gradient_has_the_layout_of_the_output() -> None:
    output = torch.zeros(2, 5, 7, 3).permute(0, 3, 1, 2)
    grad = gate.grad_output(output)
    assert grad.stride() == output.stride() and torch.equal(grad, gate.grad_output(output.contiguous()))


def test_drawn_numbers_depend_on_name_and_shape_alone() -> None:
    first = draw.normal("a", (3, 5), CPU)
    assert torch.equal(first, draw.normal("a", (3, 5), CPU)) and not torch.equal(first, draw.normal("b", (3, 5), CPU))
    long = draw.normal("a", (draw.PERIOD + 2,), CPU)
    assert torch.equal(long[-2:], long[:2])
    depth = draw.depth_distribution("a", 2, 7, 3, 4, CPU)
    assert depth.shape == (2, 7, 3, 4) and torch.allclose(depth.sum(1), torch.ones(2, 3, 4))


def test_undecided_elements_are_left_out_and_counted() -> None:
    off = case_of(lambda inputs, backend: inputs["x"] * inputs["x"].sign())
    kink = dataclasses.replace(
        off,
        reference=lambda inputs: inputs["x"].abs() + 0 * inputs["x"],
        undecided=lambda inputs: {"x": torch.zeros_like(inputs["x"], dtype=torch.bool).index_fill(0, torch.tensor([7]), True)},
    )
    row = runner.measure(kink, SPEC, "float32", "bwd", plan_of())
    assert row["correct"] and row["undecided_share"] == pytest.approx(1 / 4096)


def test_ordered_pass_runs_under_deterministic_algorithms() -> None:
    seen = []

    def call(inputs, backend):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return inputs["x"] * 2

    runner.measure(case_of(call), SPEC, "float32", "bwd_ordered", plan_of())
    # The first call only tells the shape of the output.
    assert seen[1:] and all(seen[1:]) and not torch.are_deterministic_algorithms_enabled()


def test_goal_by_graph_and_by_wall() -> None:
    row = {"graph_us": 80.0, "wall_us": 120.0, "goal_speedup": None, "speedup": None}
    assert runner._goal_met(row, Bar("X", goal_us=90)) is True
    assert runner._goal_met(row, Bar("X", goal_us=70)) is False
    assert runner._goal_met(row, Bar("X", goal_us=100, met_by="wall", allowance_us=25)) is True
    assert runner._goal_met(row, Bar("X", goal_us=100, met_by="wall")) is False
    assert runner._goal_met({**row, "graph_us": None}, Bar("X", goal_us=90)) is None
    faster = {**row, "goal_speedup": 8.0, "speedup": 9.0}
    assert runner._goal_met(faster, None) is True
    # An estimate binds nobody: the ratio within the run does.
    estimate = Bar("X", goal_us=10, met_by="baseline")
    assert runner._goal_met(faster, estimate) is True
    assert runner._goal_met({**faster, "speedup": 7.0}, estimate) is False
    assert runner._goal_met(row, estimate) is None


def test_bar_belongs_to_a_device() -> None:
    case = case_of(bars={("float32", "fwd"): (Bar("NVIDIA H200", goal_us=90, peer_us=145, peer="other"),)})
    assert case.bar("float32", "fwd", "NVIDIA H200 NVL").goal_us == 90
    assert case.bar("float32", "fwd", "AMD EPYC") is None
    assert runner.measure(case, SPEC, "float32", "fwd", plan_of(device_name="NVIDIA H200"))["peer"] == "other"


def test_sets_rotate_beyond_the_cache_on_a_gpu_only() -> None:
    inputs = {"x": torch.zeros(1 << 18)}
    on_gpu = plan_of(device=torch.device("cuda"), l2_bytes=1 << 20)
    assert len(runner._copies(case_of(), inputs, on_gpu)) == 4
    assert len(runner._copies(case_of(most_sets=3), inputs, on_gpu)) == 3
    assert len(runner._copies(case_of(), inputs, dataclasses.replace(on_gpu, l2_bytes=1 << 30))) == case_of().most_sets
    assert len(runner._copies(case_of(), inputs, plan_of(l2_bytes=1 << 20))) == 1


def test_floors_are_the_slower_of_bytes_and_flops() -> None:
    h200 = Ceilings(4.28e12, floors.CACHE_MODELS["NVIDIA H200"], floors.FLOPS["NVIDIA H200"])
    assert floors.dram_floor_us(Work(97280000, 97280000), h200) == pytest.approx(45.46, abs=0.01)
    assert floors.dram_floor_us(Work(1, 1, flops=int(60e9)), h200) == pytest.approx(1000)
    work = Work(0, 0, gathered_bytes=int(9.5e9), scattered_adds=int(0.45e9), launches=2, syncs=1)
    assert floors.cache_floor_us(work, h200) == pytest.approx(1000 + 7 + 16)
    assert floors.cache_floor_us(work, Ceilings(1e12, None)) is None


def test_measured_ceilings_of_a_cpu() -> None:
    ceilings = floors.measure_ceilings(CPU, "cpu", quick=True)
    assert 1e8 < ceilings.copy_bytes_per_s < 1e13 and ceilings.cache.gather_bytes_per_s > 1e8


def test_timer_counts_calls_and_orders_its_statistics() -> None:
    calls = [0, 0]

    def bump(index: int) -> None:
        calls[index] += 1

    timing = timer.time_calls([lambda: bump(0), lambda: bump(1)], CPU, timer.Effort(batches=5, batch_seconds=0.001))
    assert timing.best_us <= timing.median_us <= timing.worst_us and timing.batches == 5
    assert calls[0] == calls[1] and timing.calls % 2 == 0


def test_contenders_take_turns() -> None:
    order: list[str] = []
    effort = timer.Effort(batches=3, batch_seconds=1e-9)
    timings = timer.time_alternately([[lambda: order.append("a")], [lambda: order.append("b")]], CPU, effort)
    # Each batch is preceded by one untimed call.
    assert order[-12:] == ["a", "a", "b", "b"] * 3 and [timing.calls for timing in timings] == [1, 1]


def test_overhead_subtracts_the_output_allocation() -> None:
    case = OverheadCase("toy", "scale", "x (4096,)", _inputs, lambda inputs, backend: lambda: inputs["x"] * 2, ("x",))
    row = overhead.measure(case, CPU, quick=True)
    assert row["without_grad_us"] > 0 and row["forward_backward_us"] > row["with_grad_us"] and row["add_us"] > 0
    assert row["within_budget"] == (row["without_grad_us"] <= 8 and row["with_grad_us"] <= 20)
    assert len(table.overhead_cells(row)) == len(table.OVERHEAD_COLUMNS)


@pytest.fixture(scope="module")
def document() -> dict:
    family = collect.Family("toy", "muspace_core", (case_of(),), (), {"scale": SPEC})
    plan = plan_of()
    rows = collect.run(collect.selected([family], "cpu", [], [], []), plan)
    bad = dataclasses.replace(case_of(lambda inputs, backend: inputs["x"] * float("nan")), name="bad")
    rows.append(runner.measure(bad, SPEC, "float32", "fwd", plan))
    smallest = OverheadCase("toy", "scale", "x", _inputs, lambda inputs, backend: lambda: inputs["x"] * 2, ("x",))
    return collect.document([family], plan, rows, [overhead.measure(smallest, CPU, quick=True)])


def test_document_is_json_and_fits_the_schema(document: dict) -> None:
    again = json.loads(json.dumps(document, allow_nan=False))
    assert schema.faults(again) == [] and len(again["rows"]) == 5
    name = collect.result_name(document, "toy")
    assert name.startswith("toy--") and name.endswith("--cpu.json")


def _broken(document: dict) -> list[dict]:
    changes = [
        lambda d: d.pop("machine"),
        lambda d: d.update(extra=1),
        lambda d: d["rows"][0].update({"pass": "sideways"}),
        lambda d: d["rows"][0].update(wall_us="fast"),
        lambda d: d["rows"][0].update(wall_us=0),
        lambda d: d["rows"][0].update(correct=1),
        lambda d: d["rows"][-1].update(wall_us=3.0),
        lambda d: d["rows"][0]["work"].update(launches=-1),
        lambda d: d["rows"][0]["deviations"].update(output=None),
        lambda d: d.update(schema=2),
    ]
    broken = []
    for change in changes:
        wrong = copy.deepcopy(document)
        change(wrong)
        broken.append(wrong)
    return broken


def test_schema_rejects_what_is_wrong_and_above_all_a_speed_without_a_gate(document: dict) -> None:
    for wrong in _broken(document):
        with pytest.raises(ValueError, match="result"):
            schema.validate(wrong)


def test_own_checker_agrees_with_jsonschema(document: dict) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema.SCHEMA)
    jsonschema.Draft202012Validator.check_schema(schema.SCHEMA)
    assert list(validator.iter_errors(document)) == []
    assert all(list(validator.iter_errors(wrong)) for wrong in _broken(document))


def test_committed_schema_is_the_one_in_the_code() -> None:
    file = Path(__file__).resolve().parents[3] / "benchmarks" / "schema.json"
    if not file.is_file():
        pytest.skip("benchmarks/ is not part of this checkout")
    assert json.loads(file.read_text()) == schema.SCHEMA


def test_committed_results_fit_the_schema() -> None:
    folder = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
    for file in folder.glob("*/*.json"):
        assert schema.faults(json.loads(file.read_text())) == [], file.name


def test_table_has_a_cell_per_column(document: dict) -> None:
    cells = [table.cells(row) for row in document["rows"]]
    assert {len(row) for row in cells} == {len(table.COLUMNS)}
    assert cells[-1][table.COLUMNS.index("wall µs")] == "-"
    assert [table.us(value) for value in (None, 1.234, 12.34, 123.4, 1234.5)] == ["-", "1.23", "12.3", "123", "1234"]


def test_table_names_the_operator_where_there_are_several(document: dict) -> None:
    rows = [table.cells(row) for row in document["rows"]]
    assert table.columns_in_use(rows)[0] == table.COLUMNS.index("case")
    assert table.columns_in_use([*rows, ("other", *rows[0][1:])])[0] == table.COLUMNS.index("operator")


def test_goal_and_memory_in_words(document: dict) -> None:
    row = {**document["rows"][0], "goal_us": 310.0, "goal_met_by": "baseline", "goal_speedup": 1 / 0.6}
    row |= {"peak_bytes": 3 << 20, "baseline_peak_bytes": 250 << 20}
    assert {"×1.67 (estimate 310)", "3.00 (baseline 250)"} <= set(table.cells(row))
    assert "310" in table.cells({**row, "goal_met_by": "graph"})


def test_parts_of_one_machine_are_put_together(document: dict) -> None:
    part, other = copy.deepcopy(document), copy.deepcopy(document)
    other["rows"] = [{**other["rows"][0], "wall_us": 5.0}]
    other["overhead"], other["ceilings"] = [], None
    whole = collect.merged([part, other])
    assert whole["ceilings"] == part["ceilings"] is not None
    assert len(whole["rows"]) == len(document["rows"]) and whole["overhead"] == part["overhead"]
    assert whole["rows"][0]["wall_us"] == 5.0
    other["machine"]["cpu"] = "another"
    with pytest.raises(ValueError, match="machine differ"):
        collect.merged([part, other])


def test_plot_draws_passed_rows_only(document: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(document, tmp_path / "result.png")
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.draw({**document, "rows": document["rows"][-1:]}, tmp_path / "none.png")


def test_explicit_case_runs_on_a_device_it_was_not_made_for() -> None:
    family = collect.Family("toy", "muspace_core", (case_of(device_types=("cuda",)),), (), {"scale": SPEC})
    assert collect.selected([family], "cpu", [], [], []) == []
    assert [entry[2:] for entry in collect.selected([family], "cpu", ["small"], ["float32"], ["fwd"])] == [("float32", "fwd")]


def test_rows_are_chosen_by_operator_and_not_ordered_twice_on_a_cpu() -> None:
    cases = (case_of(passes=("bwd", "bwd_ordered"), device_types=("cpu", "cuda")), case_of(operator="other", name="big"))
    family = collect.Family("toy", "muspace_core", cases, (), {"scale": SPEC})
    chosen = collect.selected([family], "cpu", [], ["float32"], [], ["scale"])
    assert [(entry[1].operator, entry[3]) for entry in chosen] == [("scale", "bwd")]
    chosen = collect.selected([family], "cuda", [], ["float32"], [])
    assert [entry[3] for entry in chosen] == ["bwd", "bwd_ordered"]


def test_determinism_is_restored() -> None:
    with gate.determinism(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_list_of_a_run_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).resolve().parents[3] / "benchmarks" / "run.py"
    if not file.is_file():
        pytest.skip("benchmarks/ is not part of this checkout")
    pytest.importorskip("mu_space")
    pytest.importorskip("rich")
    spec = importlib.util.spec_from_file_location("benchmarks_run", file)
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    assert run.main(["--list", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out and not list(tmp_path.iterdir())
