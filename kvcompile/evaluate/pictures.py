"""The pictures of a comparison as SVG text for an HTML page: drawn by matplotlib, without a display, self-contained."""

import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from kvcompile.evaluate.comparison import BF16, Row
from kvcompile.evaluate.stages import STAGES

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvcompile",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a94a6",
    "axes.labelcolor": "#2b3440",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e9ef",
    "xtick.color": "#56606e",
    "ytick.color": "#56606e",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
COLOURS = ("#1f6feb", "#d1495b", "#2a9d6f", "#e09f3e", "#7b5ea7", "#3aa6b9", "#8c6d46", "#c65d9b", "#5f7d2c", "#54606e")
SMALLEST = 1e-7
"""What stands for zero on a logarithmic axis."""
_numbers = itertools.count()


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other equals or beats in both coordinates, by the first coordinate."""
    front, best = [], math.inf
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if points[index][1] < best:
            front.append(index)
            best = points[index][1]
    return front


def kl_against_bits(rows: Sequence[Row], context: str) -> str:
    """KL to the source over bits per element at `context`; schemes on the Pareto front are joined."""
    shown = [row for row in rows if row.quality.divergence is not None and row.label != BF16]
    points = [(row.bits_per_element[context], max(_kl(row), SMALLEST)) for row in shown]
    front = pareto_front(points)
    with mpl.rc_context(STYLE):
        figure, axes = _figure(8, 4.6)
        axes.plot(*zip(*(points[i] for i in front), strict=True), color="#b9c2cf", lw=6, alpha=0.6, zorder=1)
        for i, (bits, kl) in enumerate(points):
            axes.scatter(bits, kl, s=70, color=COLOURS[i % len(COLOURS)], zorder=3, edgecolor="white")
        axes.set(
            yscale="log", xlabel=f"bits per cached element at {context} tokens", ylabel="KL to the source, nats/token"
        )
        axes.margins(x=0.15, y=0.15)
        heights = _spread([axes.transData.transform(point) for point in points])
        for i, (row, point, height) in enumerate(zip(shown, points, heights, strict=True)):
            weight = "bold" if i in front else "normal"
            axes.annotate(_plain(row.label), point, (8, height), textcoords="offset points", va="center",
                          fontsize=9, fontweight=weight, color="#2b3440")  # fmt: skip
        return _svg(figure)


def errors_by_stage(rows: Sequence[Row]) -> str:
    """One panel a scheme: relative squared error over layers for every stage, under the scheme and with nothing done."""
    shown = [row for row in rows if row.layers]
    with mpl.rc_context(STYLE):
        figure, panels = _panels(len(shown), 3, 3.4, 2.7)
        for panel, row in zip(panels, shown, strict=True):
            layers = [entry.layer for entry in row.layers]
            for colour, (stage, name) in zip(COLOURS, STAGES.items(), strict=False):
                before = [max(getattr(entry.before, stage), SMALLEST) for entry in row.layers]
                after = [max(getattr(entry.after, stage), SMALLEST) for entry in row.layers]
                panel.plot(layers, before, ":", color=colour, lw=1.2)
                panel.plot(layers, after, "-o", color=colour, ms=3, lw=1.6, label=name)
            panel.set(yscale="log", title=_plain(row.label), xlabel="layer")
            panel.xaxis.get_major_locator().set_params(integer=True)
        panels[0].set_ylabel("relative squared error")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        return _svg(figure)


def spectra(found: Mapping[int, Mapping[str, tuple[float, ...]]]) -> str:
    """Eigenvalues of C_Q and of C_S, largest first, as shares of the trace: one line a layer."""
    names = {"query": "C_Q: queries that read keys", "score_value": "C_S: outputs that values become"}
    with mpl.rc_context(STYLE):
        figure, panels = _panels(len(names), 2, 4.6, 3.2)
        colours = mpl.colormaps["viridis"]
        for panel, (target, title) in zip(panels, names.items(), strict=True):
            for i, (layer, values) in enumerate(found.items()):
                shares = [max(value, 1e-9) for value in values[target]]
                colour = colours(i / max(len(found) - 1, 1) * 0.9)
                panel.plot(range(1, len(shares) + 1), shares, color=colour, lw=1.3, label=f"layer {layer}")
            panel.set(yscale="log", title=title, xlabel="eigenvalue, largest first")
        panels[0].set_ylabel("share of the trace")
        handles, labels = panels[0].get_legend_handles_labels()
        ends = (0, -1) if len(handles) > 1 else (0,)
        figure.legend(
            [handles[i] for i in ends], [labels[i] for i in ends], loc="outside lower center", ncols=2, frameon=False
        )
        return _svg(figure)


def token_norms(rows: Sequence[Row]) -> str:
    """Norms of key rows by token, over their mean, before and after a scheme's scaling; empty where no scheme scales."""
    shown = [row for row in rows if row.norms is not None]
    if not shown:
        return ""
    with mpl.rc_context(STYLE):
        figure, panels = _panels(len(shown), 2, 4.6, 2.8)
        for panel, row in zip(panels, shown, strict=True):
            assert row.norms is not None
            panel.plot(row.norms.before, color=COLOURS[1], lw=0.8, label="before")
            panel.plot(row.norms.after, color=COLOURS[0], lw=0.8, label="after")
            panel.set(title=f"{_plain(row.label)}, layer {row.norms.layer}", xlabel="token", ylim=(0, None))
        panels[0].set_ylabel("norm over its mean")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        return _svg(figure)


