# SPDX-License-Identifier: Apache-2.0
"""The demo as a whole: generated street against its truth, recorded frame, report, files, command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")
pytest.importorskip("matplotlib")

from mu_space import demo
from mu_space.demo import fuse, pipeline, report, sample, scene
from muspace_core.testing.plugin import load_sibling

# Without a built library the reference runs, with a warning that the report repeats.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs its PyTorch reference.*:RuntimeWarning")

sources = load_sibling(__file__, "demo_sources")
RECORDED, arguments = sources.RECORDED, sources.arguments

SMALL = ("--cell", "0.5", "--range", "10", "--device", "cpu")


@pytest.fixture(scope="module")
def street():
    return scene.generate((450, 800))


@pytest.fixture(scope="module")
def result(street):
    return pipeline.fuse_frame(street, reach=16.0, cell=0.2)


@pytest.fixture(scope="module")
def written(street, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    report.write_all(folder, sample.encode(street))
    return folder


def test_import_is_light():
    code = "import sys, mu_space.demo as d, argparse; d.add_arguments(argparse.ArgumentParser()); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "matplotlib", "PIL"} & set(loaded)


def test_street_is_reproducible(street):
    again = scene.generate((450, 800))
    for a, b in zip(street.cameras, again.cameras, strict=True):
        np.testing.assert_array_equal(a.image, b.image)
    np.testing.assert_array_equal(street.points, again.points)


def test_road_view_is_the_known_ground(result):
    c = result.comparison
    assert c.share > 0.4, "too little of the road is visible to say anything"
    assert c.psnr > 24 and c.psnr_near > 26 and c.mean_absolute_error < 0.035


def test_shifted_truth_is_noticed(street, result):
    """The comparison tells a displacement of 30 cm: the assertion above cannot pass by chance."""
    shifted = np.roll(result.true_view, (2, 2), (0, 1)).reshape(-1, 3)
    seen = pipeline.truth.visible(street, result.ground.grid)
    error = result.ground.colour.reshape(-1, 3) - shifted
    assert -10 * np.log10(np.mean(error[seen] ** 2)) < result.comparison.psnr - 3


def test_calls_are_checked_against_the_reference(result):
    for view, heads in ((result.ground, 1), (result.pillars, 8)):
        assert view.call.shape["H"] == heads
        assert view.call.deviation <= fuse.TOLERANCE
        assert view.call.checked >= 6 * 1000
        assert view.call.dispatch["operator"] == "multi_scale_deformable_attn"


def test_a_wrong_result_makes_no_picture(street, monkeypatch, tmp_path):
    from mu_space import ops

    true = ops.multi_scale_deformable_attn

    def wrong(*args, backend="auto", **kwargs):
        out = true(*args, backend="reference", **kwargs)
        return out if backend == "reference" else out * 1.001

    monkeypatch.setattr(ops, "multi_scale_deformable_attn", wrong, raising=False)
    monkeypatch.setattr(scene, "generate", lambda *a, **k: street)
    assert demo.main(arguments("--out", str(tmp_path / "out"), "--cell", "0.5", "--device", "cpu")) == 1
    assert not (tmp_path / "out").exists()


def test_hidden_road_is_told(street, result):
    """Road behind a car is hidden, road in front of the vehicle is open."""
    grid, openness = result.ground.grid, result.ground.openness

    def at(x: float, y: float) -> float:
        return float(openness[int((x - grid.x_range[0]) / grid.cell), int((y - grid.y_range[0]) / grid.cell)])

    assert at(8.0, 0.0) == 1 and at(-8.0, 0.0) == 1
    assert at(1.0, 0.0) == 0, "no camera sees under the vehicle"
    assert at(-15.5, 10.0) < 0.5, "behind the car at (-12.5, 7.0)"


def test_run_writes_whole_files_and_a_report(street, monkeypatch, tmp_path):
    from PIL import Image

    monkeypatch.setattr(scene, "generate", lambda *a, **k: street)
    out, copy = tmp_path / "a" / "out", tmp_path / "copy"
    document = demo.run(out=out, device="cpu", reach=10.0, cell=0.25, write_sample=copy)
    assert sorted(p.name for p in out.iterdir()) == ["figure.png", "pillars.png", "report.json", "road.png"]
    assert json.loads((out / "report.json").read_text()) == document
    assert Image.open(out / "road.png").size == (80, 80)
    assert Image.open(out / "figure.png").size[0] >= 1800
    assert document["schema"] == report.SCHEMA
    assert {"backend", "route", "library", "ms", "deviation", "psnr", "files", "calls"} <= set(document)
    assert document["psnr"] > 20 and len(document["calls"]) == 2
    assert sample.load(copy).cameras[0].name == "CAM_FRONT"


def test_json_is_alone_on_stdout(written, tmp_path, capsys):
    args = arguments("--sample", str(written), "--out", str(tmp_path), "--json", *SMALL)
    assert demo.main(args) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["files"]["road.png"] == str(tmp_path / "road.png")
    assert captured.err == ""


def test_table_is_printed(written, tmp_path, capsys):
    args = arguments("--sample", str(written), "--out", str(tmp_path), *SMALL)
    assert demo.main(args) == 0
    out = capsys.readouterr().out
    assert "ground plane" in out and "pillars of heights" in out and "figure.png" in out


def test_written_sample_is_told(street, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scene, "generate", lambda *a, **k: street)
    copy = tmp_path / "copy"
    assert demo.main(arguments("--out", str(tmp_path / "out"), "--write-sample", str(copy), *SMALL)) == 0
    assert capsys.readouterr().out.endswith(f"sample: {copy}\n") and (copy / "sample.json").is_file()


def test_written_sample_gives_the_same_view(street, written):
    loaded = sample.load(written)
    np.testing.assert_array_equal(loaded.cameras[3].image, street.cameras[3].image)
    np.testing.assert_allclose(loaded.boxes.footprint(), street.boxes.footprint(), atol=1e-9)
    assert loaded.boxes.label == street.boxes.label
    assert np.abs(loaded.ground).max() < 2e-3, "the fitted road is the plane z = 0"


def test_without_lidar_and_with_one_camera(street):
    from dataclasses import replace

    alone = replace(street, cameras=street.cameras[:1], points=street.points[:0], truth=None)
    view = pipeline.fuse_frame(alone, reach=8.0, cell=0.5)
    assert view.comparison is None
    x = view.ground.grid.centres()[:, 0].reshape(view.ground.grid.shape)
    assert (view.ground.openness[x < 0] == 0).all() and view.ground.openness.max() == 1


def test_interrupted_write_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        report.write_all(tmp_path, {"a": b"new", "b": b"new"})
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recorded frame at {RECORDED}")
def test_recorded_frame_shows_markings():
    """Lane line and lane arrow stand out from the asphalt where they are seen in the front image; kerb stones alternate."""
    frame = sample.load(RECORDED)
    assert len(frame.boxes) == 69 and len(frame.cameras) == 6
    result = pipeline.fuse_frame(frame, reach=20.0)
    assert max(result.ground.call.deviation, result.pillars.call.deviation) <= fuse.TOLERANCE
    grid = result.ground.grid
    light = result.ground.colour.mean(-1)

    def patch(x: tuple[float, float], y: tuple[float, float]) -> np.ndarray:
        i, j = ([int((v - grid.x_range[0]) / grid.cell) for v in pair] for pair in (x, y))
        return light[i[0] : i[1], j[0] : j[1]]

    arrow = patch((12.6, 18.5), (-2.4, -0.8))
    assert arrow.max() - np.median(arrow) > 0.15
    kerb = patch((6.0, 10.0), (-8.2, -7.2))
    assert kerb.max() - kerb.min() > 0.45
    assert (result.ground.openness > 0.9).mean() > 0.4
