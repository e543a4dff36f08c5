"""Bad input gets one sentence that says what is wrong, where, and what to do; nothing is lost or half-written."""

import errno
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvcompile
from kvcompile.checkpoint import Checkpoint
from kvcompile.errors import KvCompileError, SchemeError
from kvcompile.linalg import is_hadamard_order
from kvcompile.passes.inventory import check_fit
from kvcompile.scheme import load_scheme
from kvcompile.scheme.model import PASSES
from tests.commands import QUICK, contents, overwrite, quick_conversions, refuse, reseal, run, succeed, workspace
from tests.conftest import edit_json, family_config, save_model

Capsys = pytest.CaptureFixture[str]
V_PROJ = "model.layers.{}.self_attn.v_proj.weight"
O_PROJ = "model.layers.{}.self_attn.o_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint in several shards; do not alter it."""
    return save_model(family_config("qwen3"), tmp_path_factory.mktemp("pristine") / "model", shards="600KB")


@pytest.fixture(scope="module")
def pristine_artifact(pristine: Path) -> Path:
    """Its conversion; do not alter it."""
    out = pristine.parent / "artifact"
    kvcompile.convert(pristine, out, calibration_tokens=256)
    return out


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint in one file; do not alter it."""
    return save_model(family_config("qwen3"), tmp_path_factory.mktemp("single") / "model")


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def artifact(pristine_artifact: Path, tmp_path: Path) -> Path:
    """A copy of the artifact to damage."""
    return Path(shutil.copytree(pristine_artifact, tmp_path / "artifact"))


def refuse_convert(capsys: Capsys, model: Path | str, out: Path, *arguments: object) -> str:
    """A conversion that must fail and leave no trace: no output, no working directory, the source as it was."""
    source = Path(model)
    before = contents(source) if source.is_dir() else None
    existed = contents(out) if out.is_dir() else None
    error = refuse(capsys, "convert", model, "-o", out, *QUICK, *arguments)
    if before is not None:
        assert contents(source) == before
    if existed is None:
        assert not out.is_dir()
    else:
        assert contents(out) == existed
    assert not workspace(out).exists()
    return error


def check_says(error: str, *fragments: object) -> None:
    for fragment in fragments:
        assert str(fragment) in error


# Checkpoints


@pytest.mark.parametrize("command", [("convert", "-o", "out"), ("inspect",)])
def test_path_that_does_not_exist(
    command: tuple[str, ...], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refuse(capsys, *command, tmp_path / "nowhere")
    check_says(error, tmp_path / "nowhere", "is not a directory with a Hugging Face checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_path_is_a_file(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    error = refuse_convert(capsys, tmp_path / "weights.safetensors", tmp_path / "out")
    check_says(error, "weights.safetensors", "is not a directory")


def test_empty_directory(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "empty").mkdir()
    error = refuse_convert(capsys, tmp_path / "empty", tmp_path / "out")
    check_says(error, tmp_path / "empty", "not a Hugging Face checkpoint", "config.json is missing")


def test_missing_config(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (model / "config.json").unlink()
    check_says(refuse_convert(capsys, model, tmp_path / "out"), model, "config.json is missing")


@pytest.mark.parametrize("text", [b'{"model_type": "qwen3",', b"", b"\xff\xfe{}", b"[1, 2]", b"null"])
def test_invalid_config(text: bytes, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (model / "config.json").write_bytes(text)
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, model / "config.json", "JSON")


def test_only_bin_weights(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    for shard in model.glob("model*"):
        shard.unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK")
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, model, "pytorch_model.bin", "convert the weights to safetensors")


def test_missing_shard(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.unlink()
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, shard.name, model, "missing", "download it again")


def _header(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _with_header(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _break_entry(**changes: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        header, data = _header(path)
        header[V_PROJ.format(0)].update(changes)
        _with_header(path, header, data)

    return damage


def _patch(offset: int, payload: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[offset : offset + len(payload)] = payload
        path.write_bytes(raw)

    return damage


CORRUPTIONS: dict[str, Callable[[Path], None]] = {
    "header length too large": _patch(0, b"\xff" * 8),
    "header length zero": _patch(0, b"\0" * 8),
    "header is no JSON": _patch(8, b"nonsense"),
    "header is no text": _patch(8, b"\xff\xff\xff\xff"),
    "header is a list": lambda path: _with_header(path, [1, 2], b""),
    "entry is no object": lambda path: _with_header(path, {"a": 5}, b""),
    "entry without dtype": lambda path: _with_header(path, {"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    "offsets beyond the file": _break_entry(data_offsets=[0, 1 << 40]),
    "offsets reversed": _break_entry(data_offsets=[4096, 0]),
    "offsets negative": _break_entry(data_offsets=[-4096, 0]),
    "offsets are text": _break_entry(data_offsets=["a", "b"]),
    "shape larger than the data": _break_entry(shape=[64, 97]),
    "shape is no list": _break_entry(shape=7),
    "shape holds text": _break_entry(shape=["a"]),
    "bytes after the data": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 16),
}


@pytest.mark.parametrize("damage", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_corrupt_safetensors(damage: Callable[[Path], None], single: Path, tmp_path: Path, capsys: Capsys) -> None:
    model = Path(shutil.copytree(single, tmp_path / "model"))
    damage(model / "model.safetensors")
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, model / "model.safetensors", "download it again")


def test_unreadable_dtype(single: Path, tmp_path: Path, capsys: Capsys) -> None:
    model = Path(shutil.copytree(single, tmp_path / "model"))
    _break_entry(dtype="F4")(model / "model.safetensors")
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, V_PROJ.format(0), "model.safetensors", "dtype F4")


@pytest.mark.parametrize("cut", ["empty", "length", "no header", "header", "no data", "data", "last byte"])
def test_truncated_safetensors(cut: str, single: Path, tmp_path: Path, capsys: Capsys) -> None:
    model = Path(shutil.copytree(single, tmp_path / "model"))
    path = model / "model.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    size = {
        "empty": 0,
        "length": 5,
        "no header": 8,
        "header": start // 2,
        "no data": start,
        "data": (start + len(raw)) // 2,
        "last byte": len(raw) - 1,
    }[cut]
    path.write_bytes(raw[:size])
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, path, "truncated", "download it again")


def _edit_index(model: Path, change: Callable[[dict[str, object]], None]) -> Path:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    return path


def test_index_names_absent_tensor(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    shard = sorted(model.glob("*.safetensors"))[0].name
    path = _edit_index(model, lambda index: index.update({"model.ghost.weight": shard}))
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, path, "model.ghost.weight", shard, "is not there")


def test_index_names_wrong_shard(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    shards = sorted(f.name for f in model.glob("*.safetensors"))
    name = V_PROJ.format(1)

    def move(index: dict[str, object]) -> None:
        index[name] = next(s for s in shards if s != index[name])

    path = _edit_index(model, move)
    check_says(refuse_convert(capsys, model, tmp_path / "out"), path, name, "is not there")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": [1]}', "{"])
def test_unusable_index(index: str, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    check_says(refuse_convert(capsys, model, tmp_path / "out"), model / "model.safetensors.index.json")


def test_absent_projection(single: Path, tmp_path: Path, capsys: Capsys) -> None:
    model = Path(shutil.copytree(single, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    del tensors[V_PROJ.format(1)]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    check_says(refuse_convert(capsys, model, tmp_path / "out"), V_PROJ.format(1), "missing", model)


def test_config_contradicts_shapes(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    edit_json(model / "config.json", num_key_value_heads=3)
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, "layers.0.self_attn.k_proj.weight", "[64, 96]", "config.json implies [96, 96]")


def test_config_without_sizes(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    edit_json(model / "config.json", num_hidden_layers=None)
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, model / "config.json", "num_hidden_layers")


def test_missing_tokenizer(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (model / "tokenizer.json").unlink()
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, model, "tokenizer", "copy the tokenizer files there")


def test_tokenizer_beyond_the_embeddings(tmp_path: Path, capsys: Capsys) -> None:
    model = save_model(family_config("qwen3", vocab_size=300), tmp_path / "model")
    check_says(refuse_convert(capsys, model, tmp_path / "out"), model, "tokenizer", "300 embeddings")


def test_hub_id_that_cannot_be_fetched(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your internet connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    error = refuse_convert(capsys, "some-owner/some-model", tmp_path / "out")
    check_says(error, "some-owner/some-model", "no local directory", "cannot be fetched", "couldn't connect")
    assert list(tmp_path.iterdir()) == []


# Architectures


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM", "multi-head latent attention"),
        ("t5", "T5ForConditionalGeneration", "encoder-decoder"),
        ("gpt2", "GPT2LMHeadModel", "one fused matrix"),
        ("gpt_neox", "GPTNeoXForCausalLM", "one fused matrix"),
        ("frobnicator", "FrobnicatorForCausalLM", "no description of its attention"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_unsupported_architecture(
    command: str,
    model_type: str,
    architecture: str,
    reason: str,
    model: Path,
    tmp_path: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import kvcompile.checkpoint.reader as reader

    edit_json(model / "config.json", model_type=model_type, architectures=[architecture])
    monkeypatch.setattr(reader.Checkpoint, "load", lambda *_: pytest.fail("a weight was read"))
    error = (
        refuse_convert(capsys, model, tmp_path / "out") if command == "convert" else refuse(capsys, "inspect", model)
    )
    check_says(error, architecture, f"'{model_type}'", reason, "supported are cohere2, gemma, ")


def test_only_sliding_layers(tmp_path: Path, capsys: Capsys) -> None:
    model = save_model(family_config("mistral", sliding_window=128), tmp_path / "model")
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, "MistralForCausalLM", "no layer with full attention", "sliding attention")


def test_group_that_does_not_divide_the_head(tmp_path: Path, capsys: Capsys) -> None:
    model = save_model(family_config("llama", head_dim=48), tmp_path / "model")
    error = refuse_convert(capsys, model, tmp_path / "out", "--set", "value.quantizer.group_size=32")
    check_says(
        error, "value.quantizer.group_size 32", "head_dim 48", "model.layers.0", "--set value.quantizer.group_size"
    )


@pytest.mark.parametrize("head_dim", [52, 92])
def test_head_without_hadamard_matrix(head_dim: int, tmp_path: Path, capsys: Capsys) -> None:
    assert not is_hadamard_order(head_dim)
    model = save_model(family_config("llama", head_dim=head_dim), tmp_path / "model")
    error = refuse_convert(capsys, model, tmp_path / "out")
    check_says(error, "key.rotation", f"order {head_dim}", "model.layers.0", "--set key.rotation.hadamard=false")
    switches = [f"--set={half}.rotation.hadamard=false" for half in ("key", "value")]
    succeed(capsys, "convert", model, "-o", tmp_path / "out", *QUICK, *switches)


@pytest.mark.parametrize("head_dim", [24, 48, 40, 80, 96])
def test_head_with_paley_matrix(head_dim: int, tmp_path: Path, capsys: Capsys) -> None:
    model = save_model(family_config("llama", head_dim=head_dim, num_hidden_layers=1), tmp_path / "model")
    succeed(capsys, "convert", model, "-o", tmp_path / "out", *QUICK)
    succeed(capsys, "verify", tmp_path / "out")


SEEN_BY_ATTENTION = {
    "value projection": V_PROJ.format(1),
    "query projection": "model.layers.0.self_attn.q_proj.weight",
    "mlp": "model.layers.0.mlp.gate_proj.weight",
    "embedding": "model.embed_tokens.weight",
    "norm": "model.layers.1.input_layernorm.weight",
    "output projection": O_PROJ.format(1),
}
SEEN_BY_LOGITS = {
    "mlp of the last layer": "model.layers.1.mlp.down_proj.weight",
    "final norm": "model.norm.weight",
    "head": "lm_head.weight",
}
NOT_FINITE = [
    *(pytest.param(t, w, id=f"{name}, {w}") for name, t in SEEN_BY_ATTENTION.items() for w in ("fold", "overlay")),
    *(pytest.param(t, "fold", id=f"{name}, fold") for name, t in SEEN_BY_LOGITS.items()),
]


@pytest.mark.parametrize(("tensor", "weights"), NOT_FINITE)
def test_nan_in_weights(tensor: str, weights: str, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    value = torch.full_like(Checkpoint(model).load(tensor), float("nan"))
    overwrite(model, tensor, value.numpy().tobytes())
    error = refuse_convert(capsys, model, tmp_path / "out", "--weights", weights)
    check_says(error, tensor, model, "NaN or infinity", "repair the checkpoint")


def _drop(name: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        del tensors[name]
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def _configure(**changes: object) -> Callable[[Path], None]:
    return lambda model: edit_json(model / "config.json", **changes)


UNREADABLE_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent MLP weight": (_drop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
    "absent norm": (_drop("model.layers.0.self_attn.q_norm.weight"), "model.layers.0.self_attn.q_norm.weight"),
    "absent head": (_drop("lm_head.weight"), "lm_head.weight"),
    "no layers": (_configure(num_hidden_layers=0), "num_hidden_layers"),
    "too few layer types": (_configure(layer_types=["full_attention"]), "layer_types"),
    "positions are null": (_configure(max_position_embeddings=None), "max_position_embeddings"),
    "positions are text": (_configure(max_position_embeddings="many"), "max_position_embeddings"),
    "vocabulary is text": (_configure(vocab_size="large"), "vocab_size"),
    "unknown dtype": (_configure(dtype="float99"), "float99"),
    "quantized without a dictionary": (_configure(quantization_config="gptq"), "no quant_method: 'gptq'"),
    "tokenizer config is a list": (lambda model: (model / "tokenizer_config.json").write_text("[]"), "tokenizer"),
}


@pytest.mark.parametrize(("damage", "word"), UNREADABLE_MODELS.values(), ids=UNREADABLE_MODELS.keys())
def test_model_that_transformers_cannot_build(
    damage: Callable[[Path], object], word: str, single: Path, tmp_path: Path, capsys: Capsys
) -> None:
    model = Path(shutil.copytree(single, tmp_path / "model"))
    damage(model)
    check_says(refuse_convert(capsys, model, tmp_path / "out"), model, word)


def test_config_without_quantization(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    edit_json(model / "config.json", quantization_config=None)
    succeed(capsys, "convert", model, "-o", tmp_path / "out", "--scheme", "naive-int2")


# Schemes


def test_unknown_scheme(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    error = refuse_convert(capsys, model, tmp_path / "out", "--scheme", "oscar-int3")
    check_says(error, "'oscar-int3'", "oscar-int2", "kvcompile schemes list")


SCHEME_FAULTS = {
    "bad TOML": ('name = "oscar-int2"', 'name = "oscar-int2', ("not valid TOML", "line 2")),
    "unknown field": ('kind = "quantile"', 'kind = "quantile"\nrate = 3', ("rate",)),
    "wrong value": ("bits = 2", "bits = 3", ("key.quantizer.bits", "value.quantizer.bits", "2 or 4")),
    "wrong kind": ('kind = "spectral"', 'kind = "spectrum"', ("key.rotation", "spectrum")),
    "keys folded": ('apply = "online"', 'apply = "folded"', ("keys cannot be folded", "RoPE", "'online'")),
    "unknown pass": ('"clip", ', '"clap", ', ("unknown pass 'clap'", "clip")),
    "no emit": (', "emit"]', "]", ("emit",)),
    "no inventory": ('["inventory", ', "[", ("inventory",)),
    "emit before verify": ('"verify", "emit"', '"emit", "verify"', ("emit",)),
}


@pytest.mark.parametrize(("old", "new", "fragments"), SCHEME_FAULTS.values(), ids=SCHEME_FAULTS.keys())
def test_invalid_scheme_file(
    old: str, new: str, fragments: tuple[str, ...], model: Path, tmp_path: Path, capsys: Capsys
) -> None:
    text = f"passes = {json.dumps(PASSES)}\n" + succeed(capsys, "schemes", "show", "oscar-int2").out
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    check_says(refuse_convert(capsys, model, tmp_path / "out", "--scheme", path), *fragments)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("key.clip.ratio", ("--set key.clip.ratio", "expected FIELD=VALUE")),
        ("=3", ("--set =3", "expected FIELD=VALUE")),
        ("key.clip.ratios=0.9", ("key.clip", "ratios")),
        ("keys.clip.ratio=0.9", ("keys",)),
        ("key.clip.ratio=1.5", ("key.clip", "ratio", "less than or equal to 1")),
        ("key.clip.ratio=high", ("key.clip", "ratio")),
        ("window.recent=-1", ("window.recent", "greater than or equal to 0")),
        ("name.first=x", ("--set name.first=x", "'name' is a value")),
        ("key=5", ("key",)),
        ("passes=[]", ("passes", "inventory")),
    ],
)
def test_bad_override(override: str, fragments: tuple[str, ...], model: Path, tmp_path: Path, capsys: Capsys) -> None:
    check_says(refuse_convert(capsys, model, tmp_path / "out", "--set", override), *fragments)


def test_unknown_pass(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    error = refuse_convert(capsys, model, tmp_path / "out", "--stop-after", "rotate")
    check_says(error, "unknown pass 'rotate'", "rotations")
    check_says(refuse(capsys, "passes", "explain", "rotate"), "unknown pass 'rotate'", "rotations")


def test_pass_that_the_scheme_does_not_run(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    few = 'passes=["inventory", "rotations", "clip", "emit"]'
    arguments = ("--scheme", "naive-int2", "--set", few, "--stop-after", "calibrate")
    check_says(refuse_convert(capsys, model, tmp_path / "out", *arguments), "calibrate", "naive-int2")


# Calibration text


def test_calibration_text_is_too_short(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "short.txt").write_text("Hardly any text at all.")
    error = refuse_convert(capsys, model, tmp_path / "out", "--calibration", tmp_path / "short.txt")
    check_says(error, "short.txt", "too short", "256 are asked for", "--calibration-tokens")


def test_calibration_text_is_missing(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    error = refuse_convert(capsys, model, tmp_path / "out", "--calibration", tmp_path / "none.txt")
    check_says(error, tmp_path / "none.txt", "does not exist")


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_calibration_text_is_not_utf8(name: str, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / name).write_bytes("gr\u00fcn".encode("latin-1"))
    error = refuse_convert(capsys, model, tmp_path / "out", "--calibration", tmp_path / name)
    check_says(error, tmp_path / name, "UTF-8")


@pytest.mark.parametrize("line", ['{"content": "x"}', '{"text": null}', '{"text": 5}', "[1]", '"text"', "{broken"])
def test_calibration_line_without_the_field(line: str, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    error = refuse_convert(capsys, model, tmp_path / "out", "--calibration", tmp_path / "text.jsonl")
    check_says(error, tmp_path / "text.jsonl", "line 3", "'text'", "--calibration-field")


@pytest.mark.parametrize("hold", ["nothing", "blank file", "hidden file"])
def test_calibration_folder_without_text(hold: str, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    if hold == "blank file":
        (folder / "a.txt").write_text(" \n\n")
    if hold == "hidden file":
        (folder / ".a.txt").write_text("text")
    error = refuse_convert(capsys, model, tmp_path / "out", "--calibration", folder)
    check_says(error, folder, "holds no text")


# Outputs


def test_output_is_a_file(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    check_says(refuse_convert(capsys, model, out), out, "already exists", "--force")
    check_says(refuse_convert(capsys, model, out, "--force"), out, "no converted checkpoint", "choose another path")
    assert out.read_text() == "mine"


def test_output_is_a_foreign_directory(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    check_says(refuse_convert(capsys, model, out), out, "already exists", "--force")
    check_says(refuse_convert(capsys, model, out, "--force"), out, "no converted checkpoint", "choose another path")


def test_output_is_a_dangling_link(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "nowhere")
    check_says(refuse_convert(capsys, model, out), out, "already exists")
    assert out.is_symlink()


def test_output_is_an_artifact(model: Path, artifact: Path, capsys: Capsys) -> None:
    check_says(refuse_convert(capsys, model, artifact), artifact, "already exists", "--force")
    succeed(capsys, "convert", model, "-o", artifact, "--scheme", "naive-int2", "--force")
    assert json.loads((artifact / "kvcompile.json").read_text())["scheme"]["name"] == "naive-int2"
    assert not workspace(artifact).exists()


def test_forced_run_that_fails_keeps_the_old_artifact(
    model: Path, artifact: Path, tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "short.txt").write_text("Hardly any text at all.")
    refuse_convert(capsys, model, artifact, "--force", "--calibration", tmp_path / "short.txt")


def test_output_that_appears_during_the_run(
    model: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvcompile.passes.emit as emit

    out = tmp_path / "out"

    def interfere(manifest: object) -> str:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
        return ""

    monkeypatch.setattr(emit, "model_card", interfere)
    error = refuse(capsys, "convert", model, "-o", out, "--scheme", "naive-int2")
    check_says(error, out, "already exists")
    assert contents(out) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("weights", ["fold", "overlay"])
def test_source_is_never_replaced(weights: str, model: Path, artifact: Path, capsys: Capsys) -> None:
    source = model.rename(artifact / "model")
    error = refuse_convert(capsys, source, artifact, "--force", "--weights", weights)
    check_says(error, artifact, "source", "choose another path")
    check_says(refuse_convert(capsys, artifact, artifact, "--force", "--weights", weights), "converted checkpoint")


def test_a_converted_checkpoint_is_no_source(model: Path, artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    said = ("is a converted checkpoint", "convert the model that it was made from")
    succeed(capsys, "convert", model, "-o", tmp_path / "overlay", "--scheme", "quarot-int2", "--weights", "overlay")
    for source in (artifact, tmp_path / "overlay"):
        check_says(refuse_convert(capsys, source, tmp_path / "out"), source, *said)
        check_says(refuse_convert(capsys, source, tmp_path / "out", "--dry-run"), source, *said)
    check_says(refuse(capsys, "compare", artifact, "--schemes", "quarot-int2", "-o", tmp_path / "out"), artifact, *said)
    assert not (tmp_path / "out").exists()
    (artifact / "model.safetensors.index.json").unlink()
    for shard in artifact.glob("model*"):
        shard.unlink()
    torch.save({}, artifact / "pytorch_model.bin")
    check_says(refuse_convert(capsys, artifact, tmp_path / "out", "--allow-pickle"), artifact, *said)
    succeed(
        capsys, "convert", model, "-o", tmp_path / "again", "--scheme", "quarot-int2"
    )  # overlaid, and still a source


@pytest.mark.parametrize("version", [[2], 2.0, True, None])
def test_rotation_file_of_no_version(version: object, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    torch.save({"format_version": version, "layers": {}}, tmp_path / "k.pt")
    error = refuse_convert(capsys, model, tmp_path / "out", "--import-rotations", tmp_path / "k.pt", tmp_path / "k.pt")
    check_says(error, tmp_path / "k.pt", f"format_version {version!r}", "reads 1 and 2")


def test_rotation_file_that_is_a_folder(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    error = refuse_convert(capsys, model, tmp_path / "out", "--import-rotations", model, model)
    check_says(error, f"rotation file {model} is no regular file")


def test_output_below_a_file(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("mine")
    error = refuse_convert(capsys, model, tmp_path / "file" / "out")
    check_says(error, tmp_path / "file", "not a writable directory")


def test_output_where_nobody_can_write(model: Path, capsys: Capsys) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no /proc")
    check_says(refuse_convert(capsys, model, Path("/proc/kvcompile-out")), "/proc", "cannot")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system with the given options, or mounts it again with others."""
    point = tmp_path / "disk"
    point.mkdir()
    mounted = False

    def apply(options: str) -> Path:
        nonlocal mounted
        options = f"remount,{options}" if mounted else options
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting is not permitted here")
        mounted = True
        return point

    yield apply
    if mounted:
        subprocess.run(["umount", str(point)], check=True)


