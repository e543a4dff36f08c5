"""`kvcompile verify`: is a converted directory whole, self-consistent, and the same model as its source?"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvcompile.artifact import Artifact, inverse_error, open_artifact
from kvcompile.calibration import read_corpus, tokenize_corpus
from kvcompile.checkpoint import DTYPES, Checkpoint, edited_dtype, file_digest, open_checkpoint, scale_names
from kvcompile.errors import VerificationError
from kvcompile.models import EXACT, Inventory, load_tokenizer, take_inventory
from kvcompile.models.agreement import (
    LogitAgreement,
    check_logits,
    check_projections,
    compare_logits,
    logits_of,
    projections,
    same_bits,
)
from kvcompile.models.forwards import Forward
from kvcompile.models.placement import Placement, must_stream

ORTHOGONALITY_TOLERANCE = 1e-5
VERIFY_TOKENS = 256


@dataclass(frozen=True)
class Verification:
    """What was checked: one sentence per check that passed, and the logits against the source, if one was given."""

    checks: tuple[str, ...]
    logits: LogitAgreement | None


def verify(directory: str | Path, source: str | Path | None = None, low_memory: bool | None = None) -> Verification:
    """Check hashes, tensor shapes, orthogonality and, with `source`, that folding left the model as it was.

    Logits are compared in float32 on 256 tokens of the bundled text: relative error at most 1e-4 for float32
    checkpoints, KL at most 2e-4 nats per token for 16-bit ones. `low_memory` runs both models with one decoder layer in
    memory at a time; by itself where their weights would not fit. Raises VerificationError or ArtifactError naming the
    first file, layer or tensor that does not hold.
    """
    artifact = open_artifact(directory, source)
    checks = [_check_layers(artifact), _check_files(artifact), _check_sidecar(artifact)]
    artifact.check_projections()
    checks.append(f"{len(artifact.manifest.weights.projections)} projections belong to the sidecar")
    agreement = None
    if source is not None and artifact.manifest.weights.mode == "fold":
        original, converted = open_checkpoint(source), Checkpoint(artifact.weights_path)
        checks.append(_check_unchanged(original, converted, artifact))
        checks.append(_check_projections(original, converted, take_inventory(original), artifact))
        agreement = _check_logits(original, converted, artifact, low_memory)
        checks.append(
            f"logits agree with the source: relative error {agreement.relative_error:.1e}, KL {agreement.kl:.1e} nats, "
            f"same top token {agreement.agreement:.1%}"
        )
    return Verification(tuple(checks), agreement)


def _check_layers(artifact: Artifact) -> str:
    """The manifest's table lists the layers, and guards the weights, that the checkpoint really has."""
    checkpoint = Checkpoint(artifact.weights_path)
    found = {layer.index: layer for layer in take_inventory(checkpoint).layers}
    for record in artifact.manifest.layers:
        layer = found.pop(record.index, None)
        shape = (record.num_heads, record.num_key_value_heads, record.head_dim, record.key is not None)
        if layer is None or shape != (layer.num_heads, layer.num_key_value_heads, layer.head_dim, layer.compiled):
            raise VerificationError(f"layer {record.index} of the manifest is not the layer that {checkpoint.path} has")
        guarded = set(layer.stored) if layer.compiled else set()
        if missing := guarded - set(artifact.manifest.weights.projections):
            raise VerificationError(f"layer {record.index}: the manifest has no hash of tensor {min(missing)}")
    if found:
        raise VerificationError(f"layer {min(found)} of {checkpoint.path} is missing from the manifest")
    if missing_files := {shard.name for shard in checkpoint.shards} - set(artifact.manifest.weights.files):
        raise VerificationError(f"weight file {min(missing_files)} has no hash in the manifest")
    return f"{len(artifact.manifest.layers)} layers are those of the checkpoint"


def _check_files(artifact: Artifact) -> str:
    for name, digest in artifact.manifest.weights.files.items():
        path = artifact.weights_path / name
        if not path.is_file():
            raise VerificationError(f"weight file {path} is missing")
        if file_digest(path) != digest:
            raise VerificationError(
                f"weight file {path} does not match its hash in the manifest: it was altered or damaged"
            )
    return f"{len(artifact.manifest.weights.files)} weight files match their hashes"


