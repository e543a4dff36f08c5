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
from kvcompile.export.weights import copy_checkpoint, unfolded_source
from kvcompile.models import take_inventory
from kvcompile.scheme.model import BlockHadamard, Hadamard


class CompressedTensorsTarget:
    """The checkpoint with ``quantization_config.transform_config`` in its config.json: one group per layer and rotation."""

    name: ClassVar[str] = "compressed-tensors"
    summary: ClassVar[str] = (
        "The checkpoint with Hadamard rotations as a transform_config (compressed-tensors, llm-compressor)"
    )

    def refuse(self, artifact: Artifact) -> str | None:
        """Only Hadamard matrices of a power of two are named there, one for all heads of a layer."""
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
        return None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Option `source`: hand over these unfolded weights, with R2 for the library to fold at load."""
        manifest, source = artifact.manifest, unfolded_source(artifact, options.get("source"))
        weights = source or artifact.weights_path
        prefixes = {
            layer.index: layer.v_weight.rsplit(".", 2)[0] for layer in take_inventory(Checkpoint(weights)).layers
        }
        groups: dict[str, Any] = {}
        for layer in manifest.compiled:
            assert layer.key is not None
            assert layer.value is not None
            scheme, module = manifest.scheme.layer(layer.index), prefixes[layer.index]
            if layer.key.rotation is not None:
                places = [(module, "q_attn", False), (module, "k_cache", False)]
                groups[f"R3_{layer.index}"] = _group(_block(scheme.key.rotation, layer), places)
            if layer.value.rotation is not None and (source is not None or layer.value.apply == "online"):
                if reason := _unsayable("value", layer.value, scheme.value.rotation, layer):
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
        copy_checkpoint(weights, folder, {"quantization_config": config})
        return Notes(
            carried=tuple(_carried(artifact, source is not None)),
            approximated=(),
            refused=left_out(manifest, "key rotation"),
            lines=(
                "The library applies the config with `apply_transform_config(model, TransformConfig(**...))`; logits",
                "stay those of the unquantized model. transformers alone loads the weights and ignores `transform_config`.",
                "There is no `kv_cache_scheme`: it takes 8-bit floats only, and 2 or 4 bits there would be misread.",
            ),
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


def _block(rotation: Any, layer: LayerRecord) -> int:
    return min(rotation.block_size, layer.head_dim) if isinstance(rotation, BlockHadamard) else layer.head_dim


def _group(block: int, places: list[tuple[str, str, bool]]) -> dict[str, Any]:
    """A TransformScheme; unknown fields are refused there, so there are no others."""
    apply = [
        {"targets": [f"re:^{module.replace('.', chr(92) + '.')}$"], "location": where, "inverse": inverse, "ignore": []}
        for module, where, inverse in places
    ]
    return {"type": "hadamard", "head_dim": block, "randomize": False, "requires_grad": False, "apply": apply}


def _carried(artifact: Artifact, unfolded: bool) -> list[str]:
    found = []
    if _rotates(artifact, "key"):
        found.append("key rotation: R3, online on queries and keys, one group per layer")
    if _rotates(artifact, "value"):
        folded = not unfolded and all(x.value is None or x.value.apply == "folded" for x in artifact.manifest.compiled)
        how = "in the weights; R2 is not listed, because the library would fold it once more"
        found.append(
            f"value rotation: {how if folded else 'R2, which the library folds into v_proj and o_proj at load'}"
        )
    return found
