"""The GGUF sidecar, read back with the gguf package."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import kvcompile
from kvcompile.checkpoint import file_digest
from kvcompile.errors import ExportError
from kvcompile.export import export
from tests.commands import quick_conversions
from tests.conftest import EXAMPLE, family_config, save_model

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors by name and fields, as the gguf package reads them."""
    reader = gguf.GGUFReader(folder / "rotations.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return {tensor.name: np.array(tensor.data) for tensor in reader.tensors}, fields


def test_folded_weights_get_key_rotations_only(converted: Path, tmp_path: Path):
    export(converted, "gguf", tmp_path / "view")
    tensors, fields = read(tmp_path / "view")
    sidecar = load_file(converted / "kvcompile.safetensors")
    assert set(tensors) == {f"blk.{i}.attn_k_rot.weight" for i in range(4)}
    for i in range(4):
        r_KDD = sidecar[f"layers.{i}.key.rotation"].numpy()
        assert tensors[f"blk.{i}.attn_k_rot.weight"].dtype == np.float32
        assert np.array_equal(tensors[f"blk.{i}.attn_k_rot.weight"], r_KDD.transpose(0, 2, 1))
    assert fields["general.architecture"] == "qwen3"
    assert (fields["kvcompile.v_rotation"], fields["kvcompile.key_channels"]) == ("folded", "half")
    layers = kvcompile.artifact.read_manifest(converted).compiled
    assert fields["kvcompile.key.clip_ratio"] == [layer.key.clip_ratio for layer in layers]
    assert fields["kvcompile.value.side"] == ["folded"] * 4
    assert fields["kvcompile.weights.sha256"] == [f"model.safetensors {file_digest(converted / 'model.safetensors')}"]


def test_unfolded_weights_get_both(converted: Path, tmp_path: Path):
    export(converted, "gguf", tmp_path / "view", source=EXAMPLE)
    tensors, fields = read(tmp_path / "view")
    r_KDD = load_file(converted / "kvcompile.safetensors")["layers.2.value.rotation"].numpy()
    assert np.array_equal(tensors["blk.2.attn_v_rot.weight"], r_KDD.transpose(0, 2, 1))
    assert fields["kvcompile.v_rotation"] == "online"
    assert fields["kvcompile.value.side"] == ["online"] * 4
    assert fields["kvcompile.weights.sha256"] == [f"model.safetensors {file_digest(EXAMPLE / 'model.safetensors')}"]


def test_fields_say_the_whole_format_and_notes_what_is_not_there(small_model: Path, tmp_path: Path):
    """Codes are misread without axis, zero points and norms, so these are fields; tensors that the file lacks are named."""
    kvcompile.convert(small_model, tmp_path / "out", "omni-int2", calibration_tokens=256)
    notes = export(tmp_path / "out", "gguf", tmp_path / "view")
    _, fields = read(tmp_path / "view")
    layers = kvcompile.artifact.read_manifest(tmp_path / "out").compiled
    for name in ("bits", "group_size", "axis", "zero_point", "rounding", "token_scale", "norm_scope", "num_centroids"):
        for half in ("key", "value"):
            assert fields[f"kvcompile.{half}.{name}"] == [getattr(getattr(layer, half), name) for layer in layers], name
    window = kvcompile.artifact.read_manifest(tmp_path / "out").scheme.window
    assert (fields["kvcompile.window.sink"], fields["kvcompile.window.recent"]) == (
        [window.sink] * 2,
        [window.recent] * 2,
    )
    assert [entry.partition(":")[0] for entry in notes.refused] == ["key norms", "codes and windows"]


def test_keys_that_are_not_rotated_are_not_said_to_be(small_model: Path, tmp_path: Path):
    overrides = ("key.rotation.kind=identity", "key.center=true")
    kvcompile.convert(small_model, tmp_path / "out", "quarot-int4", overrides=overrides, calibration_tokens=256)
    notes = export(tmp_path / "out", "gguf", tmp_path / "view", source=small_model)
    assert notes.carried == (
        "key rotation: there is none", "value rotation: blk.{i}.attn_v_rot.weight, for unfolded weights"
    )  # fmt: skip
    assert any(entry.startswith("means:") for entry in notes.refused)


def test_a_rotation_of_the_whole_layer_is_one_matrix(tmp_path: Path):
    kvcompile.convert(EXAMPLE, tmp_path / "out", "quarot-int2", weights="overlay")
    export(tmp_path / "out", "gguf", tmp_path / "view")
    tensors, _ = read(tmp_path / "view")
    assert len(tensors) == 8
    assert tensors["blk.0.attn_v_rot.weight"].shape == (64, 64)


def test_keys_of_llama_are_in_the_order_of_llama_cpp(tmp_path: Path):
    """Its converter puts channel j + D/2 beside channel j, so the rows of R move with them."""
    model = save_model(family_config("llama"), tmp_path / "model")
    kvcompile.convert(model, tmp_path / "out", "oscar-int2", calibration_tokens=256)
    export(tmp_path / "out", "gguf", tmp_path / "view")
    tensors, fields = read(tmp_path / "view")
    assert fields["kvcompile.key_channels"] == "interleaved"
    r = load_file(tmp_path / "out" / "kvcompile.safetensors")["layers.1.key.rotation"].numpy()
    k_KTD = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    permuted = k_KTD.reshape(2, 5, 2, 16).swapaxes(2, 3).reshape(2, 5, 32)  # as permute() of convert_hf_to_gguf.py does
    stored = tensors["blk.1.attn_k_rot.weight"]
    assert np.allclose(permuted @ stored.transpose(0, 2, 1), k_KTD @ r, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "why"), [("kvc-int2", "key rotations are balanced"), ("kivi-int4", "kivi-int4 rotates nothing")]
)
def test_refusals(scheme: str, why: str, small_model: Path, tmp_path: Path):
    kvcompile.convert(small_model, tmp_path / "out", scheme, calibration_tokens=256)
    with pytest.raises(ExportError, match=why):
        export(tmp_path / "out", "gguf", tmp_path / "view")


def test_nothing_online(small_model: Path, tmp_path: Path):
    """Values folded, keys not rotated: there is nothing for a reader to apply."""
    kvcompile.convert(small_model, tmp_path / "out", "quarot-int4", overrides=["key.rotation.kind=identity"])
    with pytest.raises(ExportError, match="no rotation is applied online"):
        export(tmp_path / "out", "gguf", tmp_path / "view")
    assert not (tmp_path / "view").exists()
    notes = export(tmp_path / "out", "gguf", tmp_path / "both", source=small_model)
    assert any("attn_v_rot" in entry for entry in notes.carried)


def test_an_unknown_channel_order_is_refused(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules["kvcompile.export.gguf_sidecar"].CHANNELS, "qwen3")
    with pytest.raises(ExportError, match=r"how llama\.cpp orders the channels of qwen3 is not known"):
        export(converted, "gguf", tmp_path / "view")


def test_without_the_package(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ExportError, match=r"pip install 'kvcompile\[gguf\]'"):
        export(converted, "gguf", tmp_path / "view")


@pytest.mark.shared
def test_qwen3_32m(shared: Path, tmp_path: Path):
    kvcompile.convert(shared / "models" / "qwen3-32m", tmp_path / "out", "quarot-int2")
    export(tmp_path / "out", "gguf", tmp_path / "view")
    tensors, _ = read(tmp_path / "view")
    assert len(tensors) == 12
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"]
        == tensors["blk.0.attn_k_rot.weight"].shape[0]
    )
