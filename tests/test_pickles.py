"""Pickled weights are refused unless asked for, and never run."""

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvcompile.checkpoint import Checkpoint
from tests.commands import QUICK, contents, quick_conversions, refuse, succeed
from tests.conftest import family_config, save_model

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in safetensors; do not alter it."""
    return save_model(family_config("qwen3"), tmp_path_factory.mktemp("pickles") / "model", torch.bfloat16)


@pytest.fixture
def pickled(model: Path, tmp_path: Path) -> Path:
    """The same with pickled weights, in a folder of the same name."""
    target = tmp_path / "pickled" / "model"
    shutil.copytree(model, target)
    torch.save(load_file(target / "model.safetensors"), target / "pytorch_model.bin")
    (target / "model.safetensors").unlink()
    return target


def _convert(capsys: Capsys, model: Path, out: Path, *extra: object) -> dict[str, bytes]:
    succeed(capsys, "convert", model, "-o", out, *QUICK, *extra)
    return contents(out)


class Malice:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_pickles_are_refused_unless_asked_for(pickled: Path, tmp_path: Path, capsys: Capsys) -> None:
    error = refuse(capsys, "convert", pickled, "-o", tmp_path / "out", *QUICK)
    assert "pytorch_model.bin" in error
    assert "--allow-pickle" in error
    assert os.listdir(tmp_path) == ["pickled"]


def test_pickles_convert_to_the_same_model(model: Path, pickled: Path, tmp_path: Path, capsys: Capsys) -> None:
    plain = _convert(capsys, model, tmp_path / "plain")
    before = contents(pickled)
    ours = _convert(capsys, pickled, tmp_path / "out", "--allow-pickle")
    assert contents(pickled) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "pickled", "plain"]
    weights = {"model.safetensors", "kvcompile.json"}  # the order of tensors in the file is another
    assert ours.keys() == plain.keys()
    assert {name for name in ours if ours[name] != plain[name]} <= weights
    first, second = Checkpoint(tmp_path / "out"), Checkpoint(tmp_path / "plain")
    assert all(torch.equal(first.load(name), second.load(name)) for name in first.entries)


def test_shards_and_resume(model: Path, pickled: Path, tmp_path: Path, capsys: Capsys) -> None:
    tensors = load_file(model / "model.safetensors")
    (pickled / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        torch.save({name: tensors[name] for name in part}, pickled / f"part-{number}.bin")
        weight_map |= dict.fromkeys(part, f"part-{number}.bin")
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = _convert(capsys, pickled, tmp_path / "whole", "--allow-pickle")
    succeed(capsys, "convert", pickled, "-o", tmp_path / "out", *QUICK, "--allow-pickle", "--stop-after", "clip")
    assert _convert(capsys, pickled, tmp_path / "out", "--allow-pickle", "--resume") == whole


def test_a_malicious_pickle_is_not_run(pickled: Path, tmp_path: Path, capsys: Capsys) -> None:
    for name, content in {
        "pytorch_model.bin": Malice(tmp_path / "ran"),
        "model.pt": {"model.embed_tokens.weight": Malice(tmp_path / "ran")},
    }.items():
        (pickled / "pytorch_model.bin").unlink(missing_ok=True)
        torch.save(content, pickled / name)
        error = refuse(capsys, "convert", pickled, "-o", tmp_path / "out", *QUICK, "--allow-pickle")
        assert name in error
        assert "it was not run" in error
        (pickled / name).write_bytes(pickle.dumps(content, protocol=2))  # without torch's archive around it
        assert "it was not run" in refuse(capsys, "convert", pickled, "-o", tmp_path / "out", "--allow-pickle")
        (pickled / name).unlink()
    assert os.listdir(tmp_path) == ["pickled"]
    pickle.loads(pickle.dumps(Malice(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir(), "it is malicious"


CONTENTS: dict[str, tuple[Any, str]] = {
    "list": ([torch.ones(2)], "no tensors by name"),
    "number": ({"a": 5}, "a is no dense tensor"),
    "sparse": ({"a": torch.eye(4).to_sparse()}, "a is no dense tensor"),
    "complex": ({"a": torch.ones(2, dtype=torch.complex64)}, "a is no dense tensor"),
    "bomb": ({"a": torch.ones(1).expand(1 << 40)}, "more bytes than it holds"),
}


@pytest.mark.parametrize(("content", "fragment"), CONTENTS.values(), ids=CONTENTS.keys())
def test_pickles_of_other_things(content: Any, fragment: str, pickled: Path, tmp_path: Path, capsys: Capsys) -> None:
    torch.save(content, pickled / "pytorch_model.bin")
    error = refuse(capsys, "convert", pickled, "-o", tmp_path / "out", "--allow-pickle")
    assert "pytorch_model.bin" in error
    assert fragment in error
    assert os.listdir(tmp_path) == ["pickled"]


def test_pickles_that_cannot_be_chosen_or_laid_over(pickled: Path, tmp_path: Path, capsys: Capsys) -> None:
    arguments = ("convert", pickled, "-o", tmp_path / "out", "--allow-pickle")
    assert "no overlay" in refuse(capsys, *arguments, "--weights", "overlay")
    shutil.move(pickled / "pytorch_model.bin", pickled / "a.pt")
    shutil.copy(pickled / "a.pt", pickled / "b.pt")
    assert "several pickles (a.pt, b.pt)" in refuse(capsys, *arguments)
    (pickled / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../x.bin"}}')
    assert "'../x.bin', which is no weight file beside it" in refuse(capsys, *arguments)
    assert "holds the source" in refuse(capsys, "convert", pickled, "-o", pickled, "--allow-pickle", "--force")
