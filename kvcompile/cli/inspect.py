"""`kvcompile inspect`."""

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from kvcompile.evaluate import inspect
from kvcompile.evaluate.inspection import Inspection
from kvcompile.scheme import DEFAULT_SCHEME


@click.command("inspect")
@click.argument("path")
@click.option(
    "-s", "--scheme", default=DEFAULT_SCHEME, show_default=True, help="Scheme to cost an unconverted model with."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(path: str, scheme: str, as_json: bool) -> None:
    """Show which layers of a model or artifact have a KV cache, and what it costs in BF16 and packed.

    \b
    Example:
      kvcompile inspect path/to/model
      kvcompile inspect out/ --json
    """
    found = inspect(path, scheme)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1, default=str))
    else:
        _show(found, Console())


def _show(found: Inspection, console: Console) -> None:
    state = f"converted with {found.scheme}" if found.converted else f"not converted; costed with {found.scheme}"
    click.echo(f"{found.path}: {found.architecture} ({found.model_type}), {state}")
    click.echo(f"weights: {found.weights}")
    table = Table("layer", "attention", "heads q/kv", "head_dim", "B/token BF16", "B/token packed", "packed?")
    for x in found.layers:
        heads = f"{x.num_heads}/{x.num_key_value_heads}"
        state = x.reason or (f"yes ({x.note})" if x.note else "yes")
        table.add_row(str(x.index), x.kind, heads, str(x.head_dim), str(x.bf16_bytes), f"{x.packed_bytes:.0f}", state)
    dense, packed = sum(x.bf16_bytes for x in found.layers), sum(x.packed_bytes for x in found.layers)
    table.add_section()
    table.add_row("all", "", "", "", str(dense), f"{packed:.0f}", f"{found.packed_layers} of {len(found.layers)}")
    console.print(table)
    if found.bits_per_element:
        bits = ", ".join(f"{value:.2f} at {label}" for label, value in found.bits_per_element.items())
        click.echo(f"bits per element with BF16 windows: {bits}")
