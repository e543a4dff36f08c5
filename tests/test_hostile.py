"""Broken and hostile input gives the one-sentence error or a right result: no traceback, no hang, no memory, nothing written.

Every case runs a command in this process, within a time limit and a limit on memory, and leaves every file as it was.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import kvcompile
from kvcompile.scheme.library import scheme_text
from tests import hostile
from tests.commands import Outcome, quick_conversions, reseal, run
from tests.conftest import family_config, save_model

Capsys = pytest.CaptureFixture[str]
SECONDS = 10
ROOM = 1 << 30
"""Bytes of address space that a case may add to this process."""
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 4096,
}


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # as the command line does before it imports transformers
    yield from quick_conversions()
    transformers.utils.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in one file; do not alter it."""
    return save_model(family_config("qwen3", **SMALL), tmp_path_factory.mktemp("hostile") / "model", torch.bfloat16)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in several; do not alter it."""
    return save_model(family_config("qwen3", **SMALL), tmp_path_factory.mktemp("hostile") / "sharded", shards="100KB")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision-language model's config over the same weights; only its config is ever read."""
    folder = tmp_path_factory.mktemp("hostile") / "vision"
    save_model(family_config("qwen2", **SMALL), folder)
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    config["vision_config"] = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def artifact(model: Path) -> Path:
    """Its conversion; do not alter it."""
    out = model.parent / "artifact"
    kvcompile.convert(model, out, calibration_tokens=128)
    return out


class Hang(BaseException):
    """A case that took too long."""


