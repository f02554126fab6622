# SPDX-License-Identifier: Apache-2.0
"""Reads a recorded frame from a folder, and encodes one; every complaint is one sentence.

The folder holds `sample.json`, the images and, optionally, the LiDAR points that it names:

    {"cameras": {"CAM_FRONT": {"file": "cam_front.jpg",          image, any format that Pillow reads, all of one size
                               "cam2img": [[...] * 3] * 3,       pinhole matrix, pixels
                               "cam2ego": [[...] * 4] * 4},      rigid transform camera -> ego
                 ...},                                           one camera or more
     "lidar": {"file": "lidar_top.bin", "dtype": "float32",      optional; binary rows of `columns`
               "columns": ["x", "y", "z", ...],
               "lidar2ego": [[...] * 4] * 4},
     "categories": {"car": 0, ...},                              optional
     "boxes": [{"label": 0, "box": [x, y, z, dx, dy, dz, yaw]}]} optional; lidar frame, z of the underside, yaw about z

Ego frame: x forward, y left, z up, metres, road near z = 0. Other keys are ignored.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from .frame import Boxes, Camera, Frame, FrameError, fit_ground, no_boxes

INDEX = "sample.json"
LARGEST = 1e9
"""Magnitude up to which numbers of a frame are taken, metres or pixels: products of three stay far from the end of fp32."""


def _read_index(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"sample folder {folder} {'is not a folder' if folder.exists() else 'does not exist'}")
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a sample folder holds {INDEX} and the images that it names")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FrameError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise FrameError(f"{path} is nested too deeply") from None
    if not isinstance(index, dict):
        raise FrameError(f"{path}: expected an object with key 'cameras', got {type(index).__name__}")
    return index


def _get(entry: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(entry, dict):
        raise FrameError(f"{where}: expected an object, got {type(entry).__name__}")
    if key not in entry:
        raise FrameError(f"{where}: key '{key}' is missing")
    if not isinstance(entry[key], kind):
        raise FrameError(f"{where}.{key}: expected {kind.__name__}, got {type(entry[key]).__name__}")
    return entry[key]


_RANGE = f"expected numbers of at most {LARGEST:g}"


def _matrix(entry: dict, key: str, n: int, where: str) -> np.ndarray:
    raw = _get(entry, key, list, where)
    try:
        matrix = np.array(raw, np.float64)
    except OverflowError:  # an integer beyond the largest double
        raise FrameError(f"{where}.{key}: {_RANGE}, got a larger one") from None
    except (TypeError, ValueError):
        raise FrameError(f"{where}.{key}: expected {n}x{n} numbers, got rows of unequal length or other things") from None
    if matrix.shape != (n, n):
        raise FrameError(f"{where}.{key}: expected shape {n}x{n}, got {'x'.join(map(str, matrix.shape))}")
    if not np.isfinite(matrix).all():
        raise FrameError(f"{where}.{key}: expected finite numbers, got NaN or infinity")
    if np.abs(matrix).max() > LARGEST:
        raise FrameError(f"{where}.{key}: {_RANGE}, got {np.abs(matrix).max():g}")
    scale = np.abs(matrix).max(1).prod()
    if scale == 0 or abs(np.linalg.det(matrix)) < 1e-9 * scale:
        raise FrameError(f"{where}.{key}: the matrix is not invertible")
    return matrix


def _intrinsics(entry: dict, where: str) -> np.ndarray:
    k = _matrix(entry, "cam2img", 3, where)
    if k[0, 0] <= 0 or k[1, 1] <= 0 or np.abs(k[2] - (0, 0, 1)).max() > 1e-6:
        raise FrameError(
            f"{where}.cam2img: expected positive focal lengths and last row 0, 0, 1, got "
            f"{k[0, 0]:g}, {k[1, 1]:g} and {k[2].tolist()}"
        )
    return k


def _rigid(entry: dict, key: str, where: str) -> np.ndarray:
    pose = _matrix(entry, key, 4, where)
    error = np.abs(pose[:3, :3] @ pose[:3, :3].T - np.eye(3)).max()
    if error > 1e-2 or np.linalg.det(pose[:3, :3]) < 0 or np.abs(pose[3] - (0, 0, 0, 1)).max() > 1e-6:
        raise FrameError(f"{where}.{key}: expected a rotation and translation with last row 0, 0, 0, 1, got another matrix")
    return pose


def _file(folder: Path, entry: dict, where: str) -> Path:
    name = _get(entry, "file", str, where)
    if not name.isprintable():
        raise FrameError(f"{where}.file: expected a printable name, got {name!r}")
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{where}: file {path} does not exist")
    return path


def _image(path: Path) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.array(image.convert("RGB"))
    except Exception as error:  # each decoder fails in its own way on bytes that are not what they say
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FrameError(f"{path} is not a readable image: {text}") from None


def _cameras(folder: Path, index: dict) -> tuple[Camera, ...]:
    entries = _get(index, "cameras", dict, INDEX)
    if not entries:
        raise FrameError(f"{INDEX}.cameras: expected one camera or more, got none")
    calibrated = []
    for name, entry in entries.items():  # the whole calibration before the first image
        if not name.isprintable():
            raise FrameError(f"cameras: expected printable names, got {name!r}")
        where = f"cameras.{name}"
        if not isinstance(entry, dict):
            raise FrameError(f"{where}: expected an object, got {type(entry).__name__}")
        calibrated.append((name, _file(folder, entry, where), _intrinsics(entry, where), _rigid(entry, "cam2ego", where)))
    cameras = tuple(Camera(name, _image(path), k, pose) for name, path, k, pose in calibrated)
    for camera in cameras[1:]:
        if camera.size != cameras[0].size:
            raise FrameError(
                f"cameras.{camera.name}: expected an image of {cameras[0].size[1]}x{cameras[0].size[0]} like"
                f" {cameras[0].name}, got {camera.size[1]}x{camera.size[0]}"
            )
    if min(cameras[0].size) < 16:
        height, width = cameras[0].size
        raise FrameError(f"cameras.{cameras[0].name}: expected an image of 16x16 or more, got {width}x{height}")
    return cameras


def _lidar(folder: Path, entry: dict) -> tuple[np.ndarray, np.ndarray]:
    """(points [n, 3] in the ego frame, lidar2ego)."""
    pose = _rigid(entry, "lidar2ego", "lidar")
    columns = _get(entry, "columns", list, "lidar")
    if columns[:3] != ["x", "y", "z"]:
        raise FrameError(f"lidar.columns: expected x, y, z first, got {columns}")
    if entry.get("dtype", "float32") != "float32":
        raise FrameError(f"lidar.dtype: expected float32, got {entry['dtype']!r}")
    path = _file(folder, entry, "lidar")
    raw = np.fromfile(path, "u1")
    if raw.size % (4 * len(columns)):
        raise FrameError(f"{path}: expected rows of {len(columns)} float32 ({4 * len(columns)} bytes), got {raw.size} bytes")
    points = raw.view("<f4").reshape(-1, len(columns))[:, :3].astype(np.float64)
    points = points[(np.abs(points) <= LARGEST).all(1)]  # without NaN too
    return (points @ pose[:3, :3].T + pose[:3, 3]).astype(np.float32), pose


def _boxes(index: dict, pose: np.ndarray) -> Boxes:
    names: dict[Any, str] = {
        v: k for k, v in _get({"categories": {}, **index}, "categories", dict, INDEX).items() if isinstance(v, int)
    }
    rows, labels = [], []
    for k, entry in enumerate(_get({"boxes": [], **index}, "boxes", list, INDEX)):
        where = f"boxes[{k}]"
        box = _get(entry, "box", list, where)
        if len(box) != 7 or not all(isinstance(v, (int, float)) and abs(v) <= LARGEST for v in box):
            shown = repr(box) if len(repr(box)) < 200 else f"{repr(box)[:200]} …"
            raise FrameError(
                f"{where}.box: expected seven finite numbers x, y, z, dx, dy, dz, yaw of at most {LARGEST:g}, got {shown}"
            )
        label = entry.get("label")
        rows.append(box)
        labels.append(names.get(label, str(label)) if isinstance(label, (int, str)) else "object")
    if not rows:
        return no_boxes()
    b = np.array(rows, np.float64)
    centre = (b[:, :3] + b[:, 5:6] / 2 * (0, 0, 1)) @ pose[:3, :3].T + pose[:3, 3]
    heading = np.stack([np.cos(b[:, 6]), np.sin(b[:, 6]), np.zeros(len(b))], 1) @ pose[:3, :3].T
    return Boxes(centre, b[:, 3:6], np.arctan2(heading[:, 1], heading[:, 0]), tuple(labels))


def load(folder: str | Path) -> Frame:
    """Read and check a frame; nothing of it is used before all of it is sound.

    Raises FileNotFoundError for a missing folder or file, FrameError (a ValueError) for a broken image or a malformed
    calibration: missing key, wrong shape, numbers that are not finite, a matrix that is not invertible or not rigid.
    """
    folder = Path(folder)
    index = _read_index(folder)
    points, pose = np.zeros((0, 3), np.float32), np.eye(4)
    lidar = index.get("lidar")
    if lidar is not None:
        if not isinstance(lidar, dict):
            raise FrameError(f"lidar: expected an object, got {type(lidar).__name__}")
        points, pose = _lidar(folder, lidar)
    boxes = _boxes(index, pose)
    cameras = _cameras(folder, index)
    return Frame(folder.resolve().name, cameras, boxes, points, fit_ground(points) if len(points) else (0.0, 0.0, 0.0))


def encode(frame: Frame) -> dict[str, bytes]:
    """The files of a sample folder by name, images as PNG, the index last; the LiDAR frame is the ego frame."""
    from PIL import Image

    files: dict[str, bytes] = {}
    index: dict[str, Any] = {"source": frame.source, "cameras": {}}
    for camera in frame.cameras:
        name, stream = f"{camera.name.lower()}.png", io.BytesIO()
        Image.fromarray(camera.image).save(stream, "PNG", compress_level=1)
        files[name] = stream.getvalue()
        entry = {"file": name, "cam2img": camera.cam2img.tolist(), "cam2ego": camera.cam2ego.tolist()}
        index["cameras"][camera.name] = entry
    files["lidar_top.bin"] = frame.points[:, :3].astype("<f4").tobytes()
    index["lidar"] = {"file": "lidar_top.bin", "dtype": "float32", "columns": ["x", "y", "z"], "lidar2ego": np.eye(4).tolist()}
    index["categories"] = {name: k for k, name in enumerate(sorted(set(frame.boxes.label)))}
    b = frame.boxes
    index["boxes"] = [
        {"label": index["categories"][label], "box": [*c[:2], c[2] - s[2] / 2, *s, yaw]}
        for label, c, s, yaw in zip(b.label, b.centre.tolist(), b.size.tolist(), b.yaw.tolist(), strict=True)
    ]
    files[INDEX] = json.dumps(index, indent=1).encode()
    return files
