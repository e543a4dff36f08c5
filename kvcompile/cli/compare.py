"""`kvcompile compare`."""

import json
import re
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcompile.cli.console import tracker
from kvcompile.evaluate.comparison import Comparison, compare
from kvcompile.evaluate.evaluation import parse_lengths
from kvcompile.evaluate.table import cells, header

WIDTH = 250


@click.command("compare")
@click.argument("model")
@click.option("--schemes", required=True, metavar="A,B,...",
              help="Built-in schemes or TOML files; a scheme may carry overrides: oscar-int2+key.clip.ratio=0.95.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for report.html and compare.json.")
@click.option("--keep", is_flag=True, help="Keep the converted checkpoints in the folder, too.")
@click.option("--text", type=click.Path(path_type=Path),
              help="UTF-8 text file  [default: what calibration has not read of the bundled text].")  # fmt: skip
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="Text file, JSONL file or folder  [default: bundled text]."
)
@click.option("--calibration-field", default="text", show_default=True, help="Field that holds the text in JSONL.")
@click.option("--calibration-tokens", type=click.IntRange(1), help="Tokens to calibrate on  [default: the scheme's].")
@click.option("--seed", default=0, show_default=True, help="Order in which calibration documents are drawn.")
@click.option("--windows", default=4, show_default=True, type=click.IntRange(1), help="Windows of text, at most.")
@click.option("--length", default=2048, show_default=True, type=click.IntRange(2), help="Tokens in a window, at most.")
@click.option("--retrieval", metavar="LENGTHS", default="", help="Plant numbers in contexts such as 4k,8k.")
@click.option("--haystack", type=click.Path(path_type=Path), help="Text file to plant them in  [default: the text].")
@click.option("--trials", default=12, show_default=True, type=click.IntRange(1), help="Numbers planted at each length.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--backend", type=click.Choice(["codec", "cpu", "triton"]), help="[default: the fastest for the device]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare_command(
    model: str,
    schemes: str,
    out: Path | None,
    keep: bool,
    text: Path | None,
    calibration: Path | None,
    calibration_field: str,
    calibration_tokens: int | None,
    seed: int,
    windows: int,
    length: int,
    retrieval: str,
    haystack: Path | None,
    trials: int,
    device: str,
    backend: str | None,
    as_json: bool,
) -> None:
    """Convert MODEL with several schemes, measure each, and write one report.

    \b
    Example:
      kvcompile compare path/to/model --schemes naive-int2,quarot-int2,oscar-int2 -o report/
      kvcompile compare path/to/model --schemes oscar-int2,mine.toml --text heldout.txt --retrieval 4k -o report/
    """
    console = Console(stderr=True)
    found = compare(
        model,
        [entry.strip() for entry in re.findall(r'(?:[^,"]|"[^"]*")+', schemes) if entry.strip()],
        out,
        keep=keep,
        text=text,
        calibration=calibration,
        calibration_field=calibration_field,
        calibration_tokens=calibration_tokens,
        seed=seed,
        windows=windows,
        length=length,
        retrieval=parse_lengths(retrieval),
        haystack=haystack,
        trials=trials,
        device=device,
        backend=backend,
        track=tracker(console),
        say=lambda line: console.print(line, highlight=False, markup=False),
    )
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        _show(found, Console())
    if out is not None:
        click.echo(f"wrote {out / 'report.html'} and {out / 'compare.json'}", err=as_json)


def _show(found: Comparison, console: Console) -> None:
    title = f"{found.model}: {found.windows} windows of {found.window_tokens} tokens of {found.text}"
    table = Table(title=Text(title))
    for position, name in enumerate(header(found.rows)):
        table.add_column(Text(name.replace(" ", "\n", 1)), justify="right" if position else "left")
    for row in found.rows:
        table.add_row(*(Text(cell) for cell in cells(row)))
    console.width = max(console.width, WIDTH)  # no number is cut or broken: a narrow terminal wraps whole lines
    console.print(table)
