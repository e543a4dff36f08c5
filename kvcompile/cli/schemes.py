"""`kvcompile schemes`."""

import click
from rich.console import Console
from rich.table import Table

from kvcompile.scheme import bits_per_element, builtin_names, load_scheme, scheme_text


@click.group("schemes")
def schemes_command() -> None:
    """List, show or validate schemes.

    \b
    Example:
      kvcompile schemes list
      kvcompile schemes show oscar-int2 > mine.toml
      kvcompile schemes validate mine.toml
    """


@schemes_command.command("list")
def list_command() -> None:
    """The built-in schemes with their bits per element at head_dim 128 and a context of 128k."""
    table = Table("scheme", "bits at 128k", "summary")
    for name in builtin_names():
        scheme = load_scheme(name)
        table.add_row(name, f"{bits_per_element(scheme, 128, 131072):.2f}", scheme.summary)
    Console().print(table)


@schemes_command.command("show")
@click.argument("scheme")
def show_command(scheme: str) -> None:
    """Print a scheme as TOML: a starting point for one of your own."""
    load_scheme(scheme)
    click.echo(scheme_text(scheme), nl=False)


@schemes_command.command("validate")
@click.argument("file")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override one field; repeatable.")
def validate_command(file: str, overrides: tuple[str, ...]) -> None:
    """Check a scheme file and say what it costs."""
    scheme = load_scheme(file, overrides)
    click.echo(
        f"{file}: valid scheme '{scheme.name}', {bits_per_element(scheme, 128, 131072):.2f} bits at 128k (head_dim 128)"
    )
