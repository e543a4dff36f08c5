"""Finding schemes: built-in TOML files, a user's own file, and `--set` overrides of single fields."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcompile.document import parse_json, parse_toml, read_toml_text
from kvcompile.errors import SchemeError
from kvcompile.scheme.model import Scheme, reset_section

DEFAULT_SCHEME = "kvc-int2"
"""What a conversion uses when no scheme is named: the most accurate one at its bits (docs/schemes.md has the table)."""

_BUILTIN = files("kvcompile.scheme") / "builtin"
_KINDS = ("rotation", "clip", "correction")
"""Sections whose other fields depend on their kind."""
_FIELD = r'(?:"[^"]+"|[^."]+)'


def builtin_names() -> list[str]:
    """Names of the schemes that come with kvcompile, sorted."""
    return sorted(f.name.removesuffix(".toml") for f in _BUILTIN.iterdir() if f.name.endswith(".toml"))


def scheme_text(name_or_path: str) -> str:
    """The TOML text of a built-in scheme or of a file; raises SchemeError when there is neither."""
    if name_or_path in builtin_names():
        return (_BUILTIN / f"{name_or_path}.toml").read_text("utf-8")
    path = Path(name_or_path)
    if not path.is_file():
        raise SchemeError(
            f"unknown scheme '{name_or_path}': it is neither built in ({', '.join(builtin_names())}) nor a TOML file; "
            "see 'kvcompile schemes list'"
        )
    try:
        return read_toml_text(path)
    except (OSError, ValueError) as error:
        raise SchemeError(f"scheme file {path} cannot be read: {error}") from error


def load_scheme(name_or_path: str, overrides: tuple[str, ...] | list[str] = ()) -> Scheme:
    """A validated scheme from a built-in name or a TOML file, with overrides such as ``key.clip.ratio=0.95``.

    Raises SchemeError naming the file and every field that is wrong.
    """
    try:
        document = parse_toml(scheme_text(name_or_path))
    except ValueError as error:
        raise SchemeError(f"scheme file {name_or_path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(document, override)
    return parse_scheme(document, where=name_or_path)


def parse_scheme(document: dict[str, Any], where: str) -> Scheme:
    """Validate a scheme given as plain data; `where` names it in the error."""
    try:
        return Scheme.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(dict.fromkeys(_problem(e) for e in error.errors()))
        raise SchemeError(f"scheme {where} is invalid: {problems}") from error


def _problem(error: Any) -> str:
    """One finding of pydantic, with the field as a scheme file writes it: without kinds and names of types."""
    parts = [str(part) for part in error["loc"]]
    kept = [
        p for p, before in zip(parts, ["", *parts], strict=False) if before not in _KINDS and not re.search(r"[-\[]", p)
    ]
    field = ".".join(kept)
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "union_tag_not_found":
        message = f"say which kind first, with {field}.kind=..."
    return f"{field or 'scheme'}: {message}"


def _apply(document: dict[str, Any], override: str) -> None:
    """Set one dotted field of a scheme document in place."""
    path, separator, text = override.partition("=")
    if not separator or not re.fullmatch(rf"{_FIELD}(\.{_FIELD})*", path):
        raise SchemeError(
            f'--set {override}: expected FIELD=VALUE, for example key.clip.ratio=0.95 or layers."0-1".key.quantizer.bits=4'
        )
    value = _parse_value(text)
    *parents, leaf = (field.strip('"') for field in re.findall(_FIELD, path))
    section = document
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise SchemeError(f"--set {override}: '{parent}' is a value, not a section")
    if leaf == "kind" and section.get("kind") != value:
        replacement = reset_section(section, value)
        section.clear()
        section.update(replacement)
    else:
        section[leaf] = value


def _parse_value(text: str) -> Any:
    """JSON where it is JSON (numbers, true, false), else the text itself."""
    try:
        return parse_json(text)
    except ValueError:
        return text
