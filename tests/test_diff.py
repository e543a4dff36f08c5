"""`kvcompile diff`: what differs, and what the exit code says."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcompile
from kvcompile.checkpoint import Checkpoint
from kvcompile.errors import VerificationError
from kvcompile.evaluate.difference import Change
from kvcompile.export import export
from tests.commands import overwrite, quick_conversions, reseal, run
from tests.conftest import edit_json, family_config, save_model
from tests.families import save_family

Capsys = pytest.CaptureFixture[str]
FEW: dict[str, Any] = {"calibration_tokens": 256}


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with biases, in several shards; do not alter it."""
    return save_model(family_config("qwen2"), tmp_path_factory.mktemp("diff") / "model", shards="200KB")


@pytest.fixture(scope="module")
def artifact(model: Path) -> Path:
    """Its conversion; do not alter it."""
    kvcompile.convert(model, model.parent / "out", "oscar-int2", **FEW)
    return model.parent / "out"


def parts(a: Path, b: Path) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for change in kvcompile.diff(a, b).changes:
        found.setdefault(change.part, []).append(change)
    return found


def test_two_runs_are_the_same(model: Path, artifact: Path, tmp_path: Path, capsys: Capsys):
    kvcompile.convert(model, tmp_path / "out", "oscar-int2", **FEW)
    done = run(capsys, "diff", artifact, tmp_path / "out")
    assert (done.code, done.out) == (0, "the same\n")


def test_another_scheme(model: Path, artifact: Path, tmp_path: Path, capsys: Capsys):
    kvcompile.convert(model, tmp_path / "out", "oscar-int2", overrides=["key.clip.ratio=0.5"], **FEW)
    found = parts(artifact, tmp_path / "out")
    assert found["scheme"] == [Change("scheme", "key.clip.ratio", "calibrated", "0.5")]
    assert "0.key.clip_ratio" in [change.what for change in found["layers"]]
    assert "layers.0.key.clip_ratio" in [change.what for change in found["sidecar"]]
    assert "weights" not in found
    done = run(capsys, "diff", artifact, tmp_path / "out")
    assert done.code == 1
    assert "  key.clip.ratio: calibrated -> 0.5" in done.out
    said = json.loads(run(capsys, "diff", artifact, tmp_path / "out", "--json").out)
    assert said["same"] is False
    assert {"part": "scheme", "what": "key.clip.ratio", "a": "calibrated", "b": "0.5", "expected": False} in said[
        "changes"
    ]


def test_another_rotation_means_other_weights(model: Path, artifact: Path, tmp_path: Path):
    kvcompile.convert(model, tmp_path / "out", "oscar-int2", overrides=["value.rotation.scope=layer"], **FEW)
    found = parts(artifact, tmp_path / "out")
    changed = {change.what for change in found["weights"]}
    assert changed == {
        f"model.layers.{i}.self_attn.{name}"
        for i in range(2)
        for name in ("v_proj.weight", "v_proj.bias", "o_proj.weight")
    }
    assert "relative difference" in found["weights"][0].b


def test_other_versions_are_listed_but_do_not_count(artifact: Path, tmp_path: Path, capsys: Capsys):
    other = Path(shutil.copytree(artifact, tmp_path / "out"))
    producer = json.loads((other / "kvcompile.json").read_text())["producer"]
    edit_json(other / "kvcompile.json", producer=producer | {"torch": "9.9"})
    done = run(capsys, "diff", artifact, other)
    assert done.code == 0
    assert "-> 9.9 (expected)" in done.out
    assert "the same (beside 1 that are to be expected)" in done.out


def test_other_metrics_and_calibration(artifact: Path, tmp_path: Path):
    other = Path(shutil.copytree(artifact, tmp_path / "out"))
    document = json.loads((other / "kvcompile.json").read_text())
    document["calibration"]["seed"] = 7
    document["metrics"]["logits_kl"] = 1.0
    edit_json(other / "kvcompile.json", **document)
    found = parts(artifact, other)
    assert [change.what for change in found["provenance"]] == ["calibration.seed"]
    assert [change.what for change in found["metrics"]] == ["logits_kl"]


@pytest.mark.parametrize("swapped", [False, True])
def test_an_artifact_and_its_source(swapped: bool, model: Path, artifact: Path, capsys: Capsys):
    pair = (model, artifact) if swapped else (artifact, model)
    done = run(capsys, "diff", *pair)
    assert done.code == 0
    assert done.out.count("(expected)") == 6
    assert all(change.expected for change in kvcompile.diff(*pair).changes)


