"""What a person reads about a conversion: the model card and a one-page report, both made from the manifest alone."""

import json
from collections.abc import Sequence
from html import escape

from kvcompile.artifact.manifest import LayerRecord, Manifest

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #2b3440; background: #fff;
  max-width: 1120px; margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .3rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e6e9ef }
th { font-size: .8rem; font-weight: 600; color: #56606e; vertical-align: bottom; white-space: normal }
th:first-child, td:first-child { text-align: left; font-weight: 600 }
tbody tr:hover { background: #f6f8fb } .note, figcaption, footer { color: #56606e; font-size: .9rem }
figure { margin: 0 } svg { max-width: 100%; height: auto; display: block }
footer { margin-top: 3rem; border-top: 1px solid #e6e9ef; padding-top: .6rem }
"""


def model_card(manifest: Manifest) -> str:
    """The README.md of an artifact."""
    bits = ", ".join(f"{value:.2f} at {label}" for label, value in manifest.bits_per_element.items())
    overlay = manifest.weights.mode == "overlay"
    weights = (
        "an overlay: the weights stay in the source checkpoint"
        if overlay
        else "folded: also a plain Hugging Face checkpoint with unchanged outputs"
    )
    licence = "".join(f"{field}: {json.dumps(value)}\n" for field, value in manifest.source.license or () if value)
    bases = sorted({f"{row.bits}-bit" for x in manifest.compiled for row in (x.key, x.value) if row})
    tags = ["kvcompile", "kv-cache", "kv-cache-quantization", manifest.scheme.name, manifest.source.model_type, *bases]
    head = f"""---
{licence}library_name: kvcompile
pipeline_tag: text-generation
base_model: {manifest.source.name}
base_model_relation: quantized
tags: [{", ".join(tags)}]
---

# {manifest.source.name}, KV cache compiled with {manifest.scheme.name}

{manifest.scheme.summary}. Written by kvcompile {manifest.producer.kvcompile}.

- bits per cached element: {bits}
- weights: {weights}
- layers with a packed cache: {len(manifest.compiled)} of {len(manifest.layers)}

```python
import kvcompile
model, tokenizer = kvcompile.load("path/to/this/directory")
print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=32)[0]))
```
"""
    measured = "".join(f"| {name} | {value:.3g} |\n" for name, value in manifest.metrics.items())
    return head + (f"\n## Measured at conversion\n\n| what | value |\n|---|---|\n{measured}" if measured else "")


def report_html(manifest: Manifest) -> str:
    """A self-contained HTML page with the per-layer table."""
    bits = ", ".join(f"{value:.3f} at {label}" for label, value in manifest.bits_per_element.items())
    measured = "".join(f"<li>{escape(name)}: {value:.3g}</li>\n" for name, value in manifest.metrics.items())
    body = f"<h1>{escape(manifest.source.name)} compiled with {escape(manifest.scheme.name)}</h1>\n"
    body += (
        f"<p>{escape(manifest.scheme.summary)}.</p>\n<ul>\n<li>bits per cached element: {bits}</li>\n{measured}</ul>\n"
    )
    body += html_table(LAYER_COLUMNS, [_layer_cells(layer) for layer in manifest.layers])
    return html_page(f"{manifest.source.name}: {manifest.scheme.name}", body)


def html_page(title: str, body: str) -> str:
    """A page that needs no network, in the one style that our reports have; `body` is HTML already."""
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body>
{body}
</body>
</html>
"""


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text, escaped; the first column names the row."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return (
        f"<div class='wide'><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "".join(f"<tr>{line}</tr>\n" for line in lines)
        + "</tbody></table></div>\n"
    )


LAYER_COLUMNS = (
    "layer", "cache", "heads q/kv", "head_dim", "top-8 spectrum K / V", "residual K", "residual V", "clip K / V",
)  # fmt: skip
"""Heads, spectrum concentration, residual before and after, clip."""


def _layer_cells(layer: LayerRecord) -> list[str]:
    m, heads = layer.metrics, f"{layer.num_heads}/{layer.num_key_value_heads}"
    if layer.key is None or layer.value is None:
        return [str(layer.index), layer.reason, heads, str(layer.head_dim)]
    return [
        str(layer.index),
        f"{layer.key.bits}/{layer.value.bits} bit",
        heads,
        str(layer.head_dim),
        f"{_percent(m.get('key_spectrum_top8'))} / {_percent(m.get('value_spectrum_top8'))}",
        _change(m, "key"),
        _change(m, "value"),
        f"{layer.key.clip_ratio:.2f} / {layer.value.clip_ratio:.2f}",
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _change(metrics: dict[str, float], half: str) -> str:
    before, after = metrics.get(f"{half}_residual_before"), metrics.get(f"{half}_residual_after")
    return "-" if before is None or after is None else f"{before:.1e} -> {after:.1e}"
