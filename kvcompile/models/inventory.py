"""The attention inventory of a checkpoint: for every layer where q, k, v and o live, and whether its cache is compiled.

Decided from config.json and the tensor names alone, before any weight is read. Families differ by a few declared names
(`kvcompile.models.families`); everything else is one generic reader.
"""

from dataclasses import dataclass
from typing import Any

from kvcompile.checkpoint import (
    DTYPES,
    Checkpoint,
    Storage,
    dense_dtype,
    quant_method,
    quantization,
    storage,
    stored_tensors,
)
from kvcompile.errors import CheckpointError, UnsupportedArchitectureError
from kvcompile.models.families import FAMILIES, LAYER_PREFIXES, REFUSED, VISION_LANGUAGE, Family, supported
from kvcompile.models.loading import resolve_config

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_SIDES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_experts", "num_local_experts", "n_routed_experts",
)  # fmt: skip
_PACKED = 8
"""Elements of a quantized matrix that may share one element of the tensor that holds them."""


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer's attention.

    Tensor names are those of the checkpoint, `prefix` is what they have in common; a bias is None where the model has none.
    W_V and b_V are the rows from `v_first` on, of a fused matrix where that is not 0. A `gated` output cannot be rotated
    before W_O. `softmax` names what makes it no plain softmax, if anything does. `reason` says why a layer's cache is left as
    it is, and is empty when the layer is compiled; a layer that caches no keys and values has no heads and no tensors.

    W_V and W_O may be stored otherwise than by their names: `storage` says how (the one that can do less), and `stored` names
    all tensors that make them, scales included.
    """

    index: int
    kind: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    prefix: str
    v_weight: str
    o_weight: str
    v_bias: str | None
    v_first: int = 0
    gated: bool = False
    softmax: str = ""
    reason: str = ""
    storage: Storage = "plain"
    stored: tuple[str, ...] = ()

    @property
    def compiled(self) -> bool:
        """Whether this layer's cache is packed."""
        return not self.reason

    @property
    def note(self) -> str:
        """What is unusual about a compiled layer, for people."""
        gate = "values rotated online, because a gate stands between attention and W_O" if self.gated else ""
        return "; ".join(filter(None, (self.softmax, gate))) if self.compiled else ""

    @property
    def queries_per_kv(self) -> int:
        """G, the query heads that share a KV head."""
        return self.num_heads // self.num_key_value_heads

    @property
    def v_rows(self) -> slice:
        """The rows of `v_weight` and `v_bias` that make values: all of them, unless q and k are fused with v."""
        return slice(self.v_first, self.v_first + self.num_key_value_heads * self.head_dim)

    def projections(self) -> tuple[str, ...]:
        """The tensors that a fold of the value rotation edits: W_V, b_V if there is one, W_O."""
        return tuple(name for name in (self.v_weight, self.v_bias, self.o_weight) if name)


