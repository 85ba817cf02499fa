"""The options that say what a new checkpoint is compared with, and how much is done for a smaller store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gpuimg.cli import output
from gpuimg.errors import DamagedError, NewerFormatError, UnknownReferenceError, UsageError

if TYPE_CHECKING:
    from gpuimg.store.checkpoint import Checkpoint
    from gpuimg.store.choice import Profile
    from gpuimg.store.store import Store

PROFILES = ("fast", "balanced", "dense", "auto")


@dataclass(frozen=True, slots=True)
class Against:
    """What a new checkpoint is compared with.

    `full_because` says, in a sentence without a full stop, why an incremental checkpoint becomes a full one;
    it is empty where nothing else was asked for or there is a parent.
    """

    parent: Checkpoint | None
    full_because: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """The options as given."""

    incremental: bool
    parent: str | None
    profile_name: str

    @property
    def profile(self) -> Profile:
        from gpuimg.store.choice import Profile

        return Profile(self.profile_name)

    def against(self, store: Store, tag: str | None) -> Against:
        """The parent, looked up now: before anything is dumped.

        A tag's checkpoint that is missing or unreadable is no reason to go without a new one; one that was
        named by --parent must be there.

        Raises
        ------
        UnknownReferenceError, AmbiguousReferenceError, DamagedError, NewerFormatError
        """
        if self.parent is not None:
            return Against(store.checkpoint(self.parent))
        if not self.incremental:
            return Against(None)
        # Not `store.checkpoint(tag)`: a tag that does not exist could be the start of an id.
        found = store.tags().get(tag or "")
        if found is None:
            return Against(None, f"there is no checkpoint with the tag {tag} yet")
        try:
            return Against(store.checkpoint(found))
        except (UnknownReferenceError, DamagedError, NewerFormatError) as error:
            return Against(None, f"the tag {tag} is of no use: {error.what}")


def parent_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--incremental`, `--parent`, `--full` and `--profile`; the function gets them as `wish`."""

    @functools.wraps(function)
    def with_wish(
        *arguments: Any, incremental: bool, parent: str | None, full: bool, profile: str, **options: Any
    ) -> int | None:
        if incremental + full + (parent is not None) > 1:
            raise UsageError(
                "--incremental, --parent and --full exclude each other", remedy="give one of them"
            )
        if incremental and not options.get("tag"):
            raise UsageError(
                "--incremental compares with the checkpoint that has the tag, and no tag is given",
                remedy="give --tag NAME, or name a checkpoint with --parent REF",
            )
        return function(*arguments, wish=Wish(incremental, parent, profile), **options)

    made: Callable[..., int | None] = with_wish
    for option in (
        click.option(
            "--profile",
            type=click.Choice(PROFILES),
            default="balanced",
            show_default=True,
            help="How much is done for a smaller store; auto follows the speed of the disk.",
        ),
        click.option("--full", is_flag=True, help="Compare with no checkpoint. This is the default."),
        click.option(
            "--parent", metavar="REF", help="Compare with this checkpoint, and store what has changed."
        ),
        click.option(
            "--incremental",
            is_flag=True,
            help="Compare with the checkpoint that has the tag now; take a full one if there is none.",
        ),
    ):
        made = option(made)
    return made


def announce(against: Against, *, as_json: bool) -> None:
    """Tell people, before the work begins, that an incremental checkpoint becomes a full one."""
    if against.full_because and not as_json:
        output.note(f"{against.full_because}; this checkpoint is a full one")
