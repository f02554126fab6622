# SPDX-License-Identifier: Apache-2.0
"""The compatibility report: supported stacks as data, and nothing claimed that was not seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mu_space import compatibility
from mu_space.compatibility import compatibility_report

NO_DEVICE = {"probed": True, "count": 0, "names": [], "reason": None}
TWO_DEVICES = {"probed": True, "count": 2, "names": ["MTT S5000"] * 2, "reason": None}


def _machine(monkeypatch: pytest.MonkeyPatch, home: Path, sdk: str | None, **versions: str | None) -> None:
    monkeypatch.setenv("MUSA_HOME", str(home))
    monkeypatch.delenv("MUSA_INSTALL_PATH", raising=False)
    if sdk is not None:
        (home / "version.json").write_text(json.dumps({"musa_toolkits": {"version": sdk}}))
    monkeypatch.setattr(compatibility, "distribution_version", lambda name: versions.get(name.replace("-", "_")))


def test_core_profile_lists_the_three_recorded_stacks() -> None:
    report = compatibility_report("core")
    stacks = [(s["sdk"], s["torch"], s["torch_musa"]) for s in report["supported"]]
    assert stacks == [("4.3.8", "2.7.1", "2.7.1"), ("5.2.0", "2.9.1", "2.9.1"), ("5.2.0", "2.11.0", "2.11.0")]
    assert {stack["evidence"] for stack in report["supported"]} == {"recorded"} and report["validated"] is False
    json.dumps(report)


@pytest.mark.parametrize(("sdk", "torch"), [("4.3.8", "2.7.1"), ("5.2.0", "2.9.1"), ("5.2.0", "2.11.0")])
def test_supported_stack_with_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sdk: str, torch: str) -> None:
    _machine(monkeypatch, tmp_path, sdk, torch=f"{torch}+musa", torch_musa=torch, apache_tvm_ffi="0.1.9.post3")
    report = compatibility_report("core", devices=TWO_DEVICES)
    assert report["match"] == {"sdk": sdk, "torch": torch, "torch_musa": torch, "evidence": "recorded"}
    assert report["verdict"] is None and report["validated"] is False
    assert report["present"]["musa_sdk_source"] == str(tmp_path / "version.json")


def test_supported_stack_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _machine(monkeypatch, tmp_path, "5.2.0", torch="2.9.1", torch_musa="2.9.1")
    report = compatibility_report("core", devices=NO_DEVICE)
    assert report["verdict"] == "SDK 5.2.0 with torch_musa 2.9.1 is present, but no MUSA device: 0 found"


@pytest.mark.parametrize(
    ("sdk", "torch", "torch_musa"), [("4.3.8", "2.9.1", "2.9.1"), ("5.2.0", "2.9.1", "2.11.0"), ("5.1.0", "2.7.1", "2.7.1")]
)
def test_mixed_stack_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sdk: str, torch: str, torch_musa: str
) -> None:
    _machine(monkeypatch, tmp_path, sdk, torch=torch, torch_musa=torch_musa)
    report = compatibility_report("core", devices=TWO_DEVICES)
    assert report["match"] is None
    assert report["verdict"].startswith("not a supported MUSA stack: expected SDK 4.3.8 with torch and torch_musa 2.7.1 or SDK")
    assert report["verdict"].endswith(f"got musa_sdk {sdk}, torch {torch}, torch_musa {torch_musa}")


def test_nothing_present(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _machine(monkeypatch, tmp_path, None)
    report = compatibility_report("core")
    assert report["verdict"].endswith("got musa_sdk absent, torch absent, torch_musa absent")
    assert report["probed"]["musa_devices"] == {
        "probed": False, "count": None, "names": [], "reason": "torch_musa is not installed",
    }  # fmt: skip
    assert str(tmp_path / "version.json") in report["present"]["musa_sdk_source"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"musa_toolkits": 3}', "not json"])
def test_unreadable_sdk_version_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    _machine(monkeypatch, tmp_path, None)
    (tmp_path / "version.json").write_text(text)
    assert compatibility_report("core", devices=NO_DEVICE)["present"]["musa_sdk"] is None


def test_torch_musa_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch_musa.py").write_text("raise OSError('libmusart.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compatibility, "distribution_version", lambda name: "2.7.1")
    devices = compatibility.musa_devices()
    assert devices["probed"] is False and devices["reason"] == "OSError: libmusart.so: cannot open shared object file"


def test_unknown_profile() -> None:
    with pytest.raises(ValueError, match=r"^profile: expected one of core; got 'bevformer'$"):
        compatibility_report("bevformer")
