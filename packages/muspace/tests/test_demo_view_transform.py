# SPDX-License-Identifier: Apache-2.0
"""The demo's other view transforms: depth from LiDAR, lifting, agreement with attention and with the known ground."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")
pytest.importorskip("matplotlib")
pytest.importorskip("muspace_bevpool")

# ruff: noqa: E402
from mu_space import demo, families, ops
from mu_space.demo import agreement, depth, obstacles, pipeline, pyramid, report, sample, scene
from mu_space.demo.frame import Camera, Frame, FrameError, no_boxes
from mu_space.demo.grid import Grid
from mu_space.demo.view_transform import bev_pool_v2, flash_bevpool, module
from muspace_core.testing.plugin import load_sibling

# Without a built library the reference runs, with a warning that the report repeats.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs its PyTorch reference.*:RuntimeWarning")

sources = load_sibling(__file__, "demo_sources")
RECORDED, arguments, downward_camera = sources.RECORDED, sources.arguments, sources.downward_camera
LIFTING = ("bev_pool_v2", "flash_bevpool")
REACH, CELL = 12.0, 0.25


@pytest.fixture(scope="module")
def street():
    return scene.generate((450, 800))


@pytest.fixture(scope="module")
def results(street):
    return {name: pipeline.fuse_frame(street, reach=REACH, cell=CELL, transform=name) for name in LIFTING}


def carpet(slope: float = 0.0) -> np.ndarray:
    """LiDAR points of a plane that rises ahead, [n, 3]: beams close enough for every column of pixels."""
    x, y = np.meshgrid(np.geomspace(1.5, 14, 40), np.linspace(-6, 6, 400), indexing="ij")
    return np.stack([x, y, slope * x], -1).reshape(-1, 3)


def test_geometry_is_its_own_inverse():
    camera = downward_camera(np.zeros((90, 160, 3), np.uint8))
    points = np.random.default_rng(0).uniform((2, -2, -1), (9, 2, 1), (50, 3))
    uv, along = camera.project(points)
    np.testing.assert_allclose(camera.unproject(uv, along), points, atol=1e-9)
    frame = Frame("t", (camera,), no_boxes(), np.zeros((0, 3)), ground=(0.02, -0.01, 0.3))
    raised = np.column_stack([points[:, :2], points[:, 2] - obstacles.ground_height(frame, points), np.ones(50)])
    image = raised @ (camera.projection @ frame.road2ego).T
    np.testing.assert_allclose(image[:, :2] / image[:, 2:], uv, atol=1e-9)
    np.testing.assert_allclose(image[:, 2], along, atol=1e-9)


def rows_between(camera: Camera, points: np.ndarray, on_road: np.ndarray | None = None) -> np.ndarray:
    nothing = obstacles.DepthImage(camera, np.zeros((0, 3)))
    road = np.ones(len(points), bool) if on_road is None else on_road
    return depth.rows_of(camera, points, road, nothing, 8)


def test_depth_between_points_of_a_plane_is_exact():
    camera = downward_camera(np.zeros((240, 320, 3), np.uint8))
    found = rows_between(camera, carpet())
    v, u = np.meshgrid(np.arange(240) + 0.5, np.arange(40) * 8 + 4.0, indexing="ij")
    ray = camera.unproject(np.stack([u, v], -1), np.ones_like(u)) - camera.cam2ego[:3, 3]
    inner = np.isfinite(found)
    assert inner.mean() > 0.5
    inner[3:-3] &= np.isfinite(found[:-6]) & np.isfinite(found[6:])  # the outermost rows hold the depth of a point
    np.testing.assert_allclose(found[inner], (-2.0 / ray[..., 2])[inner], rtol=1e-4)


def test_depth_of_a_jump_is_unknown():
    camera = downward_camera(np.zeros((240, 320, 3), np.uint8))
    pixels = np.array([[100.0, 80.0], [100.0, 95.0]])
    near, far = camera.unproject(pixels, np.array([4.0, 4.2])), camera.unproject(pixels, np.array([4.0, 9.0]))
    assert np.isfinite(rows_between(camera, near, np.zeros(2, bool))[80:95, 12]).all()
    assert np.isnan(rows_between(camera, far, np.zeros(2, bool))[83:92, 12]).all(), "neither surface is known to reach there"
    assert np.isfinite(rows_between(camera, far, np.ones(2, bool))[80:95, 12]).all(), "the road goes on"
    assert np.isnan(rows_between(camera, near)[:, 20]).all() and np.isnan(rows_between(camera, near)[120:]).all()


def test_point_behind_an_obstacle_is_not_taken():
    """The LiDAR stands higher than the camera and looks over a wall."""
    camera = downward_camera(np.zeros((240, 320, 3), np.uint8))
    y, z = np.meshgrid(np.linspace(-1, 1, 80), np.linspace(0.4, 1.6, 40))
    wall = np.stack([np.full(y.shape, 4.0), y, z], -1).reshape(-1, 3)
    frame = Frame("t", (camera,), no_boxes(), np.concatenate([wall, carpet()]))
    rows = depth.of_cameras(frame, 8, (240, 320))[0]
    uv, along = camera.project(np.array([4.0, 0.0, 1.0]))
    assert rows[int(uv[1]), int(uv[0]) // 8] == pytest.approx(float(along), rel=0.02)


def test_pixel_is_spread_over_the_bins_that_it_sees():
    edges = np.linspace(1.0, 11.0, 11)
    rows = np.full((1, 2 * bev_pool_v2.STRIDE * bev_pool_v2.LINES, 3), np.nan)
    rows[0, :, 0] = 4.5
    rows[0, :24, 1], rows[0, 24:32, 1] = 7.2, 8.2
    rows[0, :, 2] = 30.0
    share = bev_pool_v2.distribution(rows, edges)
    assert share.shape == (1, 10, 2, 3)
    assert share[0, :, 0, 0].tolist() == share[0, :, 1, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(share[0, 5:9, 0, 1], [0, 0.75, 0.25, 0])
    assert share[0, :, 1, 1].sum() == 0 == share[0, :, :, 2].sum(), "unknown and too far"


def test_frustum_leaves_out_what_lies_below_the_grid():
    frame = Frame("t", (downward_camera(np.zeros((64, 64, 3), np.uint8)),), no_boxes(), np.zeros((0, 3)))
    points = bev_pool_v2.frustum(frame, Grid((0, 8), (-4, 4), 0.5), np.linspace(1, 12, 30), (8, 8))
    kept = np.isfinite(points).all(-1)
    assert kept.any() and not kept.all() and (points[kept] >= (0, -4, -obstacles.LOW)).all()


def test_bins_do_not_grow_without_bound():
    grid = Grid((-25, 25), (-25, 25), 0.25)
    assert np.diff(bev_pool_v2.bins_of(grid, 1000)).max() <= 0.25
    assert (len(bev_pool_v2.bins_of(grid, 10**6)) - 1) * 10**6 <= bev_pool_v2.FRUSTUM


def test_unknown_pixels_continue_their_neighbours():
    rows = np.full((1, 16, 4), np.nan)
    rows[0, :8, 1] = 5.0
    params, known = flash_bevpool.depth_params(rows)
    assert params.shape == (1, 4, 8, 2) and (params[..., 0] == 5).all()
    assert known[0, :, :].tolist() == [[False] * 2 + [True] * 2 + [False] * 4] * 2 + [[False] * 8] * 2
    params, known = flash_bevpool.depth_params(np.full((1, 16, 4), np.nan))
    assert np.isfinite(params).all() and not known.any()


def test_pixels_beside_another_surface_are_unknown():
    rows = np.full((1, 16, 4), 5.0)
    rows[:, :, 2:] = 9.0
    _, known = flash_bevpool.depth_params(rows)
    assert known[0, 0].tolist() == [True, True, True, False, False, True, True, True]


@pytest.mark.parametrize("name", LIFTING)
@pytest.mark.parametrize("slope", [0.0, 0.05])
def test_a_mark_on_the_road_lands_in_its_cell(name, slope):
    """A red square painted into the image where the road point (5.1, 1.5) projects is red there in the view, and only there."""
    camera = downward_camera(np.full((480, 800, 3), 90, np.uint8))
    corners = np.array([[x, y, slope * x] for x in (4.8, 5.4) for y in (1.2, 1.8)])
    uv, _ = camera.project(corners)
    (u0, v0), (u1, v1) = np.floor(uv.min(0)).astype(int), np.ceil(uv.max(0)).astype(int)
    camera.image[v0:v1, u0:u1] = (255, 0, 0)
    frame = Frame("t", (camera,), no_boxes(), carpet(slope), ground=(slope, 0.0, 0.0))
    grid = Grid((0, 8), (-4, 4), 0.2)
    views = module(name).fuse(frame, grid, pyramid.build([camera.image]), "auto", lambda *words: None)
    for view in views:
        seen, away = view.openness > 0.9, np.hypot(*(grid.centres() - [5.1, 1.5]).T).reshape(grid.shape)
        red = np.where(seen, view.colour[..., 0] - view.colour[..., 1], 0)
        assert red[away < 0.15].min() > 0.6
        assert red[away > 0.8].max() < 0.07
        open_road = seen & (red < 1e-6)
        assert open_road.mean() > 0.25
        np.testing.assert_allclose(view.colour[open_road], 90 / 255, atol=2e-3)


# PSNR of the road against the known ground and against attention's. One cell (25 cm) of displacement costs more than is
# between these figures and what the transforms reach (bev_pool_v2 23.3 and 27.7 dB, flash_bevpool 26.7 and 32.2 dB).
FLOORS = {"bev_pool_v2": (21.0, 25.0), "flash_bevpool": (25.0, 30.0)}


@pytest.mark.parametrize("name", LIFTING)
def test_road_is_the_known_ground_and_that_of_attention(name, results):
    result = results[name]
    against_truth, against_attention = FLOORS[name]
    assert result.comparison.share > 0.5, "too little of the road is visible to say anything"
    assert result.comparison.psnr > against_truth and result.comparison.mean_absolute_error < 0.05
    assert result.agreement.share > 0.3
    assert result.agreement.psnr > against_attention and result.agreement.mean_absolute_difference < 0.03


@pytest.mark.parametrize("name", LIFTING)
def test_displacement_by_a_cell_is_noticed(name, street, results):
    """The comparisons tell a displacement by one cell in any direction: the assertions above cannot pass by chance."""
    result = results[name]
    for shift in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        moved = replace(result.baseline, colour=np.roll(result.baseline.colour, shift, (0, 1)))
        assert agreement.compare(street, result.ground, moved).psnr < FLOORS[name][1] - 1
        colour = np.roll(result.ground.colour, shift, (0, 1)).reshape(-1, 3)
        compared = pipeline.truth.compare(street, result.ground.grid, colour, result.ground.weight.reshape(-1))
        assert compared.psnr < FLOORS[name][0]


@pytest.mark.parametrize("name", LIFTING)
def test_what_stands_on_the_road_is_lifted(name, street, results):
    """The two pictures differ where LiDAR points lie above the road."""
    result = results[name]
    ground, pillars = result.ground, result.pillars
    covered = np.abs(pillars.colour - ground.colour).max(-1) > 0.1
    points = street.points[:, :3].astype(np.float64)
    standing = points[(points[:, 2] > 0.5) & (points[:, 2] < 3.5) & (np.abs(points[:, :2]) < REACH - 1).all(1)]
    i, j = np.floor((standing[:, :2] + REACH) / CELL).astype(int).T
    near = np.zeros(ground.grid.shape, bool)
    for di in range(-3, 4):
        for dj in range(-3, 4):
            near[i + di, j + dj] = True
    assert covered[near].sum() > 30 and covered[near].mean() > 5 * covered[~near].mean()


@pytest.mark.parametrize("name", LIFTING)
def test_calls_are_checked_against_the_reference(name, results):
    calls = results[name].calls
    assert len(calls) == {"bev_pool_v2": 1, "flash_bevpool": 2}[name]
    for call in (*calls, results[name].baseline.call):
        assert 0 <= call.deviation <= call.limit <= 2e-4 and call.checked > 500
    assert {call.dispatch["operator"] for call in calls} == {name}


@pytest.mark.parametrize("name", LIFTING)
def test_a_wrong_result_makes_no_picture(name, street, monkeypatch, tmp_path, capsys):
    true = getattr(ops, name)

    def wrong(*args, backend="auto", **kwargs):
        out = true(*args, backend=backend, **kwargs)
        return out if backend == "reference" else out * 1.001

    monkeypatch.setattr(ops, name, wrong, raising=False)
    monkeypatch.setattr(scene, "generate", lambda *a, **k: street)
    words = ("--view-transform", name, "--out", str(tmp_path / "out"), "--cell", "0.5", "--range", "8", "--device", "cpu")
    assert demo.main(arguments(*words)) == 1
    assert "deviates from the reference" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", LIFTING)
def test_report_and_figure(name, street, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scene, "generate", lambda *a, **k: street)
    words = ("--view-transform", name, "--out", str(tmp_path), "--cell", "0.5", "--range", "8", "--device", "cpu")
    assert demo.main(arguments(*words)) == 0
    printed = capsys.readouterr().out
    assert "road near LiDAR returns against that of multi_scale_deformable_attn: PSNR" in printed
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["schema"] == report.SCHEMA and document["view_transform"] == name
    assert {call["operator"] for call in document["calls"]} == {name}
    assert document["agreement"]["call"]["operator"] == "multi_scale_deformable_attn"
    assert document["agreement"]["psnr"] > 20 and document["agreement"]["cells"] > 100 and document["psnr"] > 15
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(demo.FILES)


def test_frame_without_lidar_is_refused(street, tmp_path, capsys):
    report.write_all(tmp_path / "in", sample.encode(replace(street, cameras=street.cameras[:1], points=street.points[:0])))
    for name in LIFTING:
        words = ("--view-transform", name, "--sample", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--device", "cpu")
        assert demo.main(arguments(*words)) == 2
        assert "depth from LiDAR points, and the frame has none" in capsys.readouterr().err
    with pytest.raises(FrameError):
        pipeline.fuse_frame(replace(street, points=street.points[:0]), transform="flash_bevpool")


@pytest.mark.parametrize("name", LIFTING)
def test_camera_without_points_stays_dark(name, street):
    """Points ahead only: of two cameras the one that looks back lifts nothing."""
    cameras = tuple(c for c in street.cameras if c.name in ("CAM_FRONT", "CAM_BACK"))
    ahead = street.points[street.points[:, 0] > 5]
    result = pipeline.fuse_frame(replace(street, cameras=cameras, points=ahead, truth=None), reach=10, cell=0.5, transform=name)
    x = result.ground.grid.centres()[:, 0].reshape(result.ground.grid.shape)
    assert (result.ground.weight[x < 0] == 0).all() and (result.ground.weight[x > 7] > 0).any()
    assert result.comparison is None and result.agreement.cells > 0


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", LIFTING)
def test_largest_numbers_of_a_frame_do_not_overflow(name):
    near = downward_camera(np.full((64, 96, 3), 90, np.uint8))
    far = Camera("FAR", near.image, np.diag([1e9, 1e9, 1.0]), near.cam2ego.copy())
    far.cam2ego[0, 3] = 1e9
    points = np.concatenate([carpet(), np.full((3, 3), 1e9), np.full((3, 3), -1e9)]).astype(np.float32)
    frame = Frame("t", (near, far), no_boxes(), points)
    result = pipeline.fuse_frame(frame, backend="reference", reach=5, cell=0.5, transform=name)
    assert np.isfinite(result.ground.colour).all() and (result.ground.weight > 0).any()


def test_missing_wheel_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(families, "installed", lambda: {"msda": "muspace_msda"})
    monkeypatch.setattr(scene, "generate", lambda *a, **k: pytest.fail("the street was rendered for nothing"))
    assert demo.main(arguments("--view-transform", "bev_pool_v2", "--out", str(tmp_path / "out"))) == 2
    error = capsys.readouterr().err
    assert error.startswith("mu-space demo: view transform bev_pool_v2: the wheel muspace-bevpool is not installed; run: ")
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_unknown_view_transform_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="view_transform: expected one of msda, bev_pool_v2, flash_bevpool; got 'lss'"):
        demo.run(out=tmp_path / "out", view_transform="lss")
    with pytest.raises(SystemExit):
        arguments("--view-transform", "lss")
    assert "invalid choice: 'lss'" in capsys.readouterr().err


def test_cells_are_as_fine_as_the_view_transform_can_fill():
    assert module("msda").default_cell(25) == module("flash_bevpool").default_cell(60) == 0.1
    assert [module("bev_pool_v2").default_cell(reach) for reach in (5, 25, 60)] == [0.1, 0.25, 0.6]


@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recorded frame at {RECORDED}")
@pytest.mark.parametrize("name, least", [("bev_pool_v2", 23.0), ("flash_bevpool", 25.0)])
def test_recorded_frame_agrees_with_attention(name, least):
    frame = sample.load(RECORDED)
    result = pipeline.fuse_frame(frame, reach=10, cell=0.25, transform=name)
    assert result.agreement.share > 0.1 and result.agreement.psnr > least
    for shift in ((4, 0), (-4, 0), (0, 4), (0, -4)):
        moved = replace(result.baseline, colour=np.roll(result.baseline.colour, shift, (0, 1)))
        assert agreement.compare(frame, result.ground, moved).psnr < result.agreement.psnr - 2
