"""The Hugging Face side: the model card, pushing to (a stand-in for) the Hub, and the opt-in tag that from_pretrained obeys."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load
from transformers import AutoModelForCausalLM

import kvcompile
from kvcompile import quantizer
from kvcompile.artifact import open_artifact, read_manifest
from kvcompile.errors import ArtifactError, ExportError, VerificationError
from kvcompile.export import export
from kvcompile.export.push import push
from tests.commands import contents, overwrite, quick_conversions, refuse, succeed
from tests.conftest import EXAMPLE
from tests.hub import TOKEN, Hub, serve

Capsys = pytest.CaptureFixture[str]
IDS = torch.arange(450)[None] * 7 % 4096


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A stand-in for the Hub."""
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def tagged(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted example with the tag; do not alter it."""
    out = tmp_path_factory.mktemp("tagged") / "out"
    export(converted, "transformers", out)
    return out


# The model card


def test_card(converted: Path):
    card = ModelCard.load(converted / "README.md", ignore_metadata_errors=False)
    assert card.data.license == "apache-2.0"
    assert (card.data.library_name, card.data.pipeline_tag) == ("kvcompile", "text-generation")
    assert {"kvcompile", "kv-cache", "oscar-int2", "qwen3", "2-bit"} <= set(card.data.tags)
    assert "| fold_kl |" in card.text
    assert read_manifest(converted).source.license.license == "apache-2.0"


@pytest.mark.parametrize(
    ("front", "carried"),
    [
        (None, None),
        ("no front matter", None),
        ("---\n[broken\n---\n", None),
        (
            "---\nlicense: other\nlicense_name: 'my: own'\nlicense_link: https://x.org/L\n---\n",
            {"license": "other", "license_name": "my: own", "license_link": "https://x.org/L"},
        ),
    ],
    ids=["no card", "no fields", "broken", "a licence of its own"],
)
def test_licences_are_carried_over(front: str | None, carried: Any, small_model: Path, tmp_path: Path):
    (small_model / "README.md").unlink(missing_ok=True)
    if front is not None:
        (small_model / "README.md").write_text(front)
    kvcompile.convert(small_model, tmp_path / "out", "quarot-int2")
    recorded = read_manifest(tmp_path / "out").source.license
    assert (recorded and recorded.model_dump(exclude_none=True)) == carried
    fields = metadata_load(tmp_path / "out" / "README.md")
    assert {name: value for name, value in fields.items() if name.startswith("license")} == (carried or {})


# Pushing


def test_push(converted: Path, hub: Hub, tmp_path: Path):
    out = Path(shutil.copytree(converted, tmp_path / "out"))
    (out / "notes.bin").write_text("not ours")
    address = push(out, "me/model", private=True, token=TOKEN, endpoint=hub.endpoint)
    assert address == f"{hub.endpoint}/me/model"
    assert hub.files["me/model@main"] == contents(converted)
    assert hub.created[0]["name"] == "model"
    assert hub.created[0]["visibility"] == "private"
    assert hub.messages == ["kvcompile oscar-int2"]
    assert open_artifact(out).manifest == read_manifest(converted)


def test_a_later_push_leaves_no_weights_of_an_earlier_one(converted: Path, hub: Hub):
    """A loader takes an index before a single file: the old weights with the new manifest."""
    old = {"model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    theirs = {"adapter.safetensors": b"x", "figure.png": b"y"}
    hub.files["me/model@main"] = dict.fromkeys(old, b"old") | theirs
    push(converted, "me/model", token=TOKEN, endpoint=hub.endpoint)
    assert hub.files["me/model@main"] == contents(converted) | theirs
    push(converted, "me/model", token=TOKEN, endpoint=hub.endpoint)
    assert hub.files["me/model@main"] == contents(converted) | theirs


def test_notes_of_an_export_are_not_pushed(tagged: Path, hub: Hub):
    assert (tagged / "NOTES.md").exists()
    push(tagged, "me/model", token=TOKEN, endpoint=hub.endpoint)
    assert set(hub.files["me/model@main"]) == set(contents(tagged)) - {"NOTES.md"}


def test_push_command(converted: Path, hub: Hub, capsys: Capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    original = push

    def local(*args: Any, **kwargs: Any) -> str:
        return original(*args, **kwargs, endpoint=hub.endpoint)

    monkeypatch.setattr("kvcompile.cli.push.push", local)
    done = succeed(capsys, "push", converted, "me/model", "--revision", "int2", "--message", "first")
    assert f"to {hub.endpoint}/me/model" in done.out
    assert "kvcompile.json" in hub.files["me/model@int2"]
    assert "POST /api/models/me/model/branch/int2" in hub.requests
    assert hub.messages == ["first"]
    hub.fail = 403
    said = refuse(capsys, "push", converted, "me/model")
    assert "the token may not write there" in said


def test_a_conflict_is_explained(converted: Path, hub: Hub):
    hub.busy = True
    with pytest.raises(ExportError, match="somebody else is changing this repository; try again when they are done"):
        push(converted, "me/model", token=TOKEN, endpoint=hub.endpoint)
    hub.fail = 409  # to the question for the repository: it exists, but what then is its address?
    with pytest.raises(ExportError, match="does not answer as the Hugging Face Hub does; look at HF_ENDPOINT"):
        push(converted, "me/model", token=TOKEN, endpoint=hub.endpoint)


@pytest.mark.parametrize("status", [401, 403, 404, 409, 500])
def test_the_token_is_never_shown(status: int, converted: Path, hub: Hub, capsys: Capsys):
    """Not even where the server's answer holds it."""
    hub.fail = status
    with pytest.raises(ExportError, match="cannot push") as caught:
        push(converted, "me/model", token=TOKEN, endpoint=hub.endpoint)
    captured = capsys.readouterr()
    shown = str(caught.value) + repr(caught.value.__cause__) + captured.out + captured.err
    assert TOKEN not in shown
    assert "\n" not in str(caught.value)


def test_push_refusals(converted: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ExportError, match="Connection refused"):
        push(converted, "me/model", token=TOKEN, endpoint="http://127.0.0.1:9")
    for name in ("me", "a/b/c", "me/", "me/m\u00f6del", "me/my model"):
        with pytest.raises(ExportError, match="names no repository of the Hugging Face Hub; write owner/name"):
            push(converted, name, token=TOKEN, endpoint=hub.endpoint)
    with pytest.raises(
        ExportError, match="the token for the Hugging Face Hub has characters that no token has"
    ) as caught:
        push(converted, "me/model", token=TOKEN + "\u2026", endpoint=hub.endpoint)
    assert TOKEN not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ExportError, match="run 'hf auth login' or set HF_TOKEN"):
        push(converted, "me/model", endpoint=hub.endpoint)
    with pytest.raises(ArtifactError, match="is no converted checkpoint"):
        push(EXAMPLE, "me/model", token=TOKEN, endpoint=hub.endpoint)
    kvcompile.convert(EXAMPLE, tmp_path / "overlay", "quarot-int2", weights="overlay")
    with pytest.raises(ArtifactError, match="names a local path"):
        push(tmp_path / "overlay", "me/model", token=TOKEN, endpoint=hub.endpoint)
    assert hub.requests == []


