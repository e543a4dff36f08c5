"""`kvcompile verify`."""

from pathlib import Path

import click

from kvcompile.evaluate import verify


@click.command("verify")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--source", help="The checkpoint it was made from: also compares weights and logits.")
@click.option("--low-memory/--no-low-memory", default=None,
              help="Keep one decoder layer in memory at a time  [default: where the weights would not fit].")  # fmt: skip
def verify_command(artifact: Path, source: str | None, low_memory: bool | None) -> None:
    """Check that ARTIFACT is whole and, with --source, that it is the same model.

    \b
    Example:
      kvcompile verify out/ --source path/to/model
    """
    for check in verify(artifact, source, low_memory).checks:
        click.echo(f"ok: {check}")
