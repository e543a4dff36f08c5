"""Writing a safetensors file tensor by tensor: safetensors' own function holds a second copy of all of them."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kvcompile.checkpoint.reader import DTYPES
from kvcompile.checkpoint.writer import tensor_bytes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write `tensors` to the safetensors file `path`; no more than one of them is copied at a time. Raises OSError."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            file.write(tensor_bytes(tensors[name]))
