# SPDX-License-Identifier: Apache-2.0
"""The operators of this wheel as data: read by dispatch, tests, benchmarks, the matrix page and ``mu-space ops``."""

from __future__ import annotations

from muspace_core.spec import OpSpec, Status, Switch, Tolerance

_STORAGE = ("float32", "bfloat16", "float16")
_BACKENDS = {
    "cpu": Status("run", "x86-64, every commit"),
    "cuda": Status("run", "NVIDIA H200 (sm_90)"),
    "hip": Status("compiled", "gfx90a; the kernel text runs emulated at warp 64"),
    "musa": Status("stub-compiled", "mp_31 against stand-in headers; the kernel text runs emulated at warp 32 and 128"),
    "emu": Status("emulated", "SIMT emulation at warp 32, 64 and 128"),
}
#: fp64 is for checking gradients, which is done on cpu.
_DTYPES = {"cpu": (*_STORAGE, "float64"), **dict.fromkeys(("cuda", "hip", "musa", "emu"), _STORAGE)}
# Geometry and sums are fp32 for the three storage types, so the 16-bit figures are the rounding of inputs and result.
_TOLERANCES = {
    "float64": Tolerance(output=1e-12, grad=1e-11),
    "float32": Tolerance(output=2e-6, grad=1e-5),
    "bfloat16": Tolerance(output=4e-3, grad=6e-3),
    "float16": Tolerance(output=5e-4, grad=1e-3),
}
_POOL_DETERMINISM = "forward and backward bit-reproducible: every cell and every pixel adds its points in order"
_POOL_ROUTES = ("cached_plan", "sort")
_FUSED_DETERMINISM = (
    "forward bit-reproducible; backward bit-reproducible on cpu, elsewhere under torch.use_deterministic_algorithms "
    "(route ordered), otherwise gradients end in fp32 atomics"
)
_FUSED_BACKWARD_ROUTES = ("ordered", "block_sorted", "general")


def _pooling(
    name: str,
    summary: str,
    arguments: str,
    gradients: int,
    backward_routes: tuple[str, ...],
    models: tuple[str, ...],
    lineage: str,
    switches: tuple[Switch, ...] = (),
) -> OpSpec:
    """An operator that sums rows per cell; ``arguments`` are those of its schema before backend and determinism."""
    result = "Tensor" if gradients == 1 else "(Tensor, Tensor)"
    return OpSpec(
        family="bevpool",
        name=name,
        summary=summary,
        schema=f"({arguments}, str backend, bool deterministic) -> Tensor",
        backward_schema=f"(Tensor grad_output, {arguments}, str backend, bool deterministic) -> {result}",
        backends=_BACKENDS,
        dtypes=_DTYPES,
        tolerances=_TOLERANCES,
        determinism=_POOL_DETERMINISM,
        forward_routes=_POOL_ROUTES,
        backward_routes=backward_routes,
        models=models,
        lineage=lineage,
        switches=switches,
    )


