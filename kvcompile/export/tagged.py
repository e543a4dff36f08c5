"""Target `transformers`: the artifact with the opt-in tag, so that `from_pretrained` sets up cache and attention by itself."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

from kvcompile.artifact import MANIFEST_NAME, SIDECAR_NAME, Artifact
from kvcompile.export.target import Notes, Options
from kvcompile.export.weights import copy_checkpoint

TAG = {"quant_method": "kvcompile"}


class TransformersTarget:
    """A copy of the artifact whose config.json has ``quantization_config``; still an artifact."""

    name: ClassVar[str] = "transformers"
    summary: ClassVar[str] = (
        "The artifact, tagged so that AutoModelForCausalLM.from_pretrained sets up its packed cache"
    )

    def refuse(self, artifact: Artifact) -> str | None:
        """Weights and sidecar must travel together."""
        if artifact.manifest.weights.mode == "overlay":
            return "it is an overlay, whose weights lie elsewhere; convert with --weights fold"
        return None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Copy everything and add the tag."""
        copy_checkpoint(artifact.weights_path, folder, {"quantization_config": TAG})
        for name in (MANIFEST_NAME, SIDECAR_NAME, "README.md", "report.html"):
            if (artifact.directory / name).is_file():
                shutil.copyfile(artifact.directory / name, folder / name)
        return Notes(
            carried=(
                "everything: scheme, rotations, clip, codes, windows and corrections, through kvcompile's own runtime",
            ),
            approximated=(),
            lines=(
                "```python",
                "import kvcompile  # makes the method known to transformers",
                "from transformers import AutoModelForCausalLM",
                "",
                'model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")',
                "```",
                "",
                f"Engines that know the tag `{json.dumps(TAG)}` no better (vLLM is one) refuse the model; transformers",
                "without kvcompile warns and loads the plain weights. The untagged artifact is the one for them.",
            ),
        )
