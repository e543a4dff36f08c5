"""A converted directory as a reader sees it: the manifest, the sidecar tensors, and the weights they belong to."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvcompile.artifact.manifest import MANIFEST_NAME, SIDECAR_NAME, Manifest, read_manifest
from kvcompile.checkpoint import Checkpoint, file_digest, tensor_bytes
from kvcompile.errors import ArtifactError, CheckpointError
from kvcompile.scheme import group_size
from kvcompile.scheme.model import Identity


@dataclass(frozen=True)
class Artifact:
    """`directory` holds the manifest and the sidecar, `weights_path` the checkpoint (itself, or the overlay's source)."""

    directory: Path
    manifest: Manifest
    weights_path: Path

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The sidecar tensors, after their file has been checked against the manifest."""
        path = self.directory / SIDECAR_NAME
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

    def rotation(self, name: str | None) -> Tensor | None:
        """A rotation ``[K, D, D]`` float32 by its sidecar name; None for the identity."""
        if name is not None and name not in self.tensors:
            raise ArtifactError(
                f"sidecar tensor {name} is missing from {self.directory / SIDECAR_NAME}; convert the model again"
            )
        return None if name is None else self.tensors[name]

    def check_projections(self) -> None:
        """Raise ArtifactError unless every W_V, b_V and W_O is the one that the sidecar was made for."""
        checkpoint = Checkpoint(self.weights_path)
        for name, digest in self.manifest.weights.projections.items():
            if hashlib.sha256(tensor_bytes(checkpoint.load(name))).hexdigest() != digest:
                raise ArtifactError(
                    f"tensor {name} in {self.weights_path} is not the one that {self.directory / SIDECAR_NAME} was made for: "
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
    folded = manifest.weights.mode == "fold" and manifest.scheme.folds_values()
    for layer in manifest.layers:
        if (layer.key is None) != (layer.value is None) or (layer.key is None) != bool(layer.reason):
            return f"layer {layer.index} is compiled in part"
        for half, scheme, row in (
            ("key", manifest.scheme.key, layer.key),
            ("value", manifest.scheme.value, layer.value),
        ):
            if row is None:
                continue
            expected = None if isinstance(scheme.rotation, Identity) else f"layers.{layer.index}.{half}.rotation"
            if row.rotation != expected:
                return f"layer {layer.index}: {half} rotation is {row.rotation}, the scheme implies {expected}"
            if row.apply != ("folded" if folded and half == "value" else "online"):
                return f"layer {layer.index}: {half} rotation is said to be {row.apply}, which the scheme and weights exclude"
            quantizer = scheme.quantizer
            if (row.bits, row.group_size) != (quantizer.bits, group_size(quantizer, layer.head_dim)):
                return (
                    f"layer {layer.index}: {half} has {row.bits} bits in groups of {row.group_size}, unlike the scheme"
                )
            if row.rotation is not None and row.rotation not in manifest.sidecar.shapes:
                return f"layer {layer.index}: sidecar tensor {row.rotation} is not listed"
    return None


def orthogonality_error(r_KDD: Tensor) -> float:
    """Largest entry of ``|R^T R - I|`` over the heads."""
    r = r_KDD.double()
    return float((r.mT @ r - torch.eye(r.shape[-1], dtype=r.dtype)).abs().max())
