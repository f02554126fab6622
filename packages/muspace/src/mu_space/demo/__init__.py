# SPDX-License-Identifier: Apache-2.0
"""`mu-space demo`: camera images fused into a bird's-eye view by an operator, `multi_scale_deformable_attn` by default.

>>> from mu_space import demo
>>> report = demo.run(out="street")                                  # doctest: +SKIP
>>> report["backend"], report["files"]["figure.png"]                 # doctest: +SKIP
('cpu', 'street/figure.png')

Importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .view_transform import NAMES as VIEW_TRANSFORMS, module as view_transform_module

EPILOG = """\
input:
  Without --sample a street scene is rendered (road markings, kerbs, cars, people, trees, buildings, six cameras, LiDAR);
  its ground is known, so the report measures the fused picture against it.
  --sample DIR reads a recorded frame: DIR/sample.json and the files that it names.
    {"cameras": {"CAM_FRONT": {"file": "cam_front.jpg", "cam2img": 3x3 pinhole matrix, "cam2ego": 4x4 rigid transform}, ...},
     "lidar": {"file": "lidar_top.bin", "dtype": "float32", "columns": ["x", "y", "z", ...], "lidar2ego": 4x4},
     "categories": {"car": 0, ...}, "boxes": [{"label": 0, "box": [x, y, z, dx, dy, dz, yaw]}, ...]}
  lidar, categories and boxes are optional. Ego frame: x forward, y left, z up, metres, road near z = 0.
  --write-sample DIR writes the generated street in this form.
view transform:
  msda           cells are projected into the images, multi_scale_deformable_attn samples them there
  bev_pool_v2    pixels are lifted by a distribution over bins of depth and summed per cell
  flash_bevpool  cells are projected into the images, samples count as far as mean and scale of the depth fit
  The latter two need the wheel muspace-bevpool and take the depth from LiDAR points, which the frame must have; the report
  says how far their road agrees with that of msda.
output:
  DIR/figure.png   inputs, views, table        DIR/road.png     the road plane alone, one pixel per cell
  DIR/pillars.png  what stands on the road     DIR/report.json  what --json prints
exit status: 0 done, 1 the result deviates from the reference, 2 wrong input
examples:
  mu-space demo --out street
  mu-space demo --view-transform flash_bevpool
  mu-space demo --write-sample frame
  mu-space demo --sample frame --out again --json