BEV_POOL = _pooling(
    "bev_pool",
    "sum of the feature rows that fall into each cell of a bird's-eye-view grid",
    "Tensor feats, Tensor coords, Tensor keys, Tensor plan, SymInt B, SymInt D, SymInt H, SymInt W",
    1,
    ("gather",),
    ("BEVFusion", "MapTR", "VMA"),
    "LSS (Philion and Fidler, 2020); interface of BEVFusion",
)
BEV_POOL_V2 = _pooling(
    "bev_pool_v2",
    "depth-weighted sum of image features per bird's-eye-view cell, without the frustum of features",
    "Tensor depth, Tensor feat, Tensor ranks_depth, Tensor ranks_feat, Tensor ranks_bev, Tensor interval_starts, "
    "Tensor interval_lengths, Tensor keys, Tensor plan, Tensor row_plan, SymInt B, SymInt Dz, SymInt Dy, SymInt Dx, "
    "bool unique",
    2,
    ("unique", "accumulate", "per_point"),
    ("BEVDet", "FlashOcc", "BEVDet-Occ"),
    "BEVPoolv2 (Huang and Huang, 2022); interface of FlashOcc",
)
VOXEL_POOLING_TRAIN = _pooling(
    "voxel_pooling_train",
    "sum of frustum features per bird's-eye-view cell, the height only filters",
    "Tensor geom_xyz, Tensor input_features, Tensor keys, Tensor plan, SymInt X, SymInt Y, SymInt Z",
    1,
    ("gather",),
    ("BEVDepth", "BEVStereo"),
    "interface of BEVDepth (Li et al., 2022)",
)
VOXEL_POOLING_INFERENCE = _pooling(
    "voxel_pooling_inference",
    "depth-weighted sum of image features per bird's-eye-view cell, the height only filters",
    "Tensor geom_xyz, Tensor depth_features, Tensor context_features, Tensor keys, Tensor plan, SymInt B, SymInt X, SymInt Y, "
    "SymInt Z",
    2,
    ("frustum",),
    ("BEVDepth", "BEVStereo"),
    "interface of BEVDepth (Li et al., 2022)",
)
VOXEL_POOL_DEPTH = _pooling(
    "voxel_pool_depth",
    "depth-weighted sum of image features per voxel, for each camera or over all of them",
    "Tensor img_feats, Tensor img_depth, Tensor voxel_coords, Tensor mask, Tensor keys, Tensor plan, SymInt cameras, "
    "SymInt X, SymInt Y, SymInt Z, bool reduce_cams",
    2,
    ("frustum",),
    ("Qwen-Drive", "UniPAD", "UVTR"),
    "UVTR (Li et al., 2022), UniPAD (Yang et al., 2023); interface of Qwen-Drive",
    (
        Switch("MUSPACE_VOXEL_POOL_DEPTH_LAUNCH", "auto", "forward launch on devices: auto, linear, 2d or packed"),
        Switch("MUSPACE_VOXEL_POOL_DEPTH_DEPTH_WARP", "1", "depth gradient on devices: 1 a warp per point, 0 a thread"),
    ),
)

_FLASH_ARGUMENTS = (
    "Tensor image_feats, Tensor depth_params, Tensor projection_matrices, float[] image_size, float[] roi_range, "
    "SymInt[] grid_size, int depth_distribution, float epsilon, float depth_weight_threshold, str backend, bool deterministic"
)
FLASH_BEVPOOL = OpSpec(
    family="bevpool",
    name="flash_bevpool",
    summary="fused sampling view transform: every cell averages image features weighted by how likely its depth is",
    schema=f"({_FLASH_ARGUMENTS}) -> Tensor",
    backward_schema=f"(Tensor grad_output, {_FLASH_ARGUMENTS}) -> (Tensor, Tensor)",
    backends=_BACKENDS,
    dtypes=_DTYPES,
    # The projection is fp32 and the weight an exponential of it: 1e-5 is one ulp of a depth of 50 m at a scale of 0.5 m.
    tolerances=_TOLERANCES | {"float32": Tolerance(output=2e-5, grad=1e-4)},
    determinism=_FUSED_DETERMINISM,
    forward_routes=("fused",),
    backward_routes=_FUSED_BACKWARD_ROUTES,
    models=("FlashBEV",),
    lineage="interface of FlashBEV (yokosyun)",
)
_SCA_ARGUMENTS = (
    "Tensor image_feats, Tensor projection_matrices, Tensor sampling_offsets, Tensor attention_weights, "
    "SymInt[] level_sizes, float[] image_size, float[] roi_range, SymInt[] grid_size, float[] z_anchors, SymInt heads, "
    "SymInt points, float eps, bool average, str backend, bool deterministic"
)
FLASH_BEVPOOL_SCA = OpSpec(
    family="bevpool",
    name="flash_bevpool_sca",
    summary="spatial cross-attention of a bird's-eye-view grid in one kernel: project, mask, sample, weight, average",
    schema=f"({_SCA_ARGUMENTS}) -> Tensor",
    backward_schema=f"(Tensor grad_output, {_SCA_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    backends=_BACKENDS,
    dtypes=_DTYPES,
    tolerances=_TOLERANCES | {"float32": Tolerance(output=1e-5, grad=1e-4)},
    determinism=_FUSED_DETERMINISM,
    forward_routes=("fused",),
    backward_routes=_FUSED_BACKWARD_ROUTES,
    models=("BEVFormer", "UniAD", "Qwen-Drive"),
    lineage="BEVFormer (Li et al., 2022), spatial cross-attention",
)

SPECS = (
    BEV_POOL,
    BEV_POOL_V2,
    VOXEL_POOLING_TRAIN,
    VOXEL_POOLING_INFERENCE,
    VOXEL_POOL_DEPTH,
    FLASH_BEVPOOL,
    FLASH_BEVPOOL_SCA,
)
