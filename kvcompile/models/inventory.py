"""The attention inventory of a checkpoint: for every layer where q, k, v and o live, and whether its cache is compiled.

Decided from config.json and the tensor names alone, before any weight is read. Families differ by a few declared names
(`kvcompile.models.families`); everything else is one generic reader.
"""

from dataclasses import dataclass, replace
from typing import Any

from kvcompile.checkpoint import Checkpoint
from kvcompile.errors import CheckpointError, UnsupportedArchitectureError
from kvcompile.models.families import FAMILIES, REFUSED, Family
from kvcompile.models.loading import resolve_config

OUR_TAG = "kvcompile"
"""The quant_method of an artifact that asks transformers to set up its cache; its weights are plain."""


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer's attention.

    Tensor names are those of the checkpoint; a bias is None where the model has none. `reason` says why a layer's cache
    is left as it is, and is empty when the layer is compiled.
    """

    index: int
    kind: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    q_weight: str
    k_weight: str
    v_weight: str
    o_weight: str
    v_bias: str | None
    reason: str = ""

    @property
    def compiled(self) -> bool:
        """Whether this layer's cache is packed."""
        return not self.reason

    @property
    def queries_per_kv(self) -> int:
        """G, the query heads that share a KV head."""
        return self.num_heads // self.num_key_value_heads

    @property
    def prefix(self) -> str:
        """The layer as the checkpoint names it, for messages."""
        return self.v_weight.rsplit(".self_attn.", 1)[0]


@dataclass(frozen=True)
class Inventory:
    """All decoder layers of a model, in order."""

    model_type: str
    architecture: str
    layers: tuple[AttentionLayer, ...]
    max_positions: int

    @property
    def compiled(self) -> tuple[AttentionLayer, ...]:
        """The layers whose cache is packed."""
        return tuple(layer for layer in self.layers if layer.compiled)


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Read a checkpoint's attention layout.

    Raises UnsupportedArchitectureError (naming the architecture and what is missing) before any work starts, and
    CheckpointError where tensors are absent or their shapes contradict config.json.
    """
    config = checkpoint.config
    model_type = str(config.get("model_type", "?"))
    architecture = str((config.get("architectures") or ["?"])[0])
    family = FAMILIES.get(model_type)
    if family is None:
        reason = REFUSED.get(model_type, "kvcompile has no description of its attention")
        raise UnsupportedArchitectureError(
            f"{architecture} (model_type '{model_type}') in {checkpoint.path} is not supported: {reason}; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
    if quantization and method != OUR_TAG:
        raise UnsupportedArchitectureError(
            f"{checkpoint.path} is already quantized ({method}): its weights cannot be folded by "
            "this version; convert the unquantized checkpoint"
        )
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'} needs a positive integer '{key}', not {config.get(key)!r}"
            )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != config["num_hidden_layers"]):
        raise CheckpointError(
            f"'layer_types' in {checkpoint.path / 'config.json'} does not list one kind per hidden layer"
        )
    config = resolve_config(checkpoint.path)
    layers = tuple(_read_layer(checkpoint, family, config, i) for i in range(config["num_hidden_layers"]))
    if not any(layer.compiled for layer in layers):
        raise UnsupportedArchitectureError(
            f"{architecture} in {checkpoint.path} has no layer with full attention: {layers[0].reason}"
        )
    return Inventory(model_type, architecture, layers, config["max_position_embeddings"])


def _read_layer(checkpoint: Checkpoint, family: Family, config: dict[str, Any], index: int) -> AttentionLayer:
    num_heads = config["num_attention_heads"]
    num_kv = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    prefix = family.layer_prefix.format(index)
    v_bias = f"{prefix}.{family.v_proj}.bias"
    layer = AttentionLayer(
        index=index,
        kind=family.layer_kind(config, index),
        num_heads=num_heads,
        num_key_value_heads=num_kv,
        head_dim=head_dim,
        q_weight=f"{prefix}.{family.q_proj}.weight",
        k_weight=f"{prefix}.{family.k_proj}.weight",
        v_weight=f"{prefix}.{family.v_proj}.weight",
        o_weight=f"{prefix}.{family.o_proj}.weight",
        v_bias=v_bias if v_bias in checkpoint else None,
    )
    hidden = config["hidden_size"]
    expected = {
        layer.q_weight: (num_heads * head_dim, hidden),
        layer.k_weight: (num_kv * head_dim, hidden),
        layer.v_weight: (num_kv * head_dim, hidden),
        layer.o_weight: (hidden, num_heads * head_dim),
    }
    for name, shape in expected.items():
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} in {checkpoint.path} has shape {list(checkpoint.shape(name))}, "
                f"but config.json implies {list(shape)}"
            )
    if layer.kind != "full_attention":
        return replace(layer, reason=f"{layer.kind.replace('_', ' ')}: its cache is bounded by the window already")
    return layer
