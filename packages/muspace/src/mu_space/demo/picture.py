# SPDX-License-Identifier: Apache-2.0
"""The pictures: a fused view as an image, and one figure with the inputs, the views and the table of calls."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from .frame import Boxes, Camera, Frame
from .obstacles import LOW, ground_height
from .pipeline import Result, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, PAPER, FAINT = "#e8eaed", "#15181c", "#8b949e"
WIDTH, HEIGHT = 21.0, 11.2  # of the page, inches
EGO = np.array([[-0.9, -0.92], [-0.9, 0.92], [2.5, 0.92], [3.25, 0.62], [3.25, -0.62], [2.5, -0.92]])
KINDS = (
    ("vehicle", "#4cc9f0", ("car", "truck", "trailer", "bus", "construction_vehicle", "bicycle", "motorcycle")),
    ("pedestrian", "#ff5d8f", ("pedestrian",)),
    ("barrier, cone, other", "#ffb703", ()),
)


def image_of(view: View) -> np.ndarray:
    """uint8 [nx, ny, 3], forward up and left at the left; hidden cells are dark and almost without colour."""
    a = view.openness[..., None].astype(np.float64)
    grey = view.colour.mean(-1, keepdims=True)
    hidden = 0.26 * (0.4 * view.colour + 0.6 * grey) + np.array([0.065, 0.07, 0.08])
    colour = view.colour * a + hidden * (1 - a)
    return (np.clip(colour, 0, 1) * 255 + 0.5).astype(np.uint8)[::-1, ::-1]


def png(image: np.ndarray) -> bytes:
    """A uint8 picture [h, w, 3] as PNG bytes."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(stream, "PNG")
    return stream.getvalue()


def arrange(cameras: tuple[Camera, ...]) -> list[list[Camera]]:
    """Rows of cameras as they look: those facing forward above, those facing back below, each from left to right."""

    def heading(camera: Camera) -> float:
        return float(np.degrees(np.arctan2(camera.cam2ego[1, 2], camera.cam2ego[0, 2])))

    front = sorted((c for c in cameras if abs(heading(c)) < 90), key=lambda c: -heading(c))
    back = sorted((c for c in cameras if abs(heading(c)) >= 90), key=lambda c: heading(c) % 360)
    return [row for row in (front, back) if row]


def _kind(label: str) -> tuple[str, str]:
    return next(((name, colour) for name, colour, labels in KINDS if label in labels), KINDS[-1][:2])


def _draw_boxes(axes: Axes, boxes: Boxes, reach: float) -> None:
    for corners, label in zip(boxes.footprint(), boxes.label, strict=True):
        if np.abs(corners).max() > reach:
            continue
        colour = _kind(label)[1]
        loop = np.concatenate([corners, corners[:1]])
        axes.plot(loop[:, 1], loop[:, 0], color="black", lw=2.2, alpha=0.35)
        axes.plot(loop[:, 1], loop[:, 0], color=colour, lw=1.1)
        nose = np.array([corners.mean(0), (corners[0] + corners[3]) / 2])
        axes.plot(nose[:, 1], nose[:, 0], color=colour, lw=0.9)


