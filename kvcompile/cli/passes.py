"""`kvcompile passes`."""

import inspect

import click
from rich.console import Console
from rich.table import Table

from kvcompile.passes.registry import pass_class, pass_names


@click.group("passes")
def passes_command() -> None:
    """List or explain the passes that a conversion is made of.

    \b
    Example:
      kvcompile passes list
      kvcompile passes explain fold
    """


@passes_command.command("list")
def list_command() -> None:
    """All passes, in their usual order."""
    table = Table("pass", "version", "resumable", "what it does")
    for name in pass_names():
        cls = pass_class(name)
        summary = (inspect.getdoc(inspect.getmodule(cls)) or "").splitlines()[0].partition(": ")[2]
        table.add_row(name, str(cls.version), "yes" if cls.stored else "", summary)
    Console().print(table)


@passes_command.command("explain")
@click.argument("name")
def explain_command(name: str) -> None:
    """The rules that a pass follows."""
    cls = pass_class(name)
    click.echo(inspect.getdoc(inspect.getmodule(cls)) or "")
    click.echo()
    click.echo(inspect.getdoc(cls) or "")
