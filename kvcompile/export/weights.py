"""The weights that an export hands over: the artifact's own files, or those of its unfolded source."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvcompile.artifact import Artifact
from kvcompile.checkpoint import OUR_TAG, Checkpoint, copy_companions, file_digest, quant_method
from kvcompile.errors import ExportError
from kvcompile.export.source import check_source

Side = Literal["none", "folded", "online"]
"""Who rotates the values of a layer: nobody, the weights, or the engine."""

_WORDS: dict[Side, str] = {
    "none": "the source's own, values are not rotated",
    "folded": "value rotations folded into W_V and W_O (an engine must not rotate values again)",
    "online": "value rotations online (the weights know nothing of them)",
}


@dataclass(frozen=True)
class HandedOver:
    """Weights that a view belongs to: where they are, sha256 by file, and who rotates values, by compiled layer."""

    path: Path
    files: Mapping[str, str]
    sides: Mapping[int, Side]

    def online(self, layer: int) -> bool:
        """Whether the engine has to rotate the values of this layer."""
        return self.sides[layer] == "online"

    @property
    def side(self) -> Side | Literal["mixed"]:
        """Who rotates values, where it is the same in all compiled layers."""
        first, *others = set(self.sides.values()) or {"none"}
        return "mixed" if others else first

    def describe(self, words: Mapping[Side, str] = _WORDS) -> str:
        """Who rotates values, in `words`, with the layers where they differ."""
        if self.side != "mixed":
            return words[self.side]
        parts = []
        for side in ("folded", "online", "none"):
            if layers := [str(index) for index, found in self.sides.items() if found == side]:
                parts.append(f"{words[side]} in {'layer' if len(layers) == 1 else 'layers'} {', '.join(layers)}")
        return "; ".join(parts)


def handed_over(artifact: Artifact, source: str | Path | None = None) -> HandedOver:
    """The artifact's own weights (an overlay's are unfolded), or `source`, checked to be what the artifact was made from."""
    weights, rows = artifact.manifest.weights, {x.index: x.value for x in artifact.manifest.compiled if x.value}
    if source is None or weights.mode == "overlay":
        own: dict[int, Side] = {i: row.apply if row.rotation else "none" for i, row in rows.items()}
        return HandedOver(artifact.weights_path, weights.files, own)
    check_source(artifact, Path(source))
    files = {shard.name: file_digest(shard) for shard in Checkpoint(source).shards}
    return HandedOver(Path(source), files, {i: "online" if row.rotation else "none" for i, row in rows.items()})


def copy_checkpoint(path: Path, folder: Path, config_changes: Mapping[str, Any] | None = None) -> None:
    """Copy shards, index, config and tokenizer of the checkpoint at `path`; top-level fields of config.json may be changed.

    A copy does not keep our tag, which only an artifact may have, unless the changes bring it. Raises ExportError where a
    change would hide how weights are quantized.
    """
    checkpoint, changes = Checkpoint(path), dict(config_changes or {})
    method = quant_method(checkpoint)
    if method is not None and "quantization_config" in changes:
        raise ExportError(
            f"the weights in {path} are quantized ({method}), and config.json has room for one quantization_config; "
            "convert and export the unquantized checkpoint"
        )
    for shard in checkpoint.shards:
        shutil.copyfile(shard, folder / shard.name)
    copy_companions(checkpoint, folder)
    config = dict(checkpoint.config)
    if (config.get("quantization_config") or {}).get("quant_method") == OUR_TAG:
        del config["quantization_config"]
    config |= changes
    if config != checkpoint.config:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