def _draw_view(axes: Axes, image: np.ndarray, reach: float, title: str, ego: bool = True) -> None:
    axes.imshow(image, extent=(reach, -reach, -reach, reach), interpolation="antialiased")
    axes.set_xlim(reach, -reach)
    axes.set_ylim(-reach, reach)
    axes.set_title(title, color=INK, fontsize=11, loc="left", pad=5)
    step = 10 if reach >= 18 else 5
    ticks = np.arange(-(reach // step) * step, reach + 0.1, step)
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.tick_params(colors=FAINT, labelsize=8, length=3)
    for spine in axes.spines.values():
        spine.set_color("#3a4048")
    if ego:
        axes.fill(EGO[:, 1], EGO[:, 0], facecolor="#2b3138", edgecolor=INK, lw=1.3, joinstyle="round", zorder=5)
        axes.fill([0.45, 0, -0.45], [0.7, 1.9, 0.7], color=INK, zorder=6)


def _scale_bar(axes: Axes, reach: float) -> None:
    length = 10 if reach >= 18 else 5
    y, x = -reach * 0.95, reach * 0.94
    axes.plot([x, x - length], [y, y], color="black", lw=5, solid_capstyle="butt", alpha=0.5)
    axes.plot([x, x - length], [y, y], color=INK, lw=2.5, solid_capstyle="butt")
    axes.text(x - length / 2, y + reach * 0.015, f"{length} m", color=INK, fontsize=9, ha="center", va="bottom")


def _legend(axes: Axes, frame: Frame, dark: str) -> None:
    from matplotlib.lines import Line2D

    present = {_kind(label) for label in frame.boxes.label}
    handles = [Line2D([], [], color=c, lw=1.6, label=f"box: {n}") for n, c, _ in KINDS if (n, c) in present]
    handles.append(Line2D([], [], ls="", marker="s", ms=7, color="#3b3d40", label=dark))
    axes.legend(
        handles=handles, loc="lower right", fontsize=8, facecolor=PAPER, edgecolor="#3a4048", labelcolor=INK, framealpha=0.8
    )


def _line(text: str, most: int) -> str:
    """A name from outside as one line of text that any font can be asked for."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _draw_cameras(figure: Any, frame: Frame, box: tuple[float, float, float, float]) -> None:
    rows = arrange(frame.cameras)
    left, bottom, width, height = box
    gap = 0.004
    for r, row in enumerate(rows):
        columns = max(3, len(row))
        w, h = width / columns, height / len(rows)
        for c, camera in enumerate(row):
            axes = figure.add_axes((left + c * w, bottom + height - (r + 1) * h, w - gap, h - gap * 1.6))
            step = max(1, camera.size[1] // 800)
            axes.imshow(camera.image[::step, ::step], interpolation="antialiased", aspect="auto")
            axes.set_axis_off()
            name = camera.name.removeprefix("CAM_").replace("_", " ").lower()
            axes.text(
                0.015, 0.965, _line(name, 40), transform=axes.transAxes, color="white", fontsize=9, va="top", parse_math=False,
                bbox={"facecolor": "black", "alpha": 0.5, "lw": 0, "pad": 2},
            )  # fmt: skip


def _draw_table(axes: Axes, rows: list[list[str]], columns: list[str], foot: str) -> None:
    axes.set_axis_off()
    table = axes.table(cellText=rows, colLabels=columns, loc="upper left", cellLoc="left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.auto_set_column_width(range(len(columns)))
    table.scale(1, 1.55)
    for (r, _), cell in table.get_celld().items():
        cell.set_edgecolor("#3a4048")
        cell.get_text().set_color(FAINT if r == 0 else INK)
    axes.text(0, 0.02, foot, color=FAINT, fontsize=9, va="bottom", transform=axes.transAxes, parse_math=False)


def _road_title(result: Result) -> str:
    operator = "" if result.baseline is None else f" by {result.ground.call.dispatch['operator']}"
    return f"road plane{operator}: metres forward (up) and to the left"


def figure(frame: Frame, result: Result, rows: list[list[str]], columns: list[str], foot: str) -> bytes:
    """The whole story on one page as PNG bytes: cameras, road from above, pillars, truth (if known), table of calls."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = Figure(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
    canvas = FigureCanvasAgg(page)
    page.text(0.012, 0.972, "Six cameras, one bird's-eye view" if len(frame.cameras) == 6 else "Bird's-eye view",
              color=INK, fontsize=19, weight="bold", va="center")  # fmt: skip
    page.text(0.488, 0.972, _line(frame.source, 60), color=FAINT, fontsize=11, va="center", ha="right", parse_math=False)
    _draw_cameras(page, frame, (0.012, 0.618, 0.482, 0.328))
    reach = result.ground.grid.x_range[1]
    main = page.add_axes((0.514, 0.040, 0.481, 0.481 * WIDTH / HEIGHT))
    main.set_facecolor(PAPER)
    _draw_view(main, image_of(result.ground), reach, _road_title(result))
    _draw_boxes(main, frame.boxes, reach)
    _scale_bar(main, reach)
    _legend(main, frame, "hidden, or in no camera" if result.baseline is None else "hidden, in no camera, or of unknown depth")
    second = page.add_axes((0.026, 0.166, 0.222, 0.222 * WIDTH / HEIGHT))
    title = "pillars: what stands on the road, coloured" if len(frame.points) else "pillars: mean over the heights"
    _draw_view(second, image_of(result.pillars), reach, title)
    third = page.add_axes((0.270, 0.166, 0.222, 0.222 * WIDTH / HEIGHT))
    if result.baseline is not None:
        operator = result.baseline.call.dispatch["operator"]
        _draw_view(third, image_of(result.baseline), reach, f"for comparison: the road by {operator}")
    elif result.true_view is not None:
        known = (np.nan_to_num(result.true_view, nan=0.1) * 255).astype(np.uint8)[::-1, ::-1]
        _draw_view(third, known, reach, "known ground of the generated street")
    else:
        title = f"boxes; LiDAR {LOW:g} m (yellow) to 4 m (red) above the road"
        _draw_view(third, image_of(result.ground) // 2, reach, title)
        _draw_points(third, frame, reach)
        _draw_boxes(third, frame.boxes, reach)
    _draw_table(page.add_axes((0.014, 0.012, 0.478, 0.125)), rows, columns, foot)
    stream = io.BytesIO()
    canvas.print_png(stream)
    return stream.getvalue()


def _draw_points(axes: Axes, frame: Frame, reach: float) -> None:
    height = frame.points[:, 2] - ground_height(frame, frame.points)
    keep = (height > LOW) & (height < 5) & (np.abs(frame.points[:, :2]).max(1) < reach)
    p = frame.points[keep]
    axes.scatter(p[:, 1], p[:, 0], s=1.2, c=height[keep], cmap="autumn_r", vmin=0, vmax=4, lw=0, alpha=0.8)
