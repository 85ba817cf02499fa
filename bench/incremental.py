"""`python -m bench --incremental`: the second checkpoint of a job, and what comes of it.

Per case, on the same data in one run: gpuimg and its peers take a checkpoint and the one that follows; time,
and the bytes by which the store has grown. Then restores from a chain of checkpoints, and the codecs alone.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import incremental_report, incremental_targets, machine
from bench.generate import parse_size
from bench.incremental_codec import codec_cases
from bench.incremental_facts import compare, entropy_bound
from bench.incremental_measure import Copier, Say, measure_chain, measure_copies, measure_pair, selection
from bench.incremental_peers import Contender, contenders, describe
from bench.measure import CommandFailedError
from bench.peers import PEERS
from bench.series import Churn, Inference, Lora, Replicas, Series, Unchanged
from bench.series_finetuning import COPY, FIRST, KIND, SECOND, WEIGHTS, FineTuning
from bench.series_training import Settings

ROOT = Path(__file__).resolve().parent.parent

CHAIN = 4
"""Checkpoints behind the full one in the chain that is restored."""

NOTES = {
    "data": "bench/series*.py says how each series is made; `facts` and `bound` say what it is like",
    "new_bytes": "growth of the store on disk with the second checkpoint; gpuimg's index is apart "
    "(new_index_bytes): it can be rebuilt from the rest",
    "bound": "order-0 entropy of byte planes by 256 KiB, see bench/incremental_facts.py",
    "time": "whole processes, start-up included; files are read once before, to be in the page cache; a "
    "store's first checkpoint is synced before the second is taken",
    "memcpy": "one thread, 1 GiB, touched before; best of three, taken just before each run",
    "unchanged": "files get new times before the second checkpoint, as files written anew have",
    "order": "the order of the programs turns with every run; all start from fresh stores",
}


class Bench:
    """One run over the cases that were asked for."""

    def __init__(self, given: argparse.Namespace, folder: Path, say: Say) -> None:
        self.size: int = given.size
        self.runs: int = given.runs
        self.seed: int = given.seed
        self.cache: Path = given.disk / "bench"
        self.folder = folder
        self.say = say
        self.programs = contenders(given.peers)
        self.results: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self._tuning: dict[Settings, FineTuning] = {}

    def unchanged(self) -> None:
        # zstd has no store: it refuses to take a file as its own base.
        programs = {name: program for name, program in self.programs.items() if name != "zstd"}
        with self._written(Unchanged(self.size, self.seed), 0) as first:
            self._pair("unchanged", first, first, (2,), programs=programs, copier=Copier())

    def inference(self) -> None:
        self._steps(Inference(self.size, self.seed), (2,))

    def lora(self) -> None:
        self._steps(Lora(self.size, self.seed), (2, 4))

    def churn(self) -> None:
        # Everything lies elsewhere: bounds of coding by place say nothing.
        self._steps(Churn(self.size, self.seed), ())

    def replicas(self) -> None:
        series = Replicas(self.size, self.seed)
        with (
            self._written(series, 0) as whole,
            selection(whole, self.folder / "one", series.files[:1]) as one,
        ):
            self.say(f"replicas: {len(series.files)} of {self.size / len(series.files) / 2**20:.0f} MiB")
            self.results["replicas"] = {
                "facts": {"raw_bytes": sum(path.stat().st_size for path in whole.iterdir())},
                "copies": len(series.files),
                "peers": measure_copies(
                    whole,
                    one,
                    programs=self.programs,
                    runs=self.runs,
                    work=self.folder / "work",
                    say=self.say,
                ),
            }

    def finetune(self) -> None:
        series = self._fine_tuning(Settings())
        with self._written(series, 0) as first:
            with self._written(series, 1) as after:
                self._some("finetune", first, after, (WEIGHTS, FIRST, SECOND), (4,))
                for kind in ("weights", "m", "v"):
                    self._some(f"finetune-{kind}", first, after, (KIND[kind],), (4,), own=True)
                self._some("finetune-bf16", first, after, (COPY,), (2,))
            with self._written(series, 10) as after:
                self._some("finetune-10", first, after, (WEIGHTS, FIRST, SECOND), (4,), own=True)
                self._some("finetune-bf16-10", first, after, (COPY,), (2,))

    def early(self) -> None:
        """Fine-tuning that is far from converged: hardly a pair of sentences is seen twice."""
        series = self._fine_tuning(Settings(pairs=4096))
        with self._written(series, 0) as first, self._written(series, 1) as after:
            self._some("early", first, after, (WEIGHTS, FIRST, SECOND), (4,))
            self._some("early-bf16", first, after, (COPY,), (2,))

    def chain(self) -> None:
        series = self._fine_tuning(Settings())
        self.say(f"chain: {CHAIN + 1} checkpoints of {series.size / 2**20:.0f} MiB, one step apart")
        self.results["chain"] = {
            "facts": {"raw_bytes": series.size, "depth": CHAIN},
            "peers": {
                "gpuimg": measure_chain(
                    series.write, CHAIN, runs=self.runs, work=self.folder / "work", say=self.say
                )
            },
        }

    def codec(self) -> None:
        tuning = self._fine_tuning(Settings())
        with (
            self._written(Unchanged(self.size, self.seed), 0) as generated,
            self._written(tuning, 0, only=(COPY,)) as real,
        ):
            self.say("codec: bf16 weights without a parent")
            sources = {"generated": generated, "finetune": real}
            self.results["codec"] = {
                "bound": {name: entropy_bound(None, source, (2,)) for name, source in sources.items()},
                "facts": {
                    name: {"raw_bytes": sum(path.stat().st_size for path in source.iterdir())}
                    for name, source in sources.items()
                },
                "profiles": codec_cases(sources, runs=self.runs, work=self.folder / "work", say=self.say),
            }

    def _fine_tuning(self, settings: Settings) -> FineTuning:
        settings = replace(settings, seed=self.seed)
        if settings not in self._tuning:
            made = FineTuning(self.size, self.seed, cache=self.cache, say=self.say, settings=settings)
            self._tuning[settings] = made
            self.sources["fine-tuning weights"] = made.run.weights
        return self._tuning[settings]

    def _written(self, series: Series, step: int, only: tuple[str, ...] = ()) -> Written:
        return Written(series, step, self.folder / f"{series.name}-{step}", only)

    def _steps(self, series: Series, elements: tuple[int, ...]) -> None:
        with self._written(series, 0) as first, self._written(series, 1) as after:
            self._pair(series.name, first, after, elements)

    def _some(
        self,
        name: str,
        first: Path,
        after: Path,
        files: tuple[str, ...],
        elements: tuple[int, ...],
        *,
        own: bool = False,
    ) -> None:
        """A pair of which only some page files count; `own`: gpuimg only."""
        with (
            selection(first, self.folder / "some-first", files) as one,
            selection(after, self.folder / "some-after", files) as other,
        ):
            programs = {"gpuimg": self.programs["gpuimg"]} if own and "gpuimg" in self.programs else None
            self._pair(name, one, other, elements, programs=programs)

    def _pair(
        self,
        name: str,
        first: Path,
        after: Path,
        elements: tuple[int, ...],
        *,
        programs: dict[str, Contender] | None = None,
        copier: Copier | None = None,
    ) -> None:
        facts = compare(first, after)
        bound = entropy_bound(first, after, elements) if elements else None
        self.say(
            f"{name}: {facts['raw_bytes'] / 2**20:.0f} MiB, changed "
            f"{facts['changed_bytes'] / 2**20:.0f} MiB, equal pages {facts['equal_pages']:.1%}"
            + (f", bound {bound['best'] / 2**20:.1f} MiB" if bound else "")
        )
        self.results[name] = {
            "facts": facts,
            "bound": bound,
            "peers": measure_pair(
                first,
                after,
                programs=self.programs if programs is None else programs,
                runs=self.runs,
                work=self.folder / "work",
                say=self.say,
                copier=copier,
            ),
        }


class Written:
    """A checkpoint on disk while the block lasts."""

    def __init__(self, series: Series, step: int, folder: Path, only: tuple[str, ...]) -> None:
        self._write: Callable[[], object] = lambda: series.write(step, folder, only)
        self._folder = folder

    def __enter__(self) -> Path:
        self._write()
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


CASES: dict[str, Callable[[Bench], None]] = {
    "unchanged": Bench.unchanged,
    "inference": Bench.inference,
    "replicas": Bench.replicas,
    "lora": Bench.lora,
    "churn": Bench.churn,
    "finetune": Bench.finetune,
    "chain": Bench.chain,
    "codec": Bench.codec,
    "early": Bench.early,
}
DEFAULT_CASES = tuple(name for name in CASES if name != "early")


def main(arguments: list[str]) -> int:
    """Measure, print the tables and write the results to bench/results/."""
    given = _parse(arguments)
    compileall.compile_dir(ROOT / "gpuimg", quiet=1)
    console = Console(width=None if sys.stdout.isatty() else 160)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    results: dict[str, Any] = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "bench", "--incremental", *arguments],
        "notes": NOTES,
        "machine": machine.describe(),
        "peers": describe(given.peers),
        "size": given.size,
        "runs": given.runs,
        "failures": {},
    }
    given.disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.disk) as folder:
        say("touching memory")
        machine.warm(Path(folder), 2 * given.size)
        results["memcpy"] = Copier().rate()
        bench = Bench(given, Path(folder), say)
        for name in given.cases:
            try:
                CASES[name](bench)
            except (CommandFailedError, OSError, ValueError, MemoryError) as error:
                results["failures"][name] = f"{type(error).__name__}: {error}"
                say(f"{name} failed: {error}")
                for left in Path(folder).iterdir():
                    shutil.rmtree(left, ignore_errors=True)
    results["sources"], results["cases"] = bench.sources, bench.results
    results["machine"]["load_at_end"] = os.getloadavg()[0]
    targets = incremental_targets.judge(results)
    results["targets"] = [
        {"name": t.name, "wanted": t.wanted, "got": t.got, "reached": t.reached} for t in targets
    ]
    incremental_report.show(results, console)
    path = given.json or ROOT / "bench" / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}-incremental.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    console.print(f"results: {path}")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench --incremental", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="bytes per checkpoint (1GiB)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(DEFAULT_CASES))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other data")
    parser.add_argument("--disk", type=Path, default=ROOT / ".cache", help="a folder with room for 6 × size")
    parser.add_argument(
        "--json", type=Path, help="where the results go (bench/results/<time>-incremental.json)"
    )
    given = parser.parse_args(arguments)
    if given.runs < 1 or given.size < 8 << 20:
        parser.error("--runs must be at least 1 and --size at least 8MiB")
    return given
