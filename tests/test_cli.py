"""The command line end to end: every command, and what a conversion leaves on disk."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcompile
from kvcompile.checkpoint import Checkpoint, tensor_bytes
from kvcompile.cli.main import COMMANDS
from kvcompile.models.agreement import KL_TOLERANCE, LOGITS_TOLERANCE, LogitAgreement, compare_logits, logits_of
from kvcompile.scheme import DEFAULT_SCHEME
from kvcompile.scheme.model import PASSES
from tests.commands import QUICK, contents, quick_conversions, succeed, workspace
from tests.conftest import family_config, save_model

Capsys = pytest.CaptureFixture[str]
GROUPED = [("schemes", "list"), ("schemes", "show"), ("schemes", "validate"), ("passes", "list"), ("passes", "explain")]
SHORT_WINDOW = ("--set", "window.sink=4", "--set", "window.recent=16")
PROMPT = "The harbour master counted the boats twice, and then once more, because the fog had come in. " * 8


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint, float32, in several shards; do not alter it."""
    return save_model(family_config("qwen3"), tmp_path_factory.mktemp("cli") / "model", shards="200KB")


@pytest.fixture(scope="module")
def folded(model: Path) -> Path:
    """Its conversion with folded weights and a short window; do not alter it."""
    out = model.parent / "folded"
    kvcompile.convert(model, out, overrides=SHORT_WINDOW[1::2], calibration_tokens=256)
    return out


@pytest.fixture(scope="module")
def overlay(model: Path) -> Path:
    """The same conversion as an overlay; do not alter it."""
    out = model.parent / "overlay"
    kvcompile.convert(model, out, overrides=SHORT_WINDOW[1::2], calibration_tokens=256, weights="overlay")
    return out


def manifest_of(out: Path) -> dict:
    return json.loads((out / "kvcompile.json").read_text())


# Help


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_an_example(command: tuple[str, ...], flag: str, capsys: Capsys) -> None:
    out = succeed(capsys, *command, flag).out
    assert "Example:" in out
    assert f"kvcompile {command[0] if command else 'convert'}" in out


def test_group_help_lists_the_commands(capsys: Capsys) -> None:
    text = " ".join(succeed(capsys, "--help").out.split())
    for name, summary in COMMANDS.items():
        assert f"{name} {summary}" in text
        assert summary in " ".join(succeed(capsys, name, "--help").out.split())


@pytest.mark.parametrize("command", GROUPED, ids=" ".join)
def test_help_of_subcommands(command: tuple[str, str], capsys: Capsys) -> None:
    assert "Usage: kvcompile " + " ".join(command) in succeed(capsys, *command, "--help").out


