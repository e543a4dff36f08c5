"""The target `onnx`: an executable specification of an artifact's layers with a conformance kit; docs/onnx.md describes it."""

from importlib.util import find_spec
from pathlib import Path

from kvcompile.artifact import Artifact
from kvcompile.export.target import Notes, Options


class OnnxTarget:
    """Every operation of the codec on an artifact's layers as ONNX functions, with inputs and the answers of the codec.

    1. What is done to rows, codes, pages and states is carried in full: there is no format of a manifest that it lacks.
    2. Integers that come out are those of the codec; only sums of floats may differ, in their last bits.
    3. One folder of models per geometry; the tensors of its other layers may be fed in place of the initializers.
    """

    name = "onnx"
    summary = "ONNX functions of the codec (domain ai.kvcompile), models per layer geometry, and a conformance kit"

    def refuse(self, artifact: Artifact) -> str | None:
        """Nothing to say without a compiled layer, and nothing to write without the libraries."""
        if not artifact.manifest.compiled:
            return "no layer of it has a compiled cache"
        if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
            return f"{' and '.join(missing)} must be installed for it: pip install 'kvcompile[onnx]'"
        return None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Write models, cases and the runner."""
        from kvcompile.export.onnx.kit import write_kit  # onnx is optional

        stands_for = write_kit(artifact, folder)
        listed = [f"- `{name}`: layers {', '.join(map(str, layers))}" for name, layers in stands_for.items()]
        return Notes(
            carried=(
                "rotations, inverses and means: initializers of the models, named as in the sidecar",
                "codes, metadata, norms, centroids, packing and page bytes: byte for byte those of the codec",
                "error feedback: exact, as a loop over channels",
                "attention over sink, pages and ring: one token per row, grouped queries, to 1e-5 of the codec",
                "linear correction: states and corrected output, where the layer has one",
            ),
            approximated=(
                "order of additions in float32 sums: not part of the format; the cases are drawn so that it decides no byte",
            ),
            refused=(
                "weights, RoPE, QK-norm and logit scaling: the model's own; `scaling` is an input of attention",
                "sizes of the windows: read off the tensors that are fed; the scheme has them in `window`",
                "when a page is written: the engine's choice, docs/manifest.md, Which token is where",
            ),
            lines=(
                "`python run_conformance.py` runs every case with onnxruntime (1.31 or newer). Replace its `answer` to test",
                "another engine. Folders of models stand for these layers:",
                "",
                *listed,
            ),
        )
