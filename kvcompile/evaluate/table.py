"""The table of a comparison, as the terminal and the page show it."""

from collections.abc import Sequence

from kvcompile.evaluate.comparison import Row
from kvcompile.passes.emit import CONTEXTS


def header(rows: Sequence[Row]) -> list[str]:
    """Names of the columns."""
    lengths = [f"found at {entry.tokens:,}" for entry in rows[0].quality.retrieval]
    return [
        "scheme", *(f"bits at {label}" for label in CONTEXTS), f"B/token at {rows[0].cost.tokens:,}", "perplexity",
        "KL", "KL 99%", "same top token", *lengths, "backend", "encode ms", "decode ms", "convert s",
    ]  # fmt: skip


def cells(row: Row) -> list[str]:
    """One scheme, as text."""
    divergence, cost = row.quality.divergence, row.cost
    assert divergence is not None
    return [
        row.label,
        *(f"{row.bits_per_element[label]:.2f}" for label in CONTEXTS),
        f"{cost.bytes_per_token:,.0f}",
        f"{divergence.perplexity:.3f}",
        f"{divergence.kl:.5f}",
        f"{divergence.kl_p99:.4f}",
        f"{divergence.agreement:.2%}",
        *(f"{entry.share:.0%}" for entry in row.quality.retrieval),
        row.backend,
        "–" if cost.encode_ms is None else f"{cost.encode_ms:.1f}",
        f"{cost.decode_ms:.1f}",
        f"{row.convert_seconds:.1f}",
    ]