@contextmanager
def limits() -> Iterator[None]:
    """A time limit, and a limit on memory: what is beyond raises Hang or MemoryError, which nothing expects."""

    def stop(*_: object) -> None:
        raise Hang

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_watched: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what writes a file, or starts a program, while a case runs."""
    if _watched is None:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _watched.append(f"open {arguments[0]}")
    elif event in (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.symlink",
        "os.link",
        "os.system",
        "os.exec",
        "subprocess.Popen",
    ):
        _watched.append(f"{event} {arguments[0]}")


sys.addaudithook(_audit)


def judge(capsys: Capsys, name: str, *arguments: object) -> Outcome:
    """Run a command on hostile input: an error of one sentence, or an exit code of 0; nothing is written."""
    global _watched
    _watched = []
    try:
        with limits():
            outcome = run(capsys, *arguments)
        assert _watched == [], f"{name}: {_watched}"
    except BaseException as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    finally:
        _watched = None
    assert outcome.code in (0, 1), f"{name}: {outcome}"
    if outcome.code:
        assert len(outcome.error) < 5000, name
        assert all(line.isprintable() for line in outcome.error.splitlines()), name
    return outcome


def run_corpus(
    capsys: Capsys, folder: Path, target: Path, cases: Iterable[tuple[str, hostile.Damage]], *commands: str
) -> list[tuple[str, Outcome]]:
    """Damage a copy of `folder` in every way and run commands on it, by turns; the outcomes."""
    outcomes = []
    for number, (name, damage) in enumerate(cases):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        damage(target)
        arguments = {
            "inspect": ("inspect", target, "--json"),
            "dry run": ("convert", target, "-o", target.parent / "out", "--dry-run"),
            "verify": ("verify", target),
        }[commands[number % len(commands)]]
        outcomes.append((name, judge(capsys, name, *arguments)))
    return outcomes


def check_layers(outcomes: list[tuple[str, Outcome]]) -> None:
    """Where a damaged checkpoint is accepted, what is said of its layers is what its tensors say."""
    for name, outcome in outcomes:
        if outcome.code == 0 and outcome.out.startswith("{"):
            for layer in json.loads(outcome.out)["layers"]:
                sizes = layer["num_heads"] * layer["head_dim"], layer["num_key_value_heads"] * layer["head_dim"]
                assert sizes == (64, 32), name


def refused(outcomes: list[tuple[str, Outcome]]) -> int:
    return sum(outcome.code for _, outcome in outcomes)


def test_configs(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    sample = json.loads((model / "config.json").read_text())
    outcomes = run_corpus(
        capsys, model, tmp_path / "x", hostile.json_files("config.json", sample), "inspect", "dry run"
    )
    check_layers(outcomes)
    assert len(outcomes) > 1000
    assert refused(outcomes) > 500


def test_configs_of_vision_language_models(vision: Path, tmp_path: Path, capsys: Capsys) -> None:
    sample = json.loads((vision / "config.json").read_text())
    names = ("num_hidden_layers", "hidden_size", "layer_types", "model_type", "rope_parameters", "vocab_size")
    sample["text_config"] = {name: sample["text_config"][name] for name in names}
    outcomes = run_corpus(
        capsys, vision, tmp_path / "x", hostile.json_files("config.json", sample), "inspect", "dry run"
    )
    check_layers(outcomes)
    assert len(outcomes) > 400


def test_headers(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    header, _ = hostile.read_header(model / "model.safetensors")
    cases = hostile.safetensors_files("model.safetensors", header)
    outcomes = run_corpus(capsys, model, tmp_path / "x", cases, "inspect", "dry run")
    accepted = {name for name, outcome in outcomes if outcome.code == 0}
    assert accepted == {"model.safetensors metadata", "model.safetensors empty tensor"}
    assert len(outcomes) > 300


def test_indexes(sharded: Path, tmp_path: Path, capsys: Capsys) -> None:
    name = "model.safetensors.index.json"
    sample = json.loads((sharded / name).read_text())
    some = {"weight_map": dict(list(sample["weight_map"].items())[:2])}
    cases = [*hostile.indexes(name, sample), *hostile.json_files(name, some)]
    outcomes = run_corpus(capsys, sharded, tmp_path / "x", cases, "inspect", "dry run")
    for case, outcome in outcomes:  # a tensor that is not listed is found in its shard
        assert outcome.code == 1 or case.endswith(".weight = missing"), case
    assert len(outcomes) > 150


def test_manifests(artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    sample = json.loads((artifact / "kvcompile.json").read_text())
    for section in ("encoding", "producer", "metrics", "bits_per_element"):
        del sample[section]
    sample["layers"] = sample["layers"][:1]
    sample["sidecar"]["shapes"] = dict(list(sample["sidecar"]["shapes"].items())[:2])
    sample["scheme"] = {name: sample["scheme"][name] for name in ("name", "key", "window", "layers")}
    cases = hostile.json_files("kvcompile.json", sample)
    outcomes = run_corpus(capsys, artifact, tmp_path / "x", cases, "verify", "verify", "inspect")
    assert refused(outcomes) > 1000


def test_schemes(tmp_path: Path, capsys: Capsys) -> None:
    text = scheme_text("kvc-int2")
    path, outcomes = tmp_path / "mine.toml", []
    for name, content in hostile.scheme_texts(text, tomllib.loads(text)):
        path.write_text(content)
        outcomes.append((name, judge(capsys, name, "schemes", "validate", path)))
    assert len(outcomes) > 900
    assert refused(outcomes) > 500


def test_sidecars_of_other_models(artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Also where the manifest was edited to take them."""
    for changes in ({"head_dim": 16}, {"num_key_value_heads": 2}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}):
        other = save_model(family_config("qwen3", **{**SMALL, **changes}), tmp_path / "other", seed=1)
        kvcompile.convert(other, tmp_path / "foreign", calibration_tokens=128)
        for sealed in (False, True):
            shutil.copytree(artifact, tmp_path / "x")
            shutil.copy(tmp_path / "foreign" / "kvcompile.safetensors", tmp_path / "x")
            if sealed:
                reseal(tmp_path / "x")
            assert judge(capsys, str(changes), "verify", tmp_path / "x").code == 1
            shutil.copy(tmp_path / "foreign" / "kvcompile.json", tmp_path / "x")
            for command in (("verify",), ("generate", "-p", "Once", "-n", "1")):
                assert judge(capsys, str(changes), command[0], tmp_path / "x", *command[1:]).code == 1
            shutil.rmtree(tmp_path / "x")
        shutil.rmtree(tmp_path / "other")
        shutil.rmtree(tmp_path / "foreign")


