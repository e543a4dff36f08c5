"""Loading a checkpoint as a transformers model, quietly and with errors that a user can act on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from kvcompile.errors import CheckpointError, KvCompileError


def resolve_device(name: str | torch.device) -> torch.device:
    """A torch device that exists and can hold data; raises KvCompileError otherwise."""
    try:
        device = torch.device(name)
        if device.type != "meta":
            torch.empty(0, device=device)
            return device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise KvCompileError(f"device '{name}' is not available on this machine; try --device cpu") from error
    raise KvCompileError("device 'meta' holds no data; try --device cpu")


def load_model(
    path: Path, attention: str, device: str | torch.device = "cpu", dtype: Any = "auto", **spread: Any
) -> PreTrainedModel:
    """The causal language model at `path` in eval mode on `device`, inside its vision-language model where that was saved.

    `spread` is `device_map` or `distributed_config`, with which transformers puts it onto several devices instead. Raises
    CheckpointError when transformers cannot build it, or when a tensor of the model is absent from the checkpoint or has
    another shape there: transformers would fill it with random numbers.
    """
    device = resolve_device(device)
    with quiet():
        try:
            loaded: Any = auto_class(path).from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **spread,
            )
        except Exception as error:  # transformers raises whatever its parts raise; to the user it is one thing
            raise CheckpointError(f"transformers cannot load the model in {path}: {first_line(error)}") from error
    model, info = loaded
    check_loaded(info, path)
    return (model if spread else model.to(device)).eval()


def check_loaded(info: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for what transformers says of absent tensors and of shapes when it loads the model at `path`."""
    if info["missing_keys"]:
        raise CheckpointError(
            f"tensor {min(info['missing_keys'])} of the model is missing from {path}; download it again"
        )
    if info["mismatched_keys"]:
        name, stored, expected = min(info["mismatched_keys"], key=lambda entry: entry[0])
        raise CheckpointError(
            f"tensor {name} in {path} has shape {list(stored)}, but config.json implies {list(expected)}"
        )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The stack of decoder layers of a language model, without head and without vision tower."""
    decoder: nn.Module = model.get_decoder()
    return decoder


def auto_class(path: Path) -> Any:
    """What builds the class that config.json names: some model types have one with a vision tower and one without."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    vision = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return AutoModelForImageTextToText if vision in (config.architectures or []) else AutoModelForCausalLM


def resolve_config(path: Path) -> dict[str, Any]:
    """config.json with the defaults that transformers fills in; raises CheckpointError when it cannot read it."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # as above
        raise CheckpointError(f"transformers cannot read {path / 'config.json'}: {first_line(error)}") from error


def load_tokenizer(path: Path) -> Any:
    """The tokenizer at `path`; raises CheckpointError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise CheckpointError(
            f"{path} has no tokenizer that transformers can load ({first_line(error)}); copy the tokenizer files there"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and load reports: what matters of them becomes an error of ours."""
    logging = transformers.utils.logging
    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """An exception of somebody else's in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