def retrieval_maps(rows: Sequence[Row]) -> str:
    """One heat map a scheme: was the planted number found, by context length and depth; empty without retrieval."""
    shown = [row for row in rows if row.quality.retrieval]
    if not shown:
        return ""
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure, panels = _panels(len(shown), 3, 3.4, 1.1 + 0.45 * len(shown[0].quality.retrieval))
        colours = mpl.colors.ListedColormap(["#e8a0a8", "#a9d8bf"])
        for panel, row in zip(panels, shown, strict=True):
            found = row.quality.retrieval
            cells = [[float(finding.found) for finding in length.findings] for length in found]
            panel.pcolormesh([*_edges(len(cells[0]), 100)], [*_edges(len(found), len(found))], cells, cmap=colours,
                             vmin=0, vmax=1, edgecolors="white", linewidth=1.5)  # fmt: skip
            for line, length in enumerate(found):
                panel.text(50, line + 0.5, f"{length.share:.0%}", ha="center", va="center", color="#2b3440")
            panel.set_yticks([line + 0.5 for line in range(len(found))], [f"{length.tokens:,}" for length in found])
            panel.set_ylim(len(found), 0)
            panel.set(title=_plain(row.label), xlabel="depth, %")
        return _svg(figure)


def _spread(places: Sequence[Any], width: float = 110, gap: float = 14) -> list[float]:
    """How far up each label beside its point has to move so that those of near points do not overlap."""
    moved: dict[int, float] = {}
    for i in sorted(range(len(places)), key=lambda i: places[i][1]):
        below = [places[j][1] + moved[j] for j in moved if abs(places[j][0] - places[i][0]) < width]
        moved[i] = max(0.0, max(below, default=-math.inf) + gap - places[i][1])
    return [moved[i] for i in range(len(places))]


def _edges(cells: int, total: float) -> Iterator[float]:
    return (total * edge / cells for edge in range(cells + 1))


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """`count` axes that share both scales, `columns` in a row."""
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 5.5), height * lines + 0.4), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    panels = list(grid.flat)
    for unused in panels[count:]:
        unused.set_axis_off()
    return figure, panels[:count]


def _svg(figure: Figure) -> str:
    """The figure as an SVG element whose ids do not clash with those of other pictures in the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    prefix = f"p{next(_numbers)}-"
    text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', prefix, text[text.index("<svg") :])
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', text, count=1)


def _kl(row: Row) -> float:
    assert row.quality.divergence is not None
    return row.quality.divergence.kl


def _plain(text: str) -> str:
    """Text that matplotlib takes as it is, not as mathematics."""
    return text.replace("$", r"\$")
