"""`kvcompile diff`: what differs between two artifacts, or between an artifact and the checkpoint it was made from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcompile.artifact import MANIFEST_NAME, Artifact, open_artifact
from kvcompile.checkpoint import (
    Checkpoint,
    file_digest,
    open_checkpoint,
    quantization,
    scale_names,
    with_unquantized,
)
from kvcompile.errors import ArtifactError, CheckpointError, VerificationError
from kvcompile.models import take_inventory
from kvcompile.models.agreement import check_projections, projections, same_bits

MISSING = "absent"


@dataclass(frozen=True)
class Change:
    """One thing that differs: `part` is scheme, layers, sidecar, weights, config.json, files, metrics or provenance.

    `a` and `b` are what A and B say; of a weight file that is not what its manifest says, the manifest and the file. `expected`
    changes say nothing against the two being the same: who wrote an artifact, its tag for transformers, and the projections
    that a fold changed without changing what they compute.
    """

    part: str
    what: str
    a: str
    b: str
    expected: bool = False


@dataclass(frozen=True)
class Difference:
    """Everything that differs between A and B."""

    changes: tuple[Change, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs that is not expected."""
        return all(change.expected for change in self.changes)


def diff(a: str | Path, b: str | Path) -> Difference:
    """Compare two artifacts, or an artifact with its source, in either order.

    Two artifacts are the same when scheme, layers, sidecar, weights, provenance and metrics are. An artifact and a checkpoint
    are the same when all tensors but the folded projections are equal bit for bit, and those compute what the source's compute.
    In both cases config.json and the tokenizer's and other files beside the weights count, and weight files that are not what
    their manifest says make a difference.
    Raises ArtifactError when neither is an artifact, and what opening them raises.
    """
    are = [(Path(path) / MANIFEST_NAME).is_file() for path in (a, b)]
    if all(are):
        return Difference(tuple(_artifacts(open_artifact(a), open_artifact(b))))
    if not any(are):
        raise ArtifactError(f"neither {a} nor {b} is a converted checkpoint: {MANIFEST_NAME} is missing in both")
    return Difference(tuple(_from_source(a, b, are[0])))


def _artifacts(a: Artifact, b: Artifact) -> Iterator[Change]:
    ours, theirs = a.manifest.model_dump(), b.manifest.model_dump()
    yield from _fields("scheme", ours["scheme"], theirs["scheme"])
    rows = [{str(layer.pop("index")): layer for layer in document["layers"]} for document in (ours, theirs)]
    yield from _fields("layers", rows[0], rows[1])
    yield from _tensors("sidecar", a.tensors, b.tensors)
    left, right = Checkpoint(a.weights_path), Checkpoint(b.weights_path)
    altered = [*_altered(a, left), *_altered(b, right)]
    yield from altered
    if altered or a.manifest.weights.files != b.manifest.weights.files:
        yield from _weights(left, right)
    yield from _config(left, right)
    yield from _files(left, right)
    yield from _fields("provenance", _provenance(ours), _provenance(theirs))
    yield from _fields("metrics", ours["metrics"], theirs["metrics"])
    for change in _fields("provenance", {"producer": ours["producer"]}, {"producer": theirs["producer"]}):
        yield Change(change.part, change.what, change.a, change.b, expected=True)


def _provenance(document: dict[str, Any]) -> dict[str, Any]:
    names = ("schema_version", "source", "calibration", "imported_rotations")
    return {name: document[name] for name in names} | {"weights.mode": document["weights"]["mode"]}


def _from_source(a: str | Path, b: str | Path, first: bool) -> Iterator[Change]:
    """An artifact against a checkpoint; changes read from `a` to `b`, whichever is the artifact."""
    artifact = open_artifact(a if first else b)
    source, converted = open_checkpoint(b if first else a), Checkpoint(artifact.weights_path)
    explained: set[str] = set()
    if set(converted.entries) <= set(source.entries):
        for layer in take_inventory(source).compiled:
            if layer.index not in artifact.folded:
                continue
            try:
                check_projections(layer, projections(source, layer), projections(converted, layer))
            except (CheckpointError, VerificationError, RuntimeError):
                continue  # what they compute differs, so their tensors count below
            explained |= set(layer.stored)
    left, right = (converted, source) if first else (source, converted)
    yield from _altered(artifact, converted)
    for change in _weights(left, right):
        yield Change(change.part, change.what, change.a, change.b, change.what in explained)
    modules = [name.removesuffix(".weight") for name in sorted(explained) if scale_names(source, name)]
    yield from _config(left, right, bool(modules) and with_unquantized(source, modules) == converted.config)
    yield from _files(left, right)


def _altered(artifact: Artifact, weights: Checkpoint) -> Iterator[Change]:
    """Weight files that are not those of the manifest."""
    recorded = artifact.manifest.weights.files
    for name in sorted({*recorded, *(shard.name for shard in weights.shards)}):
        path, said = weights.path / name, recorded.get(name, MISSING)
        found = file_digest(path) if path.is_file() else MISSING
        if found != said:
            yield Change("weights", str(path), f"{said[:12]} in the manifest", f"{found[:12]} in fact")


def _config(a: Checkpoint, b: Checkpoint, expected: bool = False) -> Iterator[Change]:
    """config.json field by field; where neither is pre-quantized, all that its quantization_config can hold is our tag."""
    plain = all(quantization(side.config, side.path) is None for side in (a, b))
    for change in _fields("config.json", a.config, b.config):
        tag = plain and change.what.split(".")[0] == "quantization_config"
        yield Change(change.part, change.what, change.a, change.b, expected or tag)


def _files(a: Checkpoint, b: Checkpoint) -> Iterator[Change]:
    """Tokenizer, templates and the like; what is written about an export is none of the model's."""
    others = ("config.json", "NOTES.md")
    left, right = ({f.name: file_digest(f)[:12] for f in x.companions() if f.name not in others} for x in (a, b))
    yield from _fields("files", left, right)


def _fields(part: str, a: Any, b: Any, where: str = "") -> Iterator[Change]:
    """Leaves that differ, by dotted path."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in dict.fromkeys(chain(a, b)):
            place = f"{where}.{name}" if where else str(name)
            yield from _fields(part, a.get(name, MISSING), b.get(name, MISSING), place)
    elif a != b:
        yield Change(part, where, _short(a), _short(b))


def _tensors(part: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[Change]:
    for name in sorted({*a, *b}):
        if name in a and name in b:
            yield from _tensor(part, name, a[name], b[name])
        else:
            yield Change(part, name, _described(a.get(name)), _described(b.get(name)))


def _weights(a: Checkpoint, b: Checkpoint) -> Iterator[Change]:
    """Tensor by tensor, so that how the weights are divided into files does not matter."""
    for name in sorted({*a.entries, *b.entries}):
        if name in a and name in b:
            yield from _tensor("weights", name, a.load(name), b.load(name))
        else:
            left, right = (_described(side.load(name) if name in side else None) for side in (a, b))
            yield Change("weights", name, left, right)


def _tensor(part: str, name: str, a: Tensor, b: Tensor) -> Iterator[Change]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield Change(part, name, _described(a), _described(b))
    elif not same_bits(a, b):
        x, y = a.double(), b.double()
        relative = float((x - y).norm() / x.norm().clamp_min(1e-300))
        yield Change(part, name, _described(a), f"{_described(b)}, relative difference {relative:.1e}")


def _described(tensor: Tensor | None) -> str:
    return MISSING if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
