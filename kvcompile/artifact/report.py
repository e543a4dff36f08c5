"""What a person reads about a conversion: the model card and a one-page report, both made from the manifest alone."""

import io

from rich.console import Console
from rich.table import Table

from kvcompile.artifact.manifest import LayerRecord, Manifest


def model_card(manifest: Manifest) -> str:
    """The README.md of an artifact."""
    bits = ", ".join(f"{value:.2f} at {label}" for label, value in manifest.bits_per_element.items())
    overlay = manifest.weights.mode == "overlay"
    weights = (
        "an overlay: the weights stay in the source checkpoint"
        if overlay
        else "folded: also a plain Hugging Face checkpoint with unchanged outputs"
    )
    head = f"""---
library_name: kvcompile
base_model: {manifest.source.name}
tags: [kv-cache, {manifest.scheme.name}]
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
    console = Console(record=True, width=140, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(f"[bold]{manifest.source.name}[/bold] compiled with [bold]{manifest.scheme.name}[/bold]")
    console.print(" ".join(f"{value:.3f} bits at {label};" for label, value in manifest.bits_per_element.items()))
    for name, value in manifest.metrics.items():
        console.print(f"{name}: {value:.3g}")
    console.print(layer_table(manifest.layers))
    return console.export_html(inline_styles=True)


def layer_table(layers: list[LayerRecord]) -> Table:
    """One row per layer: heads, spectrum concentration, residual before and after, clip."""
    table = Table(
        "layer", "cache", "heads q/kv", "head_dim", "top-8 spectrum K / V", "residual K", "residual V", "clip K / V"
    )
    for layer in layers:
        m = layer.metrics
        heads = f"{layer.num_heads}/{layer.num_key_value_heads}"
        if layer.key is None or layer.value is None:
            table.add_row(str(layer.index), layer.reason, heads, str(layer.head_dim))
            continue
        table.add_row(
            str(layer.index),
            f"{layer.key.bits}/{layer.value.bits} bit",
            heads,
            str(layer.head_dim),
            f"{_percent(m.get('key_spectrum_top8'))} / {_percent(m.get('value_spectrum_top8'))}",
            _change(m, "key"),
            _change(m, "value"),
            f"{layer.key.clip_ratio:.2f} / {layer.value.clip_ratio:.2f}",
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _change(metrics: dict[str, float], half: str) -> str:
    before, after = metrics.get(f"{half}_residual_before"), metrics.get(f"{half}_residual_after")
    return "-" if before is None or after is None else f"{before:.1e} -> {after:.1e}"
