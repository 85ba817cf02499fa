"""`doctor`: can this machine dump and restore?"""

from __future__ import annotations

import click

from gpuimg.cli import output
from gpuimg.cli.context import State, command
from gpuimg.errors import NoCriuError, OldCriuError


@command(
    "doctor", example="gpuimg doctor\ngpuimg doctor --criu /usr/sbin/criu", errors=(NoCriuError, OldCriuError)
)
@click.option("--criu", metavar="PATH", help="The criu to look at, instead of the one that would be found.")
def doctor_command(state: State, criu: str | None) -> int:
    """Say whether dump and restore can work here.

    Where they cannot, says what to do.
    """
    from gpuimg.criu.doctor import examine

    findings = examine(criu, store=state.store_path())
    usable = all(finding.ok for finding in findings)
    if state.as_json:
        output.write_json({"ok": usable, "findings": findings})
        return 0 if usable else 1
    for finding in findings:
        output.write(f"{'ok' if finding.ok else 'NO':<4}{finding.name}: {output.printable(finding.detail)}")
        if not finding.ok and finding.remedy:
            output.write(f"    {finding.remedy}")
    return 0 if usable else 1