def test_version(capsys: Capsys) -> None:
    assert kvcompile.__version__ in succeed(capsys, "--version").out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["schemes", "list"], ["schemes", "show", "oscar-int2"]]
)
def test_quick_commands_do_not_import_torch(arguments: list[str]) -> None:
    program = f"""
import sys
from kvcompile.cli import main
try:
    main({arguments!r})
except SystemExit as error:
    assert error.code == 0, error.code
assert "torch" not in sys.modules
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Schemes and passes


def test_schemes(tmp_path: Path, capsys: Capsys) -> None:
    listed = succeed(capsys, "schemes", "list").out
    for name in ("naive-int2", "oscar-int2", "quarot-int2"):
        assert name in listed
        path = tmp_path / f"{name}.toml"
        path.write_text(succeed(capsys, "schemes", "show", name).out)
        assert f"valid scheme '{name}'" in succeed(capsys, "schemes", "validate", path).out
    assert "2.28" in listed
    changed = succeed(capsys, "schemes", "validate", path, "--set", "key.quantizer.bits=4").out
    assert "3.2" in changed


def test_own_scheme_file(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    text = succeed(capsys, "schemes", "show", "quarot-int2").out
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('name = "quarot-int2"', 'name = "mine"').replace("bits = 2", "bits = 4", 1))
    succeed(capsys, "convert", model, "-o", tmp_path / "out", "--scheme", path)
    scheme = manifest_of(tmp_path / "out")["scheme"]
    assert (scheme["name"], scheme["key"]["quantizer"]["bits"], scheme["value"]["quantizer"]["bits"]) == ("mine", 4, 2)


def test_passes(capsys: Capsys) -> None:
    listed = succeed(capsys, "passes", "list").out
    for name in ("inventory", "calibrate", "rotations", "clip", "fold", "verify", "emit"):
        assert name in listed
        explained = succeed(capsys, "passes", "explain", name).out
        assert f"Pass `{name}`" in explained
        assert "1. " in explained


# Convert


def test_convert_says_what_it_did(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    done = succeed(capsys, "convert", model, "-o", out, *QUICK)
    assert f"wrote {out}: 2 of 2 layers packed" in done.out
    for word in ("calibrate", "rotations", "clip", "fold", "verify", "emit", "layer   1", "ratio", "peak memory"):
        assert word in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_dry_run_writes_nothing(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    before = contents(model)
    done = succeed(capsys, "convert", model, "-o", tmp_path / "out", "--dry-run")
    assert f"dry run: Qwen3ForCausalLM, 2 of 2 layers would be packed with {DEFAULT_SCHEME}" in done.out
    assert "no output was written" in done.out
    assert list(tmp_path.iterdir()) == []
    assert contents(model) == before


@pytest.mark.parametrize("last", ["inventory", "calibrate", "rotations", "verify"])
def test_stop_after_publishes_nothing(last: str, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    done = succeed(capsys, "convert", model, "-o", out, *QUICK, "--stop-after", last)
    assert f"stopped after {last}" in done.out
    assert not out.exists()
    assert not (workspace(out) / "artifact").exists()
    order = ["inventory", "calibrate", "rotations", "clip", "fold", "verify", "emit"]
    ran = [name for name in order if any(line.startswith(name) for line in done.err.splitlines())]
    assert ran == order[: order.index(last) + 1]


def test_stopped_run_continues(model: Path, folded: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    arguments = ("convert", model, "-o", out, *QUICK, *SHORT_WINDOW)
    succeed(capsys, *arguments, "--stop-after", "clip")
    done = succeed(capsys, *arguments, "--stop-after", "rotations", "--resume")
    assert "emit" not in done.err
    succeed(capsys, *arguments, "--resume")
    assert contents(out) == contents(folded)


def test_dump_ir(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    dump = tmp_path / "deep" / "dump"
    succeed(capsys, "convert", model, "-o", tmp_path / "out", *QUICK, "--dump-ir", dump)
    expected = {f"{i:02d}-{name}.{ext}" for i, name in enumerate(PASSES) for ext in ("json", "safetensors")}
    assert {p.name for p in dump.iterdir()} == expected
    last = json.loads((dump / f"{PASSES.index('verify'):02d}-verify.json").read_text())
    assert last["summary"]["fold_logit_error"] <= LOGITS_TOLERANCE
    assert len(last["folds"]) == 4


def test_overrides_arrive_in_the_manifest(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    values = [
        "key.rotation.scope=layer",
        "key.clip.ratio=0.9",
        "key.quantizer.group_size=16",
        "value.quantizer.bits=4",
        "value.rotation.kind=hadamard",
        "value.clip.kind=none",
        "window.sink=0",
        "calibration.sequence_length=64",
        "summary=Mine",
    ]
    arguments = [part for value in values for part in ("--set", value)]
    succeed(capsys, "convert", model, "-o", tmp_path / "out", *QUICK, *arguments)
    manifest = manifest_of(tmp_path / "out")
    scheme, layer = manifest["scheme"], manifest["layers"][0]
    assert scheme["key"]["rotation"]["scope"] == "layer"
    assert scheme["key"]["clip"] == {"kind": "quantile", "ratio": 0.9}
    assert scheme["value"]["rotation"] == {"kind": "hadamard", "apply": "folded"}
    assert scheme["value"]["clip"] == {"kind": "none"}
    assert scheme["window"] == {"sink": 0, "recent": 256, "block": 64}
    assert scheme["summary"] == "Mine"
    assert manifest["calibration"]["sequence_length"] == 64
    assert manifest["calibration"]["tokens"] == 256
    assert (layer["key"]["group_size"], layer["key"]["clip_ratio"], layer["value"]["bits"]) == (16, 0.9, 4)
    succeed(capsys, "verify", tmp_path / "out", "--source", model)


def test_two_runs_give_the_same_bytes(model: Path, folded: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "elsewhere" / "again"
    succeed(capsys, "convert", model, "-o", out, *QUICK, *SHORT_WINDOW)
    assert contents(out) == contents(folded)
    assert not workspace(out).exists()


def test_seed_changes_the_calibration(model: Path, folded: Path, tmp_path: Path, capsys: Capsys) -> None:
    succeed(capsys, "convert", model, "-o", tmp_path / "out", *QUICK, *SHORT_WINDOW, "--seed", 7)
    ours, theirs = manifest_of(tmp_path / "out"), manifest_of(folded)
    assert ours["calibration"]["text_sha256"] != theirs["calibration"]["text_sha256"]
    assert ours["sidecar"]["sha256"] != theirs["sidecar"]["sha256"]


# Calibration text


def test_calibration_from_files(tmp_path: Path, model: Path, capsys: Capsys) -> None:
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    lines = [PROMPT, "A line separator \u2028 and a next line \x85 are text like any other."]
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": x}, ensure_ascii=False) + "\n" for x in lines))
    (folder / "more" / "b.txt").write_text(f"{PROMPT}\n<|doc|>\n{PROMPT}")
    (folder / ".hidden").write_bytes(b"\xff")
    for text in (folder, folder / "a.jsonl"):
        out = tmp_path / f"out-{text.name}"
        arguments = ("--calibration-tokens", 128, "--calibration", text, "--calibration-field", "body")
        succeed(capsys, "convert", model, "-o", out, *arguments)
        assert manifest_of(out)["calibration"]["text"] == text.name


# What is written


def test_unchanged_tensors_are_byte_identical(model: Path, folded: Path) -> None:
    source, converted = Checkpoint(model), Checkpoint(folded)
    edited = {f"model.layers.{i}.self_attn.{p}.weight" for i in range(2) for p in ("v_proj", "o_proj")}
    assert list(source.entries) == list(converted.entries)
    for name in source.entries:
        same = tensor_bytes(source.load(name)) == tensor_bytes(converted.load(name))
        assert same == (name not in edited), name
    for companion in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"):
        assert (model / companion).read_bytes() == (folded / companion).read_bytes()


def test_overlay_holds_only_what_is_new(model: Path, overlay: Path) -> None:
    names = {"kvcompile.json", "kvcompile.safetensors", "README.md", "report.html"}
    assert set(contents(overlay)) == names
    manifest = manifest_of(overlay)
    assert manifest["source"]["path"] == str(model)
    assert all(layer["value"]["apply"] == "online" for layer in manifest["layers"])


def test_folded_artifact_does_not_name_its_origin(model: Path, folded: Path) -> None:
    assert manifest_of(folded)["source"]["path"] is None
    for name in ("kvcompile.json", "README.md", "report.html"):
        assert str(model.parent) not in (folded / name).read_text()


def test_overlay_and_fold_are_the_same_model(folded: Path, overlay: Path) -> None:
    texts, logits = [], []
    for artifact in (folded, overlay):
        model, tokenizer = kvcompile.load(artifact, backend="codec")
        cache = kvcompile.new_cache(model)
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        assert ids.shape[1] > 96, "the prompt must reach the packed history"
        with torch.inference_mode():
            model(ids[:, :-1], past_key_values=cache)
            logits.append(model(ids[:, -1:], past_key_values=cache).logits[0])
        texts.append(model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist())
    assert compare_logits(logits[0], logits[1]).relative_error < 2e-2
    assert texts[0] == texts[1]


def _agreement(source: Path, converted: Path) -> LogitAgreement:
    """A folded directory against its source, both loaded as any user of transformers would."""
    ids = AutoTokenizer.from_pretrained(converted)(PROMPT, return_tensors="pt").input_ids[0]
    logits = []
    for path in (source, converted):
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="sdpa").eval()
        logits.append(logits_of(model, ids))
    return compare_logits(*logits)


FAMILIES = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "multi-head": ("llama", {"num_key_value_heads": 6}),
    "multi-query": ("llama", {"num_key_value_heads": 1}),
}


@pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_folding_keeps_the_logits(family: str, changes: dict[str, object], tmp_path: Path, capsys: Capsys) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    save_model(family_config(family, **changes), source, shards="200KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    before = contents(source)
    succeed(capsys, "convert", source, "-o", out, *QUICK)
    assert contents(source) == before
    assert "logits agree with the source" in succeed(capsys, "verify", out, "--source", source).out
    assert _agreement(source, out).relative_error <= LOGITS_TOLERANCE
    entries = Checkpoint(out).entries
    assert ("model.layers.0.self_attn.v_proj.bias" in entries) == (family == "qwen2" or "attention_bias" in changes)
    embedding = "model.embed_tokens.weight"
    assert ("lm_head.weight" in entries) != changes.get("tie_word_embeddings", False)
    assert tensor_bytes(Checkpoint(out).load(embedding)) == tensor_bytes(Checkpoint(source).load(embedding))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_folding_16_bit_weights(family: str, dtype: torch.dtype, tmp_path: Path, capsys: Capsys) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    save_model(family_config(family, head_dim=16), source, dtype=dtype)
    succeed(capsys, "convert", source, "-o", out, *QUICK)
    assert "logits agree with the source" in succeed(capsys, "verify", out, "--source", source).out
    assert {Checkpoint(out).load(name).dtype for name in Checkpoint(out).entries} == {dtype}
    assert _agreement(source, out).kl <= KL_TOLERANCE


def test_folding_the_trained_example(example: Path, converted: Path, capsys: Capsys) -> None:
    assert "logits agree with the source" in succeed(capsys, "verify", converted, "--source", example).out
    agreement = _agreement(example, converted)
    assert agreement.kl <= KL_TOLERANCE
    assert agreement.agreement > 0.95


# Verify, inspect, generate


def test_verify(model: Path, folded: Path, overlay: Path, capsys: Capsys) -> None:
    for artifact in (folded, overlay):
        lines = succeed(capsys, "verify", artifact).out.splitlines()
        assert len(lines) == 4
        assert all(line.startswith("ok: ") for line in lines)
    lines = succeed(capsys, "verify", folded, "--source", model).out.splitlines()
    assert len(lines) == 7


def test_inspect_model(model: Path, capsys: Capsys) -> None:
    out = succeed(capsys, "inspect", model).out
    assert "Qwen3ForCausalLM" in out
    assert f"not converted; costed with {DEFAULT_SCHEME}" in out
    assert "6/2" in out
    assert "2 of 2" in out
    found = json.loads(succeed(capsys, "inspect", model, "--json", "--scheme", "naive-int2").out)
    assert (found["converted"], found["scheme"], found["path"]) == (False, "naive-int2", str(model))
    layer = found["layers"][1]
    assert (layer["num_heads"], layer["num_key_value_heads"], layer["head_dim"]) == (6, 2, 32)
    assert layer["bf16_bytes"] == 2 * 2 * 32 * 2
    assert layer["packed_bytes"] == 2 * 2 * (32 * 2 / 8 + 4)


def test_inspect_artifact(folded: Path, overlay: Path, capsys: Capsys) -> None:
    for artifact in (folded, overlay):
        assert f"converted with {DEFAULT_SCHEME}" in succeed(capsys, "inspect", artifact).out
        found = json.loads(succeed(capsys, "inspect", artifact, "--json").out)
        assert found["converted"] is True
        assert found["bits_per_element"] == manifest_of(artifact)["bits_per_element"]


def test_inspect_names_what_is_left_alone(tmp_path: Path, capsys: Capsys) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = family_config("qwen3", layer_types=kinds, sliding_window=64, use_sliding_window=True)
    model, out = save_model(config, tmp_path / "model"), tmp_path / "out"
    found = json.loads(succeed(capsys, "inspect", model, "--json").out)
    assert ["sliding attention" in layer["reason"] for layer in found["layers"]] == [True, False]
    done = succeed(capsys, "convert", model, "-o", out, *QUICK)
    assert "1 of 2 layers packed" in done.out
    records = manifest_of(out)["layers"]
    assert records[0]["key"] is None
    assert "sliding attention" in records[0]["reason"]
    assert records[1]["key"]["bits"] == 2
    succeed(capsys, "verify", out, "--source", model)


def test_generate(folded: Path, overlay: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("-n", 8, "--backend", "codec")
    done = succeed(capsys, "generate", folded, "--prompt", PROMPT, *options)
    assert done.out.strip()
    assert "+ 8 tokens, cache" in done.err
    assert "backend codec" in done.err
    assert succeed(capsys, "generate", folded, "--prompt", PROMPT, *options).out == done.out
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert succeed(capsys, "generate", folded, *options).out == done.out
    assert succeed(capsys, "generate", overlay, "--prompt", PROMPT, *options).out == done.out


def test_sampling_follows_the_seed(folded: Path, capsys: Capsys) -> None:
    options = ("--prompt", "x", "-n", 8, "--backend", "codec", "--temperature", 1.0, "--top-p", 0.9)
    first, again, other = (succeed(capsys, "generate", folded, *options, "--seed", s).out for s in (1, 1, 2))
    assert first == again != other
