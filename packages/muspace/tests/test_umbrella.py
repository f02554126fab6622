# SPDX-License-Identifier: Apache-2.0
"""The umbrella: cheap to import, the very objects of the wheels, and one sentence for what is not there."""

from __future__ import annotations

import subprocess
import sys

import mu_space
import muspace_core
import pytest
from mu_space import families, ops

FAMILIES = sorted(families.installed())


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_quick_and_brings_in_no_torch() -> None:
    code = (
        "import sys, time; begin = time.process_time(); import mu_space, mu_space.ops; took = time.process_time() - begin\n"
        "heavy = {'torch', 'numpy', 'tvm_ffi', 'rich', 'muspace_core', 'muspace_msda'} & set(sys.modules)\n"
        "print(took, ' '.join(sorted(heavy)))"
    )
    runs = [_python(code).split(" ", 1) for _ in range(3)]
    assert {"".join(rest) for _, *rest in runs} <= {""}
    # Processor time, best of three: a busy machine must not fail this.
    assert min(float(took) for took, *_ in runs) < 0.05


def test_import_of_the_package_alone_loads_nothing_of_its_own() -> None:
    loaded = _python("import sys, mu_space; print(sorted(name for name in sys.modules if name.startswith('mu')))")
    assert loaded == "['mu_space']"


def test_msda_is_installed() -> None:
    assert "msda" in FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_the_very_objects_of_the_wheel(family: str) -> None:
    package = families.package(family)
    assert families.exports(family)
    for name in families.exports(family):
        assert getattr(ops, name) is getattr(package, name)
        assert getattr(mu_space, name) is getattr(package, name)
    for spec in families.specs(family):
        assert spec.name in families.exports(family) and spec.wheel == f"muspace-{family}"


@pytest.mark.parametrize("family", sorted(families.KNOWN))
def test_table_of_known_names_is_what_the_wheel_exports(family: str) -> None:
    assert set(families.KNOWN[family].all) == set(families.exports(family))
    assert families.KNOWN[family].operators == tuple(spec.name for spec in families.specs(family))


def test_dispatch_report_is_the_one_of_core() -> None:
    assert mu_space.get_last_dispatch_report is muspace_core.get_last_dispatch_report


def test_from_import_and_dir() -> None:
    from mu_space import multi_scale_deformable_attn
    from mu_space.ops import multi_scale_deformable_attn as same

    assert same is multi_scale_deformable_attn
    assert "multi_scale_deformable_attn" in dir(mu_space) and "multi_scale_deformable_attn" in dir(ops)
    assert "get_last_dispatch_report" in dir(mu_space) and mu_space.compatibility.PROFILES


@pytest.mark.parametrize("module", ["mu_space", "mu_space.ops"])
def test_star_import_gives_every_operator_and_nothing_else(module: str) -> None:
    names: dict[str, object] = {}
    exec(f"from {module} import *", names)
    names.pop("__builtins__")
    wanted = {name for family in FAMILIES for name in families.exports(family)}
    assert set(names) == (wanted | {"get_last_dispatch_report"} if module == "mu_space" else wanted)


def test_star_import_without_a_wheel_gives_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "installed", dict)
    names: dict[str, object] = {}
    exec("from mu_space.ops import *", names)
    assert set(names) == {"__builtins__"}


@pytest.mark.parametrize("family", FAMILIES)
def test_specs_read_from_the_file_are_those_of_the_package(family: str) -> None:
    code = f"from mu_space import families as f; n = {family!r}; a = f.specs(n); f.package(n); print(a == f.specs(n) != ())"
    assert _python(code) == "True"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'mu_space\.ops' has no attribute 'no_such'; `mu-space ops` lists"):
        _ = ops.no_such
    with pytest.raises(AttributeError, match=r"^module 'mu_space' has no attribute 'no_such'"):
        _ = mu_space.no_such
    assert not hasattr(mu_space, "_private") and not hasattr(ops, "_private")


def test_missing_wheel_is_one_sentence_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "installed", dict)
    vars(ops).pop("multi_scale_deformable_attn", None)
    vars(mu_space).pop("multi_scale_deformable_attn", None)
    sentence = "^the wheel muspace-msda is not installed; run: pip install muspace-msda$"
    with pytest.raises(ImportError, match=sentence):
        _ = ops.multi_scale_deformable_attn
    with pytest.raises(ImportError, match=sentence):
        from mu_space import multi_scale_deformable_attn  # noqa: F401


def test_family_found_by_entry_point_only(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    package = tmp_path / "muspace_toy"
    package.mkdir()
    (package / "__init__.py").write_text("__all__ = ['toy']\ndef toy(): return 1\n")
    (package / "_spec.py").write_text("SPECS = ()\n")
    info = tmp_path / "muspace_toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: muspace-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[muspace.families]\ntoy = muspace_toy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    families.installed.cache_clear()
    try:
        assert families.installed()["toy"] == "muspace_toy"
        assert mu_space.toy is ops.toy is families.package("toy").toy
    finally:
        families.installed.cache_clear()
        for name in ("muspace_toy", "muspace_toy._spec"):
            sys.modules.pop(name, None)
        vars(mu_space).pop("toy", None)
        vars(ops).pop("toy", None)


def test_broken_package_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "muspace_broken.py").write_text("raise RuntimeError('built for another machine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(families, "installed", lambda: {"msda": "muspace_broken"})
    vars(ops).pop("multi_scale_deformable_attn", None)
    with pytest.raises(RuntimeError, match="built for another machine"):
        _ = ops.multi_scale_deformable_attn
