"""Pass `fold`: plan the rotation of W_V, b_V and W_O, so that values arrive rotated and leave unrotated."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.checkpoint import Edit, dequantized
from kvcompile.errors import CheckpointError
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR, Fold


@dataclass(frozen=True)
class FoldPass:
    """Plans edits; no weight is changed before emit.

    1. ``W_V <- W_V R_V`` and ``b_V <- b_V R_V`` per KV head, ``W_O <- R_V^-1 W_O`` per query head (row-vector convention);
       the inverse of an orthogonal R_V is its transpose.
    2. Only these tensors are ever edited: embeddings, tied or not, are never touched.
    3. With overlay weights nothing is folded and R_V stays online.
    4. Weights to be folded must be finite. Codes with scales are decoded in float64 and stored as floats once folded.
    5. Everything is solved by now, so the statistics are let go.
    """

    name: ClassVar[str] = "fold"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = False

    def requires(self, ir: IR) -> str | None:
        """Rotations for every compiled layer, if values are to be folded."""
        missing = any(_rotation(ir, layer) is None for layer in self._wanted(ir))
        return "the rotations pass must come first" if missing else None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Plan one edit per tensor."""
        folds: list[Fold] = []
        for layer in self._wanted(ir):
            folds.append(Fold(layer.v_weight, layer.index, "v_weight"))
            if layer.v_bias:
                folds.append(Fold(layer.v_bias, layer.index, "v_bias"))
            folds.append(Fold(layer.o_weight, layer.index, "o_weight"))
        for fold in folds:
            if not dequantized(ir.checkpoint, fold.tensor).float().isfinite().all():
                raise CheckpointError(
                    f"tensor {fold.tensor} (layer {fold.layer}) in {ir.checkpoint.path} holds NaN or infinity; "
                    "repair the checkpoint"
                )
        return PassResult(replace(ir, folds=tuple(folds), statistics={}), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """Both sides of every rotation are planned, and no tensor twice."""
        names = [fold.tensor for fold in ir.folds]
        if len(set(names)) != len(names):
            return "a tensor would be folded twice (are two layers tied?)"
        sides = {(fold.layer, fold.role) for fold in ir.folds}
        torn = [fold.layer for fold in ir.folds if not {(fold.layer, "v_weight"), (fold.layer, "o_weight")} <= sides]
        return f"layer {torn[0]} would be folded on one side only" if torn else None

    @staticmethod
    def _wanted(ir: IR) -> list[AttentionLayer]:
        """The layers whose value rotation is to be folded."""
        layers = ir.layers().compiled if ir.weights == "fold" else ()
        return [layer for layer in layers if ir.scheme.layer(layer.index).folds_values()]


def fold_edits(ir: IR) -> dict[str, Edit]:
    """The planned edits as functions of the source tensor, dequantized, by tensor name; they compute in float64."""
    layers = {layer.index: layer for layer in ir.layers().layers}
    return {fold.tensor: _edit(ir, fold, layers[fold.layer]) for fold in ir.folds}


def _edit(ir: IR, fold: Fold, layer: AttentionLayer) -> Edit:
    r_KDD = _rotation(ir, layer)
    assert r_KDD is not None
    inverse_KDD = ir.tensors.get(f"layers.{layer.index}.value.inverse", r_KDD.mT)
    matrix_KDD = (inverse_KDD if fold.role == "o_weight" else r_KDD).double()
    rotate = {"v_weight": fold_v_weight, "v_bias": fold_v_bias, "o_weight": fold_o_weight}[fold.role]
    rows = slice(None) if fold.role == "o_weight" else layer.v_rows

    def edit(tensor: Tensor) -> Tensor:
        edited = tensor.to(torch.float64, copy=True)
        edited[rows] = rotate(edited[rows], matrix_KDD)
        return edited

    return edit


def fold_v_weight(w: Tensor, r_KDD: Tensor) -> Tensor:
    """``[K D, hidden]`` to the weight whose output rows are rotated per KV head."""
    return (r_KDD.mT @ w.unflatten(0, r_KDD.shape[:2])).flatten(0, 1)


def fold_v_bias(b: Tensor, r_KDD: Tensor) -> Tensor:
    """``[K D]`` to the rotated bias."""
    return (b.unflatten(0, r_KDD.shape[:2])[:, None] @ r_KDD).flatten()


def fold_o_weight(w: Tensor, inverse_KDD: Tensor) -> Tensor:
    """``[hidden, K G D]`` to the weight that takes rotated head outputs; the G query heads of a KV head share its R^-1."""
    num_kv, dim = inverse_KDD.shape[:2]
    w_KXD = w.unflatten(1, (num_kv, -1, dim)).transpose(0, 1).flatten(1, 2)  # X = hidden * G
    return (w_KXD @ inverse_KDD.mT).unflatten(1, (w.shape[0], -1)).transpose(0, 1).flatten(1)


def _rotation(ir: IR, layer: AttentionLayer) -> Tensor | None:
    return ir.tensors.get(f"layers.{layer.index}.value.rotation")
