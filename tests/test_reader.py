"""The manifest as a standard: a reader that knows only its specification, and what may be added without breaking it."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from kvcompile.artifact import manifest_schema, open_artifact, read_manifest
from kvcompile.checkpoint import file_digest
from kvcompile.codec import PageFormat, PageTables, RowFormat, RowTables, decode_pages, encode_pages
from kvcompile.errors import ArtifactError
from kvcompile.evaluate.uncalibrated import page_format
from kvcompile.models import load_model
from kvcompile.passes.convert import convert
from kvcompile.runtime import load, new_cache
from kvcompile.scheme import Scheme, builtin_names, load_scheme
from kvcompile.scheme import model as scheme_model
from tests.layers import random_tables

READER = Path(__file__).parents[1] / "examples" / "read_page.py"


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_page", READER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def artifact(converted: Path, tmp_path: Path) -> Path:
    """A copy of the converted example to alter."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


def rewrite(artifact: Path, change: Any) -> None:
    document = json.loads((artifact / "kvcompile.json").read_text("utf-8"))
    change(document)
    (artifact / "kvcompile.json").write_text(json.dumps(document), "utf-8")


def test_it_is_short_and_needs_little():
    lines = READER.read_text("utf-8").splitlines()
    assert len(lines) <= 150
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy", "safetensors"}


def formats() -> dict[str, PageFormat]:
    """The page format of every built-in scheme at two head sizes, and combinations that no scheme has."""
    found = {f"{name}, {dim}": page_format(load_scheme(name), dim) for name in builtin_names() for dim in (64, 128)}
    for bits in (1, 2, 4):
        for axis in ("token", "channel"):
            for zero in ("float", "integer", *(("none",) if axis == "token" else ())):
                key = RowFormat(96, bits, 32, axis=axis, zero_point=zero, token_scale="max")
                value = RowFormat(96, 4 // bits, 96, 0.9, zero_point=zero if axis == "token" else "float", centroids=5)
                found[f"{bits} bits by {axis}, {zero}"] = PageFormat(key, value, 128)
    return found


def record(row: RowFormat) -> dict[str, Any]:
    return {
        "bits": row.bits, "group_size": row.group_size, "axis": row.axis, "zero_point": row.zero_point,
        "token_scale": row.token_scale, "num_centroids": row.centroids, "apply": "online",
    }  # fmt: skip


@pytest.mark.parametrize("fmt", formats().values(), ids=formats().keys())
def test_pages_of_every_format_decode_to_the_same_numbers(fmt: PageFormat, reader: ModuleType):
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, fmt.tokens, fmt.head_dim, generator=generator).bfloat16()
    tables = random_tables(fmt, 2)
    books = PageTables(*(RowTables(t.feedback, t.centroids) for t in (tables.key, tables.value)))
    pages = encode_pages(k, v, fmt, books)
    expected = decode_pages(pages, fmt, books)
    layer = {
        "head_dim": fmt.head_dim, "page_tokens": fmt.tokens, "key": record(fmt.key), "value": record(fmt.value)
    }  # fmt: skip
    for head in range(2):
        book = [None if t.centroids is None else t.centroids[head].numpy() for t in (books.key, books.value)]
        found = reader.read_page(pages[head].numpy().tobytes(), layer, *book)
        for ours, theirs in zip(found, expected, strict=True):
            assert np.array_equal(ours, theirs[head].numpy())