def test_output_on_a_read_only_disk(mount: Callable[[str], Path], model: Path, capsys: Capsys) -> None:
    disk = mount("ro")
    check_says(refuse_convert(capsys, model, disk / "out"), disk / "out", disk, "not a writable directory")


@pytest.mark.parametrize("size", ["8k", "16k", "200k", "1000k", "3600k"])
def test_full_disk(
    size: str, mount: Callable[[str], Path], model: Path, pristine_artifact: Path, capsys: Capsys
) -> None:
    disk = mount(f"size={size}")
    out = disk / "out"
    before = contents(model)
    error = refuse(capsys, "convert", model, "-o", out, *QUICK)
    check_says(error, out, "No space left on device")
    assert contents(model) == before
    assert not out.exists()
    assert not (workspace(out) / "artifact").exists()
    kept = list(workspace(out).glob("stages/*.safetensors"))
    assert bool(kept) == workspace(out).exists() == ("--resume" in error)
    mount("size=30m")
    succeed(capsys, "convert", model, "-o", out, *QUICK, *(["--resume"] if kept else []))
    assert contents(out) == contents(pristine_artifact)
    assert os.listdir(disk) == ["out"]


def test_disk_fills_up_while_weights_are_written(
    model: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvcompile.passes.emit as emit

    def fail(source: object, destination: Path, *_: object) -> None:
        (destination / "half-written").write_bytes(b"x" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(emit, "write_patched", fail)
    out = tmp_path / "out"
    error = refuse(capsys, "convert", model, "-o", out, *QUICK)
    check_says(error, out, "No space left on device", "--resume", workspace(out))
    assert not out.exists()
    assert sorted(p.name for p in workspace(out).iterdir()) == ["inputs.json", "stages"]


# Interruption and surprises


def test_interrupt_keeps_finished_stages(
    model: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcompile.passes.clip import ClipPass

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClipPass, "run", interrupt)
    out = tmp_path / "out"
    outcome = run(capsys, "convert", model, "-o", out, *QUICK)
    assert outcome.code == 130
    check_says(outcome.error, "interrupted", "--resume", workspace(out))
    assert not out.exists()
    assert not (workspace(out) / "artifact").exists()


def test_early_interrupt_leaves_nothing(
    model: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcompile.passes.calibrate import CalibratePass

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CalibratePass, "run", interrupt)
    out = tmp_path / "out"
    outcome = run(capsys, "convert", model, "-o", out, *QUICK)
    assert outcome.code == 130
    assert outcome.error == "interrupted"
    assert not out.exists()
    assert not workspace(out).exists()


def test_bug_in_a_pass_leaves_nothing_half_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvcompile.passes.emit as emit

    monkeypatch.setattr(emit, "model_card", lambda _: 1 / 0)
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        kvcompile.convert(model, out, "naive-int2")
    assert not out.exists()
    assert not (workspace(out) / "artifact").exists()


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_unknown_device(device: str, model: Path, artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    error = refuse_convert(capsys, model, tmp_path / "out", "--device", device)
    check_says(error, f"device '{device}' is not available", "--device cpu")
    error = refuse(capsys, "generate", artifact, "--prompt", "x", "--device", device)
    check_says(error, f"device '{device}' is not available", "--device cpu")


def test_dump_folder_is_a_file(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "dump").write_text("mine")
    error = refuse_convert(capsys, model, tmp_path / "out", "--dump-ir", tmp_path / "dump")
    check_says(error, tmp_path / "dump")


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert",),
        ("convert", "model"),
        ("convert", "model", "-o", "out", "--calibration-tokens", "0"),
        ("convert", "model", "-o", "out", "--weights", "melt"),
        ("convert", "model", "-o", "out", "--no-such-option"),
        ("compile", "model"),
        ("generate", "out", "--temperature", "-1"),
    ],
)
def test_wrong_usage(
    arguments: tuple[str, ...], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(capsys, *arguments)
    assert outcome.code == 2
    assert "Error: " in outcome.err
    assert list(tmp_path.iterdir()) == []


# Artifacts


def refuse_everywhere(capsys: Capsys, artifact: Path, *fragments: object) -> None:
    """Loading and verifying must refuse an artifact with the same words, and alter nothing."""
    before = contents(artifact)
    check_says(refuse(capsys, "verify", artifact), *fragments)
    check_says(refuse(capsys, "generate", artifact, "--prompt", "x", "--backend", "codec"), *fragments)
    assert contents(artifact) == before


def edit_manifest(artifact: Path, change: Callable[[dict], None]) -> None:
    path = artifact / "kvcompile.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("version", ["2.0", "12.1"])
def test_newer_schema_is_refused(version: str, artifact: Path, capsys: Capsys) -> None:
    edit_json(artifact / "kvcompile.json", schema_version=version)
    refuse_everywhere(capsys, artifact, artifact / "kvcompile.json", version, "reads up to 1.x", "upgrade kvcompile")


def test_newer_minor_schema_is_read(artifact: Path, capsys: Capsys) -> None:
    def add_fields(node: object) -> None:
        if isinstance(node, dict):
            for value in node.values():
                add_fields(value)
        elif isinstance(node, list):
            for value in node:
                add_fields(value)

    def renew(manifest: dict) -> None:
        manifest["schema_version"] = "1.7"
        key = manifest["scheme"]["key"]
        layer = manifest["layers"][0]
        parts = ["producer", "source", "weights", "scheme", "encoding", "sidecar", "calibration"]
        sections = [manifest, layer, layer["key"], layer["value"], *(manifest[part] for part in parts)]
        sections += [key, key["rotation"], key["clip"], key["quantizer"], manifest["scheme"]["window"]]
        for section in sections:
            section["from_the_future"] = {"a": [1, 2]}

    edit_manifest(artifact, renew)
    succeed(capsys, "verify", artifact)
    succeed(capsys, "inspect", artifact)
    model, _ = kvcompile.load(artifact, backend="codec")
    assert model.kvcompile.manifest.schema_version == "1.7"


def test_directory_without_manifest(pristine: Path, tmp_path: Path, capsys: Capsys) -> None:
    model = Path(shutil.copytree(pristine, tmp_path / "model"))
    refuse_everywhere(capsys, model, model, "no converted checkpoint", "kvcompile.json is missing")
    check_says(refuse(capsys, "verify", tmp_path / "nowhere"), tmp_path / "nowhere", "kvcompile.json is missing")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": "new"}', '{"schema_version": null}', "{}"])
def test_garbled_manifest(text: str, artifact: Path, capsys: Capsys) -> None:
    (artifact / "kvcompile.json").write_text(text)
    refuse_everywhere(
        capsys, artifact, artifact / "kvcompile.json", "not a readable manifest", "convert the model again"
    )


def test_manifest_that_is_not_text(artifact: Path, capsys: Capsys) -> None:
    (artifact / "kvcompile.json").write_bytes(b"\xff\xfe\x00")
    refuse_everywhere(capsys, artifact, artifact / "kvcompile.json", "not a readable manifest")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m: m.pop("layers"), "layers"),
        (lambda m: m["layers"][1].update(head_dim="wide"), "layers.1.head_dim"),
        (lambda m: m["weights"].update(mode="melted"), "weights.mode"),
        (lambda m: m["encoding"].update(packing=128), "encoding.packing"),
        (lambda m: m["layers"][0].update(page_tokens=32), "layers.0.page_tokens"),
        (lambda m: m["scheme"]["key"]["quantizer"].update(bits=3), "scheme.key.quantizer.bits"),
    ],
)
def test_invalid_manifest(change: Callable[[dict], None], where: str, artifact: Path, capsys: Capsys) -> None:
    edit_manifest(artifact, change)
    refuse_everywhere(capsys, artifact, artifact / "kvcompile.json", "not a valid manifest", where)


