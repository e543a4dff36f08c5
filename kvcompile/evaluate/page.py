"""The page that a comparison is published as: one HTML file that needs no network."""

from html import escape

from kvcompile.artifact.report import html_page, html_table
from kvcompile.evaluate import pictures
from kvcompile.evaluate.comparison import Comparison, Row
from kvcompile.evaluate.table import cells, header
from kvcompile.version import __version__

PARETO_CONTEXT = "128k"


def comparison_page(found: Comparison) -> str:
    """`report.html`: the table at the top, then every picture with a sentence that says what to see."""
    rows = found.rows
    sections = [
        (
            "Damage against size",
            pictures.kl_against_bits(rows, PARETO_CONTEXT),
            "Lower left is better; the grey line joins the schemes that no other beats in both (the Pareto front).",
        ),
        (
            "Where the error arises",
            pictures.errors_by_stage(rows),
            "Solid: the scheme; dotted: the same bits with nothing done to rows. What counts is the error that is left at the "
            "last stage, the attention output (SVW_O). Trained corrections are not part of it.",
        ),
        (
            "Spectra",
            pictures.spectra(found.spectra),
            "The steeper a line falls, the fewer directions matter to attention, and the more a rotation to them can gain.",
        ),
        (
            "Token norms",
            pictures.token_norms(rows),
            "Tokens with outlying norms stretch the range of their whole group; after scaling all tokens are alike. The layer "
            "with the largest spread is shown, first KV head.",
        ),
        (
            "Retrieval",
            pictures.retrieval_maps(rows),
            "Green: the planted number was found. Rows are context lengths with the share found, columns how deep it lay.",
        ),
    ]
    body = f"<h1>{escape(found.model)}: {len(rows) - 1} KV-cache schemes compared</h1>\n<p>{escape(_measured_on(found))}</p>\n"
    body += html_table(header(rows), [cells(row) for row in rows])
    body += f"<p class='note'>{escape(_legend(rows))}</p>\n"
    for title, picture, sentence in sections:
        if picture:
            body += f"<h2>{escape(title)}</h2>\n<figure>{picture}<figcaption>{escape(sentence)}</figcaption></figure>\n"
    return html_page(f"{found.model}: KV-cache schemes compared", body + f"<footer>kvcompile {__version__}</footer>")


def _measured_on(found: Comparison) -> str:
    return (
        f"{found.windows} windows of {found.window_tokens} tokens of {found.text}, teacher-forced through the real packed "
        f"cache and counted from position {found.counted_from}; calibration: {found.calibration}; "
        f"{found.machine}."
    )


def _legend(rows: tuple[Row, ...]) -> str:
    return (
        "Bits per element count codes, metadata and BF16 windows at three context lengths; B/token is what a real cache of "
        f"{rows[0].cost.tokens:,} tokens holds in all layers. KL is in nats per token, mean and 99th percentile, to the source "
        "checkpoint. Encode: 1024 tokens in all layers; decode: one step of the whole model."
    )
