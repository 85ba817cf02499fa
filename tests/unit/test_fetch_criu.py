"""Fetching criu asks the mirror that the system asks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.fetch_criu import (
    FetchError,
    Source,
    one_line_sources,
    stanza_sources,
    system_mirror,
    write_launchers,
)

STANZAS = """\
# written by the installer
Types: deb deb-src
URIs: https://mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: https://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
# the nearest
URIs: https://mirror.example/debian
Suites: bookworm
 bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""

LINES = """\
# deb https://old.example/debian bookworm main
deb-src https://source.example/debian bookworm main
deb [arch=amd64 signed-by=/x] https://other.example/tool stable tool
deb https://mirror.example/debian trixie main contrib # nearest
"""


def test_both_formats_are_read() -> None:
    assert list(one_line_sources(LINES)) == [
        Source("https://other.example/tool", ("stable",), ("tool",)),
        Source("https://mirror.example/debian", ("trixie",), ("main", "contrib")),
    ]
    assert [source.uri for source in stanza_sources(STANZAS)] == [
        "https://mirror.example/debian-security",
        "https://mirror.example/debian",
    ]


@pytest.mark.parametrize(("name", "text"), [("sources.list", LINES), ("sources.list.d/a.sources", STANZAS)])
def test_the_archive_itself_is_chosen(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / name).write_text(text)
    (tmp_path / "sources.list.d" / "b.sources.disabled").write_text(STANZAS.replace("mirror", "wrong"))
    assert system_mirror(tmp_path) == "https://mirror.example/debian"


def test_another_distribution_is_told(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb https://archive.example/ubuntu noble main\n")
    with pytest.raises(FetchError, match="install it and put it on PATH"):
        system_mirror(tmp_path)


def test_launchers_work_wherever_the_folder_is(tmp_path: Path) -> None:
    root = tmp_path / "here"
    for name, text in {
        "lib64/ld-linux-x.so.2": '#!/bin/sh\necho "$@"\n',
        "usr/lib/x/libc.so.6": "",
        "usr/sbin/criu": "",
        "usr/lib/python3/dist-packages/pycriu/__init__.py": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    write_launchers(root)
    moved = root.rename(tmp_path / "a place")
    (tmp_path / "link").symlink_to(moved / "bin/criu")
    told = subprocess.run([tmp_path / "link", "dump", "a b"], capture_output=True, text=True, check=True)
    libraries = f"{moved}/usr/lib/x"
    assert told.stdout == f"--library-path {libraries} --argv0 criu {moved}/usr/sbin/criu dump a b\n"