@dataclass(frozen=True)
class Inventory:
    """All decoder layers of a model, in order; `weights` says how W_V and W_O are stored, `fold` what a fold makes of them."""

    model_type: str
    architecture: str
    layers: tuple[AttentionLayer, ...]
    max_positions: int
    weights: str
    fold: str

    @property
    def compiled(self) -> tuple[AttentionLayer, ...]:
        """The layers whose cache is packed."""
        return tuple(layer for layer in self.layers if layer.compiled)

    @property
    def foldable(self) -> bool:
        """Whether rotations can be folded into the weights of every packed layer; otherwise they are applied online."""
        return all(layer.storage != "packed" for layer in self.compiled)


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Read a checkpoint's attention layout.

    Raises UnsupportedArchitectureError (naming the architecture and what is missing) before any work starts, and
    CheckpointError where tensors are absent or their shapes contradict config.json.
    """
    raw = checkpoint.config
    _check_bounds(checkpoint, raw)
    model_type, architecture = str(raw.get("model_type", "?")), _architecture(raw)
    if model_type not in FAMILIES and model_type not in VISION_LANGUAGE:
        raise _refusal(checkpoint, model_type)
    if (quantization(raw, checkpoint.path) or {}).get("kv_cache_scheme"):
        raise UnsupportedArchitectureError(
            f"kv_cache_scheme in {checkpoint.path / 'config.json'} would quantize the cache a second time; set it to null"
        )
    if model_type in VISION_LANGUAGE:
        config = _text_config(checkpoint)
        language_type = str(config.get("model_type", "?"))
        if language_type not in FAMILIES:
            raise _refusal(checkpoint, language_type, within=True)
        _check_config(checkpoint, config)
    else:
        _check_config(checkpoint, raw)  # before transformers looks at it, which says less
        config, language_type = resolve_config(checkpoint.path), model_type
    family, prefix = FAMILIES[language_type], _layer_prefix(checkpoint)
    layers = tuple(
        _read_layer(checkpoint, family, config, prefix.format(i), i) for i in range(config["num_hidden_layers"])
    )
    if not any(layer.compiled for layer in layers):
        raise UnsupportedArchitectureError(
            f"{architecture} in {checkpoint.path} has no layer with full attention: {layers[0].reason}"
        )
    return Inventory(model_type, architecture, layers, config["max_position_embeddings"], *_weights(checkpoint, layers))


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else "?"
    return name if isinstance(name, str) and name.isidentifier() else "?"


def _refusal(checkpoint: Checkpoint, model_type: str, within: bool = False) -> UnsupportedArchitectureError:
    """The error that names an architecture, or the language model within it, and says why it is not supported."""
    reason = REFUSED.get(model_type, "kvcompile has no description of its attention")
    what = f"language model '{model_type}'" if within else f"model_type '{model_type}'"
    return UnsupportedArchitectureError(
        f"{_architecture(checkpoint.config)} ({what}) in {checkpoint.path} is not supported: {reason}; "
        f"supported are {', '.join(supported())}"
    )


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of the language model inside a vision-language model, with defaults filled in."""
    config = resolve_config(checkpoint.path).get("text_config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{checkpoint.path / 'config.json'} has no 'text_config' that describes a language model")
    return config


def _check_bounds(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raise CheckpointError for numbers, of any tower, beyond what the tensors can hold: transformers would allocate them.

    There are no more layers than tensors, and no size is larger than the largest side of a tensor, unless that is packed.
    """
    tensors = len(checkpoint.entries)
    largest = max((side for entry in checkpoint.entries.values() for side in entry.shape), default=0)
    packed = _PACKED if checkpoint.config.get("quantization_config") else 1
    limits = dict.fromkeys(_COUNTS, tensors) | dict.fromkeys(_SIDES, packed * max(largest, tensors))
    sections: list[dict[str, Any]] = [config]
    while sections:
        section = sections.pop()
        sections += [value for value in section.values() if isinstance(value, dict)]
        for key in limits.keys() & section.keys():
            if isinstance(section[key], int) and section[key] > limits[key]:
                raise CheckpointError(
                    f"{checkpoint.path / 'config.json'} says '{key}' {section[key]}, but the checkpoint has "
                    f"{tensors} tensors, none with a side longer than {largest}"
                )


def _check_config(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raise CheckpointError unless sizes are positive integers and `layer_types`, where given, has an entry per layer."""
    for key in _SIZES:
        if type(config.get(key)) is not int or not 1 <= config[key] < 2**31:
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'} needs a positive integer '{key}', not {config.get(key)!r}"
            )
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != config["num_hidden_layers"]):
        raise CheckpointError(
            f"'layer_types' in {checkpoint.path / 'config.json'} does not list one kind per hidden layer"
        )


def _layer_prefix(checkpoint: Checkpoint) -> str:
    """Where this checkpoint keeps its decoder layers; the usual place where it has none, for the error that follows."""
    for prefix in LAYER_PREFIXES:
        if any(name.startswith(prefix.format(0) + ".") for name in checkpoint.entries):
            return prefix
    return LAYER_PREFIXES[0]


