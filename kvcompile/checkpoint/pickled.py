"""Checkpoints whose weights are pickles (`.bin`, `.pt`, `.pth`): read only when asked for, and without running code.

A pickle is a program. `torch.load(weights_only=True)` runs none but the few calls that make tensors; what it holds is written
as safetensors at once, and nothing else of kvcompile sees the pickle.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvcompile.checkpoint.reader import DTYPES, INDEX_NAME, SINGLE_NAME
from kvcompile.document import read_json
from kvcompile.errors import CheckpointError

SUFFIXES = (".bin", ".pt", ".pth")
_INDEX = "pytorch_model.bin.index.json"
_NO_WEIGHTS = re.compile(r"training_args|optimizer|scheduler|rng_state|scaler|trainer_state")
_NAME = re.compile(r"[^/\\\x00-\x1f]+\.(bin|pt|pth)")


def is_pickled(path: Path) -> bool:
    """Whether a model directory has pickled weights, and no others."""
    if not path.is_dir() or (path / SINGLE_NAME).exists() or (path / INDEX_NAME).exists():
        return False
    return any(True for _ in _candidates(path))


def write_as_safetensors(source: Path, target: Path) -> None:
    """Fill the empty folder `target` with the checkpoint `source`, its weights as safetensors; times of files are kept.

    Raises CheckpointError for a pickle that holds anything but tensors, or more of them than its size allows.
    """
    for file in source.iterdir():
        if file.is_file() and file.suffix not in SUFFIXES and file.name != _INDEX:
            shutil.copy2(file, target / file.name)
    written: dict[str, str] = {}
    shards = _shards(source)
    for number, shard in enumerate(shards, 1):
        tensors = _load(shard)
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if twice := written.keys() & tensors.keys():
            raise CheckpointError(f"tensor {min(twice)} is in two shards of {source}; download them again")
        written |= dict.fromkeys(tensors, name)
        save_file(
            {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}, target / name
        )
        stat = shard.stat()
        os.utime(target / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if len(shards) > 1:
        (target / INDEX_NAME).write_text(
            json.dumps({"metadata": {}, "weight_map": dict(sorted(written.items()))}), "utf-8"
        )


def _candidates(path: Path) -> Iterator[Path]:
    return (f for f in path.iterdir() if f.suffix in SUFFIXES and f.is_file() and not _NO_WEIGHTS.match(f.name))


def _shards(path: Path) -> list[Path]:
    """The pickles that hold the weights: those of the index, the one with the usual name, or the only one."""
    index = path / _INDEX
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} has no weight_map from tensors to files; download it again") from error
        for name in names:
            if not isinstance(name, str) or not _NAME.fullmatch(name) or not (path / name).is_file():
                raise CheckpointError(f"{index} names {name!r}, which is no weight file beside it; download it again")
        return [path / name for name in names]
    if (path / "pytorch_model.bin").is_file():
        return [path / "pytorch_model.bin"]
    found = sorted(_candidates(path))
    if len(found) != 1:
        raise CheckpointError(
            f"{path} has several pickles ({', '.join(f.name for f in found)}) and no {_INDEX} that says what they hold; "
            "convert the weights to safetensors first"
        )
    return found


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle by name; other names may stand for the same one."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises whatever its parts raise; to the user it is one thing
        raise CheckpointError(
            f"{path} is no plain pickle of tensors: torch.load with weights_only=True refuses it; it was not run"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(key, str) for key in tensors):
        raise CheckpointError(f"{path} holds no tensors by name; convert the weights to safetensors first")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES.values() or tensor.layout is not torch.strided:
            raise CheckpointError(f"{path}: {name} is no dense tensor that kvcompile can read")
    if sum(tensor.nbytes for tensor in tensors.values()) > _ROOM * path.stat().st_size:
        raise CheckpointError(f"{path} claims tensors of more bytes than it holds; it was not written out")
    return tensors


_ROOM = 2
"""Tied tensors share bytes in a pickle, and do not in safetensors."""
