"""Writing a safetensors file tensor by tensor: safetensors' own function holds a second copy of all of them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvcompile.checkpoint.reader import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write `tensors` to the safetensors file `path`; no more than one of them is copied at a time. Raises OSError."""
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_tensors(path, kinds, lambda name: tensor_bytes(tensors[name]), metadata)


def write_tensors(
    path: Path,
    kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    payload: Callable[[str], bytes],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors of these dtypes and shapes, whose bytes `payload` gives one by one; wide dtypes first, so all are aligned."""
    ordered = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in ordered:
        (dtype, shape), begin = kinds[name], end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(payload(name))


def tensor_bytes(tensor: Tensor) -> bytes:
    """The little-endian bytes of a tensor as safetensors stores them."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
