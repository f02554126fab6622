# SPDX-License-Identifier: Apache-2.0
"""Shows that the allow-list stub refuses what MUSA is not known to have: each snippet is a mistake that must not compile.

``python tools/native/stub_musa/check.py MUSA_HOME`` with the home built from ``tools/native/fake_musa_home``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PROLOGUE = "#include <musa_runtime.h>\n#include <musa_fp16.h>\n#include <musa_bf16.h>\nint host_only(int);\n"
GOOD = "__global__ void k(float* p) { atomicAdd(p, __shfl_xor_sync(0xffffffffu, p[threadIdx.x], 1)); }\n" + (
    "void launch(float* p, musaStream_t s) { k<<<dim3(1), dim3(32), 0, s>>>(p); }\n"
)
MISTAKES = {
    "cuda stream type": "cudaStream_t stream;",
    "cuda bfloat16 type": "__nv_bfloat16 value;",
    "cuda runtime call": "void f() { cudaDeviceSynchronize(); }",
    "ballot": "__global__ void k(unsigned* p) { *p = __ballot_sync(0xffffffffu, *p != 0); }",
    "integer atomic maximum": "__global__ void k(int* p) { atomicMax(p, 1); }",
    "half atomic": "__global__ void k(__half* p, __half v) { atomicAdd(p, v); }",
    "streaming store": "__global__ void k(float* p) { __stcs(p, 1.f); }",
    "larger dynamic shared memory": "void f() { musaFuncSetAttribute(nullptr, 8, 1 << 16); }",
    "second argument of launch bounds": "__global__ void __launch_bounds__(128, 2) k() {}",
    "host function in a kernel": "__global__ void k(int* p) { *p = host_only(1); }",
    "kernel that returns a value": "__global__ int k() { return 1; }",
    "wrong arguments of a launch": "__global__ void k(int) {} void f(int* p) { k<<<1, 1>>>(p); }",
}


def compiles(mcc: Path, text: str) -> tuple[bool, str]:
    """Whether the stand-in compiler takes a unit, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, "unit.mu")
        unit.write_text(PROLOGUE + text + "\n")
        command = [
            mcc,
            "-x",
            "musa",
            "-std=c++17",
            "-O1",
            "-fPIC",
            "--offload-arch=mp_31",
            "-c",
            unit,
            "-o",
            f"{unit}.o",
        ]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stderr


def main() -> int:
    """Compile the good unit and every mistake; the number of surprises is the exit status."""
    mcc = Path(sys.argv[1], "bin", "mcc")
    good, text = compiles(mcc, GOOD)
    surprises = [] if good else [f"a unit of listed names does not compile:\n{text}"]
    surprises += [f"accepted: {name}" for name, snippet in MISTAKES.items() if compiles(mcc, snippet)[0]]
    print("\n".join(surprises) or f"{len(MISTAKES)} mistakes refused")
    return len(surprises)


if __name__ == "__main__":
    sys.exit(main())
