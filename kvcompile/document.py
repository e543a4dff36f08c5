"""JSON and TOML that strangers have written, bounded before anybody walks them: in bytes, and in depth."""

import json
import tomllib
from pathlib import Path
from typing import Any

LARGEST = 100 << 20
"""Bytes of a JSON document; safetensors allows its headers as many."""
LARGEST_TOML = 64 << 10
DEEPEST = 64
"""Levels of nesting; whatever walks a document may recurse so far."""
_MOST_DOTS = 100
"""Dots in one line of TOML: tomllib takes time with the square of the parts of a key."""


def read_json(path: Path) -> Any:
    """The JSON in a file; raises OSError when it cannot be read, ValueError when it is not JSON, too large or too deep."""
    return parse_json(_read(path, LARGEST))


def parse_json(text: str | bytes) -> Any:
    """The JSON in a text; raises ValueError when it is none, or too deep."""
    try:
        return _shallow(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml_text(path: Path) -> str:
    """The text of a TOML file; raises OSError when it cannot be read, ValueError when it is no text, or too large."""
    return _read(path, LARGEST_TOML)


def parse_toml(text: str) -> dict[str, Any]:
    """The TOML in a text; raises ValueError when it is none, or too deep."""
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    try:
        document: dict[str, Any] = _shallow(tomllib.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return document


def _read(path: Path, largest: int) -> str:
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    if path.stat().st_size > largest:
        raise ValueError(f"it is larger than {largest >> 10} KiB")
    return path.read_text("utf-8")


def _shallow(document: Any) -> Any:
    """The document, if it is nested no deeper than is allowed; raises ValueError otherwise."""
    level = [document]
    for _ in range(DEEPEST):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list)))
        level = [child for part in parts for child in part if isinstance(child, (dict, list))]
        if not level:
            return document
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")
