"""Target `plain`: the folded checkpoint alone, for engines with a KV cache of their own."""

from pathlib import Path
from typing import ClassVar

from kvcompile.artifact import Artifact, Manifest
from kvcompile.export.target import Notes, Options
from kvcompile.export.weights import Side, copy_checkpoint, handed_over

ENGINES = """\
The folder is an ordinary Hugging Face checkpoint. Each engine quantizes its cache by its own rules:

| engine | how it reads this | its own KV-cache quantization |
|---|---|---|
| llama.cpp | `convert_hf_to_gguf.py .` | `-fa on -ctk q8_0 -ctv q4_0`, after a Hadamard transform of its own |
| exllamav3 | `convert.py -i . -o out -w work -b BITS`, or unquantized | cache of 2 to 8 bits, without calibration |
| TensorRT-LLM | `trtllm-serve .` | `kv_cache_config: {dtype: fp8}` in its options file |
| LMDeploy | `lmdeploy serve api_server .` | `--quant-policy 4`, `8` or `42` |

None of them takes rotations from outside: the rotation of values is in the weights and works there, that of keys is lost."""


class PlainTarget:
    """The artifact's weights, config and tokenizer, and nothing that knows of kvcompile."""

    name: ClassVar[str] = "plain"
    summary: ClassVar[str] = "The folded checkpoint alone, for llama.cpp, exllamav3, TensorRT-LLM, LMDeploy and others"

    def refuse(self, artifact: Artifact) -> str | None:
        """An overlay has no weights of its own, and without folded values there is nothing to hand over."""
        manifest = artifact.manifest
        if manifest.weights.mode == "overlay":
            return f"it is an overlay, its weights are the source's own; give the engine {artifact.weights_path} itself"
        if not any(layer.value and layer.value.apply == "folded" for layer in manifest.compiled):
            return f"scheme {manifest.scheme.name} folds nothing into the weights; give the engine the source itself"
        return None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Copy the checkpoint."""
        copy_checkpoint(artifact.weights_path, folder)
        weights = handed_over(artifact)
        words: dict[Side, str] = {"folded": "folded into W_V and W_O", "online": "left out", "none": "there is none"}
        return Notes(
            carried=(
                f"value rotation: {weights.describe(words)}; the model computes what its source computes",
                "weights, config and tokenizer: byte for byte those of the artifact",
            ),
            approximated=(),
            refused=left_out(artifact.manifest),
            weights=weights,
            lines=tuple(ENGINES.splitlines()),
        )


def left_out(manifest: Manifest, *kept: str) -> tuple[str, ...]:
    """What a view that knows nothing of our cache leaves out of it, except `kept`: none of it changes unquantized outputs."""
    halves = [(half, row) for x in manifest.compiled for half, row in (("key", x.key), ("value", x.value)) if row]
    parts = {
        "key rotation": any(half == "key" and row.rotation for half, row in halves),
        "value rotation": any(half == "value" and row.rotation and row.apply == "online" for half, row in halves),
        "clip": any(row.clip_ratio < 1 for _, row in halves),
        "means": any(row.mean for _, row in halves),
        "key norms": any(row.token_scale != "none" for _, row in halves),
        "centroids": any(row.centroids for _, row in halves),
        "error feedback": any(row.feedback for _, row in halves),
        "linear correction": any(x.correction for x in manifest.compiled),
        "codes and windows": True,
    }
    why = "the engine has a cache of its own"
    return tuple(f"{name}: {why}" for name, there in parts.items() if there and name not in kept)
