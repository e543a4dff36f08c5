"""How a conversion shows itself: progress bars with rates, one line per layer, and what it cost."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvcompile.passes.base import Instrument, Pass, PassResult
from kvcompile.passes.convert import Conversion


class ConsoleInstrument(Instrument):
    """Prints each pass with its seconds, and each layer's metrics when they are complete (after `clip`)."""

    def __init__(self, console: Console):
        self.console = console

    def note(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def after(self, step: Pass, result: PassResult, seconds: float) -> None:
        """One line for the pass, one per layer after `clip`."""
        self.console.print(f"[bold]{step.name:<10}[/bold] {seconds:6.1f} s")
        if step.name == "clip":
            for index, metrics in result.ir.metrics.items():
                self.console.print(f"  layer {index:>3}  {_layer_line(metrics)}", highlight=False, soft_wrap=True)

    def track(self, items: Sequence[Any], description: str, unit: str, size: Callable[[Any], int]) -> Iterator[Any]:
        """Iterate `items` behind a progress bar that counts `size(item)` of `unit`."""
        total = sum(size(item) for item in items)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task(description, total=total, rate="")
            for item in items:
                yield item
                progress.advance(task, size(item))
                speed = progress.tasks[0].finished_speed or progress.tasks[0].speed
                progress.update(task, rate=f"{speed:,.1f} {unit}/s" if speed else "")


def tracker(console: Console) -> Callable[..., Iterable[Any]]:
    """A `track` function for `convert`."""
    return ConsoleInstrument(console).track


def cost_table(result: Conversion) -> Table:
    """Seconds per pass, the ratio to what loading, one plain forward pass and saving take, and the memory."""
    table = Table("stage", "seconds", title="cost")
    for name, seconds in result.seconds.items():
        table.add_row(name, f"{seconds:.2f}")
    total, plain = sum(result.seconds.values()), sum(result.costs.values())
    table.add_section()
    table.add_row("total", f"{total:.2f}")
    if "forward" in result.costs:
        table.add_row("load + forward without head + save", f"{plain:.2f}")
        table.add_row("ratio", f"{total / plain:.2f}")
    peak, size = result.peak_bytes / 2**20, result.checkpoint_bytes / 2**20
    table.add_row("peak memory", f"{peak:.0f} MiB ({peak / size:.1f} x checkpoint)")
    return table


def _layer_line(metrics: Mapping[str, float]) -> str:
    halves = []
    for half in ("key", "value"):
        part = f"{half[0].upper()} clip {metrics[f'{half}_clip']:.2f}"
        if (spectrum := metrics.get(f"{half}_spectrum_top8")) is not None:
            part += f" top8 {spectrum:5.1%}"
        if (before := metrics.get(f"{half}_residual_before")) is not None:
            part += f" residual {before:.1e} -> {metrics[f'{half}_residual_after']:.1e}"
        halves.append(part)
    return "  |  ".join(halves)
