"""Pictures of the GPU benchmarks, from their CSV files alone; needs matplotlib."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.cases import ATTEND, CASES, CUDNN, FLASH, FLASHINFER, READ_PACKED, STEP
from kvcompile.evaluate.pictures import COLOURS, STYLE

NAMES = {
    FLASH: "SDPA flash, BF16",
    CUDNN: "SDPA cuDNN, BF16",
    FLASHINFER: "FlashInfer, BF16",
    STEP: "INT2, append + attend",
    ATTEND: "INT2, attend alone",
    READ_PACKED: "plain read of the INT2 bytes",
}


def draw_kernels(path: Path) -> Path:
    """Time against context and against batch, and the share of the measured read bandwidth at every shape."""
    rows = [r for r in read(path) if r["what"] in NAMES and r["format"] in ("", "kvc") and number(r["us"]) > 0]
    present = [name for name in NAMES if any(r["what"] == name for r in rows)]
    llama = [r for r in rows if (r["heads"], r["kv_heads"], r["head_dim"]) == ("32", "8", "128")]
    with mpl.rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        panels = figure.subplots(1, 3)
        for panel, axis, fixed, value in (
            (panels[0], "context", "batch", "1"),
            (panels[1], "batch", "context", "16384"),
        ):
            for colour, what in zip(COLOURS, present, strict=False):
                points = sorted(
                    (int(r[axis]), number(r["us"])) for r in llama if r["what"] == what and r[fixed] == value
                )
                if points:
                    panel.plot(*zip(*points, strict=True), "-o", ms=4, lw=1.6, color=colour, label=NAMES[what])
            panel.set(
                xscale="log",
                yscale="log",
                xlabel=f"{axis} ({fixed} {value})",
                ylabel="us, one layer, 32/8 heads of 128",
            )
            panel.set_xscale("log", base=2)
        shapes = [name for name in CASES if any(r["shape"] == name for r in rows)]
        bars(
            panels[2],
            shapes,
            {
                NAMES[what]: [
                    max((share(r) for r in rows if (r["shape"], r["what"]) == (shape, what)), default=0.0)
                    for shape in shapes
                ]
                for what in present
            },
        )
        panels[2].set(xlabel="shape", ylabel="bytes read a second, of a plain read of 4 GiB", ylim=(0, 1.05))
        handles, labels = panels[2].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        return save(figure, path)


def draw_decode(path: Path) -> Path:
    """Milliseconds of a step of the whole model in every case, what is not attention beside it, and tokens per second."""
    rows = [r for r in read(path) if number(r["ms"]) > 0]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    sides = list(dict.fromkeys(r["side"] for r in rows))
    with mpl.rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = Figure(figsize=(12, 4.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for panel, column, label in (
            (panels[0], "ms", "ms a step"),
            (panels[1], "tokens_per_second", "tokens a second"),
        ):
            heights = {
                side: [
                    max((number(r[column]) for r in rows if (r["case"], r["side"]) == (case, side)), default=0.0)
                    for case in cases
                ]
                for side in sides
            }
            bars(panel, cases, heights)
            panel.set_ylabel(label)
            panel.tick_params(axis="x", labelsize=8)
        for i, side in enumerate(sides):  # what is not attention, as a line across the bar
            for position, case in enumerate(cases):
                rest = [number(r["other_ms"]) for r in rows if (r["case"], r["side"]) == (case, side)]
                if rest and rest[0] > 0:
                    left, width = position - 0.4 + 0.8 * i / len(sides), 0.8 / len(sides)
                    panels[0].hlines(rest[0], left, left + width, color="black", lw=1.5)
        panels[0].set_title("black: what is not attention")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        return save(figure, path)


def bars(panel: Any, groups: Sequence[str], series: dict[str, list[float]]) -> None:
    """Bars side by side, one colour a series."""
    width = 0.8 / max(len(series), 1)
    for i, (colour, (name, heights)) in enumerate(zip(COLOURS, series.items(), strict=False)):
        places = [position - 0.4 + (i + 0.5) * width for position in range(len(groups))]
        panel.bar(places, heights, width, color=colour, label=name)
    panel.set_xticks(range(len(groups)), groups)
    panel.grid(visible=False, axis="x")
    panel.set_axisbelow(True)


def share(row: dict[str, str]) -> float:
    """Of the measured read bandwidth."""
    return number(row["bytes"]) / number(row["us"]) * 1e6 / number(row["bandwidth"])


def number(text: str) -> float:
    """A cell as a number; minus one where there is none."""
    return -1.0 if text in ("", "nan") or math.isnan(float(text)) else float(text)


def read(path: Path) -> Iterable[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save(figure: Figure, path: Path) -> Path:
    """The picture beside its CSV."""
    out = path.with_suffix(".svg")
    figure.savefig(out, metadata={"Date": None, "Creator": None})
    return out
