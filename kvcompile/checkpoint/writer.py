"""Writing a checkpoint that differs from its source in a few tensors: shards are copied, then patched in place.

Dtypes and shapes do not change, so a shard's header stays as it is and everything that is not patched is equal byte for
byte by construction. The copy is a reflink or an in-kernel copy where the file system offers one.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvcompile.checkpoint.copying import copy_file
from kvcompile.checkpoint.reader import DTYPES, INDEX_NAME, Checkpoint

Edit = Callable[[Tensor], Tensor]
"""Source tensor in its stored dtype to edited tensor of the same shape, in any float dtype."""


def write_patched(
    source: Checkpoint, destination: Path, edits: Mapping[str, Edit], shards: Iterable[Path]
) -> dict[str, str]:
    """Copy `shards` of `source` into `destination`, replacing the tensors in `edits`; their sha256 by tensor name."""
    digests = {}
    for shard in shards:
        target = destination / shard.name
        copy_file(shard, target)
        target.chmod(0o644)
        with open(target, "r+b") as file:
            for name, entry in sorted(source.entries.items(), key=lambda item: item[1].begin):
                if entry.file != shard or name not in edits:
                    continue
                edited = edits[name](source.load(name)).to(DTYPES[entry.dtype])
                payload = tensor_bytes(edited)
                assert len(payload) == entry.end - entry.begin, name
                file.seek(entry.begin)
                file.write(payload)
                digests[name] = hashlib.sha256(payload).hexdigest()
    return digests


def copy_companions(source: Checkpoint, destination: Path) -> None:
    """Copy config, tokenizer, index and the like unchanged."""
    index = source.path / INDEX_NAME
    for file in [*source.companions(), *([index] if index.exists() else [])]:
        copy_file(file, destination / file.name)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The little-endian bytes of a tensor as safetensors stores them."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def file_digest(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
