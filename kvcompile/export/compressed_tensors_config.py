"""Target `compressed-tensors`: Hadamard rotations as the `transform_config` of that library and of llm-compressor.

R2 turns values (v_proj, o_proj) and is fused into weights at load; R3 turns queries and keys after RoPE, online. A config has
one matrix per group and no place for codes: `kv_cache_scheme` takes 8-bit floats only, so it is never written.
"""

from pathlib import Path
from typing import Any, ClassVar

from kvcompile.artifact import Artifact, LayerRecord, RowRecord
from kvcompile.checkpoint import Checkpoint
from kvcompile.errors import ExportError
from kvcompile.export.plain import left_out
from kvcompile.export.target import Notes, Options
from kvcompile.export.weights import HandedOver, Side, copy_checkpoint, handed_over
from kvcompile.models import AttentionLayer, take_inventory
from kvcompile.scheme.model import BlockHadamard, Hadamard

VERIFIED = frozenset({
    "gemma", "glm4", "granite", "llama", "mistral", "olmo2", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
    "starcoder2",
})  # fmt: skip
"""The `model_type` of families whose logits a test compares after that library applied a config: dense text models."""
MODULE = "model.layers.{}.self_attn"
"""Where transformers keeps the attention of these families, whatever a checkpoint calls it."""


class CompressedTensorsTarget:
    """The checkpoint with ``quantization_config.transform_config`` in its config.json: one group per layer and rotation."""

    name: ClassVar[str] = "compressed-tensors"
    summary: ClassVar[str] = (
        "The checkpoint with Hadamard rotations as a transform_config (compressed-tensors, llm-compressor)"
    )

    def refuse(self, artifact: Artifact) -> str | None:
        """Only Hadamard matrices of a power of two are named there, one for all heads of a layer, for keys in every layer."""
        if artifact.manifest.source.model_type not in VERIFIED:
            return f"what that library makes of {artifact.manifest.source.model_type} is not verified here"
        if artifact.manifest.imported_rotations is not None:
            return "its rotations were imported, there only Hadamard has a name"
        for layer in artifact.manifest.compiled:
            scheme = artifact.manifest.scheme.layer(layer.index)
            halves = [("key", layer.key, scheme.key.rotation)]
            if layer.value is not None and layer.value.apply == "online":
                halves.append(("value", layer.value, scheme.value.rotation))
            for half, row, rotation in halves:
                if reason := _unsayable(half, row, rotation, layer):
                    return f"layer {layer.index}: {reason}"
        if not _rotates(artifact, "key") and not _rotates(artifact, "value"):
            return f"scheme {artifact.manifest.scheme.name} rotates nothing"
        if _rotates(artifact, "key") and not all(x.key and x.key.rotation for x in artifact.manifest.layers):
            return "keys of some layers are not rotated, and that library rotates those of all layers or none"
        return None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Option `source`: hand over these unfolded weights, with R2 for the library to fold at load."""
        manifest, weights = artifact.manifest, handed_over(artifact, options["source"])
        names = {layer.index: layer for layer in take_inventory(Checkpoint(weights.path)).layers}
        groups: dict[str, Any] = {}
        for layer in manifest.compiled:
            assert layer.key is not None
            assert layer.value is not None
            scheme, module, layer_names = (
                manifest.scheme.layer(layer.index),
                MODULE.format(layer.index),
                names[layer.index],
            )
            if layer.key.rotation is not None:
                places = [(module, "q_attn", False), (module, "k_cache", False)]
                groups[f"R3_{layer.index}"] = _group(_block(scheme.key.rotation, layer), places)
            if weights.online(layer.index):
                reason = _unsayable("value", layer.value, scheme.value.rotation, layer) or _unnamed(layer_names)
                if reason:
                    raise ExportError(f"layer {layer.index}: {reason}; export the folded weights, without --source")
                places = [(f"{module}.v_proj", "weight_output", False), (f"{module}.o_proj", "weight_input", True)]
                groups[f"R2_{layer.index}"] = _group(_block(scheme.value.rotation, layer), places)
        if not groups:
            raise ExportError(
                "no rotation is applied online, the folded weights are all there is; use --to plain, or --source to hand over "
                "the unfolded ones"
            )
        config = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
            "transform_config": {"config_groups": groups},
        }
        copy_checkpoint(weights.path, folder, {"quantization_config": config})
        return Notes(
            carried=tuple(_carried(artifact, weights)),
            approximated=(),
            refused=left_out(manifest, "key rotation", "value rotation"),
            lines=(
                "The library applies the config with `apply_transform_config(model, TransformConfig(**...))`; logits",
                "stay those of the unquantized model. transformers alone loads the weights and ignores `transform_config`.",
                "There is no `kv_cache_scheme`: it takes 8-bit floats only, and 2 or 4 bits there would be misread.",
            ),
            weights=weights,
        )


def _rotates(artifact: Artifact, half: str) -> bool:
    return any(getattr(layer, half).rotation for layer in artifact.manifest.compiled)


def _unsayable(half: str, row: RowRecord | None, rotation: Any, layer: LayerRecord) -> str | None:
    """Why a half's online rotation cannot be named there."""
    if row is None or row.rotation is None:
        return None
    if not isinstance(rotation, Hadamard | BlockHadamard):
        per = " per KV head" if getattr(rotation, "scope", "layer") == "kv_head" else ""
        return f"its {half} rotations are {rotation.kind} matrices{per}, there only Hadamard has a name"
    block = _block(rotation, layer)
    if block & (block - 1):
        return f"its {half}s need a Hadamard matrix of order {block}, there only powers of two"
    return None


def _unnamed(layer: AttentionLayer) -> str | None:
    """Why R2 cannot be said of a layer: its targets are modules v_proj and o_proj, of values and outputs alone."""
    for weight, wanted in ((layer.v_weight, "v_proj"), (layer.o_weight, "o_proj")):
        if (module := weight.split(".")[-2]) != wanted:
            return f"it has {module} in place of {wanted}, which R2 cannot name"
    return None


def _block(rotation: Any, layer: LayerRecord) -> int:
    return min(rotation.block_size, layer.head_dim) if isinstance(rotation, BlockHadamard) else layer.head_dim


def _group(block: int, places: list[tuple[str, str, bool]]) -> dict[str, Any]:
    """A TransformScheme; unknown fields are refused there, so there are no others."""
    apply = [
        {"targets": [f"re:^{module.replace('.', chr(92) + '.')}$"], "location": where, "inverse": inverse, "ignore": []}
        for module, where, inverse in places
    ]
    return {"type": "hadamard", "head_dim": block, "randomize": False, "requires_grad": False, "apply": apply}


def _carried(artifact: Artifact, weights: HandedOver) -> list[str]:
    found = []
    if _rotates(artifact, "key"):
        found.append("key rotation: R3, online on queries and keys, one group per layer")
    if _rotates(artifact, "value"):
        words: dict[Side, str] = {
            "folded": "in the weights; R2 is not listed, because the library would fold it once more",
            "online": "R2, which the library folds into v_proj and o_proj at load",
            "none": "there is none",
        }
        found.append(f"value rotation: {weights.describe(words)}")
    return found
