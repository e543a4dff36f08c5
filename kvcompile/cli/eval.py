"""`kvcompile eval`."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcompile.cli.console import tracker
from kvcompile.evaluate.evaluation import Evaluation, evaluate, parse_lengths


@click.command("eval")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path),
              help="UTF-8 text file  [default: what calibration has not read of the bundled text].")  # fmt: skip
@click.option("--kl", is_flag=True, help="Compare with the same model without a packed cache.")
@click.option(
    "--against", metavar="MODEL", help="Compare with this checkpoint instead, for example the source; implies --kl."
)
@click.option("--windows", default=4, show_default=True, type=click.IntRange(1), help="Windows of text, at most.")
@click.option("--length", default=2048, show_default=True, type=click.IntRange(2), help="Tokens in a window, at most.")
@click.option("--retrieval", metavar="LENGTHS", default="", help="Plant numbers in contexts such as 4k,8k.")
@click.option("--haystack", type=click.Path(path_type=Path), help="Text file to plant them in  [default: the text].")
@click.option("--trials", default=12, show_default=True, type=click.IntRange(1), help="Numbers planted at each length.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--backend", type=click.Choice(["codec", "cpu", "triton"]), help="[default: the fastest for the device]")
@click.option("--source", type=click.Path(path_type=Path), help="Where an overlay's weights are, if they moved.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def eval_command(
    artifact: Path,
    text: Path | None,
    kl: bool,
    against: str | None,
    windows: int,
    length: int,
    retrieval: str,
    haystack: Path | None,
    trials: int,
    device: str,
    backend: str | None,
    source: Path | None,
    as_json: bool,
) -> None:
    """Measure ARTIFACT through its packed cache: perplexity, KL and agreement, retrieval by depth and length.

    \b
    Example:
      kvcompile eval out/ --text heldout.txt --kl --retrieval 4k,8k
      kvcompile eval out/ --against path/to/model --json
    """
    found = evaluate(
        artifact,
        text=text,
        kl=kl,
        against=against,
        windows=windows,
        length=length,
        retrieval=parse_lengths(retrieval),
        haystack=haystack,
        trials=trials,
        device=device,
        backend=backend,
        source=source,
        track=tracker(Console(stderr=True)),
    )
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        _show(found, Console())


def _show(found: Evaluation, console: Console) -> None:
    quality = found.quality
    table = Table("measure", "value", title=Text(f"{found.path}: {found.scheme}, {found.backend} backend"))
    bits = ", ".join(f"{value:.2f} at {label}" for label, value in found.bits_per_element.items())
    table.add_row("bits per element", bits)
    table.add_row(f"cache bytes at {found.window_tokens} tokens", f"{quality.cache_bytes:,}")
    table.add_row("perplexity", f"{quality.perplexity:.4f}")
    if divergence := quality.divergence:
        table.add_row("perplexity of the reference", f"{divergence.reference_perplexity:.4f}")
        table.add_row("KL to the reference, mean (nats per token)", f"{divergence.kl:.5f}")
        table.add_row("KL to the reference, 99th percentile", f"{divergence.kl_p99:.5f}")
        table.add_row("same top token", f"{divergence.agreement:.2%}")
    for found_at in quality.retrieval:
        hits = "".join("■" if finding.found else "□" for finding in found_at.findings)
        table.add_row(f"retrieved at {found_at.tokens:,} tokens", f"{found_at.share:.0%}  {hits} (start to end)")
    console.print(table)
    click.echo(
        f"{found.windows} windows of {found.window_tokens} tokens of {found.text}, counted from position "
        f"{found.counted_from}" + (f"; reference: {found.reference}" if found.reference else "")
    )