def test_a_page_of_a_real_cache(converted: Path, reader: ModuleType, tmp_path: Path):
    """Written while generating, read without us, and close to the rows that were cached, in the source's basis."""
    model, _ = load(converted)
    cache = new_cache(model, sink=0, recent=0)
    ids = torch.arange(150)[None] * 7 % 4096
    keys = {}

    def watch(module: Any, _args: Any, kwargs: Any) -> None:
        keys["hidden"] = kwargs["hidden_states"]

    layer = model.model.layers[1].self_attn
    hook = layer.register_forward_pre_hook(watch, with_kwargs=True)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        hook.remove()
        model(ids[:, :1], past_key_values=cache)
    stored = cache.layers[1].store.layer(1)
    page = stored.pages_PKX[int(stored.table_BN[0, 0])][1].numpy().tobytes()
    opened = reader.Artifact(converted)
    key, value = opened.read_page(1, 1, page)
    fmt = read_manifest(converted).layers[1].page_format()
    pages = torch.frombuffer(bytearray(page), dtype=torch.uint8)[None]
    for ours, theirs in zip((key, value), decode_pages(pages, fmt), strict=True):
        assert np.array_equal(ours, theirs[0].numpy())
    v_NKD = layer.v_proj(keys["hidden"])[0].float().unflatten(-1, (2, 64))  # folded: rotated by W_V
    r = load_file(converted / "kvcompile.safetensors")["layers.1.value.rotation"][1]
    source = (v_NKD[:64, 1].detach() @ r.T).numpy()
    restored = opened.restore(1, 1, value, "value")
    assert np.linalg.norm(restored - source) < 0.5 * np.linalg.norm(source)
    (tmp_path / "page.bin").write_bytes(page)
    done = subprocess.run(
        [sys.executable, READER, converted, "1", "1", tmp_path / "page.bin"], capture_output=True, text=True
    )
    assert "keys [64, 64]: stored" in done.stdout, done.stderr


def test_rows_return_to_the_basis_of_the_source(example: Path, reader: ModuleType, tmp_path: Path):
    """Keys and values of a real page, turned back by the reader, are those that the source caches; only codes are lost."""
    changes = [f"{half}.{field}" for half in ("key", "value") for field in ("rotation.balance=1.0", "center=true")]
    fine = [f"{half}.{field}" for half in ("key", "value") for field in ("quantizer.bits=4", "clip.kind=none")]
    few = ["calibration.tokens=512", "calibration.sequence_length=128", "calibration.sample_length=64"]
    convert(example, tmp_path / "out", "oscar-int2", overrides=[*fine, *few, *changes])
    ids = torch.arange(150)[None] * 7 % 4096
    source, exact = load_model(example, "sdpa"), DynamicCache()
    model, _ = load(tmp_path / "out")
    cache = new_cache(model, sink=0, recent=0)
    with torch.no_grad():
        source(ids, past_key_values=exact)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)  # pages are written when the next token comes
    stored = cache.layers[0].store.layer(0)
    opened = reader.Artifact(tmp_path / "out")
    for head in range(2):
        page = stored.pages_PKX[int(stored.table_BN[0, 0])][head].numpy().tobytes()
        for half, found in zip(("key", "value"), opened.read_page(0, head, page), strict=True):
            expected = getattr(exact.layers[0], f"{half}s")[0, head, :64].float().numpy()
            error = np.linalg.norm(opened.restore(0, head, found, half) - expected) / np.linalg.norm(expected)
            assert error < 0.15, half


# What a newer minor version may add


def everywhere(document: Any) -> Any:
    """A field that nobody knows in every object of a manifest, tables by name excepted."""
    if isinstance(document, dict):
        for value in document.values():
            everywhere(value)
        document["added_in_1_99"] = {"nested": [1, 2]}
    elif isinstance(document, list):
        for value in document:
            everywhere(value)
    return document


def overridden(document: dict[str, Any]) -> None:
    """Overrides of layers, of which one changes a kind, and rotations that somebody else solved."""
    clip = document["scheme"]["key"]["clip"]
    document["scheme"]["layers"] = {
        "0-1": {"value": {"rotation": {"kind": "random", "seed": 3, "apply": "folded"}}, "window": {"block": 64}},
        "0": {"key": {"clip": {"kind": clip["kind"]}}, "value": {"rotation": {"kind": "hadamard", "apply": "folded"}}},
    }
    made = {"file": "r.pt", "sha256": "0", "format_version": 2, "objective": "qqt", "source_grouping": ""}
    document["imported_rotations"] = {"key": made, "value": {**made, "objective": "sst"}}


