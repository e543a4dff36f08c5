"""`kvcompile bench`."""

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcompile.cli.console import tracker
from kvcompile.evaluate.bench import PACKED, Bench, bench, bench_shape, parse_batches, parse_shape
from kvcompile.evaluate.evaluation import parse_lengths
from kvcompile.scheme import DEFAULT_SCHEME


@click.command("bench")
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@click.option("--shape", metavar="SIZES", help="No artifact: heads=32,kv_heads=8,head_dim=128 and perhaps layers=4.")
@click.option("-s", "--scheme", help=f"Scheme of the shape  [default: {DEFAULT_SCHEME}].")
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a field of that scheme.")
@click.option("--contexts", metavar="LENGTHS", default="4096,16384", show_default=True, help="Tokens already cached.")
@click.option("--batch", "batches", metavar="SIZES", default="1", show_default=True, help="Rows that decode together.")
@click.option("--steps", default=32, show_default=True, type=click.IntRange(1), help="Steps to time.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--backend", type=click.Choice(["codec", "cpu", "triton"]), help="[default: the fastest for the device]")
@click.option("--source", type=click.Path(path_type=Path), help="Where an overlay's weights are, if they moved.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_command(
    artifact: Path | None,
    shape: str | None,
    scheme: str | None,
    overrides: tuple[str, ...],
    contexts: str,
    batches: str,
    steps: int,
    device: str,
    backend: str | None,
    source: Path | None,
    as_json: bool,
) -> None:
    """Time decoding from the packed cache of ARTIFACT, or of a --shape, against a BF16 cache on this machine.

    \b
    Example:
      kvcompile bench out/ --contexts 4096,16384 --batch 1,4
      kvcompile bench --shape heads=32,kv_heads=8,head_dim=128 --scheme kivi-int2 --device cuda
    """
    if (artifact is None) == (shape is None):
        raise click.UsageError("give either a converted directory or --shape")
    if shape is None and (scheme or overrides):
        raise click.UsageError("--scheme and --set are for --shape: an artifact has its scheme already")
    if shape is not None and source:
        raise click.UsageError("--source is for an artifact: a shape has no weights")
    lengths, rows = parse_lengths(contexts), parse_batches(batches)
    track = tracker(Console(stderr=True))
    if shape is None:
        assert artifact is not None
        found = bench(
            artifact, contexts=lengths, batches=rows, steps=steps, device=device, backend=backend, source=source,
            track=track,
        )  # fmt: skip
    else:
        found = bench_shape(
            parse_shape(shape), scheme or DEFAULT_SCHEME, overrides, contexts=lengths, batches=rows, steps=steps,
            device=device, backend=backend, track=track,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1))
    else:
        _show(found, Console())


def _show(found: Bench, console: Console) -> None:
    columns = ["context", "batch", "cache", "ms", "p90", "tokens/s", "MiB", "faster", "smaller"]
    table = Table(*columns, title=Text(f"{found.subject}: {found.scheme}, {found.backend} backend, {found.device}"))
    for x in found.timings:
        cells = [f"{x.context:,}", str(x.batch), x.cache, f"{x.median_ms:.2f}", f"{x.p90_ms:.2f}"]
        cells += [f"{x.tokens_per_second:,.1f}", f"{x.cache_bytes / 2**20:,.2f}"]
        if x.cache == PACKED:
            cells += [f"{ratio:.2f}x" for ratio in found.ratios(x)]
        table.add_row(*cells)
    console.print(table)
    click.echo(f"{found.measured}, {found.steps} timed; bf16 is transformers' DynamicCache with SDPA")
