"""What tests share: where reference material lies, and small models of every supported family."""

import json
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

SHARED = Path(os.environ.get("KVCOMPILE_SHARED", Path(__file__).parents[2] / "shared"))
EXAMPLE = Path(__file__).parents[1] / "examples" / "checkpoint"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    for item in items:
        if item.get_closest_marker("shared") and not (SHARED / "models").is_dir():
            item.add_marker(pytest.mark.skip(reason=f"reference material is not at {SHARED}"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference models and texts."""
    return SHARED


@pytest.fixture(scope="session")
def example() -> Path:
    """The bundled, trained checkpoint."""
    return EXAMPLE


def family_config(family: str, **changes: object):
    """A small transformers config of a family, GQA 3 to 1, with biases where the family has them."""
    from transformers import AutoConfig

    sizes = {
        "vocab_size": 4096,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        sizes["sliding_window"] = None
    return AutoConfig.for_model(family, **{**sizes, **changes})


def save_model(
    config: object, path: Path, dtype: torch.dtype = torch.float32, shards: str = "10GB", seed: int = 0
) -> Path:
    """A model with random weights (biases and norms included), saved as a checkpoint with the example's tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.1))
    model.to(dtype).save_pretrained(path, max_shard_size=shards)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((EXAMPLE / name).read_bytes())
    return path


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A random Qwen3 checkpoint, float32."""
    return save_model(family_config("qwen3"), tmp_path / "model")


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled example converted with oscar-int2, once per session; do not alter it."""
    from kvcompile import convert

    out = tmp_path_factory.mktemp("converted") / "example"
    convert(EXAMPLE, out, "oscar-int2", calibration_tokens=4096)
    return out


@pytest.fixture(scope="session")
def quarot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with Hadamard rotations, which are their own inverses; do not alter it."""
    from kvcompile import convert

    out = tmp_path_factory.mktemp("quarot") / "out"
    convert(EXAMPLE, out, "quarot-int2")
    return out


def edit_json(path: Path, **changes: object) -> None:
    """Change top-level fields of a JSON file."""
    document = json.loads(path.read_text())
    document.update(changes)
    path.write_text(json.dumps(document))
