"""Pass `inventory`: find the attention layers and check that the scheme fits them, before any weight is read."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from kvcompile.artifact import MANIFEST_NAME
from kvcompile.checkpoint import Checkpoint, open_checkpoint
from kvcompile.codec.feedback import MAX_FEEDBACK_DIM
from kvcompile.errors import CheckpointError, SchemeError
from kvcompile.linalg import is_hadamard_order
from kvcompile.models import AttentionLayer, Inventory, check_quantization, take_inventory
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR
from kvcompile.scheme import RowCodec, Scheme, group_size
from kvcompile.scheme.model import BlockHadamard, Hadamard, LinearCorrection, Spectral


@dataclass(frozen=True)
class InventoryPass:
    """Reads config.json and tensor names.

    1. An architecture without a description is refused by name.
    2. Every compiled layer must fit the scheme: groups divide the head, Hadamard orders exist.
    3. Where a gate stands between attention and W_O, the rotation of values cannot be folded: the scheme that goes on from
       here, and into the manifest, applies it online.
    4. Pre-quantized W_V and W_O that cannot be folded make the result an overlay.
    5. Where the model has to run, pre-quantized weights must be of a method that transformers can run on this device.
    """

    name: ClassVar[str] = "inventory"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = False

    def requires(self, ir: IR) -> str | None:
        """Nothing: this pass comes first."""
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Take the inventory and check the scheme against each compiled layer."""
        inventory = take_inventory(ir.checkpoint)
        scheme = ir.scheme.with_online_values() if any(x.gated for x in inventory.compiled) else ir.scheme
        check_scheme(scheme, inventory)
        weights = ir.weights if inventory.foldable else "overlay"
        if scheme.calibrates() or (weights == "fold" and scheme.folds_values()):
            check_quantization(ir.checkpoint.path, context.device)
        return PassResult(replace(ir, inventory=inventory, scheme=scheme, weights=weights), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """At least one layer is compiled."""
        return None if ir.inventory and ir.inventory.compiled else "no layer is compiled"


def open_source(model: str | Path) -> Checkpoint:
    """The checkpoint to convert, from a directory or the Hub. Raises CheckpointError for one that is converted already."""
    check_unconverted(Path(model))
    checkpoint = open_checkpoint(model)
    check_unconverted(checkpoint.path)
    return checkpoint


def check_unconverted(path: Path) -> None:
    """Raise CheckpointError for a converted directory, whose rotations would be lost from the record or applied twice."""
    if (path / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"{path} is a converted checkpoint, whose values may be rotated already; convert the model that it was made from"
        )


def check_scheme(scheme: Scheme, inventory: Inventory) -> None:
    """Raise SchemeError when `scheme` cannot be applied to some layer, or names one that the model does not have."""
    if unknown := scheme.overridden_layers() - {layer.index for layer in inventory.layers}:
        raise SchemeError(
            f"scheme {scheme.name}: layers has an entry for layer {min(unknown)}, but the model has layers "
            f"0-{len(inventory.layers) - 1}"
        )
    for layer in inventory.compiled:
        check_fit(scheme, layer)


def check_fit(scheme: Scheme, layer: AttentionLayer) -> None:
    """Raise SchemeError when `scheme` cannot be applied to heads of this layer's size, or to its kind of softmax."""
    if isinstance(scheme.correction, LinearCorrection) and layer.softmax:
        raise SchemeError(
            f"scheme {scheme.name}: correction.kind linear is for a plain softmax, but {layer.prefix} has {layer.softmax}; "
            "use --set correction.kind=none"
        )
    for half, row in scheme.layer(layer.index).rows():
        group = group_size(row.quantizer, layer.head_dim)
        if row.quantizer.axis == "token" and layer.head_dim % group:
            raise SchemeError(
                f"scheme {scheme.name}: {half}.quantizer.group_size {group} does not divide head_dim {layer.head_dim} "
                f"of {layer.prefix}; choose a divisor with --set {half}.quantizer.group_size=..."
            )
        if layer.head_dim * row.quantizer.bits % 8:
            raise SchemeError(
                f"scheme {scheme.name}: head_dim {layer.head_dim} of {layer.prefix} at {row.quantizer.bits} bits "
                "is no whole number of bytes"
            )
        if row.quantizer.rounding == "error_feedback" and layer.head_dim > MAX_FEEDBACK_DIM:
            raise SchemeError(
                f"scheme {scheme.name}: {half}.quantizer.rounding error_feedback is exact up to head_dim {MAX_FEEDBACK_DIM}, "
                f"{layer.prefix} has {layer.head_dim}; use --set {half}.quantizer.rounding=nearest"
            )
        order = _hadamard_order(row, layer.head_dim)
        if order is not None and (layer.head_dim % order or not is_hadamard_order(order)):
            raise SchemeError(
                f"scheme {scheme.name}: {half}.rotation needs a Hadamard matrix of order {order} for head_dim "
                f"{layer.head_dim} of {layer.prefix}, and there is none here "
                "(orders 2^k, and m 2^k for Paley orders m such as 12, 20, 28, 36); "
                f"use --set {half}.rotation.hadamard=false or a block_hadamard whose block divides the head"
            )


def _hadamard_order(row: RowCodec, head_dim: int) -> int | None:
    match row.rotation:
        case Hadamard():
            return head_dim
        case Spectral(hadamard=True, block_size=block):
            return min(block or head_dim, head_dim)
        case BlockHadamard(block_size=block):
            return min(block, head_dim)
        case _:
            return None
