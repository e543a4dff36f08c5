"""What an export target is: a view of an artifact for other software, which says what it cannot carry or refuses.

The native manifest is the truth. A target refuses an artifact where leaving something out would give wrong results; where it
would only give other quality, the notes say what is approximated or left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvcompile.artifact import Artifact
from kvcompile.export.weights import HandedOver

Options = Mapping[str, Any]
"""What the user says beyond artifact, target and folder; `registry.TARGETS` lists the names that each target takes."""


@dataclass(frozen=True)
class Notes:
    """What a view says about itself: printed, and written to ``NOTES.md`` beside the export.

    An entry of `carried`, `approximated` and `refused` reads ``what: how``; the table in docs/exports.md shows what stands
    before the colon. `refused` is what the view leaves out although the artifact has it. `lines` is free Markdown text.
    `weights` are those that the view belongs to; None stands for the artifact's own.
    """

    carried: tuple[str, ...]
    approximated: tuple[str, ...]
    refused: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    weights: HandedOver | None = None

    def markdown(self, head: str) -> str:
        """The text of ``NOTES.md``; `head` is what stands above."""
        sections = [("Carried", self.carried), ("Approximated", self.approximated), ("Left out", self.refused)]
        parts = [head.rstrip("\n")]
        parts += [
            f"## {title}\n\n" + "\n".join(f"- {entry}" for entry in entries or ("nothing",))
            for title, entries in sections
        ]
        if self.lines:
            parts.append("## Use\n\n" + "\n".join(self.lines))
        return "\n\n".join(parts) + "\n"


class Target(Protocol):
    """Other software that an artifact can be handed to. A target reads the artifact and nothing else."""

    name: str
    summary: str

    def refuse(self, artifact: Artifact) -> str | None:
        """One sentence why this artifact cannot be said there, from its manifest alone; None where it can be."""

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Write the view into `folder`, which exists and is empty; raises a KvCompileError for options that do not fit."""