def test_an_overlay_and_its_source(model: Path, tmp_path: Path):
    kvcompile.convert(model, tmp_path / "out", "quarot-int2", weights="overlay")
    assert kvcompile.diff(tmp_path / "out", model).changes == ()


def test_an_artifact_of_another_model(model: Path, artifact: Path, tmp_path: Path):
    other = Path(shutil.copytree(artifact, tmp_path / "out"))
    projection, norm = "model.layers.1.self_attn.o_proj.weight", "model.norm.weight"
    for name in (projection, norm):
        overwrite(other, name, b"\0" * 64)
    reseal(other, projection)
    counted = {change.what for change in kvcompile.diff(other, model).changes if not change.expected}
    assert {projection, norm} <= counted
    edit_json(other / "config.json", rms_norm_eps=1.0)
    assert [c.what for c in parts(other, model)["config.json"]] == ["rms_norm_eps"]
    another = save_model(family_config("qwen2", num_hidden_layers=1), tmp_path / "another")
    assert not kvcompile.diff(artifact, another).same


@pytest.mark.parametrize("against", ["artifact", "model"])
def test_files_are_compared_as_they_are(against: str, model: Path, artifact: Path, tmp_path: Path):
    """Not as the manifest says they are."""
    other, unaltered = tmp_path / "out", artifact if against == "artifact" else model
    shutil.copytree(artifact, other)
    assert kvcompile.diff(other, unaltered).same
    overwrite(other, "model.norm.weight", b"\0" * 64)
    edit_json(other / "config.json", rms_norm_eps=1.0)
    (other / "tokenizer.json").unlink()
    found = parts(other, unaltered)
    file = Checkpoint(other).entries["model.norm.weight"].file
    counted = {part: [c.what for c in changes if not c.expected] for part, changes in found.items()}
    assert {part: what for part, what in counted.items() if what} == {
        "weights": [str(file), "model.norm.weight"], "config.json": ["rms_norm_eps"], "files": ["tokenizer.json"],
    }  # fmt: skip
    assert (found["files"][0].a, "in the manifest" in found["weights"][0].a) == ("absent", True)
    twin = Path(shutil.copytree(other, tmp_path / "twin"))
    assert [Path(c.what).parent for c in kvcompile.diff(other, twin).changes] == [other, twin]  # both are damaged


def test_queries_in_a_fused_matrix_count(tmp_path: Path):
    model, out = save_family("phi3", tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(model, out, "quarot-int2")
    assert kvcompile.diff(out, model).same
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    overwrite(out, fused, b"\0" * 64)
    reseal(out, fused)
    assert fused in [c.what for c in kvcompile.diff(out, model).changes if not c.expected]
    with pytest.raises(VerificationError, match=r"layer 0: rows of .*qkv_proj.weight that make no values differ"):
        kvcompile.verify(out, model)


@pytest.mark.parametrize("override", ["apply=online", "kind=identity"])
def test_layers_that_fold_nothing_are_as_they_were(override: str, model: Path, tmp_path: Path):
    kvcompile.convert(model, tmp_path / "out", "quarot-int2", overrides=[f'layers."0".value.rotation.{override}'])
    changes = kvcompile.diff(tmp_path / "out", model).changes
    assert all(change.expected and ".layers.1." in change.what for change in changes)
    assert len(changes) == 3
    kvcompile.verify(tmp_path / "out", model)
    overwrite(tmp_path / "out", o_proj := "model.layers.0.self_attn.o_proj.weight", b"\1" * 4)
    reseal(tmp_path / "out", o_proj)
    assert not kvcompile.diff(tmp_path / "out", model).same
    with pytest.raises(VerificationError, match=f"tensor {o_proj} differs"):
        kvcompile.verify(tmp_path / "out", model)


def test_the_tag_is_expected(model: Path, artifact: Path, tmp_path: Path):
    export(artifact, "transformers", tmp_path / "tagged")
    for other in (model, artifact):
        found = kvcompile.diff(tmp_path / "tagged", other)
        assert found.same
        assert [c.what for c in found.changes if c.part == "config.json"] == ["quantization_config"]


def test_what_cannot_be_compared_is_exit_code_2(model: Path, artifact: Path, tmp_path: Path, capsys: Capsys):
    done = run(capsys, "diff", model, model)
    assert (done.code, "neither" in done.err) == (2, True)
    done = run(capsys, "diff", artifact, tmp_path)
    assert done.code == 2
    assert done.err.startswith("error: ")
