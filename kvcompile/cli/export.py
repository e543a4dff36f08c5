"""`kvcompile export`."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvcompile.export import TARGETS, Notes, export, load_target


@click.command("export")
@click.argument("artifact", type=click.Path(path_type=Path), required=False)
@click.option("--to", "target", metavar="TARGET", help="Whom to write for; see --list.")
@click.option("-o", "--out", "folder", type=click.Path(path_type=Path), help="Directory to create.")
@click.option("--source", type=click.Path(path_type=Path),
              help="The unconverted checkpoint: hand that over, with online value rotations.")  # fmt: skip
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the target; repeatable.")
@click.option("--list", "listing", is_flag=True, help="List the targets with their options.")
def export_command(
    artifact: Path | None,
    target: str | None,
    folder: Path | None,
    source: Path | None,
    options: tuple[str, ...],
    listing: bool,
) -> None:
    """Write ARTIFACT as other software wants it, with notes of what that view cannot carry.

    \b
    Example:
      kvcompile export --list
      kvcompile export out/ --to plain -o plain/
    """
    if listing:
        _list()
        return
    if artifact is None or target is None or folder is None:
        raise click.UsageError("give ARTIFACT, --to TARGET and -o DIR, or --list")
    given = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise click.UsageError(f"--option {option}: expected NAME=VALUE")
        given[name] = value
    notes = export(artifact, target, folder, source=source, options=given)
    _say(notes)
    click.echo(f"wrote {folder}; NOTES.md there says the same, and how to use it")


def _say(notes: Notes) -> None:
    for title, entries in (
        ("carried", notes.carried),
        ("approximated", notes.approximated),
        ("left out", notes.refused),
    ):
        for entry in entries:
            click.echo(f"{title}: {entry}")


def _list() -> None:
    table = Table("target", "what it is", "--source", "--option")
    for name, entry in TARGETS.items():
        options = "\n".join(f"{option}: {meaning}" for option, meaning in entry.options.items())
        table.add_row(name, load_target(name).summary, "taken" if entry.source else "", options)
    Console().print(table)
