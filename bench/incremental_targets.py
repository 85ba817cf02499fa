"""What incremental checkpoints are to reach, and whether they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.targets import Target

FULL_SIZE = 4 << 30
"""Speeds that include the start of the program are demanded of checkpoints from this size on."""

_CODED = 1.4
_ROOM = 1.05


def judge(results: dict[str, Any]) -> list[Target]:
    """All targets, from the results of a run; the median counts."""
    return [
        *_unchanged(results),
        *_inference(results),
        *_growth(results, "finetune", "fine-tuning, one step later: fp32 weights + m + v", 0.27),
        *_growth(results, "finetune-bf16", "fine-tuning, one step later: bf16 weights", 0.02),
        *_growth(results, "finetune-bf16-10", "fine-tuning, ten steps later: bf16 weights", 0.08),
        *_codec(results),
        *_replicas(results),
        *_chain(results),
    ]


def peer(results: dict[str, Any], case: str, name: str = "gpuimg") -> dict[str, Any] | None:
    """The figures of a program in a case, None if there are none."""
    made: dict[str, Any] | None = results["cases"].get(case, {}).get("peers", {}).get(name)
    return None if not made or "failure" in made else made


def share(figures: dict[str, float], whole: float, show: Callable[[float], str]) -> str:
    """Median (minimum–maximum) of figures divided by `whole`; once only where they show alike."""
    low, middle, high = (show(figures[part] / whole) for part in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low}–{high})"


def percent(value: float) -> str:
    return f"{value * 100:.3g} %"


def rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def _missing(name: str, wanted: str) -> Target:
    return Target(name, wanted, "not measured", None)


def _large(raw: float, reached: bool) -> bool | None:
    """The verdict, if the checkpoint is as large as the demand is made for."""
    return reached if raw >= FULL_SIZE * 0.99 else None


def _unchanged(results: dict[str, Any]) -> Iterator[Target]:
    wanted = "≥ 40 % of memcpy on 4 GiB", "≤ 0.1 % of raw"
    own = peer(results, "unchanged")
    if not own:
        yield _missing("unchanged: speed", wanted[0])
        yield _missing("unchanged: bytes written", wanted[1])
        return
    raw = results["cases"]["unchanged"]["facts"]["raw_bytes"]
    memcpy = own["memcpy"]["median"]
    speeds = sorted(raw / made["seconds"] for made in own["next"]["runs"])
    speed = raw / own["next"]["median_seconds"]
    yield Target(
        f"unchanged {raw / 2**30:.3g} GiB: speed",
        wanted[0],
        f"{percent(speed / memcpy)}: {rate(speed)} ({rate(speeds[0])}–{rate(speeds[-1])}) of {rate(memcpy)}",
        _large(raw, speed >= 0.40 * memcpy),
    )
    written = own["new_bytes"]["median"] + own["new_index_bytes"]["median"]
    yield Target(
        "unchanged: bytes written, index included",
        wanted[1],
        f"{percent(written / raw)} (index {percent(own['new_index_bytes']['median'] / raw)})",
        written <= raw * 0.001,
    )


def _inference(results: dict[str, Any]) -> Iterator[Target]:
    wanted = f"≤ {_ROOM} × changed ÷ {_CODED}", "≥ 5 × borg on 4 GiB"
    own, borg = peer(results, "inference"), peer(results, "inference", "borg")
    facts = results["cases"].get("inference", {}).get("facts")
    if own and facts:
        allowed = facts["changed_bytes"] / _CODED
        got = share(own["new_bytes"], allowed, lambda value: f"{value:.3f}")
        yield Target(
            "inference, next checkpoint: new bytes",
            wanted[0],
            f"{got} × changed ÷ {_CODED}",
            own["new_bytes"]["median"] <= allowed * _ROOM,
        )
    else:
        yield _missing("inference, next checkpoint: new bytes", wanted[0])
    if own and borg and facts:
        ratio = borg["next"]["median_seconds"] / own["next"]["median_seconds"]
        worst = borg["next"]["min_seconds"] / own["next"]["max_seconds"]
        best = borg["next"]["max_seconds"] / own["next"]["min_seconds"]
        yield Target(
            f"inference, next checkpoint of {facts['raw_bytes'] / 2**30:.3g} GiB: time",
            wanted[1],
            f"{ratio:.1f} × ({worst:.1f}–{best:.1f})",
            _large(facts["raw_bytes"], ratio >= 5),
        )
    else:
        yield _missing("inference, next checkpoint: time", wanted[1])


def _growth(results: dict[str, Any], case: str, name: str, allowed: float) -> Iterator[Target]:
    own = peer(results, case)
    if not own:
        yield _missing(name, f"≤ {percent(allowed)} of raw")
        return
    raw = results["cases"][case]["facts"]["raw_bytes"]
    others = [
        f"{other} {percent(made['new_bytes']['median'] / raw)}"
        for other in results["cases"][case]["peers"]
        if other != "gpuimg" and (made := peer(results, case, other))
    ]
    yield Target(
        name,
        f"≤ {percent(allowed)} of raw",
        share(own["new_bytes"], raw, percent) + (f"; {', '.join(others)}" if others else ""),
        own["new_bytes"]["median"] <= raw * allowed,
    )


def _codec(results: dict[str, Any]) -> Iterator[Target]:
    demands: tuple[tuple[str, str, float], ...] = (
        ("balanced", "ratio", 1.48),
        ("dense", "ratio", 1.50),
        ("fast", "ratio", 1.30),
        ("balanced", "encode", 2.2e9),
        ("balanced", "decode", 4e9),
        ("fast", "encode", 4e9),
    )
    profiles = results["cases"].get("codec", {}).get("profiles", {})
    for profile, what, wanted in demands:
        name = f"bf16 weights without a parent, {profile}: {what}"
        demand = f"≥ {wanted:g}" if what == "ratio" else f"≥ {rate(wanted)} on two threads"
        made = {source: by_profile[profile]["threads"] for source, by_profile in profiles.items()}
        figures = {source: figure[what] for source, figure in made.items() if "failure" not in figure}
        if not figures:
            yield _missing(name, demand)
        elif what == "ratio":
            got = ", ".join(f"{figure:.3f} ({source})" for source, figure in figures.items())
            yield Target(name, demand, got, min(figures.values()) >= wanted)
        else:
            got = ", ".join(f"{share(figure, 1, rate)} {source}" for source, figure in figures.items())
            lowest = min(figure["median"] for figure in figures.values())
            yield Target(name, demand, got, lowest >= wanted)


def _replicas(results: dict[str, Any]) -> Iterator[Target]:
    name, wanted = "4 data-parallel replicas: stored", "≤ 1.02 × one"
    own = peer(results, "replicas")
    if not own:
        yield _missing(name, wanted)
        return
    got = share(own["stored_bytes"], own["stored_one_bytes"]["median"], lambda value: f"{value:.4f}")
    ratio = own["stored_bytes"]["median"] / own["stored_one_bytes"]["median"]
    yield Target(name, wanted, f"{got} × one", ratio <= 1.02)


def _chain(results: dict[str, Any]) -> Iterator[Target]:
    own = peer(results, "chain")
    name = f"restore of a chain of depth {results['cases'].get('chain', {}).get('facts', {}).get('depth', 4)}"
    wanted = "≥ 60 % of the speed of the full checkpoint"
    if not own:
        yield _missing(name, wanted)
        return
    speed = own["relative_speed"]
    yield Target(name, wanted, share(speed, 1, percent), speed["median"] >= 0.60)
