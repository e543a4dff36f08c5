"""Exports: what is written, what is refused, and that no half of an export is ever left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvcompile
from kvcompile.checkpoint import Checkpoint
from kvcompile.errors import ExportError
from kvcompile.export import TARGETS, Notes, export, load_target
from kvcompile.export.table import support_table
from kvcompile.models.agreement import KL_TOLERANCE, compare_logits, logits_of
from tests.commands import contents, quick_conversions, refuse, run, succeed
from tests.conftest import EXAMPLE

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as an overlay; do not alter it."""
    out = tmp_path_factory.mktemp("overlay") / "out"
    kvcompile.convert(EXAMPLE, out, "quarot-int2", weights="overlay")
    return out


def test_plain_is_an_ordinary_checkpoint_with_the_logits_of_its_source(converted: Path, tmp_path: Path):
    notes = export(converted, "plain", tmp_path / "plain")
    view = contents(tmp_path / "plain")
    assert view["model.safetensors"] == (converted / "model.safetensors").read_bytes()
    assert not any(name.startswith("kvcompile") for name in view)
    assert any("value rotation" in entry for entry in notes.carried)
    ids = torch.arange(200) * 7 % 4096
    ours, source = (
        logits_of(AutoModelForCausalLM.from_pretrained(path), ids) for path in (tmp_path / "plain", EXAMPLE)
    )
    assert compare_logits(source, ours).kl < KL_TOLERANCE


def test_notes_of_an_export_do_not_travel(converted: Path, tmp_path: Path):
    import shutil

    model = Path(shutil.copytree(EXAMPLE, tmp_path / "model"))
    (model / "NOTES.md").write_text("of another export")
    assert "NOTES.md" not in [file.name for file in Checkpoint(model).companions()]


def test_plain_refuses_what_has_no_weights_of_its_own(overlay: Path, tmp_path: Path):
    with pytest.raises(ExportError, match="is an overlay, its weights are the source's own"):
        export(overlay, "plain", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_plain_refuses_what_folds_nothing(tmp_path: Path):
    kvcompile.convert(EXAMPLE, tmp_path / "out", "naive-int4")
    with pytest.raises(ExportError, match="naive-int4 folds nothing"):
        export(tmp_path / "out", "plain", tmp_path / "plain")


def test_notes_name_the_weights_and_who_rotates_values(converted: Path, tmp_path: Path):
    export(converted, "plain", tmp_path / "plain")
    text = (tmp_path / "plain" / "NOTES.md").read_text("utf-8")
    digest = kvcompile.artifact.read_manifest(converted).weights.files["model.safetensors"]
    assert f"model.safetensors: sha256 {digest}" in text
    assert "an engine must not rotate values again" in text
    for section in ("## Carried", "## Approximated\n\n- nothing", "## Left out\n\n- key rotation", "## Use"):
        assert section in text


def test_nothing_is_left_of_a_failed_export(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self: object, artifact: object, folder: Path, options: object) -> Notes:
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcompile.export.plain.PlainTarget.write", fail)
    with pytest.raises(ExportError, match="No space left on device; nothing was left there"):
        export(converted, "plain", tmp_path / "plain")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_the_artifacts_are_never_exported(converted: Path, tmp_path: Path):
    import shutil

    broken = Path(shutil.copytree(converted, tmp_path / "out"))
    shutil.copyfile(EXAMPLE / "model.safetensors", broken / "model.safetensors")
    with pytest.raises(kvcompile.errors.ArtifactError, match="do not belong together"):
        export(broken, "plain", tmp_path / "plain")


def test_command(converted: Path, tmp_path: Path, capsys: Capsys):
    out = succeed(capsys, "export", converted, "--to", "plain", "-o", tmp_path / "plain").out
    assert "carried: value rotation" in out
    assert "left out: key rotation" in out
    assert f"wrote {tmp_path / 'plain'}" in out
    assert len(Checkpoint(tmp_path / "plain").entries) == len(Checkpoint(EXAMPLE).entries)
    assert "already exists" in refuse(capsys, "export", converted, "--to", "plain", "-o", tmp_path / "plain")


def test_listing(capsys: Capsys):
    listed = succeed(capsys, "export", "--list").out
    assert all(name in listed for name in TARGETS)
    assert all(load_target(name).name == name for name in TARGETS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "gpt"), "unknown export target 'gpt'; there are plain"),
        (("--to", "plain", "--option", "nonsense=1"), "export to plain has no option 'nonsense'; it takes none"),
        (("--to", "sglang", "--option", "source=x"), "has no option 'source'; it takes format_version, text"),
        (("--to", "sglang", "--option", "target=x"), "has no option 'target'"),
        (("--to", "sglang", "--option", "out=x"), "has no option 'out'"),
        (("--to", "sglang", "--option", "folder=x"), "has no option 'folder'"),
        (("--to", "sglang", "--option", "format_version=abc"), "option format_version is 1 or 2, not 'abc'"),
        (("--to", "sglang", "--option", "format_version="), "option format_version is 1 or 2, not ''"),
    ],
)
def test_refusals(arguments: tuple[str, ...], said: str, converted: Path, tmp_path: Path, capsys: Capsys):
    assert said in refuse(capsys, "export", converted, *arguments, "-o", tmp_path / "x")


def test_a_source_that_would_be_ignored_is_refused(converted: Path, tmp_path: Path):
    with pytest.raises(ExportError, match="hands over the artifact's own weights; leave out --source"):
        export(converted, "plain", tmp_path / "x", source=EXAMPLE)


@pytest.mark.shared
def test_qwen3_32m(shared: Path, tmp_path: Path):
    model = shared / "models" / "qwen3-32m"
    kvcompile.convert(model, tmp_path / "out", "quarot-int2")
    export(tmp_path / "out", "plain", tmp_path / "plain")
    assert kvcompile.diff(tmp_path / "out", model).same
    ids = torch.arange(200) * 7 % 4096
    ours, source = (logits_of(AutoModelForCausalLM.from_pretrained(path), ids) for path in (tmp_path / "plain", model))
    assert compare_logits(source, ours).kl < KL_TOLERANCE


@pytest.mark.parametrize("arguments", [(), ("out",), ("out", "--to", "plain"), ("out", "--option", "name")])
def test_wrong_usage(arguments: tuple[str, ...], capsys: Capsys):
    assert run(capsys, "export", *arguments).code == 2


def test_not_an_artifact(tmp_path: Path, capsys: Capsys):
    assert "is no converted checkpoint" in refuse(capsys, "export", EXAMPLE, "--to", "plain", "-o", tmp_path / "x")


def test_the_table_in_the_documents_is_current():
    """After a change: python -m kvcompile.export.table examples/checkpoint, into docs/exports.md."""
    text = (Path(__file__).parents[1] / "docs" / "exports.md").read_text("utf-8")
    table = text.partition("<!-- table: begin -->\n")[2].partition("<!-- table: end -->")[0]
    assert table == support_table(EXAMPLE)
