"""`tag` and `rm`: names of checkpoints, and letting checkpoints go."""

from __future__ import annotations

import click

from gpuimg.cli import output
from gpuimg.cli.context import STORE_ERRORS, State, command
from gpuimg.cli.store import REFERENCE_ERRORS
from gpuimg.errors import BadNameError, BusyError, UnknownReferenceError


@command(
    "tag",
    example="gpuimg tag\ngpuimg tag stable 3fa9\ngpuimg tag --delete stable",
    errors=(*REFERENCE_ERRORS, BadNameError),
)
@click.argument("name", required=False)
@click.argument("ref", required=False)
@click.option("--delete", metavar="NAME", help="Remove this tag; its checkpoint stays.")
def tag_command(state: State, name: str | None, ref: str | None, delete: str | None) -> None:
    """Name a checkpoint, or list the tags.

    Gives the checkpoint REF the tag NAME, which moves if it exists already.
    """
    if delete is not None and name is not None:
        raise click.UsageError("--delete takes the tag itself, and nothing else")
    if name is not None and ref is None:
        raise click.UsageError("say which checkpoint to tag: gpuimg tag NAME REF")
    with state.open_store() as store:
        if delete is not None:
            store.remove_tag(delete)
            _say(state, {"deleted": delete}, f"removed the tag {output.printable(delete)}")
        elif name is not None and ref is not None:
            store.set_tag(name, ref)
            checkpoint = store.checkpoint(name).id
            _say(
                state,
                {"tag": name, "checkpoint": checkpoint},
                f"{output.printable(name)} is checkpoint {checkpoint[:12]}",
            )
        else:
            tags = store.tags()
            if state.as_json:
                output.write_json({"tags": tags})
            else:
                output.table(("tag", "checkpoint"), ((tag, tags[tag][:12]) for tag in sorted(tags)))


@command(
    "rm",
    example="gpuimg rm before-update 3fa9\ngpuimg gc",
    errors=(*STORE_ERRORS, UnknownReferenceError, BusyError),
)
@click.argument("refs", metavar="REF...", nargs=-1, required=True)
def rm_command(state: State, refs: tuple[str, ...]) -> None:
    """Remove checkpoints and their tags; `gc` frees the space."""
    with state.open_store() as store:
        ids = list(dict.fromkeys(store.checkpoint(ref).id for ref in refs))
        for checkpoint in ids:
            store.remove(checkpoint)
    text = "\n".join(f"removed checkpoint {checkpoint[:12]}" for checkpoint in ids)
    _say(state, {"removed": ids}, text)


def _say(state: State, report: dict[str, object], text: str) -> None:
    if state.as_json:
        output.write_json(report)
    else:
        output.write(text)
