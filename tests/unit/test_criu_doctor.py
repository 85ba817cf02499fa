"""Doctor: every symptom has its remedy, and nothing makes it fall ill itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuimg.criu import doctor
from gpuimg.criu.locate import Criu


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_nothing_there_is_findings_and_no_exception(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path / "no-criu", store=tmp_path / "store", proc=tmp_path)
    assert not doctor.healthy(findings)
    assert all(finding.remedy for finding in findings if not finding.ok)
    assert findings[0].name == "criu"


def test_capabilities_are_read_by_name(tmp_path: Path) -> None:
    put(tmp_path, "self/status", "Name:\tx\nCapEff:\t0000000000000000\n")
    finding = doctor.check_privilege(tmp_path)
    assert not finding.ok
    assert "CAP_SYS_ADMIN" in finding.remedy
    put(tmp_path, "self/status", f"CapEff:\t{1 << 40 | 1 << 21 | 1 << 24 | 1 << 19:016x}\n")
    assert doctor.check_privilege(tmp_path).ok


@pytest.mark.usefixtures("user")
def test_small_pipes_are_told(tmp_path: Path) -> None:
    put(tmp_path, "sys/fs/pipe-max-size", "65536\n")
    finding = doctor.check_pipe_size(tmp_path)
    assert (finding.ok, finding.detail) == (False, "up to 64 KiB")
    put(tmp_path, "sys/fs/pipe-user-pages-soft", "512\n")
    assert not doctor.check_pipe_pages(tmp_path).ok
    put(tmp_path, "sys/fs/pipe-user-pages-soft", "0\n")
    assert doctor.check_pipe_pages(tmp_path).ok


@pytest.mark.usefixtures("user")
def test_yama_is_told(tmp_path: Path) -> None:
    assert doctor.check_ptrace(tmp_path).ok
    put(tmp_path, "sys/kernel/yama/ptrace_scope", "1\n")
    assert doctor.check_ptrace(tmp_path).remedy == "run as root"
    put(tmp_path, "sys/kernel/yama/ptrace_scope", "3\n")
    assert not doctor.check_ptrace(tmp_path).ok


def test_a_store_that_is_not_made_yet_is_fine(tmp_path: Path) -> None:
    finding = doctor.check_store(tmp_path / "a/b/store")
    assert finding.ok
    assert "not made yet" in finding.detail
    (tmp_path / "file").touch()
    assert not doctor.check_store(tmp_path / "file").ok


def test_criu_check_quotes_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "criu"
    script.write_text("#!/bin/sh\necho 'Error (criu/x.c:1): no soft-dirty' >&2\nexit 1\n")
    script.chmod(0o755)
    finding = doctor.check_criu(Criu(script, (4, 1), "--criu"))
    assert (finding.ok, finding.detail) == (False, "no soft-dirty")
    assert not doctor.check_streaming(Criu(script, (4, 1), "--criu")).ok


def test_the_packages_of_this_environment_are_right() -> None:
    findings = doctor.check_packages()
    assert len(findings) > 5
    assert doctor.healthy(findings)


def test_the_doctor_tells_of_a_missing_kernel(monkeypatch):
    monkeypatch.setattr(doctor, "kernel", lambda: None)
    finding = doctor.check_coding()
    assert finding.ok and "slower" in finding.detail and "gcc" in finding.remedy
