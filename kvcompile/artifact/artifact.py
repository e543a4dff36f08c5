"""A converted directory as a reader sees it: the manifest, the sidecar tensors, and the weights they belong to."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvcompile.artifact.manifest import (
    MANIFEST_NAME,
    Manifest,
    correction_record,
    read_manifest,
    row_record,
)
from kvcompile.checkpoint import Checkpoint, file_digest, tensor_bytes
from kvcompile.errors import ArtifactError, CheckpointError


@dataclass(frozen=True)
class Artifact:
    """`directory` holds the manifest and the sidecar, `weights_path` the checkpoint (itself, or the overlay's source)."""

    directory: Path
    manifest: Manifest
    weights_path: Path

    @property
    def folded(self) -> frozenset[int]:
        """The layers whose value rotation is in the weights."""
        rows = ((layer.index, layer.value) for layer in self.manifest.layers)
        return frozenset(index for index, value in rows if value is not None and value.apply == "folded")

    @property
    def sidecar_path(self) -> Path:
        """The file that the manifest names."""
        return self.directory / self.manifest.sidecar.file

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The sidecar tensors, after their file has been checked against the manifest."""
        path = self.sidecar_path
        if not path.is_file():
            raise ArtifactError(f"{path} is missing; convert the model again")
        if file_digest(path) != self.manifest.sidecar.sha256:
            raise ArtifactError(
                f"{path} does not match its manifest (sha256 differs): it was altered or damaged; convert the model again"
            )
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ArtifactError(f"{path} is no valid safetensors file; convert the model again") from error

    def tensor(self, name: str | None) -> Tensor | None:
        """A sidecar tensor by its name; None for None."""
        if name is not None and name not in self.tensors:
            raise ArtifactError(f"sidecar tensor {name} is missing from {self.sidecar_path}; convert the model again")
        return None if name is None else self.tensors[name]

    def check_projections(self) -> None:
        """Raise ArtifactError unless every W_V, b_V and W_O is the one that the sidecar was made for."""
        checkpoint = Checkpoint(self.weights_path)
        for name, digest in self.manifest.weights.projections.items():
            if hashlib.sha256(tensor_bytes(checkpoint.load(name))).hexdigest() != digest:
                raise ArtifactError(
                    f"tensor {name} in {self.weights_path} is not the one that {self.sidecar_path} was made for: "
                    "weights and sidecar do not belong together; convert the model again"
                )


def open_artifact(directory: str | Path, source: str | Path | None = None) -> Artifact:
    """Open a converted directory; `source` overrides where an overlay finds its weights.

    Raises ArtifactError when the manifest is missing, damaged or too new, or when an overlay's weights are not found.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    if fault := _inconsistency(manifest):
        raise ArtifactError(f"{directory / MANIFEST_NAME} contradicts itself: {fault}; convert the model again")
    weights_path = directory
    if manifest.weights.mode == "overlay":
        weights_path = Path(source or manifest.source.path or "")
        try:
            Checkpoint(weights_path)
        except CheckpointError as error:
            raise ArtifactError(
                f"{directory} is an overlay over {weights_path}, which cannot be used: {error}"
            ) from error
    return Artifact(directory, manifest, weights_path)


def _inconsistency(manifest: Manifest) -> str | None:
    """What in the per-layer table does not follow from the scheme, or None: such a manifest would run, and run wrongly."""
    if [layer.index for layer in manifest.layers] != list(range(len(manifest.layers))):
        return "layers are missing or out of order"
    if not manifest.weights.files or len(manifest.weights.projections) < 2 * len(manifest.compiled):
        return "hashes of weights are missing"
    for layer in manifest.layers:
        if (layer.key is None) != (layer.value is None) or (layer.key is None) != bool(layer.reason):
            return f"layer {layer.index} is compiled in part"
        if layer.key is None or layer.value is None:
            continue
        scheme = manifest.scheme.layer(layer.index)
        folded = manifest.weights.mode == "fold" and scheme.folds_values()
        for half, wanted, row in (("key", scheme.key, layer.key), ("value", scheme.value, layer.value)):
            expected = row_record(layer.index, half, wanted, layer.head_dim, row.clip_ratio, folded and half == "value")
            for field, value in expected:
                if getattr(row, field) != value:
                    return f"layer {layer.index}: {half} {field} is {getattr(row, field)}, the scheme implies {value}"
            if missing := set(row.tensors()) - set(manifest.sidecar.shapes):
                return f"layer {layer.index}: sidecar tensor {min(missing)} is not listed"
        if layer.page_tokens != scheme.window.block:
            return (
                f"layer {layer.index}: pages hold {layer.page_tokens} tokens, the scheme implies {scheme.window.block}"
            )
        if layer.correction != correction_record(layer.index, scheme):
            return f"layer {layer.index}: its correction is not the one that the scheme implies"
    return None


def inverse_error(r_KDD: Tensor, inverse_KDD: Tensor | None) -> float:
    """Largest entry of ``|R^-1 R - I|`` over the heads; the inverse of an orthogonal matrix (None) is its transpose."""
    r = r_KDD.double()
    inverse = r.mT if inverse_KDD is None else inverse_KDD.double()
    return float((inverse @ r - torch.eye(r.shape[-1], dtype=r.dtype)).abs().max())
