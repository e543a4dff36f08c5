"""Pre-quantized weights: how a linear layer is stored, what it stands for, and how a config says that a layer is not quantized.

What counts is how a layer's own tensors are stored, not only the method that config.json names: most methods leave some
layers alone. Shapes: N output rows, M input columns.
"""

import copy
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvcompile.checkpoint.reader import DTYPES, Checkpoint
from kvcompile.errors import CheckpointError

OUR_TAG = "kvcompile"
"""The quant_method of an artifact that asks transformers to set up its cache; its weights are plain."""

Storage = Literal["plain", "scaled", "packed"]
"""A float matrix; 8-bit codes times scales, which can be read here and stored as a float matrix; or anything else."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_CODES = {"fp8": ("F8_E4M3", "F8_E5M2"), "compressed-tensors": ("F8_E4M3", "F8_E5M2", "I8")}
"""Dtypes of codes that are read here, by method."""
_UNQUANTIZED = {"fp8": ("modules_to_not_convert", "ignored_layers"), "compressed-tensors": ("ignore",)}
"""Where a method's config lists the modules that are not quantized, by its names for that field."""
_SCALES = ("weight_scale", "weight_scale_inv")
_OF_ACTIVATIONS = ("activation_scale", "input_scale")


def quantization(config: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """The `quantization_config` of the config.json in `path`, or of the language model in it; None where weights are plain.

    Raises CheckpointError for one that names no method.
    """
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not found:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("quant_method"), str):
        raise CheckpointError(
            f"quantization_config in {path / 'config.json'} names no quant_method: {found!r}; download config.json again"
        )
    return None if found["quant_method"] == OUR_TAG else found


def quant_method(checkpoint: Checkpoint) -> str | None:
    """The method by which a checkpoint is quantized, such as fp8 or gptq; None where it is not."""
    found = quantization(checkpoint.config, checkpoint.path)
    return None if found is None else str(found["quant_method"])


def stored_tensors(checkpoint: Checkpoint, module: str) -> tuple[str, ...]:
    """Names of all tensors in which a module is stored: weight, bias, codes, scales, shapes."""
    names = checkpoint.names
    return tuple(names[bisect_left(names, f"{module}.") : bisect_left(names, f"{module}/")])  # "/" comes after "."


def storage(checkpoint: Checkpoint, module: str) -> Storage:
    """How the weight of a linear layer is stored."""
    method, weight = quant_method(checkpoint), f"{module}.weight"
    if method is None:
        return "plain"
    if weight not in checkpoint:
        return "packed"
    dtype, others = checkpoint.entries[weight].dtype, {x[len(module) + 1 :] for x in stored_tensors(checkpoint, module)}
    others -= {"weight", "bias"}
    if dtype in _FLOATS and not others:
        return "plain"
    others -= {*_OF_ACTIVATIONS}
    return "scaled" if dtype in _CODES.get(method, ()) and len(others) == 1 and others <= set(_SCALES) else "packed"


def scale_names(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    """Names of the scales that the tensor `name` is read with, those of activations included; none where it is plain."""
    module, _, kind = name.rpartition(".")
    if kind != "weight" or storage(checkpoint, module) != "scaled":
        return ()
    return tuple(x for x in stored_tensors(checkpoint, module) if x not in (name, f"{module}.bias"))


def dequantized(checkpoint: Checkpoint, name: str) -> Tensor:
    """A weight ``[N, M]`` or bias as the model means it: codes times scales, exactly, in float64; else as it is stored.

    Raises CheckpointError for a packed weight, and for scales that do not fit their codes.
    """
    module, _, kind = name.rpartition(".")
    if kind == "weight" and storage(checkpoint, module) == "packed":
        raise CheckpointError(
            f"the weight of {module} in {checkpoint.path} is packed ({quant_method(checkpoint)}) and cannot be read here; "
            "give the checkpoint that was converted"
        )
    scale = next((x for x in scale_names(checkpoint, name) if x.endswith(_SCALES)), None)
    if scale is None:
        return checkpoint.load(name)
    w_NM, s = checkpoint.load(name).double(), checkpoint.load(scale).float().double()
    s = s.reshape(-1, 1) if s.ndim < 2 else s
    for axis, block in enumerate(_block(checkpoint) or w_NM.shape):
        size, count = w_NM.shape[axis], s.shape[axis] if s.ndim == 2 else 0
        if count and -(-size // block) != count:
            block = size // count
        if not block or -(-size // block) != count:
            raise CheckpointError(
                f"tensor {scale} in {checkpoint.path} has shape {list(checkpoint.shape(scale))}, which does not fit "
                f"{name} with shape {list(w_NM.shape)}; download both again"
            )
        s = s.repeat_interleave(block, axis).narrow(axis, 0, size)
    return w_NM * s


def decodes(checkpoint: Checkpoint) -> bool:
    """Whether every tensor can be read here as what the model means: floats, or codes with scales."""
    plain = quant_method(checkpoint) is None
    return plain or all(x.dtype in _FLOATS or scale_names(checkpoint, name) for name, x in checkpoint.entries.items())


def dense_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors, with codes that are read here as floats of the model's dtype."""
    if quant_method(checkpoint) is None:
        return checkpoint.nbytes
    shapes = ((checkpoint.entries[name].shape, edited_dtype(checkpoint, name)) for name in checkpoint.entries)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def edited_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """What an edited tensor is stored in: its own dtype, or where it consists of codes that of the model."""
    return dense_dtype(checkpoint.config) if scale_names(checkpoint, name) else DTYPES[checkpoint.entries[name].dtype]


def dense_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which transformers computes: what config.json says, bfloat16 where it says nothing."""
    for part in (config, config.get("text_config")):
        named = (part.get("dtype") or part.get("torch_dtype")) if isinstance(part, dict) else None
        if named in ("float32", "float16", "bfloat16"):
            return {"float32": torch.float32, "float16": torch.float16}.get(named, torch.bfloat16)
    return torch.bfloat16


def with_unquantized(checkpoint: Checkpoint, modules: Iterable[str]) -> dict[str, Any]:
    """config.json with `modules` among those that are not quantized; nothing else changes."""
    config = copy.deepcopy(checkpoint.config)
    found = quantization(config, checkpoint.path)
    assert found is not None
    fields = _UNQUANTIZED[found["quant_method"]]
    field = next((x for x in fields if found.get(x) is not None), fields[0])
    # transformers leaves the head out by itself only where there is no list.
    listed = found[field] if isinstance(found.get(field), list) else _plain_modules(checkpoint)
    found[field] = [*listed, *(x for x in modules if x not in listed)]
    return config


def _plain_modules(checkpoint: Checkpoint) -> list[str]:
    """The head, and every other module with a float matrix."""
    matrices = [
        x
        for x, entry in checkpoint.entries.items()
        if x.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in _FLOATS
    ]
    return sorted({"lm_head", *(x.removesuffix(".weight") for x in matrices)})


def _block(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Rows and columns of a block that shares a scale, where the config gives them: the last blocks may be cut off."""
    found = quantization(checkpoint.config, checkpoint.path) or {}
    groups = found.get("config_groups")
    parts = (
        [part.get("weights") for part in groups.values() if isinstance(part, dict)] if isinstance(groups, dict) else []
    )
    blocks = [
        found.get("weight_block_size"),
        *(part.get("block_structure") for part in parts if isinstance(part, dict)),
    ]
    for block in blocks:
        if isinstance(block, list) and len(block) == 2 and all(isinstance(x, int) and x > 0 for x in block):
            return block[0], block[1]
    return None
