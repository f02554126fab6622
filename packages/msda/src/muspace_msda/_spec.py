# SPDX-License-Identifier: Apache-2.0
"""The operators of this wheel as data: read by dispatch, tests, benchmarks, the matrix page and ``mu-space ops``."""

from __future__ import annotations

from muspace_core.spec import OpSpec, Status, Tolerance

_STORAGE = ("float32", "bfloat16", "float16")

MULTI_SCALE_DEFORMABLE_ATTN = OpSpec(
    family="msda",
    name="multi_scale_deformable_attn",
    summary="weighted sum of bilinear samples of a feature pyramid, one set of points per query and head",
    schema=(
        "(Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor sampling_locations, "
        "Tensor attention_weights, str backend, bool deterministic) -> Tensor"
    ),
    backward_schema=(
        "(Tensor grad_output, Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor sampling_locations, "
        "Tensor attention_weights, str backend, bool deterministic) -> (Tensor, Tensor, Tensor)"
    ),
    backends={
        "cpu": Status("run", "x86-64, every commit"),
        "cuda": Status("run", "NVIDIA H200 (sm_90)"),
        "hip": Status("compiled", "gfx90a; the kernel text runs emulated at warp 64"),
        "musa": Status("stub-compiled", "mp_31 against stand-in headers; the kernel text runs emulated at warp 32 and 128"),
        "emu": Status("emulated", "SIMT emulation at warp 32, 64 and 128"),
    },
    dtypes={
        "cpu": (*_STORAGE, "float64"),
        "cuda": (*_STORAGE, "float64"),
        "hip": (*_STORAGE, "float64"),
        "musa": _STORAGE,
        "emu": (*_STORAGE, "float64"),
    },
    # Geometry and sums are fp32 for the three storage types, so the 16-bit figures are the rounding of inputs and result.
    # One rounding to bfloat16 alone is 2**-8 = 3.9e-3 of a result just above a power of two.
    tolerances={
        "float64": Tolerance(output=1e-12, grad=1e-11),
        "float32": Tolerance(output=2e-6, grad=1e-5),
        "bfloat16": Tolerance(output=4e-3, grad=6e-3),
        "float16": Tolerance(output=5e-4, grad=1e-3),
    },
    determinism=(
        "forward bit-reproducible; backward bit-reproducible on cpu, elsewhere under torch.use_deterministic_algorithms "
        "(route ordered), otherwise the value gradient ends in fp32 atomics"
    ),
    forward_routes=("native", "fused", "general"),
    backward_routes=("ordered", "block_sorted", "general"),
    models=("BEVFormer", "UniAD", "Deformable-DETR", "Qwen-Drive"),
    lineage="Deformable DETR (Zhu et al., 2021); interface of mmcv",
)

DEFORMABLE_AGGREGATION = OpSpec(
    family="msda",
    name="deformable_aggregation",
    summary="weighted sum of bilinear samples of several cameras' feature pyramids at the projected points of each anchor",
    schema=(
        "(Tensor mc_ms_feat, Tensor spatial_shape, Tensor scale_start_index, Tensor sampling_location, "
        "Tensor weights, str backend, bool deterministic) -> Tensor"
    ),
    backward_schema=(
        "(Tensor grad_output, Tensor mc_ms_feat, Tensor spatial_shape, Tensor scale_start_index, Tensor sampling_location, "
        "Tensor weights, str backend, bool deterministic) -> (Tensor, Tensor, Tensor)"
    ),
    backends=MULTI_SCALE_DEFORMABLE_ATTN.backends,
    # fp64 is for checking gradients, which is done on cpu.
    dtypes={"cpu": (*_STORAGE, "float64"), **dict.fromkeys(("cuda", "hip", "musa", "emu"), _STORAGE)},
    tolerances={**MULTI_SCALE_DEFORMABLE_ATTN.tolerances, "float32": Tolerance(output=3e-6, grad=2e-5)},
    determinism=(
        "forward bit-reproducible; backward bit-reproducible on cpu, elsewhere under torch.use_deterministic_algorithms "
        "(route ordered), otherwise the feature gradient ends in fp32 atomics"
    ),
    forward_routes=("native", "fused", "general"),
    backward_routes=("ordered", "block_sorted", "general"),
    models=("SparseDrive", "Sparse4D"),
    lineage="Sparse4D v2 (Lin et al., 2023)",
)

SPECS = (MULTI_SCALE_DEFORMABLE_ATTN, DEFORMABLE_AGGREGATION)
