"""Which scheme goes to which target, in Markdown, from what the targets say themselves: `docs/exports.md` holds the result.

python -m kvcompile.export.table examples/checkpoint
"""

import sys
import tempfile
from pathlib import Path

from kvcompile.artifact import open_artifact
from kvcompile.errors import ExportError
from kvcompile.export.registry import TARGETS, export, load_target
from kvcompile.export.target import Notes
from kvcompile.passes.convert import convert
from kvcompile.scheme import builtin_names, load_scheme
from kvcompile.scheme.model import LinearCorrection

TOKENS = 256
"""Enough calibration to know what a scheme writes; the table holds no numbers."""


def support_table(model: str | Path) -> str:
    """Convert `model` with every built-in scheme, export it to every target, and tabulate what each carries or refuses."""
    notes: dict[str, int] = {}

    def mark(text: str) -> str:
        return f"[{notes.setdefault(text, len(notes) + 1)}]"

    lines = ["| scheme | " + " | ".join(f"`{name}`" for name in TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for scheme in builtin_names():
            out = Path(folder) / scheme
            trained = isinstance(load_scheme(scheme).correction, LinearCorrection)
            convert(model, out, scheme, calibration_tokens=TOKENS, overrides=("correction.steps=1",) * trained)
            cells = []
            for target in TARGETS:
                try:
                    reason = load_target(target).refuse(open_artifact(out))
                    said = None if reason else export(out, target, Path(folder) / f"{scheme}.{target}")
                except ExportError as error:  # with other options it may be said
                    reason, said = str(error), None
                if said is None:
                    cells.append(
                        f"refused {mark(str(reason).removeprefix('layer 0: ').replace(f'scheme {scheme}', 'it'))}"
                    )
                else:
                    cells.append(" ".join([_state(said), *(mark(text) for text in _short_of(said))]))
            lines.append(f"| `{scheme}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {text}" for text, number in notes.items())]) + "\n"


def _state(notes: Notes) -> str:
    return "approximated" if notes.approximated else "carried"


def _short_of(notes: Notes) -> list[str]:
    """What is approximated and what is left out, without the details behind the colons."""
    found = []
    for word, entries in (("approximated", notes.approximated), ("left out", notes.refused)):
        names = [entry.partition(":")[0] for entry in entries if not entry.startswith("cost of all this")]
        found += [f"{word}: {', '.join(names)}"] if names else []
    return found


if __name__ == "__main__":
    print(support_table(sys.argv[1]), end="")
