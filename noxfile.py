# SPDX-License-Identifier: Apache-2.0
"""Every task of the repository.  ``./dev`` makes the environment and forwards here; ``./dev`` alone lists the tasks.

Sessions run in the environment of ``./dev`` (no environment per session: torch is large, and one install serves all).
``test`` runs everything that needs no GPU, part by part; a part whose compiler is absent skips and says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ROOT / "packages"
FAMILIES = sorted(folder.parent.name for folder in PACKAGES.glob("*/CMakeLists.txt"))
GROUPS = nox.project.load_toml("pyproject.toml")
BUILD = ROOT / "build"

nox.options.default_venv_backend = "none"
nox.options.sessions = ["test"]
nox.options.error_on_missing_interpreters = True

#: Argument with which ``test`` asks a compiler session for one target instead of all.
ONE_TARGET = "--one-target"

_done: set[str] = set()


def python(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Runs the interpreter of this environment, errors and all."""
    session.run(sys.executable, *arguments, env=env, external=True)


def pip(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """``pip install`` into this environment, once a process for the same arguments."""
    key = f"{arguments}{sorted((env or {}).items())}"
    if key not in _done:
        python(session, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments, env=env)
        _done.add(key)


def group(session: nox.Session, name: str) -> None:
    """Installs a dependency group of the root pyproject.toml."""
    pip(session, *nox.project.dependency_groups(GROUPS, name))


def gpu_visible() -> bool:
    """Whether an NVIDIA driver answers and its compiler is here."""
    if not (shutil.which("nvidia-smi") and shutil.which("nvcc")):
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def develop(session: nox.Session, backends: str) -> None:
    """Editable installs of every package, with the native libraries of ``backends`` (a semicolon list)."""
    group(session, "dev")
    editable = ["--no-build-isolation", "--no-deps", "--editable"]
    pip(session, *editable, str(PACKAGES / "core"))
    for family in FAMILIES:
        env = {"MUSPACE_BACKENDS": os.environ.get("MUSPACE_BACKENDS", backends)}
        pip(session, *editable, str(PACKAGES / family), env=env)
    pip(session, *editable, str(PACKAGES / "muspace"))


def development_backends() -> str:
    """Backends of the test environment: the cpu library, the emulation, and cuda where it can run."""
    return "cpu;emu;cuda" if gpu_visible() else "cpu;emu"


def cmake(session: nox.Session, family: str, name: str, backends: str, *options: str) -> Path:
    """Configures and builds ``packages/<family>`` in ``build/<family>-<name>``; returns that folder."""
    group(session, "build")
    folder = BUILD / f"{family}-{name}"
    configure = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DMUSPACE_BACKENDS={backends}",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    tool = shutil.which("cmake") or "cmake"
    session.run(tool, "-S", str(PACKAGES / family), "-B", str(folder), "-G", "Ninja", *configure, *options, external=True)
    session.run(tool, "--build", str(folder), "--parallel", str(os.cpu_count() or 2), external=True)
    return folder


#: pytest with a process for every core, as far as memory goes: each holds torch, under a sanitizer twice over.
PYTEST = ("-m", "pytest", "-q", "--numprocesses", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal")


def pytest(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """pytest from the root, with the arguments after ``--`` appended; a selection may leave a package without tests."""
    nothing_selected = [5] if session.posargs else []
    command = [sys.executable, *PYTEST, *arguments, *session.posargs]
    session.run(*command, env=env, external=True, success_codes=[0, *nothing_selected])


@nox.session
def demo(session: nox.Session) -> None:
    """Builds what this machine runs and makes the bird's-eye view of a street scene."""
    develop(session, "cpu;cuda" if gpu_visible() else "cpu")
    python(session, "-m", "mu_space", "demo", *session.posargs)


@nox.session
@nox.parametrize("family", ["core", *FAMILIES, "muspace"], ids=["core", *FAMILIES, "muspace"])
def test(session: nox.Session, family: str) -> None:
    """Everything that needs no GPU, for one family or all: cpu tests, then emulation, sanitizers, compilers, packaging."""
    if family not in FAMILIES:
        cpu(session, family)
        if family == "core":
            session.notify("lint")
            session.notify("types")
        return
    cpu(session, family)
    for part in ("emu", "sanitize", "stub_musa", "fake_device"):
        session.notify(f"{part}({family})")
    session.notify("packaging")
    for part in ("cuda", "hip"):
        session.notify(f"{part}({family})", posargs=[ONE_TARGET])


def cpu(session: nox.Session, package: str) -> None:
    """Tests of one package on the cpu backend."""
    start = time.monotonic()
    develop(session, development_backends())
    session.log(f"set-up and build: {time.monotonic() - start:.0f} s")
    pytest(session, str(PACKAGES / package / "tests"))
    sources = PACKAGES / package / "src"
    if package in FAMILIES:
        pytest(session, str(PACKAGES / package / "tests"), "--backend=reference")
        python(session, "-m", "pytest", "-q", "--doctest-modules", "--import-mode=importlib", str(sources))


by_family = nox.parametrize("family", FAMILIES, ids=FAMILIES)


@nox.session
@by_family
def emu(session: nox.Session, family: str) -> None:
    """The contract on the SIMT emulation at warp 32, and its warp-sensitive part at 64 and 128."""
    develop(session, development_backends())
    tests = str(PACKAGES / family / "tests")
    pytest(session, tests, "--backend=emu", env={"MUSPACE_EMU_WARP": "32"})
    for warp in ("64", "128"):
        pytest(session, tests, "--backend=emu", "-m", "warp_sensitive", env={"MUSPACE_EMU_WARP": warp})


@nox.session
@by_family
def cuda(session: nox.Session, family: str) -> None:
    """Compiles the CUDA library (MUSPACE_CUDA_ARCHS) and opens it; with a GPU, runs the tests on it."""
    if not shutil.which("nvcc"):
        session.skip("nvcc is not on PATH")
    archs = os.environ.get("MUSPACE_CUDA_ARCHS", "90-real" if ONE_TARGET in session.posargs else "80-real;90")
    folder = cmake(session, family, "cuda", "cuda", f"-DMUSPACE_CUDA_ARCHS={archs}")
    opens(session, family, "cuda", folder)
    if gpu_visible():
        python(session, "-m", "pytest", "-q", str(PACKAGES / family / "tests"), "--backend=cuda")


@nox.session
@by_family
def hip(session: nox.Session, family: str) -> None:
    """Compiles the HIP library (MUSPACE_HIP_ARCHS) and opens it."""
    roots = [os.environ.get("ROCM_PATH", ""), "/opt/dtk", "/opt/rocm"]
    if not shutil.which("hipcc") and not any(root and Path(root, "bin/hipcc").exists() for root in roots):
        session.skip("hipcc is not in ROCM_PATH, /opt/dtk, /opt/rocm or on PATH")
    archs = os.environ.get("MUSPACE_HIP_ARCHS", "gfx90a" if ONE_TARGET in session.posargs else "gfx906;gfx90a")
    folder = cmake(session, family, "hip", "hip", f"-DMUSPACE_HIP_ARCHS={archs}")
    opens(session, family, "hip", folder)


def opens(session: nox.Session, family: str, backend: str, folder: Path) -> None:
    """Loads a library that was just built, which needs no device, and prints what it says of itself."""
    code = (
        f"from muspace_core.loader import NativeLibrary; lib = NativeLibrary('muspace_{family}', '{family}'); "
        f"print(lib.abi_info('{backend}'))"
    )
    develop(session, development_backends())
    python(session, "-c", code, env={"MUSPACE_LIBRARY_PATH": str(folder)})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, and the rules of the tree that no linter knows."""
    group(session, "lint")
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")
    python(session, "tools/check_tree.py")


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the sources of every package."""
    develop(session, development_backends())
    names = ["muspace_core", *(f"muspace_{family}" for family in FAMILIES), "mu_space"]
    sources = {"MYPYPATH": os.pathsep.join(map(str, sorted(PACKAGES.glob("*/src"))))}
    python(session, "-m", "mypy", *(argument for name in names for argument in ("-p", name)), env=sources)


def plain_cmake(session: nox.Session, source: str, folder: Path, *options: str) -> None:
    """Configures and builds a folder that is not a package."""
    tool = shutil.which("cmake") or "cmake"
    session.run(tool, "-S", str(ROOT / source), "-B", str(folder), "-G", "Ninja", *options, external=True)
    session.run(tool, "--build", str(folder), external=True)


def header_checks(session: nox.Session, sanitizer: str) -> None:
    """Tests of the shared headers outside any package, under a sanitizer (address or thread)."""
    folder = BUILD / f"checks-{sanitizer}"
    plain_cmake(session, "tools/native/checks", folder, f"-DMUSPACE_SANITIZE={sanitizer}")
    session.run("ctest", "--test-dir", str(folder), "--output-on-failure", "--quiet", external=True)


def sanitized(session: nox.Session, kind: str, folder: Path, *arguments: str, success_codes: list[int] | None = None) -> None:
    """Runs the interpreter with a sanitizer's runtime loaded and the libraries of ``folder``."""
    command = [str(ROOT / "tools/native/sanitized"), kind, sys.executable, *arguments]
    env = {"MUSPACE_LIBRARY_PATH": str(folder)}
    session.run(*command, env=env, external=True, success_codes=success_codes or [0])


#: What reaches the kernels with shapes and numbers of its own; the rest asks torch, and takes minutes under a sanitizer.
KERNEL_TESTS = " or ".join(
    ("oracle", "golden", "hostile", "values", "properties", "native", "limits", "grad", "empty", "plan", "odd_addresses")
)


@nox.session
@by_family
def sanitize(session: nox.Session, family: str) -> None:
    """The kernels under ASan and UBSan on emu and cpu, a planted fault that must be reported, the thread pool under TSan."""
    develop(session, development_backends())
    header_checks(session, "address")
    header_checks(session, "thread")
    tests = [*PYTEST, "-p", "no:faulthandler", str(PACKAGES / family / "tests")]
    folder = cmake(session, family, "address", "cpu;emu", "-DMUSPACE_SANITIZE=address")
    sanitized(session, "address", folder, *tests, "--backend=emu", "-k", KERNEL_TESTS)
    sanitized(session, "address", folder, *tests, "--backend=cpu", "-k", KERNEL_TESTS)
    library = folder / f"lib{family}_emu.so"
    probe = f"import tvm_ffi; tvm_ffi.load_module({str(library)!r})['sanitizer_probe'](8)"
    sanitized(session, "address", folder, "-c", probe, success_codes=[1])
    session.log("the planted out-of-bounds read above was reported, as it must be")
    folder = cmake(session, family, "thread", "cpu", "-DMUSPACE_SANITIZE=thread")
    sanitized(session, "thread", folder, *tests, "-k", "thread or test_native")


@nox.session
@by_family
def stub_musa(session: nox.Session, family: str) -> None:
    """The MUSA branch of the build through a stand-in mcc: clang against headers that hold only names seen in public."""
    if not shutil.which(os.environ.get("CLANG", "clang")):
        session.skip("clang is not on PATH")
    group(session, "build")
    home = BUILD / "fake_musa_home"
    plain_cmake(session, "tools/native/fake_musa_home", home)
    python(session, "tools/native/stub_musa/check.py", str(home))
    cmake(session, family, "stub-musa", "musa", f"-DMUSA_HOME={home}")


@nox.session
@by_family
def fake_device(session: nox.Session, family: str) -> None:
    """A PrivateUse1 device renamed musa on host memory runs the operators end to end, strict mode on."""
    develop(session, development_backends())
    folder = cmake(session, family, "alias", "emu", "-DMUSPACE_EMU_ALIAS=musa")
    plugin = str(ROOT / "tools/native/fake_device")
    env = {"MUSPACE_LIBRARY_PATH": str(folder), "MUSPACE_STRICT_PATCH": "1", "PYTHONPATH": plugin}
    operators = ["-p", "fake_device", "--backend=musa", "-k", "test_matches_the_oracle"]
    python(session, *PYTEST, *operators, str(PACKAGES / family / "tests"), env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks of every family on this machine, each row with its correctness check, into benchmarks/results/."""
    develop(session, "cpu;cuda" if gpu_visible() else "cpu")
    python(session, "benchmarks/run.py", *session.posargs)


def build_wheels(session: nox.Session, out: Path, backends: str | None) -> None:
    """sdist and wheel of every package, each wheel built from its sdist outside the repository, in isolation.

    The oldest tvm-ffi of the range builds them: a library built with it runs on every newer one.
    """
    group(session, "build")
    shutil.rmtree(out, ignore_errors=True)
    env = {"PIP_CONSTRAINT": str(ROOT / "constraints/release.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if backends is not None:
        env["MUSPACE_BACKENDS"] = backends
    for package in ("core", *FAMILIES, "muspace"):
        python(session, "-m", "build", "--outdir", str(out), str(PACKAGES / package), env=env)
    python(session, "tools/check_wheel.py", *map(str, sorted(out.glob("*.whl"))))


@nox.session
def wheels(session: nox.Session) -> None:
    """Release wheels and sdists into dist/: cpu plus every toolchain found, or what MUSPACE_BACKENDS names."""
    build_wheels(session, ROOT / "dist", os.environ.get("MUSPACE_BACKENDS"))


@nox.session
def packaging(session: nox.Session) -> None:
    """sdist -> wheel, wheel checks, and the installed wheels doing the main job in a fresh environment (cpu only)."""
    out = BUILD / "packaging"
    build_wheels(session, out, "cpu")
    # torch is large, so the fresh environment sees this one's packages behind its own; editable installs stay invisible.
    fresh = BUILD / "fresh"
    python(session, "-m", "venv", "--clear", str(fresh))
    interpreter = str(fresh / "bin/python")
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    session.run(interpreter, *quiet, "numpy", "matplotlib", "pillow", "rich", external=True)
    session.run(interpreter, *quiet, *map(str, sorted(out.glob("*.whl"))), external=True)
    code = "import site, torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)"
    packages = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    target = next(fresh.glob("lib/python*/site-packages"))
    (target / "borrowed_torch.pth").write_text(f"import sys; sys.path.append({packages!r})\n")
    with session.chdir(session.create_tmp()):
        env = {"MUSPACE_STRICT_PATCH": "1"}
        session.run(interpreter, "-m", "mu_space", "ops", external=True, env=env)
        session.run(interpreter, "-m", "mu_space", "demo", "--json", external=True, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """The site, strictly, into site/; operator pages, matrix and benchmark page come from the code."""
    group(session, "docs")
    python(session, "-m", "mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
