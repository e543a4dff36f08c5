"""Targets by name, and the one way in which an export is written: into a temporary sibling, then renamed."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from kvcompile.artifact import Artifact, open_artifact
from kvcompile.errors import ExportError
from kvcompile.export.target import Notes, Options, Target
from kvcompile.export.weights import handed_over
from kvcompile.version import __version__

NOTES_NAME = "NOTES.md"


@dataclass(frozen=True)
class Entry:
    """Where a target's class is (``module:class``), imported only when it is used, and the options it takes.

    `source` says whether it can hand over the unfolded source of a folded artifact, with online value rotations.
    """

    home: str
    options: Mapping[str, str] = field(default_factory=dict)
    source: bool = False


TARGETS: dict[str, Entry] = {
    "plain": Entry("kvcompile.export.plain:PlainTarget"),
    "transformers": Entry("kvcompile.export.tagged:TransformersTarget"),
    "gguf": Entry("kvcompile.export.gguf_sidecar:GgufTarget", source=True),
    "compressed-tensors": Entry("kvcompile.export.compressed_tensors_config:CompressedTensorsTarget", source=True),
    "sglang": Entry(
        "kvcompile.export.sglang:SglangTarget",
        {
            "format_version": "1 (one rotation per layer) or 2 (per KV head); default: 1 where that is enough",
            "text": "a text file, or 'bundled': measure what the view costs",
        },
        source=True,
    ),
    "onnx": Entry("kvcompile.export.onnx:OnnxTarget"),
}


def load_target(name: str) -> Target:
    """The target of this name; raises ExportError for an unknown one."""
    if name not in TARGETS:
        raise ExportError(f"unknown export target '{name}'; there are {', '.join(TARGETS)}")
    module, _, attribute = TARGETS[name].home.partition(":")
    target: Target = getattr(import_module(module), attribute)()
    return target


def export(
    out: str | Path,
    target: str,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    options: Options | None = None,
) -> Notes:
    """Write the artifact `out` as `target` wants it into the new directory `folder`; what the view carries and what not.

    `source` says where an overlay's weights are; targets that hand over unfolded weights take it for a folded artifact too.
    `options` are the target's own (`kvcompile export --list`). Everything is written beside `folder` first, then renamed.
    Raises ExportError where the target refuses the artifact, for an unknown option, and for a folder that exists.
    """
    view, folder, options = load_target(target), Path(folder).absolute(), dict(options or {})
    entry = TARGETS[target]
    if unknown := sorted(set(options) - set(entry.options)):
        takes = f"it takes {', '.join(entry.options)}" if entry.options else "it takes none"
        raise ExportError(f"export to {target} has no option '{unknown[0]}'; {takes}")
    if folder.exists() or folder.is_symlink():
        raise ExportError(f"{folder} already exists; choose another path for the export")
    artifact = open_artifact(out, source)
    if source is not None and not entry.source and artifact.manifest.weights.mode == "fold":
        raise ExportError(f"export to {target} hands over the artifact's own weights; leave out --source")
    if reason := view.refuse(artifact):
        raise ExportError(f"{out} cannot be exported to {target}: {reason}")
    artifact.check_projections()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ExportError(f"cannot write beside {folder}: {error.strerror}") from error
    try:
        notes = view.write(artifact, staging, {**options, "source": source})
        (staging / NOTES_NAME).write_text(notes.markdown(_head(artifact, view, notes)), "utf-8")
        staging.chmod(0o755)
        staging.rename(folder)
    except OSError as error:
        raise ExportError(f"cannot write {folder}: {error.strerror or error}; nothing was left there") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return notes


def _head(artifact: Artifact, view: Target, notes: Notes) -> str:
    """What the export is of, with the digests that tell whether weights and view belong together."""
    manifest, weights = artifact.manifest, notes.weights or handed_over(artifact)
    lines = [
        f"# {manifest.source.name} ({manifest.scheme.name}) for {view.name}",
        "",
        f"{view.summary}. Written by kvcompile {__version__}. This is a view: `kvcompile.json` of the artifact is the truth.",
        "",
        f"- source: {manifest.source.name} ({manifest.source.architecture})",
        f"- sidecar of the artifact: sha256 {manifest.sidecar.sha256}",
        f"- weights that this view belongs to: {weights.describe()}",
        *(f"  - {name}: sha256 {digest}" for name, digest in sorted(weights.files.items())),
    ]
    return "\n".join(lines)
