"""The weights that an export hands over: the artifact's own files, or those of its unfolded source."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcompile.artifact import Artifact
from kvcompile.checkpoint import Checkpoint, copy_companions, quant_method
from kvcompile.errors import ExportError, VerificationError
from kvcompile.models import take_inventory
from kvcompile.models.agreement import check_projections, projections


def copy_checkpoint(path: Path, folder: Path, config_changes: Mapping[str, Any] | None = None) -> None:
    """Copy shards, index, config and tokenizer of the checkpoint at `path`; top-level fields of config.json may be changed.

    Raises ExportError where a change would hide how weights are quantized.
    """
    checkpoint = Checkpoint(path)
    method = quant_method(checkpoint)
    if method is not None and "quantization_config" in (config_changes or {}):
        raise ExportError(
            f"the weights in {path} are quantized ({method}), and config.json has room for one quantization_config; "
            "convert and export the unquantized checkpoint"
        )
    for shard in checkpoint.shards:
        shutil.copyfile(shard, folder / shard.name)
    copy_companions(checkpoint, folder)
    if config_changes:
        config = checkpoint.config | dict(config_changes)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def unfolded_source(artifact: Artifact, source: str | Path | None) -> Path | None:
    """The checkpoint whose values are not rotated, checked to be this artifact's: an overlay's own, or `source`; None without.

    Raises ExportError when `source` is another model than the one that was converted.
    """
    if artifact.manifest.weights.mode == "overlay":
        return artifact.weights_path
    if source is None:
        return None
    original, converted = Checkpoint(source), Checkpoint(artifact.weights_path)
    compiled = {layer.index for layer in artifact.manifest.compiled}
    for layer in take_inventory(original).compiled:
        if layer.index not in compiled:
            continue
        try:
            check_projections(layer, projections(original, layer), projections(converted, layer))
        except (VerificationError, KeyError, RuntimeError) as error:
            raise ExportError(
                f"{source} is not the checkpoint that {artifact.directory} was made from: its value projections in layer "
                f"{layer.index} compute something else; give the source"
            ) from error
    return Path(source)
