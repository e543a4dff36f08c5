"""An interrupted conversion: what it leaves, what `--resume` takes up again, and that the bytes come out the same."""

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvcompile
import kvcompile.passes.emit as emit
import kvcompile.passes.workspace as workspaces
from kvcompile.passes.calibrate import CalibratePass
from kvcompile.passes.clip import ClipPass
from kvcompile.passes.fold import FoldPass
from kvcompile.passes.rotations import RotationsPass
from kvcompile.passes.workspace import Workspace
from tests.commands import QUICK, contents, quick_conversions, refuse, succeed, workspace
from tests.conftest import edit_json, family_config, save_model

Capsys = pytest.CaptureFixture[str]
STAGES = ["calibrate", "clip", "rotations"]
PATIENCE = 60.0
"""Seconds to wait for another process on a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint in several shards; do not alter it."""
    return save_model(family_config("qwen3"), tmp_path_factory.mktemp("resume") / "model", shards="600KB")


@pytest.fixture(scope="module")
def expected(pristine: Path) -> dict[str, bytes]:
    """What an uninterrupted conversion writes."""
    out = pristine.parent / "expected"
    kvcompile.convert(pristine, out, calibration_tokens=256)
    return contents(out)


@pytest.fixture(scope="module")
def failed(pristine: Path) -> Path:
    """The output path of a conversion that failed in `emit`; do not alter what it left."""
    out = pristine.parent / "failed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit, "write_patched", _fail)
        with pytest.raises(ZeroDivisionError) as caught:
            kvcompile.convert(pristine, out, calibration_tokens=256)
    assert any("--resume" in note for note in caught.value.__notes__)
    return out


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, modification times included."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def out(failed: Path, tmp_path: Path) -> Path:
    """An output path with the failed conversion's stages waiting beside it."""
    out = tmp_path / "out"
    shutil.copytree(workspace(failed), workspace(out))
    return out


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the stored passes that run during the test."""
    names: list[str] = []
    for cls in (CalibratePass, RotationsPass, ClipPass):

        def run(self: Any, *arguments: Any, plain: Any = cls.run) -> Any:
            names.append(self.name)
            return plain(self, *arguments)

        monkeypatch.setattr(cls, "run", run)
    return names


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def stages(out: Path) -> list[str]:
    return sorted(path.stem for path in (workspace(out) / "stages").glob("*.safetensors"))


# Failure and resumption in one process


def test_failed_run_keeps_only_its_stages(out: Path) -> None:
    assert not out.exists()
    assert sorted(contents(workspace(out))) == ["inputs.json", "stages", *(f"stages/{s}.safetensors" for s in STAGES)]


def test_resume_does_not_repeat_finished_passes(
    model: Path, out: Path, expected: dict[str, bytes], ran: list[str], capsys: Capsys
) -> None:
    succeed(capsys, "convert", model, "-o", out, *QUICK, "--resume")
    assert ran == []
    assert contents(out) == expected
    assert not workspace(out).exists()


def test_without_resume_a_run_starts_over(
    model: Path, out: Path, expected: dict[str, bytes], ran: list[str], capsys: Capsys
) -> None:
    succeed(capsys, "convert", model, "-o", out, *QUICK)
    assert ran == ["calibrate", "rotations", "clip"]
    assert contents(out) == expected
    assert not workspace(out).exists()


def test_resume_without_anything_to_resume(
    model: Path, tmp_path: Path, expected: dict[str, bytes], ran: list[str], capsys: Capsys
) -> None:
    succeed(capsys, "convert", model, "-o", tmp_path / "new", *QUICK, "--resume")
    assert ran == ["calibrate", "rotations", "clip"]
    assert contents(tmp_path / "new") == expected
    assert "already exists" in refuse(capsys, "convert", model, "-o", tmp_path / "new", *QUICK, "--resume")


def test_failure_can_be_repeated(
    model: Path, out: Path, expected: dict[str, bytes], capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = contents(workspace(out))
    with monkeypatch.context() as patch:
        patch.setattr(emit, "save_file", _fail)
        with pytest.raises(ZeroDivisionError):
            kvcompile.convert(model, out, calibration_tokens=256, resume=True)
    assert contents(workspace(out)) == left
    succeed(capsys, "convert", model, "-o", out, *QUICK, "--resume")
    assert contents(out) == expected


def _touch_weights(model: Path) -> None:
    os.utime(sorted(model.glob("*.safetensors"))[0], ns=(1, 1))


CHANGES: dict[str, tuple[tuple[object, ...], Callable[[Path], None], tuple[str, ...]]] = {
    "field of the scheme": (("--set", "window.sink=8"), lambda model: None, ("scheme",)),
    "scheme": (("--scheme", "quarot-int2"), lambda model: None, ("scheme",)),
    "seed": (("--seed", 1), lambda model: None, ("calibration",)),
    "number of tokens": (("--calibration-tokens", 255), lambda model: None, ("calibration",)),
    "calibration text": (("--calibration", "TEXT"), lambda model: None, ("calibration",)),
    "weights": (("--weights", "overlay"), lambda model: None, ("weights",)),
    "config": ((), lambda model: edit_json(model / "config.json", use_cache=False), ("source",)),
    "weight file": ((), _touch_weights, ("source",)),
    "tokenizer": ((), lambda model: edit_json(model / "tokenizer_config.json", extra=1), ("source",)),
    "two things": (("--seed", 1), _touch_weights, ("calibration", "source")),
}


@pytest.mark.parametrize(("arguments", "change", "names"), CHANGES.values(), ids=CHANGES.keys())
def test_resume_is_refused_after_a_change(
    arguments: tuple[object, ...],
    change: Callable[[Path], None],
    names: tuple[str, ...],
    model: Path,
    out: Path,
    tmp_path: Path,
    capsys: Capsys,
) -> None:
    (tmp_path / "text.txt").write_text("Every word of this was written to be counted. " * 100)
    arguments = tuple(tmp_path / "text.txt" if a == "TEXT" else a for a in arguments)
    left = contents(workspace(out))
    change(model)
    error = refuse(capsys, "convert", model, "-o", out, *QUICK, *arguments, "--resume")
    assert f"cannot resume: {', '.join(names)} changed since the interrupted run" in error
    assert "without --resume" in error
    assert not out.exists()
    assert contents(workspace(out)) == left


def test_stages_of_another_version_are_not_reused(
    model: Path, out: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClipPass, "version", ClipPass.version + 1)
    error = refuse(capsys, "convert", model, "-o", out, *QUICK, "--resume")
    assert "cannot resume: passes changed" in error


# Damaged stages


def _flip_last_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def _zero_the_data(path: Path) -> None:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:start] + bytes(len(raw) - start))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "garbage": lambda path: path.write_bytes(b"garbage" * 100),
    "one bit": _flip_last_bit,
    "zeros": _zero_the_data,
    "no metadata": lambda path: save_file(load_file(path), path),
    "foreign metadata": lambda path: save_file(load_file(path), path, metadata={"ir": "[]", "sha256": ""}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_stage_is_computed_again(
    damage: Callable[[Path], object],
    model: Path,
    out: Path,
    expected: dict[str, bytes],
    ran: list[str],
    capsys: Capsys,
) -> None:
    damage(workspace(out) / "stages" / "clip.safetensors")
    succeed(capsys, "convert", model, "-o", out, *QUICK, "--resume")
    assert ran == ["clip"]
    assert contents(out) == expected


def test_nothing_but_damaged_stages(
    model: Path, out: Path, expected: dict[str, bytes], ran: list[str], capsys: Capsys
) -> None:
    for stage in STAGES:
        _zero_the_data(workspace(out) / "stages" / f"{stage}.safetensors")
    succeed(capsys, "convert", model, "-o", out, *QUICK, "--resume")
    assert ran == ["calibrate", "rotations", "clip"]
    assert contents(out) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "\udcff"])
def test_damaged_inputs_mean_starting_over(
    text: str, model: Path, out: Path, expected: dict[str, bytes], ran: list[str], capsys: Capsys
) -> None:
    (workspace(out) / "inputs.json").write_bytes(text.encode(errors="surrogateescape"))
    succeed(capsys, "convert", model, "-o", out, *QUICK, "--resume")
    assert ran == ["calibrate", "rotations", "clip"]
    assert contents(out) == expected


# Killed processes


def _pause(*_: object, **__: object) -> None:
    time.sleep(2 * PATIENCE)


def _pause_instead_of(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
    plain = getattr(owner, name)

    def paused(*arguments: Any, **options: Any) -> Any:
        return _pause() if when(*arguments) else plain(*arguments, **options)

    setattr(owner, name, paused)


POINTS: dict[str, tuple[Callable[[], None], str, list[str]]] = {
    "before calibration": (lambda: _pause_instead_of(CalibratePass, "run"), "inputs.json", []),
    "after calibrate": (lambda: _pause_instead_of(RotationsPass, "run"), "stages/calibrate.safetensors", STAGES[:1]),
    "after rotations": (lambda: _pause_instead_of(ClipPass, "run"), "stages/rotations.safetensors", STAGES[::2]),
    "while storing clip": (
        lambda: _pause_instead_of(workspaces.os, "replace", lambda _, target: Path(target).stem == "clip"),
        "stages/.clip.tmp",
        STAGES[::2],
    ),
    "after clip": (lambda: _pause_instead_of(FoldPass, "run"), "stages/clip.safetensors", STAGES),
    "among the weights": (
        lambda: _pause_instead_of(emit, "file_digest", lambda path: "00002" in path.name),
        "artifact/model-00002*",
        STAGES,
    ),
    "before the manifest": (lambda: _pause_instead_of(emit, "report_html"), "artifact/README.md", STAGES),
    "before publishing": (lambda: _pause_instead_of(Workspace, "publish"), "artifact/kvcompile.json", STAGES),
}
"""By name: how to stop a process at that point, the file that shows from outside that it is there, the stages kept."""

BETWEEN_RENAMES = "between the renames"


def _convert(model: Path, out: Path, point: str | None, options: dict[str, Any]) -> None:
    """What a killed process runs."""
    torch.set_num_threads(1)
    if point == BETWEEN_RENAMES:
        _pause_instead_of(Path, "rename", lambda path, _: path.name == "artifact")
    elif point is not None:
        POINTS[point][0]()
    kvcompile.convert(model, out, calibration_tokens=256, **options)


@pytest.fixture(scope="module")
def start() -> Callable[..., BaseProcess]:
    """Starts a conversion in a process of its own, forked from one that has done the slow imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcompile.passes.convert", "transformers.models.qwen3.modeling_qwen3"])

    def begin(model: Path, out: Path, point: str | None = None, **options: Any) -> BaseProcess:
        process = context.Process(target=_convert, args=(model, out, point, options), daemon=True)
        process.start()
        return process

    return begin


