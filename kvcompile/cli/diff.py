"""`kvcompile diff`."""

import json
import sys
from dataclasses import asdict

import click

from kvcompile.errors import KvCompileError
from kvcompile.evaluate.difference import Change, diff


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff_command(a: str, b: str, as_json: bool) -> int:
    """Compare two artifacts, or an artifact with its source; the exit code is 0 where they are the same, 1 where not.

    As with diff(1), 2 says that they could not be compared. What a fold changes without changing what the model computes, and who
    wrote an artifact, is listed but counts as the same.

    \b
    Example:
      kvcompile diff out/ other-out/
      kvcompile diff out/ path/to/model && echo the same model
    """
    try:
        found = diff(a, b)
    except KvCompileError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps({"same": found.same, "changes": [asdict(change) for change in found.changes]}, indent=1))
        return int(not found.same)
    for part in dict.fromkeys(change.part for change in found.changes):
        click.echo(part)
        for change in found.changes:
            if change.part == part:
                click.echo(f"  {_line(change)}")
    counted = sum(not change.expected for change in found.changes)
    expected = len(found.changes) - counted
    said = f" (beside {expected} that are to be expected)" if expected else ""
    click.echo(f"the same{said}" if found.same else f"{counted} differences{said}")
    return int(not found.same)


def _line(change: Change) -> str:
    text = f"{change.what}: {change.a} -> {change.b}" if change.a != change.b else f"{change.what}: {change.b}"
    return text + (" (expected)" if change.expected else "")
