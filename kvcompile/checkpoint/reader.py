"""A Hugging Face checkpoint on disk, read lazily: headers first, a tensor only when somebody asks for it."""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from yaml import YAMLError

from kvcompile.document import LARGEST, parse_json, read_json
from kvcompile.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_SHARD_NAME = re.compile(r"(?!kvcompile\.)[^/\\\x00-\x1f]+\.safetensors")
"""A plain file name that is not one of ours: a shard lies beside its index, and its copy in the output is named like it."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: file, dtype name of safetensors, shape, and byte range counted from the file's start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The tensors and the config of a local model directory.

    Raises CheckpointError when the directory is no checkpoint, a shard is missing or truncated, a header is corrupt, or
    the index and the shards disagree. No weight is read by the constructor.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"'{path}' is not a directory with a Hugging Face checkpoint")
        self.config: dict[str, Any] = _read_object(self.path / "config.json", self.path)
        self.shards: tuple[Path, ...] = self._find_shards()
        self.entries: dict[str, TensorEntry] = {}
        for shard in self.shards:
            found = read_header(shard)
            if twice := min(found.keys() & self.entries.keys(), default=None):
                raise CheckpointError(
                    f"tensor {twice} is in two shards of {self.path}, {self.entries[twice].file.name} and {shard.name}; "
                    "download them again"
                )
            self.entries.update(found)
        self._check_index()

    @cached_property
    def names(self) -> list[str]:
        """All tensors, sorted."""
        return sorted(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor without reading it."""
        return self._entry(name).shape

    def load(self, name: str) -> Tensor:
        """Read one tensor into memory, in its stored dtype."""
        entry = self._entry(name)
        buffer = bytearray(entry.end - entry.begin)
        try:
            with open(entry.file, "rb") as file:
                file.seek(entry.begin)
                read = file.readinto(buffer)
        except OSError as error:
            raise CheckpointError(f"tensor {name} cannot be read from {entry.file}: {error.strerror}") from error
        if read != len(buffer):
            raise CheckpointError(f"tensor {name} is cut short in {entry.file}; download the shard again")
        if not buffer:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(buffer, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def non_finite(self, prefix: str = "") -> Iterator[str]:
        """Names of the floating-point tensors under `prefix` that hold NaN or infinity; reads each of them."""
        for name, entry in self.entries.items():
            if (
                name.startswith(prefix)
                and DTYPES[entry.dtype].is_floating_point
                and not self.load(name).float().isfinite().all()
            ):
                yield name

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(shard.stat().st_size for shard in self.shards)

    def companions(self) -> list[Path]:
        """Files beside the weights that belong to the model: config, tokenizer, generation config, templates, licence."""
        foreign = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot"}
        return sorted(
            f
            for f in self.path.iterdir()
            if f.is_file()
            and f.suffix not in foreign
            and not f.name.startswith((".", "README", "kvcompile."))
            and not f.name.endswith(".index.json")
            and f.name not in ("report.html", "NOTES.md")
        )

    def license(self) -> dict[str, str] | None:
        """`license`, `license_name` and `license_link` of the model card beside the weights, as far as it has them."""
        from huggingface_hub import metadata_load

        try:
            card = metadata_load(self.path / "README.md") or {}
        except (OSError, ValueError, YAMLError):  # no card, or none that can be read: nothing is known of a licence
            return None
        fields = {name: card.get(name) for name in ("license", "license_name", "license_link")}
        return {name: str(value) for name, value in fields.items() if value} or None

    def fingerprint(self) -> str:
        """A cheap identity of the source: config, file names, sizes, modification times and headers, no weights.

        The files beside the weights count too: another tokenizer means other calibration tokens.
        """
        card = self.path / "README.md"
        try:
            digest = hashlib.sha256((self.path / "config.json").read_bytes())
            for file in [*self.shards, *self.companions(), *([card] if card.exists() else [])]:
                stat = file.stat()
                digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
        except OSError as error:
            raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
        for name, entry in sorted(self.entries.items()):
            digest.update(f"{name}:{entry.dtype}:{entry.shape}:{entry.begin};".encode())
        return digest.hexdigest()

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.entries:
            raise CheckpointError(f"tensor {name} is missing from {self.path}")
        return self.entries[name]

    @cached_property
    def _index(self) -> dict[str, str] | None:
        path = self.path / INDEX_NAME
        if not path.exists():
            return None
        weight_map = _read_object(path, self.path).get("weight_map")
        named = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
        if not named or not weight_map:
            raise CheckpointError(f"{path} has no weight_map from tensors to files; download it again")
        return weight_map

    def _find_shards(self) -> tuple[Path, ...]:
        if self._index is not None:
            names = sorted(set(self._index.values()))
        elif (self.path / SINGLE_NAME).exists():
            names = [SINGLE_NAME]
        else:
            other = next((f.name for f in self.path.iterdir() if f.suffix in (".bin", ".gguf", ".pt", ".pth")), None)
            hint = f" ({other} is not read: convert the weights to safetensors first)" if other else ""
            if other and not other.endswith(".gguf"):
                hint = hint[:-1] + ", or let convert do it with --allow-pickle if you trust where they come from)"
            raise CheckpointError(f"{self.path} holds neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")
        for name in names:
            if not _SHARD_NAME.fullmatch(name):
                raise CheckpointError(
                    f"{self.path / INDEX_NAME} names the shard {name!r}, which is no safetensors file beside it; "
                    "download it again"
                )
            if not (self.path / name).is_file():
                raise CheckpointError(
                    f"shard {name} is named by {INDEX_NAME} but missing from {self.path}; download it again"
                )
        return tuple(self.path / name for name in names)

    def _check_index(self) -> None:
        for name, shard in (self._index or {}).items():
            if name not in self.entries or self.entries[name].file.name != shard:
                raise CheckpointError(
                    f"{self.path / INDEX_NAME} says that tensor {name} is in {shard}, but it is not there"
                )


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensor table of a safetensors file; raises CheckpointError when the file is corrupt or truncated.

    Its tensors lie one behind the other and fill the file: no two share bytes, and none are left over.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, LARGEST):
                raise CheckpointError(f"{path} is corrupt or truncated: its header does not fit; download it again")
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, name, info) for name, info in header.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupt: its header is not valid; download it again") from error
    promised = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != promised:
            raise CheckpointError(
                f"{path} is corrupt: its header has a gap or an overlap before tensor {name}; download it again"
            )
        promised = entry.end
    if promised != size:
        kind = "truncated" if size < promised else "corrupt"
        raise CheckpointError(
            f"{path} is {kind}: it has {size} bytes, but its header describes {promised}; download it again"
        )
    return entries


