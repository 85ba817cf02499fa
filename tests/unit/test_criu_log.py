"""The log of a failed criu becomes a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuimg.criu.log import failure, read_errors, remedy_for


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("tty: Found dangling tty with sid 10 pgid 11 (pts) on peer fd 0.", "-- --shell-job"),
        ("A session leader of 7(7) is outside of its pid namespace", "setsid"),
        ("The root process 7 is not a session leader. Consider using --shell-job option", "-- --shell-job"),
        ("inet: Connected TCP socket, consider using --tcp-established option.", "-- --tcp-established"),
        (
            "Some file locks are hold by dumping tasks! You can try --file-locks to dump them.",
            "-- --file-locks",
        ),
        ("net: Locking network failed: iptables-restore returned 1", "-- --network-lock skip"),
        ("unix: External socket is used. Consider using --ext-unix-sk option.", "-- --ext-unix-sk"),
        ("Can't dump ghost file /tmp/x of 2097152 size, increase limit", "-- --ghost-limit"),
        ("Can't create link remap for /tmp/x. Use link-remap option.", "-- --link-remap"),
        ("mnt: Mount 99:./data is autodetected external mount.", "-- --external mnt"),
        ("Can't fork for 1234: File exists", "PID of the checkpoint is in use"),
        ("File usr/bin/x has bad size 7 (expect 8)", "put the old one back"),
        ("Can't open file tmp/x on restore: No such file or directory", "put it back"),
        ("cpu: CPU instruction capabilities do not match run time", "--cpu-cap none"),
        ("Unable to connect to image streamer socket: /x: Connection refused", "streamer was not listening"),
        ("Can't suspend seccomp: Operation not permitted", "run as root"),
        ("11 has rseq but kernel lacks get_rseq_conf feature", "this kernel lacks"),
        ("vdso: ELF header magic mismatch", "use the one that dumped it"),
        ("something nobody has ever seen", "documentation"),
    ],
)
def test_a_known_error_has_its_remedy(message: str, remedy: str) -> None:
    assert remedy in remedy_for([message])


def test_the_first_real_errors_are_quoted(tmp_path: Path) -> None:
    log = write(
        tmp_path / "log",
        "(00.000100) Version: 4.1.1 (gitid 0)",
        "(00.001000) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: no",
        "(00.002000) Warn  (criu/x.c:1): no matter",
        "(00.003000)    42: Error (criu/files-reg.c:2143): File tmp/x has bad size 1 (expect 2)",
        "(00.003001)    42: Error (criu/files-reg.c:2143): File tmp/x has bad size 1 (expect 2)",
        "(00.004000) Error (criu/cr-restore.c:2500): Restoring FAILED.",
    )
    assert read_errors(log) == ["File tmp/x has bad size 1 (expect 2)"]
    error = failure("restore", 1, log, tmp_path / "none")
    assert error.what == 'criu restore ended with status 1: "File tmp/x has bad size 1 (expect 2)"'
    assert "put the old one back" in error.remedy


def test_what_criu_says_before_its_log_is_open_is_quoted(tmp_path: Path) -> None:
    stderr = write(tmp_path / "stderr", "criu: unrecognized option '--nonsense'")
    error = failure("dump", 1, tmp_path / "none", stderr)
    assert "unrecognized option '--nonsense'" in error.what


def test_a_criu_that_was_killed_is_told(tmp_path: Path) -> None:
    error = failure("dump", -9, tmp_path / "none", tmp_path / "none")
    assert error.what == "criu dump was killed by signal 9 and told no reason"


def test_the_errors_of_a_task_that_restores_itself_are_read(tmp_path: Path) -> None:
    """When only its memory is still to come, it runs code of criu that logs in a way of its own."""
    log = write(
        tmp_path / "log",
        "(00.036378) pie: 4711: Error (criu/pie/util-vdso.c:117): vdso: ELF header magic mismatch",
        "(00.036383) pie: 4711: Error (criu/pie/restorer.c:2253): Restorer fail 4711",
        "(00.036478) Error (criu/cr-restore.c:2320): Restoring FAILED.",
    )
    assert read_errors(log) == ["vdso: ELF header magic mismatch", "Restorer fail 4711"]


def test_a_warning_that_ends_a_dump_counts_as_its_error(tmp_path: Path) -> None:
    log = write(
        tmp_path / "log",
        "(00.023790) Warn  (criu/kerndat.c:1): no matter",
        "(00.023794) Warn  (compel/src/lib/infect.c:133): "
        "Unable to interrupt task: 7 (Operation not permitted)",
        "(00.023808) Error (compel/src/lib/infect.c:418): Unable to detach from 7: No such process",
        "(00.023905) Error (criu/cr-dump.c:2111): Dumping FAILED.",
    )
    assert read_errors(log) == ["Unable to interrupt task: 7 (Operation not permitted)"]
    assert "another program traces it" in failure("dump", 1, log, tmp_path / "none").remedy