def _wait_for(directory: Path, pattern: str, process: BaseProcess) -> None:
    deadline = time.monotonic() + PATIENCE
    while not any(directory.glob(pattern)):
        assert process.is_alive(), f"the process ended with {process.exitcode} before {pattern} appeared"
        assert time.monotonic() < deadline, f"{pattern} never appeared"
        time.sleep(0.01)


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -9


@pytest.mark.parametrize("point", POINTS)
def test_killed_run_resumes(
    point: str,
    start: Callable[..., BaseProcess],
    model: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    ran: list[str],
    capsys: Capsys,
) -> None:
    out = tmp_path / "out"
    process = start(model, out, point)
    _wait_for(workspace(out), POINTS[point][1], process)
    assert not out.exists()
    _kill(process)
    assert not out.exists()
    assert stages(out) == sorted(POINTS[point][2])
    assert "is no converted checkpoint" in refuse(capsys, "verify", out)
    succeed(capsys, "convert", model, "-o", out, *QUICK, "--resume")
    assert sorted([*ran, *POINTS[point][2]]) == STAGES
    assert contents(out) == expected
    assert not workspace(out).exists()


def test_killed_run_leaves_no_trace_after_a_new_one(
    start: Callable[..., BaseProcess], model: Path, tmp_path: Path, expected: dict[str, bytes], capsys: Capsys
) -> None:
    out = tmp_path / "out"
    process = start(model, out, "before publishing")
    _wait_for(workspace(out), "artifact/kvcompile.json", process)
    _kill(process)
    succeed(capsys, "convert", model, "-o", out, "--scheme", "naive-int2")
    assert json.loads((out / "kvcompile.json").read_text())["scheme"]["name"] == "naive-int2"
    assert not workspace(out).exists()


def test_killed_again_and_again(
    start: Callable[..., BaseProcess], model: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """At whatever moment a run is killed, the output is absent or whole."""
    out = tmp_path / "out"
    for attempt in range(1, 100):
        process = start(model, out, resume=True)
        process.join(0.12 * attempt)
        process.kill()
        process.join(PATIENCE)
        if out.exists():
            break
        assert process.exitcode == -9
    assert contents(out) == expected


def test_kill_between_two_renames_keeps_the_old_artifact(
    start: Callable[..., BaseProcess], model: Path, tmp_path: Path, expected: dict[str, bytes], capsys: Capsys
) -> None:
    out = tmp_path / "out"
    succeed(capsys, "convert", model, "-o", out, "--scheme", "naive-int2")
    old = contents(out)
    process = start(model, out, BETWEEN_RENAMES, force=True)
    _wait_for(workspace(out), "replaced", process)
    _kill(process)
    assert not out.exists()
    error = refuse(capsys, "convert", model, "-o", out, *QUICK)
    assert "already exists" in error
    assert contents(out) == old
    succeed(capsys, "convert", model, "-o", out, *QUICK, "--force", "--resume")
    assert contents(out) == expected
    assert not workspace(out).exists()