def test_code_beside_the_weights_is_not_run(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Neither a checkpoint's own classes nor a template that reaches for Python."""
    folder = Path(shutil.copytree(model, tmp_path / "x"))
    code = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Evil: pass\n"
    for name in ("evil.py", "__init__.py", "sitecustomize.py", "torch.py", "conftest.py"):
        (folder / name).write_text(code)
    hostile.edit("config.json", ("auto_map",), {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})(folder)
    hostile.edit("tokenizer_config.json", ("auto_map",), {"AutoTokenizer": ["evil.Evil", None]})(folder)
    hostile.edit("tokenizer_config.json", ("chat_template",), "{{ ''.__class__.__mro__[1].__subclasses__() }}")(folder)
    assert judge(capsys, "auto_map", "inspect", folder).code == 0
    kvcompile.convert(folder, tmp_path / "out", calibration_tokens=128)
    assert judge(capsys, "auto_map", "generate", tmp_path / "out", "-p", "Once", "-n", "1").code == 0
    assert sorted(os.listdir(tmp_path)) == ["out", "x"]


LIES = [
    ("intermediate_size", 1 << 24),
    ("vocab_size", 1 << 26),
    ("num_hidden_layers", 1 << 30),
    ("num_experts", 1 << 20),
]


@pytest.mark.parametrize(("field", "value"), LIES)
def test_sizes_that_lie_allocate_nothing(field: str, value: int, model: Path, tmp_path: Path, capsys: Capsys) -> None:
    """What transformers would allocate before it compared shapes."""
    folder = Path(shutil.copytree(model, tmp_path / "x"))
    hostile.edit("config.json", (field,), value)(folder)
    assert f"'{field}' {value}" in judge(capsys, field, "convert", folder, "-o", tmp_path / "out").error
    assert os.listdir(tmp_path) == ["x"]


# Drawn at random, the same on every machine

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
drawn = settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@drawn
@given(data=st.data())
def test_drawn_documents(data: st.DataObject, model: Path, artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Several places of a document at once get anything that JSON can say."""
    source, name, command = data.draw(
        st.sampled_from(
            [
                (model, "config.json", "inspect"),
                (artifact, "kvcompile.json", "verify"),
                (artifact, "config.json", "verify"),
            ]
        )
    )
    document = json.loads((source / name).read_text())
    for _ in range(data.draw(st.integers(1, 4))):
        with suppress(KeyError, IndexError):  # an earlier change has taken the place away
            hostile.put(
                document, data.draw(st.sampled_from(sorted(hostile.places(document), key=str))), data.draw(documents)
            )
    run_corpus(capsys, source, tmp_path / "x", [("drawn", hostile.write(name, json.dumps(document)))], command)


@drawn
@given(data=st.data())
def test_drawn_bytes(data: st.DataObject, model: Path, artifact: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Bytes of any file are cut, exchanged or added."""
    source, command = data.draw(st.sampled_from([(model, "inspect"), (model, "dry run"), (artifact, "verify")]))
    names = ["config.json", "model.safetensors"] + ["kvcompile.json", "kvcompile.safetensors"] * (source is artifact)
    name = data.draw(st.sampled_from(names))
    raw = bytearray((source / name).read_bytes())
    start = data.draw(st.integers(0, min(len(raw), data.draw(st.sampled_from([8, 64, 4096, len(raw)])))))
    raw[start : start + data.draw(st.integers(0, 64))] = data.draw(st.binary(max_size=64))
    run_corpus(capsys, source, tmp_path / "x", [("drawn", hostile.write(name, bytes(raw)))], command)


@drawn
@given(
    text=st.text(max_size=200)
    | st.lists(
        st.sampled_from(
            [
                "name",
                "=",
                '"',
                "'",
                "[",
                "]",
                "{",
                "}",
                ".",
                "\n",
                "#",
                "key",
                "layers",
                "0-1",
                "1e999",
                "0x",
                "_",
                "inf",
                "\\u",
                ",",
                "2",
                "quantizer",
                "bits",
            ]
        ),
        max_size=40,
    ).map("".join)
)
def test_drawn_schemes(text: str, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8", errors="surrogatepass")
    judge(capsys, repr(text), "schemes", "validate", path)
    judge(capsys, repr(text), "schemes", "validate", "kvc-int2", "--set", text.replace("\0", ""))


@pytest.mark.parametrize("name", ["../{}", "sub/{}", "{}/{}", "kvcompile.safetensors", "weights"])
def test_shards_lie_beside_their_index(name: str, sharded: Path, tmp_path: Path, capsys: Capsys) -> None:
    """Also where the file that is named is a whole shard."""
    folder = Path(shutil.copytree(sharded, tmp_path / "x"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["lm_head.weight"]
    named = name.format(tmp_path, shard) if name.startswith("{}") else name.format(shard)
    (folder / named).parent.mkdir(exist_ok=True)
    (folder / shard).rename(folder / named)
    weight_map = {tensor: named if file == shard else file for tensor, file in index["weight_map"].items()}
    hostile.edit("model.safetensors.index.json", ("weight_map",), weight_map)(folder)
    for command in (("inspect", folder), ("convert", folder, "-o", tmp_path / "out", "--dry-run")):
        assert "which is no safetensors file beside it" in judge(capsys, name, *command).error
