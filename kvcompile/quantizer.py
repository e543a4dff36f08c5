"""Opt-in: a checkpoint tagged ``quantization_config: {"quant_method": "kvcompile"}`` sets up its cache and attention by itself.

Importing this module registers the method with transformers; `import kvcompile` sees to that. It happens while transformers is
being imported, so this module imports nothing heavy. The tag is written by `kvcompile export --to transformers`.
"""

from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "kvcompile"


class KvCompileConfig(QuantizationConfigMixin):
    """The tag: it says nothing but the method; `kvcompile.json` beside the weights is the truth."""

    def __init__(self, **kwargs: Any):
        self.quant_method: Any = METHOD


class KvCompileQuantizer(HfQuantizer):
    """Leaves weights alone; after loading, attention and caches are those of the artifact that the weights lie in.

    Raises ArtifactError where manifest and sidecar are missing or do not belong to the weights.
    """

    requires_calibration = True
    directory: Path | None = None

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        files = [checkpoint_files] if isinstance(checkpoint_files, str) else checkpoint_files
        self.directory = Path(files[0]).parent if files else None
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from kvcompile.runtime.cache import ATTENTION
        from kvcompile.runtime.load import attach
        from kvcompile.runtime.norms import fuse_norms

        artifact = open_tagged(model, self.directory)
        model.set_attn_implementation(ATTENTION)
        attach(model, artifact)
        if model.device.type == "cuda":
            fuse_norms(model)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Saving would leave manifest and sidecar behind: copy the directory instead."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Weights are plain, but the sidecar belongs to them as they are."""
        return False


def open_tagged(model: Any, directory: Path | None) -> Any:
    """The artifact that a model was loaded from; on the Hub, manifest and sidecar are fetched at the revision of the weights."""
    from kvcompile.artifact import MANIFEST_NAME, SIDECAR_NAME, open_artifact
    from kvcompile.errors import ArtifactError

    name = str(model.config.name_or_path)
    if directory is None:
        raise ArtifactError(
            f"{name} is tagged '{METHOD}', but its weights were not loaded from files; use kvcompile.load"
        )
    if not Path(name).is_dir():
        for file in (MANIFEST_NAME, SIDECAR_NAME):
            try:
                found = cached_file(name, file, _commit_hash=getattr(model.config, "_commit_hash", None))
            except OSError as error:
                raise ArtifactError(f"{name} is tagged '{METHOD}', but {file} cannot be fetched from it") from error
            directory = Path(str(found)).parent
    artifact = open_artifact(directory, source=directory)
    artifact.check_projections()
    return artifact


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(KvCompileConfig)
    register_quantizer(METHOD)(KvCompileQuantizer)
