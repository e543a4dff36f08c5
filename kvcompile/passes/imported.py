"""Rotations solved elsewhere: the files of the OSCAR research fork (SGLang), as an input of the rotations pass.

A file is a torch pickle ``{"format_version", "objective", "source_grouping", "layers": {i: {"layer_id", "rotation", ...}}}``
with one matrix ``[D, D]`` per layer (format_version 1) or ``[K, D, D]`` (2), to be applied as ``rows @ R``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.artifact import RotationImport, inverse_error
from kvcompile.checkpoint import Checkpoint, file_digest
from kvcompile.errors import RotationError, SchemeError
from kvcompile.models import AttentionLayer, Inventory
from kvcompile.scheme import Scheme
from kvcompile.scheme.model import Half, Identity

VERSIONS = {1: 2, 2: 3}
"""Dimensions of a rotation by format_version."""
TARGETS = {"qqt": "key", "sst": "value"}
"""What an objective's name begins with, by the half that it is made for."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class ImportedRotations:
    """Matrices of keys and of values by layer, float32 ``[D, D]`` or ``[K, D, D]``, and the files they are from."""

    files: Mapping[Half, Path]
    records: Mapping[Half, RotationImport]
    matrices: Mapping[Half, Mapping[int, Tensor]]

    def rotation(self, half: Half, layer: AttentionLayer) -> Tensor:
        """float64 ``[K, D, D]`` for a layer that `check` has seen; a matrix of the whole layer serves all its heads."""
        shape = layer.num_key_value_heads, layer.head_dim, layer.head_dim
        return self.matrices[half][layer.index].double().expand(shape)

    def check(self, checkpoint: Checkpoint, scheme: Scheme, inventory: Inventory) -> None:
        """Raise RotationError or SchemeError, naming file and layer, unless every packed layer finds its matrices."""
        for layer in inventory.compiled:
            for half, row in scheme.layer(layer.index).rows():
                if isinstance(row.rotation, Identity) or bool(getattr(row.rotation, "balance", 0)):
                    wrong = "has none" if isinstance(row.rotation, Identity) else "is balanced, not orthogonal"
                    raise SchemeError(
                        f"scheme {scheme.name} cannot take imported rotations: its {half}.rotation {wrong}; "
                        "use one such as oscar-int2"
                    )
                self._check_layer(half, layer)
        for half, matrices in self.matrices.items():
            if unknown := set(matrices) - {layer.index for layer in inventory.layers}:
                raise RotationError(
                    f"{self.files[half]} has a rotation for layer {min(unknown)}, but {checkpoint.path} has layers "
                    f"0-{len(inventory.layers) - 1}: is it made for another model?"
                )

    def _check_layer(self, half: Half, layer: AttentionLayer) -> None:
        path, matrix = self.files[half], self.matrices[half].get(layer.index)
        if matrix is None:
            raise RotationError(f"{path} has no rotation for layer {layer.index}; give the file of this model")
        version, dim = self.records[half].format_version, layer.head_dim
        shape = [dim, dim] if version == 1 else [layer.num_key_value_heads, dim, dim]
        if list(matrix.shape) != shape:
            raise RotationError(
                f"{path}: the rotation of layer {layer.index} has shape {list(matrix.shape)}, the model implies {shape} "
                f"(format_version {version})"
            )
        error = inverse_error(matrix, None) if bool(matrix.isfinite().all()) else float("nan")
        if not error <= TOLERANCE:
            raise RotationError(
                f"{path}: the rotation of layer {layer.index} is not orthogonal (error {error:.1e}, allowed {TOLERANCE:.0e})"
            )


def read_rotations(key: str | Path, value: str | Path) -> ImportedRotations:
    """The rotation files of keys and of values. Raises RotationError naming a file that is none."""
    files: dict[Half, Path] = {"key": Path(key), "value": Path(value)}
    records: dict[Half, RotationImport] = {}
    matrices: dict[Half, dict[int, Tensor]] = {}
    for half, path in files.items():
        document = _load(path)
        records[half], matrices[half] = _record(path, document), _matrices(path, document)
        made_for = TARGETS.get(records[half].objective[:3], half)
        if made_for != half:
            raise RotationError(
                f"{path} is given for {half}s, but its objective '{records[half].objective}' is of {made_for}s; "
                "give the file of keys first"
            )
    return ImportedRotations(files, records, matrices)


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        wrong = "is no regular file" if path.exists() else "does not exist"
        raise RotationError(f"rotation file {path} {wrong}; give a file such as k_rotation.pt")
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its parts raise; to the user it is one thing
        raise RotationError(f"{path} is no rotation file: torch.load with weights_only=True cannot read it") from error
    if not isinstance(document, dict) or not isinstance(document.get("layers"), dict):
        raise RotationError(f"{path} is no rotation file: it has no 'layers'")
    version = document.get("format_version")
    if type(version) is not int or version not in VERSIONS:
        raise RotationError(
            f"{path} has format_version {version!r}, but this kvcompile reads 1 and 2; upgrade kvcompile"
        )
    return document


def _record(path: Path, document: dict[str, Any]) -> RotationImport:
    return RotationImport(
        file=path.name,
        sha256=file_digest(path),
        format_version=document["format_version"],
        objective=str(document.get("objective", "")),
        source_grouping=str(document.get("source_grouping", "")),
    )


def _matrices(path: Path, document: dict[str, Any]) -> dict[int, Tensor]:
    matrices = {}
    for index, entry in document["layers"].items():
        matrix = entry.get("rotation") if isinstance(entry, dict) else None
        if not isinstance(index, int) or not isinstance(matrix, Tensor) or not matrix.is_floating_point():
            raise RotationError(f"{path}: layer {index} has no rotation")
        if entry.get("layer_id", index) != index:
            raise RotationError(f"{path}: layer {index} says that it is layer {entry['layer_id']}")
        matrices[index] = matrix.float()
    return matrices
