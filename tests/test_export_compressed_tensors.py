"""transform_config, applied by compressed-tensors itself: the unquantized logits, and rows rotated as ours are."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvcompile
from kvcompile.artifact import open_artifact
from kvcompile.errors import ExportError
from kvcompile.export import export
from kvcompile.export.compressed_tensors_config import VERIFIED, CompressedTensorsTarget
from kvcompile.models.agreement import KL_TOLERANCE, compare_logits, logits_of
from tests.commands import quick_conversions
from tests.conftest import EXAMPLE, family_config, save_model
from tests.families import CASES, save_family

transform = pytest.importorskip("compressed_tensors.transform", reason="compressed-tensors is not installed")
IDS = torch.arange(160) * 7 % 4096


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


def config_of(view: Path) -> dict[str, Any]:
    return json.loads((view / "config.json").read_text())["quantization_config"]


def applied(view: Path) -> PreTrainedModel:
    """The export as transformers loads it, its config applied by the library."""
    model = AutoModelForCausalLM.from_pretrained(view, dtype=torch.float32)
    transform.apply_transform_config(model, transform.TransformConfig(**config_of(view)["transform_config"]))
    return model


def reference(model: Path = EXAMPLE) -> torch.Tensor:
    return logits_of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), IDS)


def test_folded_weights_list_r3_alone(quarot: Path, tmp_path: Path):
    export(quarot, "compressed-tensors", tmp_path / "view")
    config = config_of(tmp_path / "view")
    assert list(config["transform_config"]["config_groups"]) == [f"R3_{i}" for i in range(4)]
    assert "kv_cache_scheme" not in config
    assert compare_logits(reference(), logits_of(applied(tmp_path / "view"), IDS)).kl < KL_TOLERANCE


def test_unfolded_weights_list_r2_too(quarot: Path, tmp_path: Path):
    """The library folds R2 itself; its v_proj is then ours."""
    export(quarot, "compressed-tensors", tmp_path / "view", source=EXAMPLE)
    assert {"R2_0", "R3_0"} <= set(config_of(tmp_path / "view")["transform_config"]["config_groups"])
    model = applied(tmp_path / "view")
    assert compare_logits(reference(), logits_of(model, IDS)).relative_error < 1e-5
    ours = load_file(quarot / "model.safetensors")
    for name in ("v_proj", "o_proj"):
        theirs = dict(model.named_parameters())[f"model.layers.3.self_attn.{name}.weight"]
        assert torch.allclose(theirs, ours[f"model.layers.3.self_attn.{name}.weight"].float(), atol=2e-3)


@pytest.mark.parametrize("scheme", ["quarot-int2", "saw-int4"])
def test_cached_keys_are_rotated_as_ours(scheme: str, tmp_path: Path):
    kvcompile.convert(
        EXAMPLE, tmp_path / "out", scheme, overrides=("key.rotation.block_size=16",) * (scheme == "saw-int4")
    )
    export(tmp_path / "out", "compressed-tensors", tmp_path / "view")
    plain = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32)
    with torch.inference_mode():
        theirs, ours = (m(IDS[None], use_cache=True).past_key_values for m in (applied(tmp_path / "view"), plain))
    r_KDD = load_file(tmp_path / "out" / "kvcompile.safetensors")["layers.0.key.rotation"]
    assert torch.allclose(theirs.layers[0].keys, ours.layers[0].keys @ r_KDD, atol=1e-4)


@pytest.mark.parametrize("family", sorted(VERIFIED))
def test_verified_families(family: str, tmp_path: Path):
    """Logits of the source, with R3 on every layer; with R2 too, or a refusal where a module has another name."""
    model = save_family(family, tmp_path / "model")
    kvcompile.convert(model, tmp_path / "out", "quarot-int2", overrides=("calibration.tokens=64",))
    expected = reference(model)
    weights: list[Path | None] = [None, model]
    if family in ("phi", "phi3"):
        with pytest.raises(ExportError, match=r"layer 0: it has (qkv_proj|dense) in place of [vo]_proj"):
            export(tmp_path / "out", "compressed-tensors", tmp_path / "view", source=weights.pop())
    for number, source in enumerate(weights):
        export(tmp_path / "out", "compressed-tensors", tmp_path / str(number), source=source)
        loaded = applied(tmp_path / str(number))
        assert compare_logits(expected, logits_of(loaded, IDS)).relative_error < 1e-5
        hooked = {name.partition(".self_attn")[0] for name, _ in loaded.named_modules() if "R3_" in name}
        assert hooked == {"model.layers.0", "model.layers.1"}


@pytest.mark.parametrize("family", sorted(CASES.keys() - VERIFIED))
def test_other_families_are_refused(family: str, quarot: Path):
    artifact = open_artifact(quarot)
    other = artifact.manifest.source.model_copy(update={"model_type": family})
    manifest = artifact.manifest.model_copy(update={"source": other})
    reason = CompressedTensorsTarget().refuse(replace(artifact, manifest=manifest))
    assert reason == f"what that library makes of {family} is not verified here"


def test_keys_of_all_layers_or_none(tmp_path: Path):
    """The library looks for its hooks in every layer once one layer has them."""
    why = "keys of some layers are not rotated"
    kinds = ["full_attention", "sliding_attention"]
    partly = family_config("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=16)
    kvcompile.convert(save_model(partly, tmp_path / "model"), tmp_path / "out", "quarot-int2")
    with pytest.raises(ExportError, match=why):
        export(tmp_path / "out", "compressed-tensors", tmp_path / "view")
    scheme = tmp_path / "scheme.toml"
    scheme.write_text(
        'name = "mixed"\nsummary = "keys of layer 1 are left"\n[key.rotation]\nkind = "hadamard"\n'
        '[value.quantizer]\nbits = 4\n[layers."1".key.rotation]\nkind = "identity"\n'
    )
    kvcompile.convert(EXAMPLE, tmp_path / "mixed", scheme)
    with pytest.raises(ExportError, match=why):
        export(tmp_path / "mixed", "compressed-tensors", tmp_path / "view")


def test_overlays_and_biases(tmp_path: Path):
    model = save_model(family_config("qwen2"), tmp_path / "model")
    kvcompile.convert(model, tmp_path / "out", "quarot-int4", weights="overlay")
    export(tmp_path / "out", "compressed-tensors", tmp_path / "view")
    assert compare_logits(reference(model), logits_of(applied(tmp_path / "view"), IDS)).relative_error < 1e-5


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("oscar-int2", "layer 0: its key rotations are spectral matrices per KV head, there only Hadamard has a name"),
        ("turboquant-int2", "layer 0: its key rotations are random matrices, there only Hadamard has a name"),
        ("kivi-int4", "rotates nothing"),
    ],
)
def test_refusals(scheme: str, why: str, small_model: Path, tmp_path: Path):
    kvcompile.convert(small_model, tmp_path / "out", scheme, calibration_tokens=256)
    with pytest.raises(ExportError, match=why):
        export(tmp_path / "out", "compressed-tensors", tmp_path / "view")


def test_only_powers_of_two(tmp_path: Path):
    model = save_model(family_config("qwen3", head_dim=24), tmp_path / "model")
    kvcompile.convert(model, tmp_path / "out", "quarot-int2", overrides=["key.quantizer.group_size=256"])
    with pytest.raises(ExportError, match="Hadamard matrix of order 24, there only powers of two"):
        export(tmp_path / "out", "compressed-tensors", tmp_path / "view")


def test_value_rotations_that_have_no_name_stay_in_the_weights(small_model: Path, tmp_path: Path):
    kvcompile.convert(
        small_model, tmp_path / "out", "oscar-int2", calibration_tokens=256, overrides=["key.rotation.kind=hadamard"]
    )
    export(tmp_path / "out", "compressed-tensors", tmp_path / "view")
    with pytest.raises(
        ExportError, match=r"its value rotations are spectral .*; export the folded weights, without --source"
    ):
        export(tmp_path / "out", "compressed-tensors", tmp_path / "both", source=small_model)


@pytest.mark.shared
def test_qwen3_32m(shared: Path, tmp_path: Path):
    model = shared / "models" / "qwen3-32m"
    kvcompile.convert(model, tmp_path / "out", "quarot-int2")
    export(tmp_path / "out", "compressed-tensors", tmp_path / "view")
    assert compare_logits(reference(model), logits_of(applied(tmp_path / "view"), IDS)).kl < KL_TOLERANCE