"""


FILES = ("figure.png", "road.png", "pillars.png", "report.json")
SAMPLE_FILES = ("sample.json", "lidar_top.bin")


class Unavailable(RuntimeError):
    """Something that the demo needs is not on this machine; the text is one sentence with the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's arguments to a command's parser."""
    parser.add_argument("--sample", metavar="DIR", help="folder of a recorded frame (default: a street that is rendered)")
    parser.add_argument(
        "--view-transform", choices=VIEW_TRANSFORMS, default=VIEW_TRANSFORMS[0], help="how images become a view (%(default)s)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda[:n], musa[:n]; auto takes the accelerator if there is one")
    parser.add_argument("--backend", default="auto", help="auto (default), native, cpu, cuda, hip, musa, emu or reference")
    parser.add_argument("--out", metavar="DIR", default="mu-space-demo", help="folder of the results (default: %(default)s)")
    parser.add_argument(
        "--range", dest="reach", type=float, default=25.0, metavar="M", help="half side of the view, 5..60 (25)"
    )
    parser.add_argument("--cell", type=float, metavar="M", help="side of a cell, 0.05..1 (0.1; bev_pool_v2: range / 100)")
    parser.add_argument("--write-sample", metavar="DIR", help="also write the generated street as a sample folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout, nothing else")
    parser.epilog = EPILOG


def _need_packages() -> None:
    extras = {"numpy": "numpy", "PIL": "pillow", "matplotlib": "matplotlib"}
    missing = [name for module, name in extras.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Unavailable(f"the demo needs {', '.join(missing)}: pip install 'muspace[demo]'")
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("the demo needs torch: install the build of your accelerator's vendor, or pip install torch")


def _device(name: str) -> str:
    """The torch device to use; raises Unavailable for one that this machine lacks."""
    import torch

    if importlib.util.find_spec("torch_musa"):  # registers the device
        importlib.import_module("torch_musa")

    def present(kind: str) -> bool:
        module = getattr(torch, kind, None)
        return module is not None and bool(module.is_available())

    if name == "auto":
        return next((kind for kind in ("musa", "cuda") if present(kind)), "cpu")
    try:
        kind, index = torch.device(name).type, torch.device(name).index or 0
    except RuntimeError:
        raise Unavailable(
            f"device {name!r} is unknown to torch {torch.__version__}:"
            " expected auto, cpu, cuda[:n], or musa[:n] with torch_musa"
        ) from None
    count = 1 if kind == "cpu" else getattr(torch, kind).device_count() if present(kind) else 0
    if index >= count:
        raise Unavailable(f"device {name} is not on this machine: torch {torch.__version__} sees {count} of kind {kind}")
    return name


def _check_backend(transform: str, backend: str, device: str) -> None:
    """Refuse a wheel or a named backend before any work is done for it; raises ValueError for an unknown name."""
    import torch

    from mu_space import families

    default, chosen = view_transform_module(VIEW_TRANSFORMS[0]), view_transform_module(transform)
    for module in dict.fromkeys((chosen, default)):  # the default one is what the others are compared with
        try:
            package = families.package(module.FAMILY)
        except ImportError as error:
            raise Unavailable(f"view transform {transform}: {error}") from None
        reason = (
            None if backend == "auto" else package.why_not(backend, torch.empty(0, device=device), operator=module.OPERATOR)
        )
        if reason:
            raise Unavailable(reason)


def _check_output(option: str, folder: Path, names: tuple[str, ...]) -> None:
    """Refuse a folder that could not be made or written, before there is anything to write."""
    for nearest in (folder, *folder.parents):
        try:
            nearest.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:  # a name that is too long
            raise OSError(f"{option} {folder}: {error.strerror}") from None
        break
    if not nearest.is_dir():
        raise NotADirectoryError(f"{option} {folder}: {nearest} exists and is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{option} {folder}: {nearest} is not writable")
    try:  # some file systems say only then that they take nothing, /proc among them
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".mu-space-"):
            pass
    except OSError as error:
        raise PermissionError(f"{option} {folder}: nothing can be made in {nearest}: {error.strerror}") from None
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{option} {folder / name} is a folder, expected a file or nothing")


def _check(reach: float, cell: float) -> None:
    if not 5 <= reach <= 60:
        raise ValueError(f"range: expected 5 to 60 metres, got {reach:g}")
    if not 0.05 <= cell <= 1:
        raise ValueError(f"cell: expected 0.05 to 1 metre, got {cell:g}")
    if (2 * reach / cell) ** 2 > 2.25e6:
        raise ValueError(f"cell: {cell:g} m over +-{reach:g} m gives more than 1500 x 1500 cells; take a larger cell")


def run(
    sample: str | Path | None = None,
    device: str = "auto",
    backend: str = "auto",
    out: str | Path = "mu-space-demo",
    reach: float = 25.0,
    cell: float | None = None,
    write_sample: str | Path | None = None,
    image_size: tuple[int, int] = (900, 1600),
    progress: Callable[[str], None] = lambda text: None,
    view_transform: str = VIEW_TRANSFORMS[0],
) -> dict[str, Any]:
    """Fuse one frame and write figure.png, road.png, pillars.png and report.json to `out`; returns the report.

    Args:
        sample: folder of a recorded frame; None renders a street (`image_size` = height, width of its cameras).
        device: torch device, or "auto". backend: as of the operator.
        reach, cell: the view covers +-reach metres around the vehicle with cells of `cell` metres; None takes the view
            transform's own.
        write_sample: folder to which the generated street is written in the format of a recorded frame.
        view_transform: one of VIEW_TRANSFORMS.

    Raises:
        FileNotFoundError, ValueError: the input cannot be used; nothing has been written.
        Unavailable, muspace_core.BackendUnavailable: a package, device or backend is missing; nothing has been written.
        fuse.DeviationError: the backend's result is not the reference's; nothing has been written.

    The report's keys are listed in `report.as_dict`.
    """
    out = Path(out)
    _check_output("--out", out, FILES)
    if write_sample is not None:
        _check_output("--write-sample", Path(write_sample), SAMPLE_FILES)
    if view_transform not in VIEW_TRANSFORMS:
        raise ValueError(f"view_transform: expected one of {', '.join(VIEW_TRANSFORMS)}; got {view_transform!r}")
    _need_packages()
    cell = view_transform_module(view_transform).default_cell(reach) if cell is None else cell
    _check(reach, cell)
    if sample is not None and write_sample is not None:
        raise ValueError("write_sample: only the generated street is written, not a frame that was read")
    from . import picture, pipeline, report, sample as samples, scene

    where = _device(device)
    _check_backend(view_transform, backend, where)
    if sample is not None:
        progress("reading the frame")
        frame = samples.load(sample)
    else:
        frame = scene.generate(image_size, progress=progress)
    result = pipeline.fuse_frame(frame, where, backend, reach, cell, progress, view_transform)
    progress("drawing")
    document = report.as_dict(frame, result, {name: str(out / name) for name in FILES})
    page = picture.figure(frame, result, report.rows(result), report.columns(result), "\n".join(report.sentences(result)))
    images = [page, picture.png(picture.image_of(result.ground)), picture.png(picture.image_of(result.pillars))]
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    report.write_all(out, dict(zip(FILES, [*images, text.encode()], strict=True)))
    if write_sample is not None:
        progress("writing the sample")
        report.write_all(Path(write_sample), samples.encode(frame))
    return document


class _Progress:
    """One line on stderr that is rewritten; silent when stderr is not a terminal."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self.shown:
            print(f"\r\x1b[K{text} …", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=sys.stderr)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print_table(document: dict[str, Any]) -> None:
    from mu_space.cli.text import table

    rows = [
        [c["name"], c["backend"], c["route"], c["device"], f"{c['ms']:.1f}", f"{c['deviation']:.1e}"] for c in document["calls"]
    ]
    table(document["source"], ["call", "backend", "route", "device", "ms", "deviation from the reference"], rows)
    agreement = document["agreement"]
    if agreement is not None and agreement["psnr"] is not None:
        print(
            f"road near LiDAR returns against that of {agreement['call']['operator']}: PSNR {agreement['psnr']:.1f} dB,"
            f" mean absolute difference {agreement['mean_absolute_difference']:.3f} over {agreement['cells']} cells"
        )
    if document["psnr"] is not None:
        print(
            f"visible road against the known ground: PSNR {document['psnr']:.1f} dB"
            f" ({document['psnr_near']:.1f} dB within 12 m), mean absolute error {document['mean_absolute_error']:.3f}"
        )
    print(f"picture: {document['files']['figure.png']}")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 done, 1 the result deviates from the reference, 2 wrong input (one sentence on stderr)."""
    progress = _Progress()
    try:
        _need_packages()
        from muspace_core import BackendUnavailable

        from .fuse import DeviationError
    except (Unavailable, ImportError) as error:
        print(f"mu-space demo: {error}", file=sys.stderr)
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *rest: progress.say(f"mu-space demo: {message}")
            document = run(
                args.sample, args.device, args.backend, args.out, args.reach, args.cell, args.write_sample,
                progress=progress, view_transform=args.view_transform,
            )  # fmt: skip
    except (ValueError, OSError, Unavailable, BackendUnavailable) as error:
        progress.say(f"mu-space demo: {error}")
        return 2
    except DeviationError as error:
        progress.say(f"mu-space demo: {error}")
        return 1
    progress.clear()
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        _print_table(document)
        if args.write_sample is not None:
            print(f"sample: {args.write_sample}")
    return 0
