"""Target `gguf`: the rotations that are applied online, as a GGUF file beside a converted model.

ggml's ``mul_mat(W, x)`` gives ``x Wᵀ`` for row vectors, so matrices are stored transposed: ``mul_mat(rot, x)`` is ``x R``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvcompile.artifact import Artifact, LayerRecord
from kvcompile.errors import ExportError
from kvcompile.export.plain import left_out
from kvcompile.export.target import Notes, Options
from kvcompile.export.weights import HandedOver, Side, handed_over
from kvcompile.version import __version__

FILE = "rotations.gguf"
CHANNELS = {"llama": "interleaved", "mistral": "interleaved", "qwen2": "half", "qwen3": "half"}
"""How llama.cpp orders the channels of keys under RoPE: as Hugging Face does, or each channel beside its partner."""

_SCALARS = ("bits", "group_size", "axis", "zero_point", "rounding", "token_scale", "norm_scope", "num_centroids")
"""Fields of a `RowRecord`, clip_ratio apart, that are written by layer."""


class GgufTarget:
    """``blk.{i}.attn_{k,v}_rot.weight``, float32 ``[D, D]`` or ``[K, D, D]``, transposed, and what else a reader needs to know.

    Value rotations are written only where the weights do not have them.
    """

    name: ClassVar[str] = "gguf"
    summary: ClassVar[str] = (
        "A GGUF sidecar with the online rotations, for llama.cpp or ggml code that wants to apply them"
    )

    def refuse(self, artifact: Artifact) -> str | None:
        """Orthogonal matrices of families whose channel order in llama.cpp is known."""
        manifest = artifact.manifest
        if manifest.source.model_type not in CHANNELS:
            known = ", ".join(sorted(CHANNELS))
            return (
                f"how llama.cpp orders the channels of {manifest.source.model_type} is not known here (known: {known})"
            )
        for layer in manifest.compiled:
            for half, row in (("key", layer.key), ("value", layer.value)):
                if row is not None and row.inverse is not None and row.apply == "online":
                    return f"layer {layer.index}: {half} rotations are balanced, and a reader would undo them by the transpose"
        if not any(row and row.rotation for layer in manifest.compiled for row in (layer.key, layer.value)):
            return f"scheme {manifest.scheme.name} rotates nothing"
        return None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Option `source`: for these unfolded weights, value rotations included."""
        manifest, weights = artifact.manifest, handed_over(artifact, options["source"])
        matrices: dict[str, Tensor] = {}
        for layer in manifest.compiled:
            matrices |= _matrices(artifact, layer, weights)
        if not matrices:
            raise ExportError(
                "no rotation is applied online, the folded weights are all there is; use --to plain, or --source to hand over "
                "the unfolded ones"
            )
        _write(artifact, folder / FILE, matrices, weights)
        order, keys = CHANNELS[manifest.source.model_type], any(".attn_k_rot" in name for name in matrices)
        key = f"blk.{{i}}.attn_k_rot.weight, float32, transposed, rows in llama.cpp's {order} channel order"
        return Notes(
            carried=(
                f"key rotation: {key if keys else 'there is none'}",
                f"value rotation: {weights.describe(_VALUES)}",
            ),
            approximated=(),
            refused=left_out(manifest, "key rotation", "value rotation"),
            lines=(
                f"`{FILE}` belongs to a GGUF conversion of {weights.path.resolve()}.",
                "llama.cpp itself does not read it: it quantizes its cache after a Hadamard transform of its own.",
                "`ggml_mul_mat(ctx, rot, x)` rotates; queries and keys take attn_k_rot after RoPE, values attn_v_rot, and the "
                "attention output its transpose.",
                "The `kvcompile.*` fields have the scalars of the cache's format by layer, in the words of docs/manifest.md, for "
                "a reader to know what was left out; its tensors other than rotations are not in the file.",
            ),
            weights=weights,
        )


_VALUES: Mapping[Side, str] = {
    "folded": "folded into the weights; no tensor, so that nothing is rotated twice",
    "online": "blk.{i}.attn_v_rot.weight, for unfolded weights",
    "none": "there is none",
}


def _matrices(artifact: Artifact, layer: LayerRecord, weights: HandedOver) -> dict[str, Tensor]:
    """The transposed matrices of a layer that an engine has to apply, by their GGUF names."""
    assert layer.key is not None
    assert layer.value is not None
    found: dict[str, Tensor] = {}
    if (r_KDD := artifact.tensor(layer.key.rotation)) is not None:
        if CHANNELS[artifact.manifest.source.model_type] == "interleaved":
            r_KDD = r_KDD.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # row 2j + s is row j + s D/2
        found[f"blk.{layer.index}.attn_k_rot.weight"] = r_KDD
    r_KDD = artifact.tensor(layer.value.rotation)
    if r_KDD is not None and weights.online(layer.index):
        if layer.value.inverse is not None:
            raise ExportError(
                f"layer {layer.index}: value rotations are balanced, and a reader would undo them by the transpose; export "
                "the folded weights, without --source"
            )
        found[f"blk.{layer.index}.attn_v_rot.weight"] = r_KDD
    shared = {name: bool((r == r[:1]).all()) for name, r in found.items()}
    return {name: (r[0] if shared[name] else r).mT.float().contiguous() for name, r in found.items()}


def _write(artifact: Artifact, path: Path, matrices: dict[str, Tensor], weights: HandedOver) -> None:
    try:
        from gguf import GGUFValueType, GGUFWriter
    except ImportError as error:
        raise ExportError("export to gguf needs the gguf package: pip install 'kvcompile[gguf]'") from error
    manifest = artifact.manifest
    writer = GGUFWriter(path, manifest.source.model_type)
    writer.add_type("kv-rotation")
    writer.add_name(f"{manifest.source.name} {manifest.scheme.name}")
    writer.add_string("kvcompile.version", __version__)
    writer.add_string("kvcompile.scheme", manifest.scheme.name)
    writer.add_string("kvcompile.v_rotation", weights.side)
    writer.add_string("kvcompile.key_channels", CHANNELS[manifest.source.model_type])
    writer.add_string("kvcompile.sidecar.sha256", manifest.sidecar.sha256)
    writer.add_array("kvcompile.weights.sha256", [f"{name} {sha}" for name, sha in sorted(weights.files.items())])
    writer.add_array("kvcompile.layers", [layer.index for layer in manifest.compiled])
    writer.add_array("kvcompile.value.side", [weights.sides[layer.index] for layer in manifest.compiled])
    for half in ("key", "value"):
        rows = [getattr(layer, half) for layer in manifest.compiled]
        ratios = [row.clip_ratio for row in rows]  # in full, for int(ratio * D) to be ours
        writer.add_key_value(f"kvcompile.{half}.clip_ratio", ratios, GGUFValueType.ARRAY, GGUFValueType.FLOAT64)
        for name in _SCALARS:
            writer.add_array(f"kvcompile.{half}.{name}", [getattr(row, name) for row in rows])
    windows = [manifest.scheme.layer(layer.index).window for layer in manifest.compiled]
    for name in ("sink", "recent", "block"):
        writer.add_array(f"kvcompile.window.{name}", [getattr(window, name) for window in windows])
    for name, matrix in matrices.items():
        writer.add_tensor(name, matrix.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
