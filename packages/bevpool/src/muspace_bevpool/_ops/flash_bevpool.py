# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool: checks in the caller's words."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from muspace_core import checks, environment

from muspace_bevpool import _autograd, _host, _reference

_DISPATCHER = _autograd.DISPATCHERS["flash_bevpool"]
Numbers = torch.Tensor | Sequence[float]
#: Of a grid, heights included: what the device kernels count.
MOST_CELLS = 1 << 28


def flash_bevpool(
    image_feats: torch.Tensor,
    depth_params: torch.Tensor,
    projection_matrices: torch.Tensor,
    feature_size: Any,
    image_size: Numbers,
    roi_range: Numbers,
    grid_size: Numbers,
    depth_distribution: int = 0,
    use_shared_memory: bool = True,
    optimize_z_precompute: bool = True,
    use_warp_kernel: bool = False,
    use_vectorized_load: bool = False,
    epsilon: float = 1e-6,
    depth_weight_threshold: float = 1e-6,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    r"""FlashBEV's fused view transform: every cell samples the images it projects into and trusts them as far as depth agrees.

    For every camera and height the cell centre is projected to ``(u, v, d)``; where ``d > 0`` and the pixel lies on the map
    (``0 <= u < W``, ``0 <= v < H``, pixel centres on integers, far corner clamped), mean ``mu``, scale and features
    ``F`` are interpolated. With ``s = scale + epsilon`` and ``z = (d - mu) / s``:

    .. math:: w = e^{-z^2/2} / s \quad\text{or}\quad w = e^{-|z|} / (2 s), \qquad
              out = \frac{1}{count} \sum_{w \geq threshold} w\, F

    ``count`` is the number of samples kept (not the sum of the weights). Geometry and sums are fp32 for 16-bit and fp32
    features, fp64 for fp64.

    Args:
        image_feats: ``[B, N, H, W, C]``; float32, bfloat16, float16, or float64 (cpu). Decides the dtype of the result.
        depth_params: ``[B, N, H, W, 2]`` (mean, scale) in metres, its own dtype.
        projection_matrices: ``[B, N, 3, 4]`` or ``[B, N, 4, 4]`` (the top three rows count), ego frame to image pixels.
        feature_size: ``[B, N, 2]`` or ``(h, w)``, must equal (H, W); ``None`` takes them from the features. A tensor in device
            memory is looked at only under ``MUSPACE_CHECK=1``.
        image_size: ``(h, w)`` of the images that the projections map to.
        roi_range: ``(x_min, x_max, y_min, y_max, z_min, z_max)`` in metres.
        grid_size: ``(X, Y, Z)``. Sizes in device memory are read once per tensor, which waits for the device.
        depth_distribution: 0 Gaussian, 1 Laplace.
        use_shared_memory, optimize_z_precompute, use_warp_kernel, use_vectorized_load: accepted for compatibility, ignored.
        epsilon: added to the scale and least divisor of the projection.
        depth_weight_threshold: samples of a smaller weight are dropped; so are those of a weight that is not finite.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, Y, X, C]``. Differentiable once in ``image_feats`` and ``depth_params`` (count and threshold are constants;
        upstream's depth gradient is not a derivative); the geometry receives no gradient.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size, device or number.
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: the forward is bit-reproducible. The backward is on cpu; on a GPU gradients end in fp32 atomics unless
    ``torch.use_deterministic_algorithms(True)`` held when the forward ran.

    Example:
        >>> import torch
        >>> from muspace_bevpool import flash_bevpool
        >>> camera = torch.tensor([[[[8.0, -8.0, 0.0, 0.0], [8.0, 0.0, -8.0, 0.0], [1.0, 0.0, 0.0, 0.0]]]])  # looks along x
        >>> feats, depth = torch.ones(1, 1, 4, 4, 3), torch.tensor([6.0, 2.0]).expand(1, 1, 4, 4, 2)
        >>> flash_bevpool(feats, depth, camera, None, (16, 16), (0, 10, -5, 5, -1, 1), (10, 10, 2)).shape
        torch.Size([1, 10, 10, 3])
    """
    checks.tensors(image_feats=image_feats, depth_params=depth_params, projection_matrices=projection_matrices)
    checks.rank("image_feats", image_feats, "B N H W C")
    checks.storage("image_feats", image_feats)
    batch, cameras, height, width, _ = image_feats.shape
    checks.rank("depth_params", depth_params, "B N H W 2")
    checks.shape("depth_params", depth_params, "B N H W 2", (batch, cameras, height, width, 2))
    checks.companion("depth_params", depth_params, "image_feats", image_feats)
    projections = projection_rows(projection_matrices, image_feats, batch, cameras)
    _check_feature_size(feature_size, batch, cameras, height, width)
    image, roi, grid = image_extent(image_size), bounds(roi_range, 6), cell_counts(grid_size, 3)
    distribution, epsilon, threshold = _parameters(depth_distribution, epsilon, depth_weight_threshold)
    tensors = (image_feats, depth_params, projections)
    scalars: tuple[Any, ...] = (image, roi, grid, distribution, epsilon, threshold)
    return _DISPATCHER.run(
        backend,
        image_feats,
        _autograd.flash_bevpool,
        _reference.flash_bevpool,
        (*tensors, *scalars),
        (image_feats.shape, grid, image_feats.dtype),
    )


def image_extent(image_size: Numbers) -> tuple[float, ...]:
    """(h, w) of the images."""
    image = _host.reals("image_size", image_size, 2)
    if min(image) <= 0:
        raise checks.fail("image_size", "positive (h, w)", list(image))
    return image


def bounds(roi_range: Numbers, *counts: int) -> tuple[float, ...]:
    """(low, high) of every axis in turn; ``counts`` are the lengths that will do."""
    roi = _host.reals("roi_range", roi_range, *counts)
    for axis in range(0, len(roi), 2):
        if not roi[axis] < roi[axis + 1]:
            raise checks.fail("roi_range", "low < high on every axis", list(roi))
    return roi


def cell_counts(grid_size: Numbers, *counts: int) -> tuple[int, ...]:
    """Cells along every axis; ``counts`` are the lengths that will do."""
    grid = _host.sizes("grid_size", grid_size, *counts)
    if math.prod(grid) > MOST_CELLS:
        raise checks.fail("grid_size", f"at most {MOST_CELLS} cells", list(grid))
    return grid


def projection_rows(projections: torch.Tensor, image_feats: torch.Tensor, batch: int, cameras: int) -> torch.Tensor:
    """The top three rows ``[B, N, 3, 4]`` in fp32 (fp64 for fp64 features), without a gradient."""
    shape = projections.shape
    if shape != (batch, cameras, 3, 4) and shape != (batch, cameras, 4, 4):
        expected = f"shape [B, N, 3 or 4, 4] with B = {batch}, N = {cameras}"
        raise checks.fail("projection_matrices", expected, list(projections.shape))
    checks.storage("projection_matrices", projections)
    checks.same_device("projection_matrices", projections, "image_feats", image_feats.device)
    kind = checks.sum_dtype(image_feats.dtype)
    if projections.dtype is kind and shape[2] == 3 and not projections.requires_grad:
        return projections
    checks.plain_memory("projection_matrices", projections)  # torch would crash on converting none
    return projections.detach()[:, :, :3].to(kind)


def _parameters(distribution: Any, epsilon: Any, threshold: Any) -> tuple[int, float, float]:
    ordinary = type(distribution) is int or (isinstance(distribution, numbers.Integral) and not isinstance(distribution, bool))
    if not ordinary or distribution not in (0, 1):
        raise checks.fail("depth_distribution", "0 (Gaussian) or 1 (Laplace)", repr(distribution))
    return int(distribution), positive("epsilon", epsilon, 0), positive("depth_weight_threshold", threshold, 0)


def positive(argument: str, value: Any, least: float) -> float:
    """A finite number of at least ``least``."""
    if type(value) is float and least <= value < math.inf:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{argument}: expected a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not least <= number < math.inf:  # comparisons can be traced, isfinite cannot
        raise checks.fail(argument, f"a finite number of at least {least}", value)
    return number


def _check_feature_size(given: Any, batch: int, cameras: int, height: int, width: int) -> None:
    if given is None or (isinstance(given, torch.Tensor) and not given.is_cpu and not environment.CHECK.enabled()):
        if isinstance(given, torch.Tensor):
            checks.plain_memory("feature_size", given)
        return
    expected = f"(h, w) = ({height}, {width}) of image_feats for every camera"
    if isinstance(given, torch.Tensor):
        checks.layout(feature_size=given)
        checks.plain_memory("feature_size", given)
    elif isinstance(given, (tuple, list)) and len(given) == 2 and type(given[0]) is type(given[1]) is int:
        if tuple(given) != (height, width):  # compared here, plain numbers can be traced
            raise checks.fail("feature_size", expected, list(given))
        return
    try:
        rows = torch.as_tensor(given, device=None if isinstance(given, torch.Tensor) else "cpu").detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"feature_size: expected a tensor or numbers (h, w), got {given!r}") from None
    if rows.shape not in ((2,), (batch, cameras, 2)):
        raise checks.fail("feature_size", f"shape [2] or [B, N, 2] = [{batch}, {cameras}, 2]", list(rows.shape))
    if rows.numel() and not bool((rows == torch.tensor([height, width], device="cpu")).all()):
        raise checks.fail("feature_size", expected, rows.tolist())