def _read_layer(
    checkpoint: Checkpoint, family: Family, config: dict[str, Any], prefix: str, index: int
) -> AttentionLayer:
    kind = family.layer_kind(config, index)
    if kind == "linear_attention":
        reason = "linear attention: it keeps a state of fixed size, no keys and values"
        return AttentionLayer(index, kind, 0, 0, 0, prefix, "", "", None, reason=reason)
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden // num_heads
    q_rows, v_rows = num_heads * head_dim, num_kv * head_dim
    o_weight, v_proj = f"{prefix}.{family.o_proj}.weight", f"{prefix}.{family.qkv_proj or family.v_proj}"
    expected = {o_weight: (hidden, q_rows)}
    if family.qkv_proj:
        expected[f"{v_proj}.weight"] = (q_rows + 2 * v_rows, hidden)
    else:
        expected[f"{prefix}.{family.q_proj}.weight"] = (q_rows * (2 if family.gated else 1), hidden)
        expected[f"{prefix}.{family.k_proj}.weight"] = (v_rows, hidden)
        expected[f"{v_proj}.weight"] = (v_rows, hidden)
    for name, shape in expected.items():
        module = name.removesuffix(".weight")
        if storage(checkpoint, module) == "packed" and stored_tensors(checkpoint, module):
            continue  # its shape is the method's business
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} in {checkpoint.path} has shape {list(checkpoint.shape(name))}, "
                f"but config.json implies {list(shape)}"
            )
    modules = (v_proj, f"{prefix}.{family.o_proj}")
    kinds = [storage(checkpoint, module) for module in modules]
    return AttentionLayer(
        index=index,
        kind=kind,
        num_heads=num_heads,
        num_key_value_heads=num_kv,
        head_dim=head_dim,
        prefix=prefix,
        v_weight=f"{v_proj}.weight",
        o_weight=o_weight,
        v_bias=f"{v_proj}.bias" if f"{v_proj}.bias" in checkpoint else None,
        v_first=q_rows + v_rows if family.qkv_proj else 0,
        gated=family.gated,
        softmax=_softmax(checkpoint, config, prefix),
        reason="" if kind == "full_attention" else _unpacked(kind),
        storage=next(x for x in ("packed", "scaled", "plain") if x in kinds),
        stored=tuple(
            name for x in modules for name in stored_tensors(checkpoint, x) if name != f"{prefix}.{family.o_proj}.bias"
        ),
    )


def _weights(checkpoint: Checkpoint, layers: tuple[AttentionLayer, ...]) -> tuple[str, str]:
    """How W_V and W_O of packed layers are stored, and what a fold makes of them."""
    packed = [layer for layer in layers if layer.compiled]
    method, kinds = quant_method(checkpoint), {layer.storage for layer in packed}
    if "packed" in kinds:
        return str(method), "an overlay, because these weights cannot be folded: values are rotated online"
    if "scaled" in kinds:
        dense = str(dense_dtype(checkpoint.config)).removeprefix("torch.")
        return str(method), f"W_V and W_O are folded and stored in {dense}, all else stays as it is"
    dtypes = {checkpoint.entries[layer.v_weight].dtype for layer in packed}
    plain = " and ".join(sorted(str(DTYPES[dtype]).removeprefix("torch.") for dtype in dtypes))
    return f"{method}, with W_V and W_O in {plain}" if method else plain, "W_V and W_O are folded as they are"


def _softmax(checkpoint: Checkpoint, config: dict[str, Any], prefix: str) -> str:
    """What makes the attention of this model no plain softmax."""
    if config.get("attn_logit_softcapping") is not None:
        return "soft-capped logits"
    return "attention sinks" if f"{prefix}.self_attn.sinks" in checkpoint else ""


def _unpacked(kind: str) -> str:
    """Why the cache of a layer of this kind is left as it is."""
    name = kind.replace("_", " ")
    if kind in ("sliding_attention", "chunked_attention"):
        return f"{name}: its cache is bounded by the window already"
    return f"{name}: only full attention is packed"