def test_a_damaged_artifact_is_not_pushed(converted: Path, hub: Hub, tmp_path: Path):
    broken = Path(shutil.copytree(converted, tmp_path / "out"))
    overwrite(broken, "model.norm.weight", b"\0" * 8)
    with pytest.raises(VerificationError, match="does not match its hash"):
        push(broken, "me/model", token=TOKEN, endpoint=hub.endpoint)
    assert hub.requests == []


# The tag


def test_tagged_models_set_themselves_up(converted: Path, tagged: Path):
    model = AutoModelForCausalLM.from_pretrained(tagged)
    assert isinstance(kvcompile.new_cache(model), kvcompile.PackedCache)
    ours, _ = kvcompile.load(converted)
    made = [m.generate(IDS, max_new_tokens=8, do_sample=False) for m in (model, ours)]
    assert torch.equal(*made)
    cache = kvcompile.new_cache(model)
    model.generate(IDS, max_new_tokens=8, do_sample=False, past_key_values=cache)
    assert cache.stores[0].layer(0).num_pages_B.tolist() == [2]


def test_in_a_process_of_its_own(converted: Path, tagged: Path):
    """Without kvcompile the weights are plain; imported after transformers, it is obeyed from then on."""
    program = f"""
import torch, transformers
def load():
    return transformers.AutoModelForCausalLM.from_pretrained({str(tagged)!r})
plain = load()
assert plain.config._attn_implementation == "sdpa"
print(float(plain(torch.arange(64)[None]).logits.double().sum()))
import kvcompile
assert isinstance(kvcompile.new_cache(load()), kvcompile.PackedCache)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(converted)(torch.arange(64)[None]).logits
    assert float(done.stdout) == pytest.approx(float(logits.double().sum()), rel=1e-3)


def test_kvcompile_imported_first(tagged: Path):
    program = f"""
