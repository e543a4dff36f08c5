"""Rotation files of the OSCAR fork of SGLang, both ways: never a double rotation, and files of the fork itself."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvcompile
from kvcompile.artifact import open_artifact, read_manifest
from kvcompile.checkpoint import file_digest
from kvcompile.errors import ExportError, RotationError, SchemeError
from kvcompile.export import Notes, export
from kvcompile.export.sglang import closest_ratio
from kvcompile.models.agreement import KL_TOLERANCE, compare_logits, logits_of
from tests.commands import contents, quick_conversions, refuse, succeed
from tests.conftest import EXAMPLE, SHARED, family_config, save_model

Capsys = pytest.CaptureFixture[str]
ROTATIONS = SHARED / "data" / "oscar_rotations"
ENGINE = "oscar-sglang"
FIXED_CLIP = ("key.clip.ratio=0.96", "value.clip.ratio=0.92")


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def view(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example for weights that are folded; do not alter it."""
    out = tmp_path_factory.mktemp("sglang") / "folded"
    export(converted, "sglang", out)
    return out


@pytest.fixture(scope="module")
def unfolded(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example for the weights of its source; do not alter it."""
    out = tmp_path_factory.mktemp("sglang") / "unfolded"
    export(converted, "sglang", out, source=EXAMPLE)
    return out


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def environment(view: Path) -> dict[str, str]:
    """What a shell makes of the environment file."""
    script = f'set -a; OSCAR_HERE="{view}"; . "{view}/oscar.env"; env'
    lines = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    return {k: v for k, _, v in (line.partition("=") for line in lines) if k.startswith("SGLANG_")}


def as_that_engine(weights: Path, view: Path, ids_T: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits ``[T, V]`` of `weights` with attention as that engine computes it, and values ``[K, T, D]`` as it stores them.

    q and k are rotated by R_K; v by R_V (with ABSORB that happens in W_V, which is the same); the output always by R_V^T.
    Nothing is quantized. Logits do not tell whether values were rotated once: what is stored does.
    """
    files = environment(view)
    stored: dict[int, Tensor] = {}
    keys, values = (read(Path(files[f"SGLANG_OSCAR_{half}_ROTATION_PATH"]))["layers"] for half in "KV")

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        groups = q.shape[1] // k.shape[1]

        def matrix(layers: dict[int, Any], heads: int) -> Tensor:
            r = layers[module.layer_idx]["rotation"]
            r_KDD = r.expand(k.shape[1], -1, -1)
            return r_KDD.repeat_interleave(groups, 0) if heads != k.shape[1] else r_KDD

        q, k = q @ matrix(keys, q.shape[1]), k @ matrix(keys, k.shape[1])
        v = v @ matrix(values, v.shape[1])
        stored[module.layer_idx] = v[0].clone()
        out_BTHD, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        return (out_BTHD.transpose(1, 2) @ matrix(values, q.shape[1]).mT).transpose(1, 2), None

    AttentionInterface.register(ENGINE, attend)
    AttentionMaskInterface.register(ENGINE, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation=ENGINE)
    return logits_of(model, ids_T), stored


def check_values(stored: dict[int, Tensor], artifact: Path, ids_T: Tensor) -> None:
    """Assert that values are stored as the artifact says: those of the plain source, rotated by the sidecar, once."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32)
    with torch.inference_mode():
        plain = model(ids_T[None], use_cache=True).past_key_values
    for i, v_KTD in stored.items():
        wanted_KTD = plain.layers[i].values[0] @ open_artifact(artifact).tensors[f"layers.{i}.value.rotation"]
        assert (v_KTD - wanted_KTD).norm() < 0.02 * wanted_KTD.norm()  # bfloat16 weights, rounded once more


def source_logits(ids_T: Tensor) -> Tensor:
    return logits_of(AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32), ids_T)


# Out


def test_folded_weights_get_the_identity_and_no_absorption(converted: Path, view: Path):
    values, said = read(view / "v_rotation.pt"), environment(view)
    assert (values["format_version"], values["objective"]) == (1, "identity")
    assert all(torch.equal(entry["rotation"], torch.eye(64)) for entry in values["layers"].values())
    assert said["SGLANG_OSCAR_ABSORB_V_ROTATION"] == "0"
    ids = torch.arange(200) * 7 % 4096
    logits, stored = as_that_engine(converted, view, ids)
    assert compare_logits(source_logits(ids), logits).kl < KL_TOLERANCE
    check_values(stored, converted, ids)


def test_unfolded_weights_get_the_true_rotations(converted: Path, unfolded: Path):
    artifact, said = open_artifact(converted), environment(unfolded)
    for half in ("key", "value"):
        document = read(unfolded / f"{half[0]}_rotation.pt")
        assert (document["format_version"], document["source_grouping"]) == (2, "per_kv_head")
        for i, entry in document["layers"].items():
            assert entry["layer_id"] == i
            assert torch.equal(entry["rotation"], artifact.tensors[f"layers.{i}.{half}.rotation"])
    assert read(unfolded / "k_rotation.pt")["objective"] == "qqt_r_h_pbr"
    assert read(unfolded / "v_rotation.pt")["objective"] == "sst_r_h_pbr"
    assert said["SGLANG_OSCAR_ABSORB_V_ROTATION"] == "1"
    assert str(EXAMPLE) in (unfolded / "launch.sh").read_text()
    ids = torch.arange(200) * 7 % 4096
    logits, stored = as_that_engine(EXAMPLE, unfolded, ids)
    assert compare_logits(source_logits(ids), logits).relative_error < 1e-5
    check_values(stored, converted, ids)


def test_the_emulation_notices_a_double_rotation(converted: Path, unfolded: Path):
    """True R_V with weights that are folded already: right logits, and values that nothing was calibrated for."""
    ids = torch.arange(200) * 7 % 4096
    logits, stored = as_that_engine(converted, unfolded, ids)
    assert compare_logits(source_logits(ids), logits).kl < KL_TOLERANCE
    with pytest.raises(AssertionError):
        check_values(stored, converted, ids)


def test_environment_and_launch_command(converted: Path, view: Path):
    said, layers = environment(view), read_manifest(converted).compiled
    assert said["SGLANG_ENABLE_MIXED_KV_WINDOWS"] == "1"
    assert (said["SGLANG_MIXED_KV_PREFIX_TOKENS"], said["SGLANG_MIXED_KV_RECENT_TOKENS"]) == ("64", "256")
    assert len({layer.key.clip_ratio for layer in layers}) > 1
    channels = [int(layer.key.clip_ratio * 64) for layer in layers]
    assert int(float(said["SGLANG_OSCAR_K_CLIP_RATIO"]) * 64) == round(sum(channels) / len(channels))
    launch = (view / "launch.sh").read_text()
    assert "--kv-cache-dtype int2 --kv-cache-quant-group-size 64" in launch
    assert str(converted) in launch
    subprocess.run(["bash", "-n", view / "launch.sh"], check=True)
    fake = view.parent / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "python").write_text('#!/bin/sh\necho "$SGLANG_OSCAR_K_ROTATION_PATH" "$@"\n')
    (fake / "python").chmod(0o755)
    ran = subprocess.run([view / "launch.sh"], env={"PATH": f"{fake}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert ran.stdout.startswith(f"{view}/k_rotation.pt -m sglang.launch_server --model-path {converted} "), ran.stderr


def test_one_clip_ratio_says_what_it_costs(converted: Path, tmp_path: Path):
    def cost(notes: Notes) -> str:
        return next(entry for entry in notes.approximated if entry.startswith("cost"))

    assert "not measured" in cost(export(converted, "sglang", tmp_path / "silent"))
    assert any(entry.startswith("key clip per layer: one ratio") for entry in export(
        converted, "sglang", tmp_path / "measured", options={"text": EXAMPLE.parent / "heldout.txt"}).approximated)  # fmt: skip
    text = (tmp_path / "measured" / "NOTES.md").read_text()
    assert "KL to the unquantized model" in text
    assert "positions of heldout.txt" in text


def test_nothing_is_approximated_where_all_layers_have_one_ratio(tmp_path: Path):
    kvcompile.convert(EXAMPLE, tmp_path / "out", "oscar-int2", overrides=FIXED_CLIP, calibration_tokens=256)
    notes = export(tmp_path / "out", "sglang", tmp_path / "view", options={"text": "bundled"})
    assert notes.approximated == ()


@pytest.mark.parametrize("ratio", ["0.953125", "0.9375", "0.96", "1"])
def test_a_clip_ratio_selects_the_same_channel_there(ratio: str, small_model: Path, tmp_path: Path):
    """int(ratio * D) of the ratio as that engine reads it; 61/64 rounded to four digits would select the channel below."""
    clip = (f"key.clip.ratio={ratio}", f"value.clip.ratio={ratio}")
    kvcompile.convert(small_model, tmp_path / "out", "oscar-int2", overrides=clip, calibration_tokens=256)
    assert export(tmp_path / "out", "sglang", tmp_path / "view").approximated == ()
    for half in "KV":
        theirs = float(environment(tmp_path / "view")[f"SGLANG_OSCAR_{half}_CLIP_RATIO"])
        assert [int(theirs * dim) for dim in (64, 80, 128)] == [int(float(ratio) * dim) for dim in (64, 80, 128)]


def test_one_ratio_for_layers_that_differ():
    assert closest_ratio([0.96, 0.96], [64, 64]) == 0.96
    assert closest_ratio([0.95, 1.0], [64, 64]) == 62.5 / 64  # channels 60 and 63, which rounds to even
    assert int(closest_ratio([0.9, 0.96], [80, 80]) * 80) == 74  # 72 and 76


def test_windows_count_in_the_cost(small_model: Path, tmp_path: Path):
    """They are approximated where nothing else is, and the view is measured with them."""
    overrides = (*FIXED_CLIP, "window.sink=60", "window.recent=70")
    kvcompile.convert(small_model, tmp_path / "out", "oscar-int2", overrides=overrides, calibration_tokens=256)
    notes = export(tmp_path / "out", "sglang", tmp_path / "view", options={"text": EXAMPLE.parent / "heldout.txt"})
    windows, cost = notes.approximated
    assert windows.startswith("windows: rounded up")
    native, there = re.search(r"model (\S+) nats per token instead of (\S+) ", cost).groups()
    assert native != there


def test_layer_scope_is_format_version_1(tmp_path: Path):
    scope = ("key.rotation.scope=layer", "value.rotation.scope=layer", *FIXED_CLIP, "window.sink=60")
    kvcompile.convert(
        EXAMPLE, tmp_path / "out", "oscar-int2", overrides=scope, calibration_tokens=256, weights="overlay"
    )
    notes = export(tmp_path / "out", "sglang", tmp_path / "view")
    keys = read(tmp_path / "view" / "k_rotation.pt")
    assert (keys["format_version"], keys["source_grouping"]) == (1, "layer")
    assert keys["layers"][0]["rotation"].shape == (64, 64)
    assert notes.approximated[0].startswith("windows: rounded up")
    assert environment(tmp_path / "view")["SGLANG_MIXED_KV_PREFIX_TOKENS"] == "64"
    export(tmp_path / "out", "sglang", tmp_path / "two", options={"format_version": "2"})
    assert read(tmp_path / "two" / "k_rotation.pt")["layers"][0]["rotation"].shape == (2, 64, 64)


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("kvc-int2", "key rotations are balanced"),
        ("quarot-int4", "key bits is 4"),
        ("kivi-int2", "key axis is channel"),
        ("turboquant-int2", "key zero_point is none"),
    ],
)
def test_refusals(scheme: str, why: str, small_model: Path, tmp_path: Path, capsys: Capsys):
    kvcompile.convert(small_model, tmp_path / "out", scheme, calibration_tokens=256)
    assert f"layer 0: {why}" in refuse(capsys, "export", tmp_path / "out", "--to", "sglang", "-o", tmp_path / "view")
    assert not (tmp_path / "view").exists()


def test_refuses_options_that_do_not_fit(converted: Path, small_model: Path, tmp_path: Path):
    with pytest.raises(ExportError, match="format_version 1 cannot say"):
        export(converted, "sglang", tmp_path / "view", options={"format_version": "1"})
    with pytest.raises(ExportError, match="format_version is 1 or 2, not '3'"):
        export(converted, "sglang", tmp_path / "view", options={"format_version": "3"})
    with pytest.raises(ExportError, match=r"is not the checkpoint that .* was made from"):
        export(converted, "sglang", tmp_path / "view", source=small_model)


# And back


def test_round_trip(converted: Path, unfolded: Path, tmp_path: Path, capsys: Capsys):
    """Imported rotations are those that were exported, bit for bit; clip and fold follow as usual."""
    succeed(
        capsys, "convert", EXAMPLE, "--scheme", "oscar-int2", "--calibration-tokens", 4096, "-o", tmp_path / "out",
        "--import-rotations", unfolded / "k_rotation.pt", unfolded / "v_rotation.pt",
    )  # fmt: skip
    ours, theirs = contents(tmp_path / "out"), contents(converted)
    assert ours["kvcompile.safetensors"] == theirs["kvcompile.safetensors"]
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    record = read_manifest(tmp_path / "out").imported_rotations["key"]
    assert (record.file, record.format_version, record.objective) == ("k_rotation.pt", 2, "qqt_r_h_pbr")
    assert record.sha256 == file_digest(unfolded / "k_rotation.pt")
    assert read_manifest(converted).imported_rotations is None
    kvcompile.verify(tmp_path / "out", EXAMPLE)


def rotations(layers: int = 2, dim: int = 32, **changes: Any) -> dict[str, Any]:
    """A rotation file of format_version 1 for the small model."""
    entries = {i: {"layer_id": i, "rotation": torch.eye(dim), "eigenvalues": torch.ones(dim)} for i in range(layers)}
    return {"format_version": 1, "objective": "test", "source_grouping": "layer", "layers": entries} | changes


def edited(change: Any) -> dict[str, Any]:
    document = rotations()
    change(document["layers"])
    return document


FAULTS = {
    "no dictionary": (lambda: torch.eye(3), "is no rotation file: it has no 'layers'"),
    "format 3": (lambda: rotations(format_version=3), "has format_version 3, but this kvcompile reads 1 and 2"),
    "a layer missing": (lambda: rotations(1), "has no rotation for layer 1"),
    "a layer too many": (lambda: rotations(3), "has a rotation for layer 2, but"),
    "another head": (lambda: rotations(dim=64), "the rotation of layer 0 has shape [64, 64], the model implies [32, 32]"),
    "per head": (lambda: rotations(format_version=2), "has shape [32, 32], the model implies [2, 32, 32] (format_version 2)"),
    "sheared": (lambda: edited(lambda x: x[1]["rotation"].add_(0.1)), "the rotation of layer 1 is not orthogonal"),
    "not finite": (lambda: edited(lambda x: x[1]["rotation"].mul_(torch.nan)), "the rotation of layer 1 is not orthogonal"),
    "mislabelled": (lambda: edited(lambda x: x[1].update(layer_id=0)), "layer 1 says that it is layer 0"),
    "no matrix": (lambda: edited(lambda x: x[1].pop("rotation")), "layer 1 has no rotation"),
    "values": (lambda: rotations(objective="sst_r_h_pbr"), "is given for keys, but its objective 'sst_r_h_pbr' is of values"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_faulty_files(make: Any, said: str, small_model: Path, tmp_path: Path):
    """Refused before any work, naming the file and the layer."""
    torch.save(make(), tmp_path / "k.pt")
    torch.save(rotations(), tmp_path / "v.pt")
    with pytest.raises(RotationError) as caught:
        kvcompile.convert(
            small_model,
            tmp_path / "out",
            "oscar-int2",
            import_rotations=(tmp_path / "k.pt", tmp_path / "v.pt"),
            dry_run=True,
        )
    assert str(tmp_path / "k.pt") in str(caught.value)
    assert said in str(caught.value)


class Payload:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_nothing_is_unpickled(small_model: Path, tmp_path: Path, capsys: Capsys):
    torch.save({"layers": {}, "x": Payload()}, tmp_path / "k.pt")
    with pytest.raises(RotationError, match="weights_only"):
        kvcompile.convert(
            small_model, tmp_path / "out", "oscar-int2", import_rotations=(tmp_path / "k.pt", tmp_path / "k.pt")
        )
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(RotationError, match="does not exist"):
        kvcompile.convert(small_model, tmp_path / "out", import_rotations=(tmp_path / "none.pt", tmp_path / "k.pt"))


@pytest.mark.parametrize(("scheme", "said"), [("kvc-int2", "is balanced, not orthogonal"), ("naive-int2", "has none")])
def test_schemes_that_cannot_take_rotations(scheme: str, said: str, small_model: Path, tmp_path: Path):
    torch.save(rotations(), tmp_path / "k.pt")
    with pytest.raises(SchemeError, match=said):
        kvcompile.convert(
            small_model, tmp_path / "out", scheme, import_rotations=(tmp_path / "k.pt", tmp_path / "k.pt"), dry_run=True
        )


def test_a_converted_model_takes_no_further_rotations(converted: Path, unfolded: Path, tmp_path: Path):
    files = unfolded / "k_rotation.pt", unfolded / "v_rotation.pt"
    with pytest.raises(
        kvcompile.errors.CheckpointError, match="is a converted checkpoint, whose values may be rotated already"
    ):
        kvcompile.convert(converted, tmp_path / "out", "oscar-int2", import_rotations=files)


def test_resuming_notices_other_rotations(small_model: Path, tmp_path: Path):
    torch.save(rotations(), tmp_path / "k.pt")
    torch.save(rotations(objective="other"), tmp_path / "v.pt")
    arguments: dict[str, Any] = {"calibration_tokens": 256, "overrides": FIXED_CLIP}
    k, v = tmp_path / "k.pt", tmp_path / "v.pt"
    kvcompile.convert(
        small_model, tmp_path / "out", "oscar-int2", import_rotations=(k, v), stop_after="clip", **arguments
    )
    with pytest.raises(kvcompile.errors.OutputError, match="rotations changed"):
        kvcompile.convert(
            small_model, tmp_path / "out", "oscar-int2", import_rotations=(v, v), resume=True, **arguments
        )
    done = kvcompile.convert(
        small_model, tmp_path / "out", "oscar-int2", import_rotations=(k, v), resume=True, **arguments
    )
    assert done.manifest.imported_rotations["value"].objective == "other"


# Files that the fork ships


def real(folder: str) -> tuple[Path, Path]:
    if not (ROTATIONS / folder).is_dir():
        pytest.skip(f"rotation files of the OSCAR fork are not at {ROTATIONS}")
    keys, values = sorted((ROTATIONS / folder).glob("*.pt"))
    return keys, values


def test_files_of_qwen3_8b(tmp_path: Path):
    """Random weights in its shape: 36 layers with heads of 128."""
    files = real("qwen3-8b")
    config = family_config("qwen3", num_hidden_layers=36, head_dim=128, hidden_size=32, num_attention_heads=2,
                           num_key_value_heads=1, intermediate_size=32)  # fmt: skip
    model = save_model(config, tmp_path / "model")
    kvcompile.convert(
        model, tmp_path / "out", "oscar-int2", import_rotations=files, calibration_tokens=128, overrides=FIXED_CLIP
    )
    artifact, keys = open_artifact(tmp_path / "out"), read(files[0])["layers"]
    for i, entry in keys.items():
        assert torch.equal(artifact.tensors[f"layers.{i}.key.rotation"][0], entry["rotation"])
    record = artifact.manifest.imported_rotations["value"]
    assert (record.objective, record.format_version, record.source_grouping) == ("sst_r_h_pbr", 1, "layer")
    kvcompile.verify(tmp_path / "out", model)
    export(tmp_path / "out", "sglang", tmp_path / "view", source=model)
    back = read(tmp_path / "view" / "v_rotation.pt")
    assert (back["format_version"], back["objective"]) == (1, "sst_r_h_pbr")
    assert all(torch.equal(back["layers"][i]["rotation"], e["rotation"]) for i, e in read(files[1])["layers"].items())


def test_files_of_a_hybrid_model(tmp_path: Path):
    """Keyed by global layer number; layers between have another kind of attention, here sliding windows."""
    files = real("qwen3.5-4b-hadamard")
    kinds = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(32)]
    config = family_config("qwen3", num_hidden_layers=32, head_dim=256, hidden_size=32, num_attention_heads=2,
                           num_key_value_heads=1, intermediate_size=32, layer_types=kinds,
                           use_sliding_window=True, sliding_window=16)  # fmt: skip
    model = save_model(config, tmp_path / "model")
    kvcompile.convert(
        model, tmp_path / "out", "oscar-int2", import_rotations=files, calibration_tokens=128, overrides=FIXED_CLIP
    )
    manifest = read_manifest(tmp_path / "out")
    assert [layer.index for layer in manifest.compiled] == [3, 7, 11, 15, 19, 23, 27, 31]
    assert manifest.imported_rotations["key"].objective == "hadamard"
    kvcompile.verify(tmp_path / "out", model)
    with pytest.raises(RotationError, match="rotation of layer 3 has shape"):
        kvcompile.convert(model, tmp_path / "out2", "oscar-int2", import_rotations=real("qwen3-8b"), dry_run=True)


@pytest.mark.shared
def test_qwen3_32m(shared: Path, tmp_path: Path):
    model = shared / "models" / "qwen3-32m"
    kvcompile.convert(model, tmp_path / "out", "oscar-int2", calibration_tokens=512, overrides=FIXED_CLIP)
    export(tmp_path / "out", "sglang", tmp_path / "view", source=model)
    files = tmp_path / "view" / "k_rotation.pt", tmp_path / "view" / "v_rotation.pt"
    kvcompile.convert(
        model, tmp_path / "again", "oscar-int2", calibration_tokens=512, overrides=FIXED_CLIP, import_rotations=files
    )
    assert (tmp_path / "again" / "kvcompile.safetensors").read_bytes() == (
        tmp_path / "out" / "kvcompile.safetensors"
    ).read_bytes()
