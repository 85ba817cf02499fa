"""What is to be reached, and whether it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WEIGHTS = "weights-bf16"
PLACES = ("disk", "tmpfs")


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table; `reached` is None where nothing was measured or nothing is demanded."""

    name: str
    wanted: str
    got: str
    reached: bool | None


def judge(results: dict[str, Any]) -> list[Target]:
    """All targets, from the results of a run."""
    targets = [
        _speed(
            results,
            "first import of bf16 weights, disk",
            step="first",
            places=("disk",),
            wanted=3,
            only=WEIGHTS,
        ),
        _speed(
            results,
            "first import of bf16 weights, tmpfs",
            step="first",
            places=("tmpfs",),
            wanted=5,
            only=WEIGHTS,
        ),
        _size(results),
        _speed(results, "import of a second copy", step="second", places=PLACES, wanted=4),
        _speed(results, "export", step="export", places=PLACES, wanted=3),
    ]
    start = results.get("help")
    if start:
        seconds = start["median"]
        targets.append(Target("gpuimg --help", "< 150 ms", f"{seconds * 1e3:.0f} ms", seconds < 0.15))
    return targets + list(_streaming(results.get("streaming") or {}))


def _pairs(results: dict[str, Any], places: tuple[str, ...], only: str) -> Iterator[tuple[str, Any, Any]]:
    """(where, gpuimg's figures, borg's figures) of every set and place in which both ended well."""
    for name, made in results["sets"].items():
        for place in places:
            peers = made["places"].get(place, {})
            own, other = peers.get("gpuimg"), peers.get("borg")
            if own and other and "failure" not in own and "failure" not in other and only in ("", name):
                yield f"{name}, {place}", own, other


def _speed(
    results: dict[str, Any], name: str, *, step: str, places: tuple[str, ...], wanted: float, only: str = ""
) -> Target:
    demand = f"≥ {wanted:g} × borg"
    ratios = [
        (own[step]["bytes_per_second"] / other[step]["bytes_per_second"], where)
        for where, own, other in _pairs(results, places, only)
    ]
    if not ratios:
        return Target(name, demand, "not measured", None)
    ratio, where = min(ratios)
    lowest = f" (lowest: {where})" if len(ratios) > 1 else ""
    return Target(name, demand, f"{ratio:.1f} ×{lowest}", ratio >= wanted)


def _size(results: dict[str, Any]) -> Target:
    name, demand = "store of bf16 weights", "≤ borg's"
    for _, own, other in _pairs(results, PLACES, WEIGHTS):
        ratio = own["stored_bytes"] / other["stored_bytes"]
        return Target(name, demand, f"{ratio:.3f} of borg's", ratio <= 1)
    return Target(name, demand, "not measured", None)


def _streaming(streaming: dict[str, Any]) -> Iterator[Target]:
    for kind, allowed in (("raw", 0.3), ("coded", 0.8)):
        made = streaming.get(kind)
        if not made or "failure" in made:
            yield Target(f"serve, {kind} chunks", f"≤ {allowed} CPU s/GB", "not measured", None)
            continue
        size = f"{streaming['bytes'] / 2**30:g} GiB"
        rss, cpu = made["serve"]["max_rss"], made["serve"]["cpu_per_gb"]
        yield Target(
            f"serve {size}, {kind}: peak RSS", "≤ 256 MiB", f"{rss / 2**20:.0f} MiB", rss <= 256 * 2**20
        )
        yield Target(
            f"serve {size}, {kind}: CPU", f"≤ {allowed} CPU s/GB", f"{cpu:.2f} CPU s/GB", cpu <= allowed
        )
        yield Target(
            f"capture {size}, {kind}: CPU",
            "beside upstream's 0.27",
            f"{made['capture']['cpu_per_gb']:.2f} CPU s/GB",
            None,
        )