import kvcompile, sys
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
assert isinstance(kvcompile.new_cache(AutoModelForCausalLM.from_pretrained({str(tagged)!r})), kvcompile.PackedCache)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_tagged_artifact_is_an_artifact(converted: Path, tagged: Path, tmp_path: Path):
    config = json.loads((tagged / "config.json").read_text())
    assert config.pop("quantization_config") == {"quant_method": "kvcompile"}
    assert config == json.loads((converted / "config.json").read_text())
    kvcompile.verify(tagged, EXAMPLE)
    model, _ = kvcompile.load(tagged)
    assert isinstance(kvcompile.new_cache(model), kvcompile.PackedCache)
    assert not kvcompile.inspect(tagged).layers[0].reason
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")


def test_the_tag_stays_with_the_artifact(tagged: Path, tmp_path: Path):
    """Plain weights with the tag would be taken for an artifact whose manifest is missing."""
    export(tagged, "plain", tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    export(tagged, "transformers", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tagged)


def test_a_tag_without_its_manifest_is_an_error(tagged: Path, tmp_path: Path):
    broken = Path(shutil.copytree(tagged, tmp_path / "out"))
    (broken / "kvcompile.json").unlink()
    with pytest.raises(ArtifactError, match=r"kvcompile\.json is missing"):
        AutoModelForCausalLM.from_pretrained(broken)


def test_a_tag_over_other_weights_is_an_error(tagged: Path, tmp_path: Path):
    broken = Path(shutil.copytree(tagged, tmp_path / "out"))
    shutil.copyfile(EXAMPLE / "model.safetensors", broken / "model.safetensors")
    with pytest.raises(ArtifactError, match="do not belong together"):
        AutoModelForCausalLM.from_pretrained(broken)


def test_on_the_hub_the_sidecar_is_fetched_too(tagged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, asked = AutoModelForCausalLM.from_pretrained(tagged), []
    model.config.name_or_path, model.config._commit_hash = "me/model", "abc"

    def fetch(repo: str, file: str, _commit_hash: str) -> str:
        asked.append((repo, file, _commit_hash))
        return str(tagged / file)

    monkeypatch.setattr(quantizer, "cached_file", fetch)
    assert quantizer.open_tagged(model, tmp_path).directory == tagged
    assert asked == [("me/model", "kvcompile.json", "abc"), ("me/model", "kvcompile.safetensors", "abc")]

    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("offline")

    monkeypatch.setattr(quantizer, "cached_file", fail)
    with pytest.raises(ArtifactError, match=r"kvcompile\.json cannot be fetched"):
        quantizer.open_tagged(model, tmp_path)
    with pytest.raises(ArtifactError, match="not loaded from files"):
        quantizer.open_tagged(model, None)


@pytest.mark.shared
def test_qwen3_32m(shared: Path, tmp_path: Path):
    kvcompile.convert(shared / "models" / "qwen3-32m", tmp_path / "out", "quarot-int2")
    export(tmp_path / "out", "transformers", tmp_path / "view")
    model, (ours, _) = AutoModelForCausalLM.from_pretrained(tmp_path / "view"), kvcompile.load(tmp_path / "out")
    made = [m.generate(IDS, max_new_tokens=4, do_sample=False) for m in (model, ours)]
    assert torch.equal(*made)


def test_overlays_cannot_be_tagged(tmp_path: Path):
    kvcompile.convert(EXAMPLE, tmp_path / "out", "quarot-int2", weights="overlay")
    with pytest.raises(ExportError, match="convert with --weights fold"):
        export(tmp_path / "out", "transformers", tmp_path / "view")
