"""Which names the files of a checkpoint may have."""

from __future__ import annotations

from gpuimg.errors import BadNameError


def check_name(name: str) -> None:
    """Refuse a file name that could leave its directory.

    Raises
    ------
    BadNameError
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= 255 or "/" in name or "\0" in name or name in {".", ".."}:
        raise BadNameError(
            f"the file name {name!r} is not allowed",
            remedy="names have 1 to 255 bytes of UTF-8, no '/', and are not '.' or '..'",
        )