def test_unknown_fields_are_ignored_at_any_depth(artifact: Path, reader: ModuleType):
    """Tables by name have entries, not fields: a digest, a shape and the layers of an override are never ignored."""

    def add(document: dict[str, Any]) -> None:
        tables = [
            (document["weights"], ("files", "projections")),
            (document["sidecar"], ("shapes",)),
        ]
        kept = [(section, {name: section.pop(name) for name in names}) for section, names in tables]
        everywhere(document)
        for section, names in kept:
            section.update(names)
        del document["scheme"]["layers"]["added_in_1_99"]
        document["metrics"]["not_measured"] = None
        document["schema_version"] = "1.99"

    rewrite(artifact, overridden)
    before = read_manifest(artifact)
    rewrite(artifact, add)
    after = read_manifest(artifact)
    assert after.model_copy(update={"schema_version": before.schema_version}) == before
    assert after.scheme.layers["0-1"]["value"]["rotation"]["seed"] == 3
    assert (after.scheme.layer(0).value.rotation.kind, after.scheme.layer(1).value.rotation.kind) == (
        "hadamard",
        "random",
    )
    assert reader.Artifact(artifact).layer(0)["added_in_1_99"] == {"nested": [1, 2]}


def test_a_newer_artifact_runs(artifact: Path):
    def add(document: dict[str, Any]) -> None:
        document["schema_version"] = "1.99"
        document["scheme"]["layers"] = {"1": {"key": {"added": 1, "clip": {"added": {}}}, "added": {}}}
        everywhere(document["layers"])

    rewrite(artifact, add)
    model, tokenizer = load(artifact)
    inputs = tokenizer("The harbour", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2


@pytest.mark.parametrize(
    "override",
    [{"key": {"quantizer": {"bits": 3}}}, {"correction": {"kind": "none"}}, {"key": {"clip": {"kind": "x"}}}],
)
def test_what_is_wrong_in_an_override_stays_wrong(override: dict[str, Any], artifact: Path):
    rewrite(artifact, lambda document: document["scheme"].update(layers={"0": {**override, "added": 1}}))
    with pytest.raises(ArtifactError, match=r'scheme: .*layers\."0"'):
        read_manifest(artifact)


def test_schemes_of_people_may_have_no_unknown_fields():
    document = load_scheme("oscar-int2").model_dump()
    for layers in ({"0": {"key": {"added": 1}}}, {"0": {"added": 1}}):
        with pytest.raises(ValidationError, match="added"):
            Scheme.model_validate({**document, "layers": layers})


def test_unnamed_sidecar_tensors_are_ignored(artifact: Path, reader: ModuleType):
    path = artifact / "kvcompile.safetensors"
    tensors = load_file(path) | {"layers.0.key.added": torch.ones(3, dtype=torch.int64)}
    save_file(tensors, path)

    def seal(document: dict[str, Any]) -> None:
        document["sidecar"]["sha256"] = file_digest(path)

    rewrite(artifact, seal)
    load(artifact)
    reader.Artifact(artifact)
    with safe_open(path, framework="np") as file:
        assert "layers.0.key.added" in file.keys()  # noqa: SIM118 - safe_open is no mapping


def test_absent_fields_have_their_defaults(artifact: Path, reader: ModuleType):
    """A manifest as 1.0 would have had it, of a format that 1.0 could say."""
    later = (
        "axis", "zero_point", "rounding", "token_scale", "norm_scope", "num_centroids", "inverse", "mean", "feedback",
        "centroids",
    )  # fmt: skip

    def age(document: dict[str, Any]) -> None:
        for layer in document["layers"]:
            for name in ("page_tokens", "correction"):
                del layer[name]
            for half in ("key", "value"):
                for name in later:
                    del layer[half][name]
        del document["imported_rotations"]
        document["source"].pop("license", None)
        document["schema_version"] = "1.0"

    before = read_manifest(artifact)
    old = reader.Artifact(artifact).layer(0)
    rewrite(artifact, age)
    assert read_manifest(artifact).layers == before.layers
    aged = reader.Artifact(artifact).layer(0)
    assert reader.DEFAULTS.keys() == set(later) - {"feedback"}
    assert {name: aged["key"][name] for name in reader.DEFAULTS} == {name: old["key"][name] for name in reader.DEFAULTS}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 3),
        ("axis", "head"),
        ("zero_point", "half"),
        ("token_scale", "median"),
        ("apply", "sometimes"),
        ("rounding", "stochastic"),
        ("norm_scope", "layer"),
    ],
)
def test_unknown_values_of_known_fields_are_errors(field: str, value: Any, artifact: Path, reader: ModuleType):
    def change(document: dict[str, Any]) -> None:
        document["layers"][0]["key"][field] = value

    rewrite(artifact, change)
    with pytest.raises(ArtifactError, match=field):
        open_artifact(artifact)
    with pytest.raises(ValueError, match=field):
        reader.Artifact(artifact).layer(0)


