"""`kvcompile inspect`: what a checkpoint or an artifact caches, what it costs, and what is supported, before any work."""

from dataclasses import dataclass
from pathlib import Path

from kvcompile.artifact import MANIFEST_NAME, open_artifact
from kvcompile.checkpoint import open_checkpoint
from kvcompile.errors import SchemeError
from kvcompile.models import AttentionLayer, Inventory, take_inventory
from kvcompile.passes.emit import CONTEXTS
from kvcompile.passes.inventory import check_fit
from kvcompile.scheme import DEFAULT_SCHEME, Scheme, bits_per_element, history_bits, load_scheme

BF16_BYTES = 2


@dataclass(frozen=True)
class LayerInspection:
    """One layer: heads, bytes per cached token (BF16, packed history), and why the scheme leaves its cache alone, if it does.

    `note` says what is unusual about a layer that is packed.
    """

    index: int
    kind: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    reason: str
    bf16_bytes: int
    packed_bytes: float
    note: str = ""


@dataclass(frozen=True)
class Inspection:
    """A model or an artifact; `bits_per_element` is by context length, over the layers that are packed.

    `weights` says how W_V and W_O are stored, and before a conversion what becomes of them.
    """

    path: Path
    architecture: str
    model_type: str
    scheme: str
    converted: bool
    layers: tuple[LayerInspection, ...]
    bits_per_element: dict[str, float]
    weights: str

    @property
    def packed_layers(self) -> int:
        """How many layers have a packed cache."""
        return sum(not layer.reason for layer in self.layers)


def inspect(path: str | Path, scheme: str | Scheme = DEFAULT_SCHEME) -> Inspection:
    """Describe a checkpoint under `scheme`, or an artifact under its own.

    Raises UnsupportedArchitectureError or CheckpointError as convert would.
    """
    path = Path(path)
    converted = (path / MANIFEST_NAME).exists()
    if converted:
        artifact = open_artifact(path)
        scheme = artifact.manifest.scheme
        checkpoint = open_checkpoint(artifact.weights_path)
    else:
        scheme = scheme if isinstance(scheme, Scheme) else load_scheme(scheme)
        checkpoint = open_checkpoint(path)
    inventory = take_inventory(checkpoint)
    layers = tuple(_inspect_layer(layer, scheme) for layer in inventory.layers)
    packed = [layer for layer in layers if not layer.reason]
    bits = {
        label: sum(bits_per_element(scheme.layer(x.index), x.head_dim, tokens) for x in packed) / max(len(packed), 1)
        for label, tokens in CONTEXTS.items()
    }
    return Inspection(
        checkpoint.path,
        inventory.architecture,
        inventory.model_type,
        scheme.name,
        converted,
        layers,
        bits if packed else {},
        f"{inventory.weights}; {_plan(inventory, scheme, artifact.manifest.weights.mode if converted else None)}",
    )


def _plan(inventory: Inventory, scheme: Scheme, mode: str | None) -> str:
    """What becomes of W_V and W_O, or in an artifact of this `mode` became of them."""
    if mode == "overlay":
        return "an overlay"
    if inventory.foldable and (not scheme.folds_values() or any(layer.gated for layer in inventory.compiled)):
        return "left as they are"
    return "folded" if mode else inventory.fold


def _inspect_layer(layer: AttentionLayer, scheme: Scheme) -> LayerInspection:
    elements = layer.num_key_value_heads * layer.head_dim
    dense = 2 * elements * BF16_BYTES
    reason = layer.reason
    if not reason:
        try:
            check_fit(scheme, layer)
        except SchemeError as error:
            reason = str(error)
    packed = float(dense)
    if not reason:
        packed = elements * sum(history_bits(row, layer.head_dim) for _, row in scheme.layer(layer.index).rows()) / 8
    return LayerInspection(
        layer.index, layer.kind, layer.num_heads, layer.num_key_value_heads, layer.head_dim, reason, dense, packed, layer.note
    )  # fmt: skip
