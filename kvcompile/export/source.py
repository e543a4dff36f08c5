"""Is a checkpoint the unfolded source of an artifact? It is, where the artifact's own fold makes the artifact's weights of it.

What W_O W_V computes does not tell: that is the same before and after a fold.
"""

import hashlib
from pathlib import Path

import torch

from kvcompile.artifact import MANIFEST_NAME, Artifact
from kvcompile.checkpoint import Checkpoint, Edit, dequantized, edited_dtype, tensor_bytes
from kvcompile.errors import CheckpointError, ExportError
from kvcompile.models import AttentionLayer, Inventory, take_inventory
from kvcompile.passes.fold import fold_edits
from kvcompile.passes.ir import IR, Fold


def check_source(artifact: Artifact, source: Path) -> None:
    """Raise ExportError unless the artifact, whose weights are its own, was made from the checkpoint `source`."""
    original, converted = Checkpoint(source), Checkpoint(artifact.weights_path)
    if (source / MANIFEST_NAME).exists():
        raise ExportError(
            f"{source} is a converted checkpoint, whose values may be rotated already; give the one that it was made from"
        )
    inventory = take_inventory(original)
    ours = [(x.index, bool(x.reason)) for x in artifact.manifest.layers]
    fault = None if ours == [(x.index, bool(x.reason)) for x in inventory.layers] else "it has other attention layers"
    edits = {} if fault else _edits(artifact, original, inventory)
    for layer in inventory.compiled:
        fault = fault or _difference(artifact, layer, edits, original, converted)
    if fault:
        raise ExportError(
            f"{source} is not the checkpoint that {artifact.directory} was made from: {fault}; give the source"
        )


def _edits(artifact: Artifact, original: Checkpoint, inventory: Inventory) -> dict[str, Edit]:
    """The artifact's fold as functions of the source's tensors, by name: those of the fold pass."""
    folded = {x.index for x in artifact.manifest.compiled if x.value and x.value.apply == "folded" and x.value.rotation}
    folds: list[Fold] = []
    for layer in inventory.compiled:
        if layer.index in folded:
            folds += [Fold(layer.v_weight, layer.index, "v_weight"), Fold(layer.o_weight, layer.index, "o_weight")]
            folds += [Fold(layer.v_bias, layer.index, "v_bias")] if layer.v_bias else []
    scheme = artifact.manifest.scheme
    return fold_edits(IR(original, scheme, "fold", inventory=inventory, tensors=artifact.tensors, folds=tuple(folds)))


def _difference(
    artifact: Artifact, layer: AttentionLayer, edits: dict[str, Edit], original: Checkpoint, converted: Checkpoint
) -> str | None:
    """Which tensor of a layer tells that `converted` was not made from `original`; None where all agree.

    A fold is one float64 product and one rounding, so another machine may round a tie otherwise and no more.
    """
    try:
        if layer.v_weight not in edits:
            digests = artifact.manifest.weights.projections
            stored = {name: hashlib.sha256(tensor_bytes(original.load(name))).hexdigest() for name in layer.stored}
            other = next((name for name, digest in stored.items() if digests.get(name) != digest), None)
            return other and f"{other} is another tensor"
        for name in layer.projections():
            wanted = edits[name](dequantized(original, name)).to(edited_dtype(original, name))
            found = converted.load(name)
            same = found.dtype == wanted.dtype and found.shape == wanted.shape
            error = (found.double() - wanted.double()).norm() / wanted.double().norm() if same else torch.inf
            if not error <= torch.finfo(found.dtype).eps:
                return f"its {name}, folded by the artifact's rotation, is not the artifact's"
    except (CheckpointError, RuntimeError) as error:
        return f"layer {layer.index} does not fit ({error})"
    return None
