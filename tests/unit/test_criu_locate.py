"""A criu is found if it starts, and what was tried is told if none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuimg.criu.locate import find_criu, probe_version
from gpuimg.errors import NoCriuError, OldCriuError


def fake(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def version(number: str) -> str:
    return f'echo "Version: {number}"'


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which no criu is found, whatever this machine has."""
    monkeypatch.setattr("gpuimg.criu.locate._SYSTEM_PLACES", "")
    (tmp_path / "empty").mkdir()
    return {"PATH": str(tmp_path / "empty")}


def test_a_named_criu_is_used_or_refused(tmp_path: Path, nowhere: dict[str, str]) -> None:
    good = fake(tmp_path / "a/criu", version("4.1.1"))
    broken = fake(tmp_path / "b/criu", 'echo "symbol lookup error" >&2; exit 127')
    environment = nowhere | {"GPUIMG_CRIU": str(good)}
    assert find_criu(environment=environment, checkout=tmp_path).version == (4, 1, 1)
    with pytest.raises(NoCriuError, match="symbol lookup error"):
        find_criu(broken, environment=environment, checkout=tmp_path)


def test_a_name_without_a_slash_is_looked_up(tmp_path: Path, nowhere: dict[str, str]) -> None:
    fake(tmp_path / "empty/my-criu", version("3.19"))
    assert find_criu("my-criu", environment=nowhere, checkout=tmp_path).path == tmp_path / "empty/my-criu"
    with pytest.raises(NoCriuError, match="no other-criu on PATH"):
        find_criu("other-criu", environment=nowhere, checkout=tmp_path)


def test_the_newest_of_a_checkout_comes_before_path(tmp_path: Path, nowhere: dict[str, str]) -> None:
    fake(tmp_path / ".criu/trixie/bin/criu", version("4.1.1"))
    fake(tmp_path / ".criu/sid/bin/criu", version("4.10"))
    fake(tmp_path / ".criu/.half-fetched/bin/criu", version("9.9"))
    fake(tmp_path / "empty/criu", version("5.0"))
    found = find_criu(environment=nowhere, checkout=tmp_path)
    assert (found.version, found.source) == ((4, 10), "checkout")


def test_path_serves_where_the_checkout_is_broken(tmp_path: Path, nowhere: dict[str, str]) -> None:
    fake(tmp_path / ".criu/sid/bin/criu", "kill -9 $$")
    fake(tmp_path / "empty/criu", version("3.15"))
    found = find_criu(environment=nowhere, checkout=tmp_path)
    assert (found.version_text, found.source) == ("3.15", "PATH")


def test_what_was_tried_is_told(tmp_path: Path, nowhere: dict[str, str]) -> None:
    fake(tmp_path / ".criu/sid/bin/criu", "kill -9 $$")
    (tmp_path / "empty/criu").write_bytes(b"\0no program")
    (tmp_path / "empty/criu").chmod(0o755)
    with pytest.raises(NoCriuError) as caught:
        find_criu(environment=nowhere, checkout=tmp_path)
    assert "sid/bin/criu does not start: killed by signal 9" in caught.value.what
    assert f"{tmp_path}/empty/criu: Exec format error" in caught.value.what
    assert "make criu" in caught.value.remedy


def test_none_at_all_is_told(tmp_path: Path, nowhere: dict[str, str]) -> None:
    with pytest.raises(NoCriuError, match="there is none on PATH"):
        find_criu(environment=nowhere, checkout=tmp_path)


def test_an_old_criu_is_told_with_its_version(tmp_path: Path, nowhere: dict[str, str]) -> None:
    fake(tmp_path / "empty/criu", version("3.14"))
    with pytest.raises(OldCriuError, match=r"is 3\.14"):
        find_criu(environment=nowhere, checkout=tmp_path)


def test_a_development_version_is_understood(tmp_path: Path) -> None:
    criu = fake(tmp_path / "criu", 'printf "Version: 4.2\\nGitID: v4.2-123-gabcdef\\n"')
    assert probe_version(criu) == (4, 2)
