"""Nothing is lost: whatever interrupts a conversion, at whatever moment, `--resume` writes what a whole run writes."""

import os
import random
import shutil
from pathlib import Path

import pytest

import kvcompile
from kvcompile.errors import CheckpointError
from kvcompile.passes.emit import EmitPass
from kvcompile.passes.lock import DirectoryLock
from tests.commands import contents, workspace
from tests.conftest import EXAMPLE
from tests.interruption import Conversions, check_remains, interrupt_and_resume, moments

MOMENTS = {"kill -9": 34, "SIGTERM": 8, "SIGINT": 8, "full disk": 8, "read error": 6}


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    return Conversions(EXAMPLE, tmp_path_factory.mktemp("interruption"))


@pytest.fixture(scope="module")
def expected(conversions: Conversions) -> dict[str, bytes]:
    """What an uninterrupted run writes."""
    out = conversions.folder / "expected"
    assert conversions.run(out).code == 0
    return contents(out)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "count"), MOMENTS.items())
def test_interrupted_at_moments_of_every_stage(
    fault: str, count: int, conversions: Conversions, expected: dict[str, bytes], tmp_path: Path
) -> None:
    before = contents(EXAMPLE)
    stages = conversions.calls(tmp_path / "whole", fault)
    codes = [
        interrupt_and_resume(conversions, tmp_path / "out", fault, at, expected).code
        for _, at in moments(stages, count, random.Random(count))
    ]
    assert contents(EXAMPLE) == before
    if fault in ("full disk", "read error"):  # some are of files that nobody needs
        assert codes.count(1) >= count // 2
        assert set(codes) <= {0, 1}
    else:
        assert set(codes) <= {0, {"kill -9": -9, "SIGTERM": 143, "SIGINT": 130}[fault]}
        assert codes.count(0) <= count // 4  # only those that came after the last rename


@pytest.mark.parametrize("largest", [0, 1_000, 300_000, 2_000_000, 7_000_000])
@pytest.mark.parametrize("fault", ["kill -9", "full disk"])
def test_a_file_is_cut_while_it_is_written(
    fault: str, largest: int, conversions: Conversions, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """By the kernel, at a number of bytes: the process is killed there, or the write fails."""
    out = tmp_path / "out"
    outcome = conversions.run(out, fault=fault, largest_file=largest or 1)
    assert outcome.code == (1 if fault == "full disk" else -25)
    assert "Traceback" not in outcome.said
    assert not check_remains(out, expected)
    resumed = conversions.run(out, "--resume")
    assert resumed.code == 0, resumed.said
    assert contents(out) == expected


# Two at once


def test_the_second_conversion_to_one_output_is_refused(
    conversions: Conversions, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stages = conversions.calls(tmp_path / "whole", "pause")
    first = conversions.start(out, fault="pause", at=(stages["verify"] + stages["emit"]) // 2)
    first.wait_until_stopped()
    held = contents(workspace(out))
    for extra in ((), ("--resume",), ("--force",)):
        second = conversions.run(out, *extra)
        assert second.code == 1
        assert f"error: another conversion is writing {out}" in second.said
        assert contents(workspace(out)) == held
    first.resume()
    assert first.outcome().code == 0
    assert contents(out) == expected
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_one_of_two_wins(conversions: Conversions, expected: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    runs = [conversions.start(out) for _ in range(3)]
    outcomes = sorted((run.outcome() for run in runs), key=lambda outcome: outcome.code)
    assert [outcome.code for outcome in outcomes] == [0, 1, 1]
    for outcome in outcomes[1:]:
        assert "another conversion is writing" in outcome.said or "already exists" in outcome.said
    assert contents(out) == expected
    assert os.listdir(out.parent) == ["out"]


def test_a_lock_follows_the_directory_that_is_there(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path / "work"), DirectoryLock(tmp_path / "work")
    assert first.take()
    assert not second.take()
    shutil.rmtree(tmp_path / "work")  # as a run that has published does
    assert second.take()
    first.release()  # its own file is gone; the other's is not its to remove
    assert not first.take()
    second.release()
    assert first.take()


def test_a_lock_left_by_a_killed_run_is_free(
    conversions: Conversions, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stages = conversions.calls(tmp_path / "whole", "kill -9")
    assert conversions.run(out, at=stages["clip"]).code == -9
    assert (workspace(out) / "lock").exists()
    assert conversions.run(out, "--resume").code == 0
    assert contents(out) == expected


def test_failed_run_removes_the_parents_that_it_made(conversions: Conversions, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    out = tmp_path / "mine" / "deep" / "deeper" / "out"
    assert conversions.run(out, "--calibration-tokens", "999999999").code == 1
    assert os.listdir(tmp_path / "mine") == []


# A source that does not stay as it is


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_source_that_changes_during_the_run_is_not_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = Path(shutil.copytree(EXAMPLE, tmp_path / "model")), tmp_path / "out"
    emit = EmitPass.run

    def change(*arguments: object) -> object:
        os.utime(model / name, ns=(1, 1))
        return emit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(EmitPass, "run", change)
    with pytest.raises(CheckpointError, match="changed while it was converted"):
        kvcompile.convert(model, out, "naive-int2")
    assert os.listdir(tmp_path) == ["model"]
