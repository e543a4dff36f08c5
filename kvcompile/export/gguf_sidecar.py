"""Target `gguf`: the rotations that are applied online, as a GGUF file beside a converted model.

ggml's ``mul_mat(W, x)`` gives ``x Wᵀ`` for row vectors, so matrices are stored transposed: ``mul_mat(rot, x)`` is ``x R``.
"""

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvcompile.artifact import Artifact, LayerRecord
from kvcompile.errors import ExportError
from kvcompile.export.target import Notes, Options
from kvcompile.export.weights import unfolded_source
from kvcompile.version import __version__

FILE = "rotations.gguf"
CHANNELS = {"llama": "interleaved", "mistral": "interleaved", "qwen2": "half", "qwen3": "half"}
"""How llama.cpp orders the channels of keys under RoPE: as Hugging Face does, or each channel beside its partner."""


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
        manifest, source = artifact.manifest, unfolded_source(artifact, options.get("source"))
        matrices: dict[str, Tensor] = {}
        for layer in manifest.compiled:
            matrices |= _matrices(artifact, layer, source is not None)
        if not matrices:
            raise ExportError(
                "no rotation is applied online, the folded weights are all there is; use --to plain, or --source to hand over "
                "the unfolded ones"
            )
        online = any(".attn_v_rot" in name for name in matrices)
        folded = not online and any(x.value and x.value.rotation for x in manifest.compiled)
        _write(artifact, folder / FILE, matrices, "online" if online else "folded" if folded else "none")
        order = CHANNELS[manifest.source.model_type]
        return Notes(
            carried=(
                f"key rotation: blk.{{i}}.attn_k_rot.weight, float32, transposed, rows in llama.cpp's {order} channel order",
                "value rotation: blk.{i}.attn_v_rot.weight, for unfolded weights" if online
                else "value rotation: folded into the weights; no tensor, so that nothing is rotated twice" if folded
                else "value rotation: there is none",
            ),
            approximated=(),
            refused=(
                "cache: codes, clip, means and windows are described in kvcompile.* fields, but llama.cpp has no such cache",
            ),
            lines=(
                f"`{FILE}` belongs to a GGUF conversion of {(source or artifact.weights_path).resolve()}.",
                "llama.cpp itself does not read it: it quantizes its cache after a Hadamard transform of its own.",
                "`ggml_mul_mat(ctx, rot, x)` rotates; queries and keys take attn_k_rot after RoPE, values attn_v_rot, and the "
                "attention output its transpose.",
            ),
        )  # fmt: skip


def _matrices(artifact: Artifact, layer: LayerRecord, unfolded: bool) -> dict[str, Tensor]:
    """The transposed matrices of a layer that an engine has to apply, by their GGUF names."""
    assert layer.key is not None
    assert layer.value is not None
    found: dict[str, Tensor] = {}
    if (r_KDD := artifact.tensor(layer.key.rotation)) is not None:
        if CHANNELS[artifact.manifest.source.model_type] == "interleaved":
            r_KDD = r_KDD.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # row 2j + s is row j + s D/2
        found[f"blk.{layer.index}.attn_k_rot.weight"] = r_KDD
    r_KDD = artifact.tensor(layer.value.rotation)
    if r_KDD is not None and (unfolded or layer.value.apply == "online"):
        if layer.value.inverse is not None:
            raise ExportError(
                f"layer {layer.index}: value rotations are balanced, and a reader would undo them by the transpose; export "
                "the folded weights, without --source"
            )
        found[f"blk.{layer.index}.attn_v_rot.weight"] = r_KDD
    shared = {name: bool((r == r[:1]).all()) for name, r in found.items()}
    return {name: (r[0] if shared[name] else r).mT.float().contiguous() for name, r in found.items()}


def _write(artifact: Artifact, path: Path, matrices: dict[str, Tensor], v_rotation: str) -> None:
    try:
        from gguf import GGUFWriter
    except ImportError as error:
        raise ExportError("export to gguf needs the gguf package: pip install 'kvcompile[gguf]'") from error
    manifest = artifact.manifest
    writer = GGUFWriter(path, manifest.source.model_type)
    writer.add_type("kv-rotation")
    writer.add_name(f"{manifest.source.name} {manifest.scheme.name}")
    writer.add_string("kvcompile.version", __version__)
    writer.add_string("kvcompile.scheme", manifest.scheme.name)
    writer.add_string("kvcompile.v_rotation", v_rotation)
    writer.add_string("kvcompile.key_channels", CHANNELS[manifest.source.model_type])
    writer.add_string("kvcompile.sidecar.sha256", manifest.sidecar.sha256)
    writer.add_array(
        "kvcompile.weights.sha256", [f"{name} {sha}" for name, sha in sorted(manifest.weights.files.items())]
    )
    writer.add_array("kvcompile.layers", [layer.index for layer in manifest.compiled])
    for half in ("key", "value"):
        rows = [getattr(layer, half) for layer in manifest.compiled]
        writer.add_array(f"kvcompile.{half}.clip_ratio", [row.clip_ratio for row in rows])
        writer.add_array(f"kvcompile.{half}.bits", [row.bits for row in rows])
        writer.add_array(f"kvcompile.{half}.group_size", [row.group_size for row in rows])
    for name, matrix in matrices.items():
        writer.add_tensor(name, matrix.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
