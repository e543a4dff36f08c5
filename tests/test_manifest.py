"""The manifest and its published JSON Schema."""

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from kvcompile.artifact import Manifest, manifest_schema, read_manifest


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