def test_unknown_kinds_in_the_scheme_are_errors(artifact: Path):
    def change(document: dict[str, Any]) -> None:
        document["scheme"]["key"]["rotation"]["kind"] = "learned"

    rewrite(artifact, change)
    with pytest.raises(ArtifactError, match=r"scheme\.key\.rotation"):
        read_manifest(artifact)


@pytest.mark.parametrize("version", ["1", "1.x", "-3.1", "1.2.3", "", 1.2, None])
def test_what_is_no_version_is_refused(version: Any, artifact: Path, reader: ModuleType):
    rewrite(artifact, lambda document: document.update(schema_version=version))
    with pytest.raises(ArtifactError, match="not a readable manifest"):
        read_manifest(artifact)
    with pytest.raises(ValueError, match="or none"):
        reader.Artifact(artifact)


def test_the_sidecar_is_the_file_that_the_manifest_names(artifact: Path, reader: ModuleType):
    (artifact / "kvcompile.safetensors").rename(artifact / "other.safetensors")
    rewrite(artifact, lambda document: document["sidecar"].update(file="other.safetensors"))
    tensors = open_artifact(artifact).tensors
    assert tensors.keys() == reader.Artifact(artifact).tensors.keys()
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, artifact / "other.safetensors")
    with pytest.raises(ArtifactError, match=r"other.safetensors does not match its manifest"):
        assert open_artifact(artifact).tensors
    with pytest.raises(ValueError, match="sidecar is not the one"):
        reader.Artifact(artifact)
    rewrite(artifact, lambda document: document["sidecar"].update(file="../other.safetensors"))
    with pytest.raises(ArtifactError, match=r"sidecar\.file"):
        read_manifest(artifact)


def test_newer_major_versions_are_refused(artifact: Path, reader: ModuleType):
    rewrite(artifact, lambda document: document.update(schema_version="2.0"))
    with pytest.raises(ArtifactError, match="upgrade kvcompile"):
        read_manifest(artifact)
    with pytest.raises(ValueError, match="too new"):
        reader.Artifact(artifact)


def passages() -> dict[str, str]:
    """The parts of the specification of the manifest, by what they are about: ``manifest``, ``source``, ``layers[]``, ..."""
    text = (READER.parents[1] / "docs" / "manifest.md").read_text("utf-8")
    text = text.split("\n## The manifest\n")[1].split("\n## ")[0]
    first, *parts = re.split(r"^`([\w.\[\]]+)`(?=:| and `| has )", text, flags=re.MULTILINE)
    return {"manifest": first, **dict(zip(parts[::2], parts[1::2], strict=True))}


def rows(passage: str) -> dict[str, str]:
    """The rows of its table, by the field that they describe."""
    lines = [line for line in passage.splitlines() if line.startswith("| `")]
    return {name: line for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_the_specification_names_every_field():
    """docs/manifest.md describes every field of the published schema where it belongs, and in tables no other."""
    schema: Any = manifest_schema()
    found = passages()
    fields = {name: set(record["properties"]) for name, record in schema["$defs"].items() if "properties" in record}
    tables = {"Source": "source", "Weights": "weights", "LayerRecord": "layers[]", "RowRecord": "layers[].key"}
    assert rows(found["manifest"]).keys() == set(schema["properties"])
    for record, place in tables.items():
        assert rows(found[place]).keys() == fields[record], place
    sentences = {
        "Producer": rows(found["manifest"])["producer"],
        "License": rows(found["source"])["license"],
        "CorrectionRecord": found["layers[].correction"],
        "Sidecar": found["sidecar"],
        "RotationImport": found["imported_rotations"],
        "CalibrationRecord": found["calibration"],
        "Encoding": found["encoding"],
    }
    for record, sentence in sentences.items():
        assert [name for name in sorted(fields[record]) if f"`{name}`" not in sentence] == [], record
    of_schemes = {name for name in fields if getattr(scheme_model, name, None) is not None}
    assert set(fields) - of_schemes == {*tables, *sentences}