def test_missing_sidecar(artifact: Path, capsys: Capsys) -> None:
    (artifact / "kvcompile.safetensors").unlink()
    refuse_everywhere(capsys, artifact, artifact / "kvcompile.safetensors", "is missing", "convert the model again")


@pytest.mark.parametrize("how", ["one bit", "truncated", "empty"])
def test_altered_sidecar(how: str, artifact: Path, capsys: Capsys) -> None:
    path = artifact / "kvcompile.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes({"one bit": raw, "truncated": raw[:-4], "empty": b""}[how])
    refuse_everywhere(capsys, artifact, path, "sha256 differs", "convert the model again")


def test_sidecar_that_is_no_safetensors_file(artifact: Path, capsys: Capsys) -> None:
    (artifact / "kvcompile.safetensors").write_bytes(b"garbage, but with the right digest")
    reseal(artifact)
    refuse_everywhere(capsys, artifact, artifact / "kvcompile.safetensors", "convert the model again")


@pytest.mark.parametrize("name", ["layers.1.key.rotation", "layers.0.value.rotation"])
def test_sidecar_without_a_tensor(name: str, artifact: Path, capsys: Capsys) -> None:
    path = artifact / "kvcompile.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    reseal(artifact)
    check_says(refuse(capsys, "verify", artifact), name, "missing")
    if ".key." in name:  # a folded value rotation is not needed at run time
        check_says(refuse(capsys, "generate", artifact, "-p", "x", "--backend", "codec"), name, path, "missing")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape; do not alter it."""
    path = tmp_path_factory.mktemp("stranger") / "model"
    return save_model(family_config("qwen3"), path, shards="600KB", seed=1)


def test_weights_of_another_model(stranger: Path, artifact: Path, capsys: Capsys) -> None:
    for shard in stranger.glob("*.safetensors"):
        shutil.copy(shard, artifact / shard.name)
    generate = ("generate", artifact, "--prompt", "x", "--backend", "codec")
    words = ("tensor model.layers.0.self_attn.", artifact / "kvcompile.safetensors", "do not belong together")
    check_says(refuse(capsys, *generate), *words)
    check_says(refuse(capsys, "verify", artifact), artifact / "model-0000", "does not match its hash")
    reseal(artifact)
    check_says(refuse(capsys, *generate), *words)
    check_says(refuse(capsys, "verify", artifact), *words)


@pytest.mark.parametrize("tensor", [V_PROJ.format(1), "model.layers.0.mlp.up_proj.weight"])
def test_altered_weight_file(tensor: str, artifact: Path, capsys: Capsys) -> None:
    file = Checkpoint(artifact).entries[tensor].file
    overwrite(artifact, tensor, b"\0\0\0\0")
    check_says(refuse(capsys, "verify", artifact), file, "does not match its hash", "altered or damaged")


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_incomplete_weight_file(how: str, artifact: Path, capsys: Capsys) -> None:
    file = sorted(artifact.glob("model-*.safetensors"))[1]
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-10])
    refuse_everywhere(capsys, artifact, file.name)


def test_rotation_that_is_not_orthogonal(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    artifact = tmp_path / "out"
    kvcompile.convert(model, artifact, "oscar-int2", calibration_tokens=256)
    path = artifact / "kvcompile.safetensors"
    tensors = load_file(path)
    tensors["layers.1.key.rotation"][0, 3, 5] += 0.01
    save_file(tensors, path)
    reseal(artifact)
    error = refuse(capsys, "verify", artifact)
    check_says(error, "layer 1", "layers.1.key.rotation", "not orthogonal")


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_sidecar_with_wrong_clip_ratio(value: float, artifact: Path, capsys: Capsys) -> None:
    path = artifact / "kvcompile.safetensors"
    tensors = load_file(path)
    tensors["layers.1.value.clip_ratio"] = torch.tensor(value, dtype=torch.float64)
    save_file(tensors, path)
    reseal(artifact)
    error = refuse(capsys, "verify", artifact)
    check_says(error, *(["layers.1.value.clip_ratio"] if value != value else ["layer 1: value clip ratio", "0.5"]))


def _swap(model: Path, first: str, second: str) -> None:
    checkpoint = Checkpoint(model)
    a, b = (checkpoint.load(name).numpy().tobytes() for name in (first, second))
    overwrite(model, first, b)
    overwrite(model, second, a)


def test_wrong_fold(pristine: Path, artifact: Path, capsys: Capsys) -> None:
    swapped = O_PROJ.format(0), O_PROJ.format(1)
    _swap(artifact, *swapped)
    reseal(artifact, *swapped)
    succeed(capsys, "verify", artifact)
    error = refuse(capsys, "verify", artifact, "--source", pristine)
    check_says(error, "layer 0", V_PROJ.format(0), O_PROJ.format(0), "do not compute what the source computes")


def test_altered_tensor_that_no_fold_touches(pristine: Path, artifact: Path, capsys: Capsys) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    overwrite(artifact, name, b"\0\0\0\0")
    reseal(artifact)
    error = refuse(capsys, "verify", artifact, "--source", pristine)
    check_says(error, name, pristine, "should be unchanged")


def test_wrong_source(stranger: Path, artifact: Path, capsys: Capsys) -> None:
    error = refuse(capsys, "verify", artifact, "--source", stranger)
    check_says(error, "tensor ", stranger, "is this the right source?")


def test_source_of_another_architecture(artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    other = save_model(family_config("llama"), tmp_path / "other")
    check_says(refuse(capsys, "verify", artifact, "--source", other), other, "is this the right source?")


def test_source_that_does_not_exist(artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    error = refuse(capsys, "verify", artifact, "--source", tmp_path / "nowhere")
    check_says(error, tmp_path / "nowhere", "is not a directory")


def test_overlay_and_its_source(model: Path, stranger: Path, tmp_path: Path, capsys: Capsys) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"
    succeed(capsys, "convert", model, "-o", out, "--scheme", "quarot-int2", "--weights", "overlay")
    model.rename(moved)
    refuse_everywhere(capsys, out, out, "is an overlay over", model, "cannot be used")
    check_says(refuse(capsys, "inspect", out), "is an overlay over", model)
    succeed(capsys, "verify", out, "--source", moved)
    prompt = ("--prompt", "x", "-n", 2, "--backend", "codec")
    succeed(capsys, "generate", out, *prompt, "--source", moved)
    check_says(refuse(capsys, "generate", out, *prompt, "--source", stranger), "self_attn", "do not belong together")
    check_says(refuse(capsys, "verify", out, "--source", stranger), stranger, "does not match its hash")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("convert", "-o", "out"), "config.json"),
        (("inspect",), "config.json"),
        (("generate", "-p", "x"), "kvcompile.json"),
        (("verify",), "kvcompile.json"),
    ],
)
def test_file_without_permission(
    command: tuple[str, ...], name: str, artifact: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal of the system is simulated."""
    read_text = Path.read_text

    def read(path: Path, *arguments: object, **options: object) -> str:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_text(path, *arguments, **options)

    if name == "config.json":
        (artifact / "kvcompile.json").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "read_text", read)
    error = refuse(capsys, command[0], artifact, *command[1:])
    check_says(error, artifact / name, "Permission denied")


