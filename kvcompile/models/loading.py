"""Loading a checkpoint as a transformers model, quietly and with errors that a user can act on."""

import copy
import importlib.util
import inspect
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
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
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from kvcompile.checkpoint import quantization
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
    path: Path,
    attention: str,
    device: str | torch.device = "cpu",
    dtype: Any = "auto",
    *,
    dequantize: bool = False,
    **spread: Any,
) -> PreTrainedModel:
    """The causal language model at `path` in eval mode on `device`, inside its vision-language model where that was saved.

    Pre-quantized weights run as transformers runs them, which may quantize activations too; with `dequantize` they become
    floats where the method knows how, and activations stay as they are. `spread` is `device_map` or `distributed_config`, with
    which transformers puts the model onto several devices instead.

    Raises CheckpointError when transformers cannot build it, or when a tensor of the model is absent from the checkpoint
    or has another shape there: transformers would fill it with random numbers.
    """
    device = resolve_device(device)
    check_quantization(path, device)
    with quiet():
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            found = _quantization(config, path)
            floats = found is None or _can_dequantize(found)
            if found is not None and floats and (dequantize or _lacks_kernels(found)):
                found["dequantize"] = True
            if not floats:  # other methods pack for a device while they load
                spread.setdefault("device_map", str(device))
            loaded: Any = auto_class(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **spread,
            )
            if hasattr(loaded[0], "ct_decompress_hook"):  # what compressed-tensors would do in the first forward pass
                loaded[0].hf_quantizer.compressor.decompress_model(loaded[0])
            for module in loaded[0].modules() if dequantize else ():
                if hasattr(module, "quantization_scheme"):  # transformers 5.17 would still quantize activations
                    module.quantization_enabled = False
        except Exception as error:  # transformers raises whatever its parts raise; to the user it is one thing
            raise CheckpointError(f"transformers cannot load the model in {path}: {first_line(error)}") from error
    model, info = loaded
    check_loaded(info, path)
    if found is not None and dtype != "auto" and not hasattr(model, "hf_quantizer"):
        model = model.to(dtype=dtype)  # dequantizing casts what was codes, and leaves the rest
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


def check_quantization(path: Path, device: torch.device) -> None:
    """Raise CheckpointError where transformers cannot run the pre-quantized weights at `path` on `device`; nothing is loaded."""
    found = quantization(resolve_config(path), path)
    if found is None:
        return
    problem = ""
    with quiet():
        try:
            if not AutoHfQuantizer.supports_quant_method(found):  # it would take the codes for weights
                raise ValueError("it does not know this method")
            quantizer = AutoHfQuantizer.from_config(copy.deepcopy(found), pre_quantized=True)
            quantizer.validate_environment(device_map={"": device})
        except Exception as error:  # a missing library, a missing GPU, a config that makes no sense
            problem = first_line(error)
    if problem:
        raise CheckpointError(
            f"the weights in {path} are quantized ({found['quant_method']}), and transformers cannot run them on {device} "
            f"here: {problem}; see to that, or convert the unquantized checkpoint"
        )


def _quantization(config: Any, path: Path) -> dict[str, Any] | None:
    """The `quantization_config` of foreign weights that transformers will read, to be changed in place."""
    parts = [getattr(part, "quantization_config", None) for part in (config, config.get_text_config(decoder=True))]
    return quantization({"quantization_config": next((part for part in parts if part), None)}, path)


def _lacks_kernels(found: dict[str, Any]) -> bool:
    """Whether a forward pass would fail for want of FP8 kernels; where other methods lack theirs, transformers notices."""
    return found["quant_method"] == "fp8" and importlib.util.find_spec("kernels") is None


def _can_dequantize(found: dict[str, Any]) -> bool:
    method = AUTO_QUANTIZATION_CONFIG_MAPPING.get(found["quant_method"])
    return method is not None and "dequantize" in inspect.signature(method).parameters


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The stack of decoder layers of a language model, without head and without vision tower."""
    decoder: nn.Module = model.get_decoder()
    return decoder


def auto_class(config: Any) -> Any:
    """What builds the class that config.json names: some model types have one with a vision tower and one without."""
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
        with redirect_stderr(io.StringIO()):  # libraries of quantization methods have bars of their own
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """An exception of somebody else's in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