def _entry(path: Path, start: int, name: str, info: Any) -> TensorEntry:
    """One tensor of a header; raises what read_header expects of a header that is not valid."""
    begin, end = info["data_offsets"]
    if info["dtype"] not in DTYPES:
        raise CheckpointError(f"tensor {name} in {path} has dtype {info['dtype']}, which kvcompile cannot read")
    shape = tuple(info["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError
    if end - begin != math.prod(shape) * DTYPES[info["dtype"]].itemsize:
        raise CheckpointError(f"{path} is corrupt: its header contradicts itself on tensor {name}; download it again")
    return TensorEntry(path, info["dtype"], shape, start + begin, start + end)


def open_checkpoint(model: str | Path) -> Checkpoint:
    """A checkpoint from a local directory, or from the Hugging Face Hub when `model` looks like ``owner/name``."""
    path = Path(model)
    if path.exists() or not _HUB_ID.match(str(model)) or path.parent.exists():
        return Checkpoint(path)
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "LICENSE*", "README.md"]
        return Checkpoint(snapshot_download(str(model), allow_patterns=patterns))
    except CheckpointError:
        raise
    except Exception as error:  # the hub client raises many kinds; to the user they are one
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"'{model}' is no local directory and cannot be fetched from the Hugging Face Hub: {reason}"
        ) from error


def _read_object(path: Path, root: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{root} is not a Hugging Face checkpoint: {path.name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return document