def _check_sidecar(artifact: Artifact) -> str:
    tensors, manifest = artifact.tensors, artifact.manifest
    for name, shape in manifest.sidecar.shapes.items():
        if name not in tensors:
            raise VerificationError(f"sidecar tensor {name} is missing")
        if list(tensors[name].shape) != shape:
            raise VerificationError(
                f"sidecar tensor {name} has shape {list(tensors[name].shape)}, the manifest says {shape}"
            )
        if not tensors[name].isfinite().all():
            raise VerificationError(f"sidecar tensor {name} holds NaN or infinity")
    for layer in manifest.compiled:
        square = [layer.num_key_value_heads, layer.head_dim, layer.head_dim]
        for half, row in (("key", layer.key), ("value", layer.value)):
            assert row is not None
            where = f"layer {layer.index}: sidecar tensor {row.rotation}"
            if row.rotation is not None:
                if manifest.sidecar.shapes.get(row.rotation) != square:
                    raise VerificationError(
                        f"{where} has shape {manifest.sidecar.shapes.get(row.rotation)}, expected {square}"
                    )
                error = inverse_error(tensors[row.rotation], artifact.tensor(row.inverse))
                if not error <= ORTHOGONALITY_TOLERANCE:
                    wrong = "orthogonal" if row.inverse is None else "undone by its inverse"
                    raise VerificationError(
                        f"{where} is not {wrong} (error {error:.1e}, allowed {ORTHOGONALITY_TOLERANCE:.0e})"
                    )
            stored = float(tensors[f"layers.{layer.index}.{half}.clip_ratio"])
            if stored != row.clip_ratio:
                raise VerificationError(
                    f"layer {layer.index}: {half} clip ratio is {row.clip_ratio} in the manifest but {stored} in the sidecar"
                )
    return f"{len(tensors)} sidecar tensors have the right shapes, and rotations are undone by their inverses"


def _check_unchanged(original: Checkpoint, converted: Checkpoint, artifact: Artifact) -> str:
    folded = [layer for layer in take_inventory(original).compiled if layer.index in artifact.folded]
    edited = {name for layer in folded for name in layer.projections()}
    scales = {scale for name in edited for scale in scale_names(original, name)}
    if set(original.entries) - scales != set(converted.entries):
        name = min((set(original.entries) - scales) ^ set(converted.entries))
        raise VerificationError(
            f"tensor {name} is in only one of {original.path} and {converted.path}; is this the right source?"
        )
    for name in sorted(converted.entries):
        ours, theirs = converted.load(name), original.load(name)
        dtype = edited_dtype(original, name) if name in edited else theirs.dtype
        if ours.shape != theirs.shape or ours.dtype != dtype or (name not in edited and not same_bits(ours, theirs)):
            raise VerificationError(
                f"tensor {name} differs from {original.path}, although it should be unchanged; is this the right source?"
            )
    return f"{len(converted.entries) - len(edited)} other tensors equal the source bit for bit"


def _check_projections(original: Checkpoint, converted: Checkpoint, inventory: Inventory, artifact: Artifact) -> str:
    worst = 0.0
    compiled = {record.index for record in artifact.manifest.compiled}
    for layer in inventory.compiled:
        if layer.index not in compiled:
            continue
        source = projections(original, layer)
        worst = max(worst, check_projections(layer, source, projections(converted, layer)))
    return f"value projections compute what the source computes in every layer (largest relative error {worst:.1e})"


def _check_logits(
    original: Checkpoint, converted: Checkpoint, artifact: Artifact, low_memory: bool | None
) -> LogitAgreement:
    tokenizer = load_tokenizer(original.path)
    length = min(VERIFY_TOKENS, take_inventory(original).max_positions)
    ids = tokenize_corpus(read_corpus(None), tokenizer, length, length)[0]
    reference, candidate = (_logits(checkpoint, ids, low_memory) for checkpoint in (original, converted))
    agreement = compare_logits(reference, candidate)
    dtypes = {DTYPES[converted.entries[name].dtype] for name in artifact.manifest.weights.projections}
    check_logits(agreement, dtypes, original.path)
    return agreement


def _logits(checkpoint: Checkpoint, ids_T: torch.Tensor, low_memory: bool | None) -> torch.Tensor:
    device = torch.device("cpu")
    streamed = must_stream(checkpoint, device) if low_memory is None else low_memory
    source = Placement(device, streamed).open_model(checkpoint, take_inventory(checkpoint), EXACT)
    forward = Forward(partial(logits_of, source.model, ids_T), len(ids_T))
    return source.run([forward], "logits", lambda items, *_: items)[0]
