"""The manifest and its published JSON Schema."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from kvcompile.artifact import Manifest, manifest_schema, open_artifact, read_manifest
from kvcompile.errors import ArtifactError, KvCompileError, VerificationError
from kvcompile.evaluate import verify
from kvcompile.runtime import load


def published() -> dict:
    return json.loads((files("kvcompile.artifact") / "manifest.schema.json").read_text("utf-8"))


def test_published_schema_is_current():
    """After a change: python -m kvcompile.artifact.manifest > kvcompile/artifact/manifest.schema.json"""
    assert published() == json.loads(json.dumps(manifest_schema()))


def test_written_manifest_follows_the_published_schema(converted: Path):
    document = json.loads((converted / "kvcompile.json").read_text("utf-8"))
    jsonschema.validate(document, published())
    del document["scheme"]
    with pytest.raises(jsonschema.ValidationError, match="scheme"):
        jsonschema.validate(document, published())


def test_manifest_round_trips(converted: Path):
    manifest = read_manifest(converted)
    assert Manifest.model_validate_json(manifest.to_json()) == manifest
    assert manifest.to_json() == (converted / "kvcompile.json").read_text("utf-8")


def test_manifest_says_what_a_reader_needs(converted: Path):
    manifest = read_manifest(converted)
    layer = manifest.layers[0]
    assert layer.key.rotation == "layers.0.key.rotation"
    assert manifest.sidecar.shapes[layer.key.rotation] == [2, 64, 64]
    assert (layer.key.apply, layer.value.apply) == ("online", "folded")
    assert layer.page_format().page_bytes == 64 * 2 * (16 + 4)
    assert manifest.bits_per_element["128k"] == pytest.approx(2.5 + 320 / 131072 * 13.5)
    assert not any(text in manifest.to_json() for text in ("/tmp", "/home", "/root"))


TAMPERED = {
    "value said to be online": lambda d: d["layers"][0]["value"].update(apply="online"),
    "no key rotation": lambda d: d["layers"][0]["key"].update(rotation=None),
    "another layer's rotation": lambda d: d["layers"][0]["key"].update(rotation="layers.1.key.rotation"),
    "a layer dropped": lambda d: d["layers"].pop(1),
    "no hashes of projections": lambda d: d["weights"].update(projections={}),
    "no hashes of files": lambda d: d["weights"].update(files={}),
    "an impossible group": lambda d: d["layers"][0]["key"].update(group_size=7),
    "other bits": lambda d: d["layers"][0]["value"].update(bits=4),
    "a wrong index": lambda d: d["layers"][3].update(index=7),
    "a compiled layer disowned": lambda d: d["layers"][0].update(key=None),
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_manifest_that_contradicts_itself_is_refused(tamper, converted: Path, tmp_path: Path):
    """Such a manifest would run, and run wrongly: a value rotated twice, or not at all."""
    artifact = Path(shutil.copytree(converted, tmp_path / "out"))
    document = json.loads((artifact / "kvcompile.json").read_text("utf-8"))
    tamper(document)
    (artifact / "kvcompile.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="contradicts itself"):
        open_artifact(artifact)


def test_verify_compares_the_table_with_the_checkpoint(converted: Path, tmp_path: Path):
    artifact = Path(shutil.copytree(converted, tmp_path / "out"))
    document = json.loads((artifact / "kvcompile.json").read_text("utf-8"))
    document["layers"][2].update(key=None, value=None, reason="left out")
    (artifact / "kvcompile.json").write_text(json.dumps(document))
    with pytest.raises(VerificationError, match="layer 2 of the manifest is not the layer"):
        verify(artifact)


def test_pickled_weights_are_never_read(converted: Path, tmp_path: Path):
    artifact = Path(shutil.copytree(converted, tmp_path / "out"))
    (artifact / "model.safetensors").rename(artifact / "pytorch_model.bin")
    with pytest.raises(KvCompileError, match="safetensors"):
        load(artifact, check=False)
