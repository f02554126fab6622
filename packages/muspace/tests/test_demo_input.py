# SPDX-License-Identifier: Apache-2.0
"""The demo's input and geometry: what is refused, in which words, and where a pixel lands in the view."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")

# ruff: noqa: E402
from mu_space import demo
from mu_space.demo import fuse, lift, pyramid, report, sample, scene, truth
from mu_space.demo.frame import Frame, FrameError, fit_ground, no_boxes
from muspace_core.testing.plugin import load_sibling

sources = load_sibling(__file__, "demo_sources")
arguments, downward_camera = sources.arguments, sources.downward_camera

pytestmark = pytest.mark.filterwarnings("ignore:.*runs its PyTorch reference.*:RuntimeWarning")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    camera = downward_camera(rng.integers(0, 255, (96, 160, 3), np.uint8))
    frame = Frame("test", (camera,), no_boxes(), np.zeros((10, 3), np.float32))
    report.write_all(tmp_path / "in", sample.encode(frame))
    return tmp_path / "in"


def edit(folder: Path, change) -> None:
    path = folder / "sample.json"
    index = json.loads(path.read_text())
    change(index, index["cameras"]["CAM_FRONT"])
    path.write_text(json.dumps(index))


def matrix(key: str, value):
    return lambda index, camera: camera.__setitem__(key, value)


CAM2EGO = np.eye(4).tolist()
BROKEN = {
    "no cameras key": (lambda i, c: i.pop("cameras"), "sample.json: key 'cameras' is missing"),
    "no camera": (lambda i, c: i["cameras"].clear(), "expected one camera or more, got none"),
    "cameras is a list": (lambda i, c: i.__setitem__("cameras", []), "sample.json.cameras: expected dict, got list"),
    "camera is a number": (lambda i, c: i["cameras"].__setitem__("A", 3), "cameras.A: expected an object, got int"),
    "no file": (lambda i, c: c.pop("file"), "cameras.CAM_FRONT: key 'file' is missing"),
    "no cam2img": (lambda i, c: c.pop("cam2img"), "cameras.CAM_FRONT: key 'cam2img' is missing"),
    "no cam2ego": (lambda i, c: c.pop("cam2ego"), "cameras.CAM_FRONT: key 'cam2ego' is missing"),
    "short matrix": (matrix("cam2img", [[1, 0], [0, 1]]), "cameras.CAM_FRONT.cam2img: expected shape 3x3, got 2x2"),
    "ragged matrix": (matrix("cam2img", [[1, 0, 0], [0, 1]]), "cameras.CAM_FRONT.cam2img: expected 3x3 numbers, got rows of"),
    "words": (matrix("cam2img", [["a"] * 3] * 3), "cameras.CAM_FRONT.cam2img: expected 3x3 numbers"),
    "NaN": (matrix("cam2img", [[float("nan"), 0, 1], [0, 1, 1], [0, 0, 1]]), "cam2img: expected finite numbers, got NaN"),
    "infinite pose": (matrix("cam2ego", [[math.inf, 0, 0, 0], *CAM2EGO[1:]]), "cam2ego: expected finite numbers"),
    "singular": (matrix("cam2img", [[5, 0, 1], [5, 0, 1], [0, 0, 1]]), "cam2img: the matrix is not invertible"),
    "zero pose": (matrix("cam2ego", [[0] * 4] * 4), "cam2ego: the matrix is not invertible"),
    "negative focal": (matrix("cam2img", [[-5, 0, 1], [0, 5, 1], [0, 0, 1]]), "cam2img: expected positive focal lengths"),
    "scaled pose": (matrix("cam2ego", np.diag([2, 2, 2, 1]).tolist()), "cam2ego: expected a rotation and translation"),
    "mirrored pose": (matrix("cam2ego", np.diag([1, 1, -1, 1]).tolist()), "cam2ego: expected a rotation and translation"),
    "lidar columns": (lambda i, c: i["lidar"].update(columns=["x", "z"]), "lidar.columns: expected x, y, z first, got"),
    "lidar rows": (lambda i, c: i["lidar"].update(columns=["x", "y", "z", "i"] * 2), "expected rows of 8 float32"),
    "lidar pose": (lambda i, c: i["lidar"].pop("lidar2ego"), "lidar: key 'lidar2ego' is missing"),
    "lidar dtype": (lambda i, c: i["lidar"].update(dtype="float64"), "lidar.dtype: expected float32, got 'float64'"),
    "lidar is a number": (lambda i, c: i.update(lidar=4), "lidar: expected an object, got int"),
    "integer beyond a double": (
        matrix("cam2img", [[10**400, 0, 1], [0, 5, 1], [0, 0, 1]]),
        "cam2img: expected numbers of at most",
    ),
    "focal that overflows": (matrix("cam2img", [[1e308, 0, 1], [0, 1e308, 1], [0, 0, 1]]), "at most 1e+09, got 1e+308"),
    "camera light years away": (
        matrix("cam2ego", [[1, 0, 0, 1e200], *CAM2EGO[1:]]),
        "cam2ego: expected numbers of at most 1e+09",
    ),
    "lidar light years away": (
        lambda i, c: i["lidar"]["lidar2ego"][0].__setitem__(3, 1e300),
        "lidar.lidar2ego: expected numbers of at most 1e+09",
    ),
    "huge box": (lambda i, c: i.update(boxes=[{"box": [0, 0, 0, 10**400, 1, 1, 0]}]), "boxes[0].box: expected seven finite"),
    "box that overflows": (lambda i, c: i.update(boxes=[{"box": [1e308] * 7}]), "boxes[0].box: expected seven finite"),
    "box of words": (lambda i, c: i.update(boxes=[{"box": ["\n"] * 7}]), "boxes[0].box: expected seven finite"),
    "camera named by half a character": (
        lambda i, c: i["cameras"].update({"\ud800": c}),
        "cameras: expected printable names, got '\\ud800'",
    ),
    "camera named in two lines": (
        lambda i, c: i["cameras"].update({"a\nb": c}),
        "cameras: expected printable names, got 'a\\nb'",
    ),
    "image named by half a character": (lambda i, c: c.update(file="\ud800"), "cameras.CAM_FRONT.file: expected a printable"),
    "image named in two lines": (lambda i, c: c.update(file="a\nb"), "cameras.CAM_FRONT.file: expected a printable name"),
    "dtype in two lines": (lambda i, c: i["lidar"].update(dtype="a\nb"), "lidar.dtype: expected float32, got 'a\\nb'"),
    "box of six": (lambda i, c: i.update(boxes=[{"label": 0, "box": [0] * 6}]), "boxes[0].box: expected seven finite numbers"),
}


def refusal(capsys, out: Path, *words: str) -> str:
    """Run the command on input that it must refuse: status 2, one sentence, nothing written."""
    assert demo.main(arguments(*words, "--out", str(out))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("mu-space demo: ") and captured.err.count("\n") == 1
    assert not os.path.isdir(out)  # noqa: PTH112 - a Path raises for a name that is too long
    return captured.err


@pytest.mark.parametrize("case", BROKEN)
def test_broken_calibration(case, folder, tmp_path, capsys):
    change, text = BROKEN[case]
    edit(folder, change)
    assert text in refusal(capsys, tmp_path / "out", "--sample", str(folder))
    with pytest.raises(FrameError):
        sample.load(folder)


def test_missing_and_broken_files(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert "does not exist" in refusal(capsys, out, "--sample", str(tmp_path / "nowhere"))
    image = folder / "cam_front.png"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    assert "cam_front.png is not a readable image" in refusal(capsys, out, "--sample", str(folder))
    image.write_bytes(b"not an image")
    assert "cam_front.png is not a readable image" in refusal(capsys, out, "--sample", str(folder))
    image.unlink()
    assert "cameras.CAM_FRONT: file" in refusal(capsys, out, "--sample", str(folder))
    image.write_bytes(whole)
    (folder / "lidar_top.bin").unlink()
    assert "lidar: file" in refusal(capsys, out, "--sample", str(folder))
    (folder / "sample.json").write_text("{")
    assert "sample.json is not JSON" in refusal(capsys, out, "--sample", str(folder))
    (folder / "sample.json").write_text("[]")
    assert "expected an object with key 'cameras', got list" in refusal(capsys, out, "--sample", str(folder))
    (folder / "sample.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"sample\.json does not exist"):
        sample.load(folder)


@pytest.mark.parametrize(
    ("text", "sentence"), [("[" * 100_000, "sample.json is nested too deeply"), ("1" * 5000, "sample.json is not JSON: ")]
)
def test_index_that_no_parser_takes(text, sentence, folder, tmp_path, capsys):
    (folder / "sample.json").write_text(text)
    assert sentence in refusal(capsys, tmp_path / "out", "--sample", str(folder))


def test_sample_that_is_a_file(folder, tmp_path, capsys):
    file = folder / "sample.json"
    assert f"sample folder {file} is not a folder" in refusal(capsys, tmp_path / "out", "--sample", str(file))


def test_a_decoder_may_fail_in_any_way(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda path: (_ for _ in ()).throw(KeyError("no such marker")))
    assert "cam_front.png is not a readable image: 'no such marker'" in refusal(
        capsys, tmp_path / "out", "--sample", str(folder)
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", ["$\\frac{$", "x" * 500, ""])
def test_any_printable_name_is_drawn_as_it_is(name, folder, tmp_path):
    """Camera and folder names are no mathematics, and the largest numbers that are taken do not overflow."""
    folder = folder.rename(folder.with_name(name[:100] or "in"))
    far = np.full((4, 3), 3e38, "<f4")
    edit(
        folder,
        lambda i, c: i.update(
            cameras={
                name: c,
                "FAR": {**c, "cam2ego": [[1, 0, 0, 1e9], *CAM2EGO[1:]], "cam2img": np.diag([1e9, 1e9, 1]).tolist()},
            },
            boxes=[{"label": name, "box": [1e9] * 7}],
        ),
    )
    (folder / "lidar_top.bin").write_bytes(far.tobytes())
    written = demo.run(folder, "cpu", "reference", tmp_path / "out", reach=5, cell=0.5)
    assert written["cameras"] == [name, "FAR"] and (tmp_path / "out" / "figure.png").is_file()


def test_images_of_unlike_size(folder, tmp_path, capsys):
    Image.new("RGB", (64, 64)).save(folder / "small.png")
    edit(folder, lambda i, c: i["cameras"].update(CAM_BACK={**c, "file": "small.png"}))
    error = refusal(capsys, tmp_path / "out", "--sample", str(folder))
    assert "cameras.CAM_BACK: expected an image of 160x96 like CAM_FRONT, got 64x64" in error


def test_wrong_options(folder, tmp_path, capsys):
    out, here = tmp_path / "out", ("--sample", str(folder))
    assert "range: expected 5 to 60 metres, got 1" in refusal(capsys, out, *here, "--range", "1")
    assert "range: expected 5 to 60 metres, got nan" in refusal(capsys, out, *here, "--range", "nan")
    assert "cell: expected 0.05 to 1 metre, got 7" in refusal(capsys, out, *here, "--cell", "7")
    assert "1500 x 1500" in refusal(capsys, out, *here, "--range", "60", "--cell", "0.05")
    assert "backend: expected one of" in refusal(capsys, out, *here, "--backend", "abacus")
    assert "needs tensors on musa" in refusal(capsys, out, *here, "--backend", "musa", "--device", "cpu")
    assert "device 'abacus' is unknown" in refusal(capsys, out, *here, "--device", "abacus")
    assert "device cuda:99 is not on this machine" in refusal(capsys, out, *here, "--device", "cuda:99")
    assert "write_sample" in refusal(capsys, out, *here, "--write-sample", str(tmp_path / "copy"))


def test_output_that_cannot_be_written_is_refused_before_the_work(folder, tmp_path, capsys, monkeypatch):
    from mu_space.demo import pipeline

    monkeypatch.setattr(pipeline, "fuse_frame", lambda *a: pytest.fail("the frame was fused for nothing"))
    monkeypatch.setattr(scene, "generate", lambda *a, **k: pytest.fail("the street was rendered for nothing"))
    file = tmp_path / "afile"
    file.write_text("a file")
    for out in (file, file / "x", file / "x" / "y"):
        assert f"--out {out}: {file} exists and is not a folder" in refusal(capsys, out, "--sample", str(folder))
        assert f"--write-sample {out}: " in refusal(capsys, tmp_path / "new", "--write-sample", str(out))
    if Path("/proc").is_dir():  # root may write there, says os.access
        assert "--out /proc/x: " in refusal(capsys, Path("/proc/x"), "--sample", str(folder))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "is not a folder" in refusal(capsys, tmp_path / "dangling", "--sample", str(folder))
    error = refusal(capsys, tmp_path / ("x" * 300), "--sample", str(folder))
    assert "--out " in error and "too long" in error
    (tmp_path / "used" / "report.json").mkdir(parents=True)
    assert demo.main(arguments("--sample", str(folder), "--out", str(tmp_path / "used"))) == 2
    assert "report.json is a folder" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *a: False)
    assert "is not writable" in refusal(capsys, tmp_path / "new", "--sample", str(folder))
    assert file.read_text() == "a file" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("module, package", [("PIL", "pillow"), ("matplotlib", "matplotlib")])
def test_missing_package_names_the_extra(module, package, folder, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else find(name, *a))
    error = refusal(capsys, tmp_path / "out", "--sample", str(folder))
    assert error == f"mu-space demo: the demo needs {package}: pip install 'muspace[demo]'\n"


def test_optional_parts_may_be_absent(folder):
    edit(folder, lambda i, c: [i.pop(key) for key in ("lidar", "boxes", "categories")])
    frame = sample.load(folder)
    assert len(frame.boxes) == 0 and frame.points.shape == (0, 3) and frame.ground == (0, 0, 0)


def test_projection_of_known_points():
    camera = downward_camera(np.zeros((90, 160, 3), np.uint8))
    axis = camera.cam2ego[:3, :3] @ [0, 0, 4.0] + camera.cam2ego[:3, 3]
    uv, depth = camera.project(np.array([axis, [-3.0, 0, 0]]))
    np.testing.assert_allclose(uv[0], [80, 45], atol=1e-9)
    assert depth[0] == pytest.approx(4) and depth[1] < 0 and not np.isfinite(uv[1]).any()
    left, _ = camera.project(axis + np.array([0, 0.5, 0]))
    assert left[0] < 80, "left in the ego frame is left in the image"


def test_a_mark_on_the_road_lands_in_its_cell():
    """A red square painted into the image where the road point (4.1, 0.9) projects is red there in the view, and only there."""
    camera = downward_camera(np.full((480, 800, 3), 90, np.uint8))
    corners = np.array([[x, y, 0] for x in (3.9, 4.3) for y in (0.7, 1.1)])
    uv, _ = camera.project(corners)
    (u0, v0), (u1, v1) = np.floor(uv.min(0)).astype(int), np.ceil(uv.max(0)).astype(int)
    camera.image[v0:v1, u0:u1] = (255, 0, 0)
    grid = lift.Grid((0, 8), (-4, 4), 0.2)
    levels = pyramid.build([camera.image])
    flat = lift.Pillars(grid, np.zeros(1600), np.zeros(1), np.ones((1600, 1), np.float32), side=2)
    lifted = lift.lift((camera,), levels.extent, flat)
    out, _ = fuse.sample("test", levels, lifted, "auto")
    colour, valid = fuse.gather(out, lifted, 1600)
    red = (colour[:, 0, 0] - colour[:, 0, 1]) * (valid[:, 0] > 0)
    xy = grid.centres()
    assert red[np.hypot(*(xy - [4.1, 0.9]).T) < 0.12].min() > 0.5
    assert red[np.hypot(*(xy - [4.1, 0.9]).T) > 0.8].max() < 0.01
    open_road = (valid[:, 0] > 0.5) & (red < 1e-6)
    np.testing.assert_allclose(colour[open_road, 0], 90 / 255, atol=2e-3)


def test_pyramid_pads_with_invalid_pixels():
    image = np.full((36, 50, 3), 200, np.uint8)
    levels = pyramid.build([image, image])
    assert levels.shapes == ((12, 16), (6, 8), (3, 4)) and levels.extent == (48, 64)
    value = levels.value
    assert value.shape == (2, 12 * 16 + 6 * 8 + 3 * 4, 1, 4)
    first = value[0, :192, 0].view(12, 16, 4)
    torch.testing.assert_close(first[0, 0], torch.tensor([200 / 255] * 3 + [1.0]))
    assert first[8, 12, 3] == 0.5 and first[9:].abs().max() == 0, "column 12 is half inside, rows from 9 on are padding"


def test_level_shares_follow_the_distance():
    camera = downward_camera(np.zeros((900, 1600, 3), np.uint8))
    near, far = (lift._level_share(camera, np.array([[x, 0.0, 0.0]]), 0.1)[0] for x in (1.2, 18.0))
    assert near.sum() == pytest.approx(1) and far.sum() == pytest.approx(1)
    assert near @ [0, 1, 2] > far @ [0, 1, 2] == 0


def test_fit_ground_finds_the_plane_among_obstacles():
    rng = np.random.default_rng(3)
    xy = rng.uniform(-20, 20, (4000, 2))
    z = 0.004 * xy[:, 0] - 0.006 * xy[:, 1] + 0.05 + rng.normal(0, 0.02, 4000)
    z[::4] += rng.uniform(0.3, 3, 1000)
    np.testing.assert_allclose(fit_ground(np.column_stack([xy, z])), (0.004, -0.006, 0.05), atol=0.012)
    assert fit_ground(np.zeros((3, 3))) == (0, 0, 0)


def test_truth_is_averaged_over_cells():
    ground = np.zeros((40, 40, 3), np.float32)
    ground[:, 20:] = 1
    frame = Frame("t", (), no_boxes(), np.zeros((0, 3)), truth=truth_of(ground))
    view = truth.top_view(frame, lift.Grid((-1, 1), (-1, 1), 0.1)).reshape(20, 20, 3)
    assert view[9].max() == 0 and view[10].min() == 1
    assert np.isnan(truth.top_view(frame, lift.Grid((-2, 2), (-2, 2), 0.5))).any()


def truth_of(ground: np.ndarray):
    from mu_space.demo.frame import Truth

    return Truth(ground, (-1.0, -1.0), 0.05, ())


def test_street_is_in_the_units_of_its_texture():
    """The stop line of the painted ground is white where the layout says it is."""
    picture = scene.street.paint_ground([], 1)
    j, i = int((0.0 - scene.street.Y_RANGE[0]) / scene.street.STEP), int((10.8 - scene.street.X_RANGE[0]) / scene.street.STEP)
    assert picture[j, i].min() > 0.75 and picture[j, i - 20].max() < 0.55
    assert np.isfinite(picture).all()
