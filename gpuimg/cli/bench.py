"""`bench`: how fast gpuimg is on this machine, and what each stage costs."""

from __future__ import annotations

from pathlib import Path

import click

from gpuimg.cli import output
from gpuimg.cli.context import State, byte_size, command
from gpuimg.errors import NoSpaceError, PermissionDeniedError


@command(
    "bench",
    example="gpuimg bench\ngpuimg bench --size 1GiB --set kv-cache --directory /dev/shm",
    errors=(PermissionDeniedError, NoSpaceError),
)
@click.option(
    "--size",
    type=byte_size,
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Bytes of generated data.",
)
@click.option(
    "--set",
    "data_set",
    type=click.Choice(["weights-bf16", "kv-cache", "training-fp32", "noise"]),
    default="weights-bf16",
    show_default=True,
    help="What the data looks like.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Work below this directory; else where temporary files go.",
)
def bench_command(state: State, size: int, data_set: str, directory: Path | None) -> None:
    """Measure gpuimg on this machine, on generated data.

    Import, second import, export, and each stage of an import. Uses no existing store.
    """
    from gpuimg.cli.selfbench import measure

    report = measure(data_set, size, directory)
    if state.as_json:
        output.write_json(report)
        return
    output.write(f"{data_set}, {output.size(report.raw_bytes)}, stored in {output.size(report.stored_bytes)}")
    for title, timings in (("whole", report.whole), ("stage of the import, CPU", report.stages)):
        output.write("")
        output.table(
            (title, ">seconds", ">MB/s", ">CPU s/GB"),
            (
                (item.name, f"{item.seconds:.3f}", f"{item.rate / 1e6:.0f}", f"{item.cpu_per_gb:.3f}")
                for item in timings
            ),
        )
