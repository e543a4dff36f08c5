"""Writing a checkpoint that differs from its source in a few tensors: shards are copied, then patched in place.

Where dtypes and shapes do not change, a shard's header stays as it is, and everything that is not patched is equal byte for
byte by construction. The copy is a reflink or an in-kernel copy where the file system offers one. Only a shard with codes that
become floats is laid out anew: its codes grow, and their scales go.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from kvcompile.checkpoint.copying import copy_file
from kvcompile.checkpoint.quantized import dequantized, edited_dtype, scale_names, with_unquantized
from kvcompile.checkpoint.reader import DTYPES, INDEX_NAME, Checkpoint, TensorEntry, read_header
from kvcompile.checkpoint.tensors import tensor_bytes, write_tensors
from kvcompile.errors import CheckpointError

Edit = Callable[[Tensor], Tensor]
"""Source tensor, dequantized, to edited tensor of the same shape, in any float dtype."""


def write_patched(
    source: Checkpoint, destination: Path, edits: Mapping[str, Edit], shards: Iterable[Path]
) -> dict[str, str]:
    """Copy `shards` of `source` into `destination`, replacing the tensors in `edits`; their sha256 by tensor name."""
    dropped = dropped_tensors(source, edits)
    digests: dict[str, str] = {}

    def payload(name: str) -> bytes:
        if name not in edits:
            return tensor_bytes(source.load(name))
        edited = tensor_bytes(edits[name](dequantized(source, name)).to(edited_dtype(source, name)))
        digests[name] = hashlib.sha256(edited).hexdigest()
        return edited

    for shard in shards:
        target = destination / shard.name
        names = sorted((n for n, e in source.entries.items() if e.file == shard), key=lambda n: source.entries[n].begin)
        if any(name in dropped or (name in edits and scale_names(source, name)) for name in names):
            _write_anew(source, shard, target, [name for name in names if name not in dropped], edits, payload)
            continue
        copy_file(shard, target)
        target.chmod(0o644)
        with open(target, "r+b") as file:
            for name in names:
                if name in edits:
                    entry, patch = source.entries[name], payload(name)
                    assert len(patch) == entry.end - entry.begin, name
                    file.seek(entry.begin)
                    file.write(patch)
    return digests


def dropped_tensors(source: Checkpoint, edits: Iterable[str]) -> set[str]:
    """The scales that nothing is left of once the tensors named in `edits` are stored as floats."""
    return {scale for name in edits for scale in scale_names(source, name)}


def copy_companions(source: Checkpoint, destination: Path) -> None:
    """Copy config, tokenizer, index and the like unchanged."""
    index = source.path / INDEX_NAME
    for file in [*source.companions(), *([index] if index.exists() else [])]:
        copy_file(file, destination / file.name)


def write_companions(source: Checkpoint, destination: Path, edits: Iterable[str]) -> None:
    """Copy config, tokenizer, index and the like beside patched shards.

    Where codes have become floats, config.json lists their layers as not quantized, and the index knows no scales of theirs.
    """
    copy_companions(source, destination)
    modules = [name.removesuffix(".weight") for name in sorted(edits) if scale_names(source, name)]
    if not modules:
        return
    config = with_unquantized(source, modules)
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    path = destination / INDEX_NAME
    if path.exists():
        index = json.loads(path.read_text("utf-8"))
        entries: dict[str, TensorEntry] = {}
        for shard in source.shards:
            entries |= read_header(destination / shard.name)
        index["weight_map"] = {name: entry.file.name for name, entry in sorted(entries.items())}
        index["metadata"] = {
            **index.get("metadata", {}),
            "total_size": sum(entry.end - entry.begin for entry in entries.values()),
        }
        path.write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _write_anew(
    source: Checkpoint,
    shard: Path,
    target: Path,
    names: list[str],
    edits: Mapping[str, Edit],
    payload: Callable[[str], bytes],
) -> None:
    """A shard with these tensors, laid out anew."""
    kinds = {
        n: (edited_dtype(source, n) if n in edits else DTYPES[source.entries[n].dtype], source.shape(n)) for n in names
    }
    with open(shard, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    write_tensors(target, kinds, payload, header.get("__metadata__", {}))


def file_digest(path: Path) -> str:
    """sha256 of a file, hexadecimal; raises CheckpointError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