def test_standard_input_that_is_no_text(artifact: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    check_says(refuse(capsys, "generate", artifact, "--backend", "codec"), "standard input is not UTF-8 text")


def test_empty_prompt(artifact: Path, capsys: Capsys) -> None:
    error = refuse(capsys, "generate", artifact, "--prompt", "", "--backend", "codec")
    check_says(error, "prompt is empty")


def test_every_error_is_one_of_ours() -> None:
    """The command line prints exactly the classes that callers of the Python functions can catch."""
    import kvcompile.errors as errors

    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert all(issubclass(c, KvCompileError) for c in classes)


def test_error_feedback_refuses_heads_that_are_too_large():
    layer = SimpleNamespace(index=0, head_dim=512, prefix="model.layers.0.self_attn", softmax="")
    with pytest.raises(SchemeError, match=r"exact up to head_dim 256, model\.layers\.0\.self_attn has 512"):
        check_fit(load_scheme("kvc-int2"), layer)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (["clip", "rotations"], "must keep this order"),
        (["rotations", "center", "clip", "feedback"], "must keep this order"),
        ([], "pass 'calibrate' must be among its passes"),
        (["calibrate", "rotations", "center", "clip"], "pass 'feedback' must be among its passes"),
    ],
)
def test_lists_of_passes_that_cannot_work_are_refused_before_any_work(pristine, tmp_path, capsys, passes, message):
    chosen = json.dumps(["inventory", *passes, "emit"])
    for extra in ([], ["--dry-run"]):
        arguments = ("convert", pristine, "-o", tmp_path / "out", "--set", f"passes={chosen}", *extra)
        assert message in refuse(capsys, *arguments)
    assert not (tmp_path / "out").exists()


def test_a_field_without_its_kind_is_explained(pristine, tmp_path, capsys):
    sets = ("--set", "key.clip.ratio=0.95")
    assert "key.clip.kind=" in refuse(capsys, "convert", pristine, "-s", "naive-int2", "-o", tmp_path / "out", *sets)
