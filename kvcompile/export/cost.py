"""What a view costs where it approximates: KL to the unquantized model, with the artifact's cache and with the view's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvcompile.artifact import Artifact, LayerRecord
from kvcompile.errors import ExportError
from kvcompile.evaluate.divergence import Divergence, reference_logits, scores
from kvcompile.evaluate.teacher_forcing import first_page
from kvcompile.evaluate.text import cut_windows, held_back_text, read_text
from kvcompile.models import load_model, load_tokenizer
from kvcompile.runtime import new_cache
from kvcompile.runtime.cache import ATTENTION
from kvcompile.runtime.load import attach
from kvcompile.scheme.model import Window

WINDOWS, LENGTH = 2, 1024


@dataclass(frozen=True)
class ViewCost:
    """Nats per token, through the packed cache on this machine: as the artifact says, and as the view says."""

    text: str
    positions: int
    native_kl: float
    view_kl: float

    def __str__(self) -> str:
        change = self.view_kl / max(self.native_kl, 1e-300) - 1
        return (
            f"KL to the unquantized model {self.view_kl:.4g} nats per token instead of {self.native_kl:.4g} ({change:+.1%}), "
            f"measured here on {self.positions} positions of {self.text}"
        )


def measure_view(artifact: Artifact, layers: Sequence[LayerRecord], window: Window, text: str | Path) -> ViewCost:
    """Compare the artifact with itself as `layers` and `window` have it; `text` is a file, or ``bundled``.

    The weights are the artifact's own, and both are scored on the same positions. Raises ExportError where the text gives no
    window that is quantized.
    """
    model, tokenizer = load_model(artifact.weights_path, ATTENTION), load_tokenizer(artifact.weights_path)
    found = held_back_text([artifact.manifest.calibration], tokenizer) if text == "bundled" else read_text(text)
    limit = int(getattr(model.config, "max_position_embeddings", LENGTH))
    view = replace(artifact, manifest=artifact.manifest.model_copy(update={"layers": list(layers)}))
    windowed = partial(new_cache, model, sink=window.sink, recent=window.recent)
    attach(model, artifact)
    needed = max(first_page(new_cache(model)) or 0, first_page(windowed()) or 0)
    if needed + 64 > min(limit, LENGTH * 4):
        raise ExportError(f"the cost cannot be measured: the first {needed} tokens are exact, the model takes {limit}")
    windows_NT = cut_windows(found, tokenizer, WINDOWS, min(max(LENGTH, 2 * needed), limit), needed)
    start = max(needed, windows_NT.shape[1] // 2)
    native = Divergence.of([_scores(model, new_cache(model), ids_T[None], start) for ids_T in windows_NT])
    attach(model, view)
    there = Divergence.of([_scores(model, windowed(), ids_T[None], start) for ids_T in windows_NT])
    return ViewCost(found.name, native.positions, native.kl, there.kl)


def _scores(model: Any, cache: Any, ids_BT: Any, start: int) -> Any:
    return scores(model, cache, ids_BT, reference_logits(model, ids_BT), start)
