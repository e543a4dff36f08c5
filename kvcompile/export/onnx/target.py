"""Target `onnx`: an executable specification of an artifact's layers with a conformance kit; docs/onnx.md describes it."""

from pathlib import Path
from typing import ClassVar

from kvcompile.artifact import Artifact
from kvcompile.errors import ExportError
from kvcompile.export.target import Notes, Options


class OnnxTarget:
    """Every operation of the codec on an artifact's layers as ONNX functions, with inputs and the answers of the codec.

    1. What is done to rows, codes, pages and states is carried in full: there is no format of a manifest that it lacks.
    2. Integers that come out are those of the codec; only sums of floats may differ, in their last bits.
    3. One folder of models per geometry; the tensors of its other layers may be fed in place of the initializers.
    """

    name: ClassVar[str] = "onnx"
    summary: ClassVar[str] = (
        "ONNX functions of the codec (domain ai.kvcompile), models per layer geometry, and a conformance kit"
    )

    def refuse(self, artifact: Artifact) -> str | None:
        """Nothing: the functions say whatever a manifest can say."""
        return None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Write models, cases and the runner."""
        try:
            from kvcompile.export.onnx.kit import write_kit
        except ImportError as error:
            raise ExportError("export to onnx needs onnx and onnxscript: pip install 'kvcompile[onnx]'") from error
        stands_for = write_kit(artifact, folder)
        listed = [f"- `{name}`: layers {', '.join(map(str, layers))}" for name, layers in stands_for.items()]
        return Notes(
            carried=(
                "rotations, inverses and means: initializers of the models, named as in the sidecar",
                "codes, metadata, norms, centroids, packing and page bytes: byte for byte those of the codec",
                "clip and error feedback: exact",
                "attention: one token per row over sink, pages and ring, grouped queries, to 1e-5 of the codec",
                *_carried(artifact),
            ),
            approximated=(),
            refused=(
                "weights: the model's own, and so are RoPE, QK-norm and the factor of logits (`scaling`, an input)",
                "window sizes: read off the tensors that are fed; the manifest has them in `scheme.window`",
            ),
            lines=(
                "`python run_conformance.py` runs every case with numpy and onnxruntime (1.27 or newer). Replace its `answer`",
                "to test another engine. The folders of models stand for these layers:",
                "",
                *listed,
            ),
        )


def _carried(artifact: Artifact) -> list[str]:
    if any(layer.correction for layer in artifact.manifest.compiled):
        return ["linear correction: its states and the corrected output"]
    return []
