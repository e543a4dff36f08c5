"""Pass `calibrate`: one forward pass over the calibration text, streaming second moments and a sample of attention."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcompile.artifact import CalibrationRecord
from kvcompile.calibration import OBSERVER, Recorder, read_corpus, recording, tokenize_corpus
from kvcompile.errors import CalibrationError, CheckpointError
from kvcompile.models import load_model, load_tokenizer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR
from kvcompile.passes.memory import release_memory


@dataclass(frozen=True)
class CalibratePass:
    """Collects what the scheme's rotations and clips need (seed 000 section 3), in float64.

    1. Only the targets that the scheme names are collected; the language-model head is not run. A scheme that needs no
       statistics is not calibrated.
    2. Sequences are as long as the scheme asks and the model allows, in batches of about one full sequence.
    3. A non-finite statistic is traced to the weight that causes it where there is one.
    """

    name: ClassVar[str] = "calibrate"
    version: ClassVar[int] = 3
    stored: ClassVar[bool] = True

    text: Path | None = None
    field: str = "text"
    tokens: int = 8192
    sequence_length: int = 2048
    sample_sequences: int = 2
    sample_length: int = 1024
    sample_queries: int = 32
    seed: int = 0

    def requires(self, ir: IR) -> str | None:
        """An inventory."""
        return None if ir.inventory else "the inventory pass must come first"

    def run(self, ir: IR, context: Context) -> PassResult:
        """Read the text, run the model, and store ``layers.{i}.{target}`` and the attention samples."""
        if not ir.scheme.calibrates():
            return PassResult(ir, modified=False)
        corpus = read_corpus(self.text, self.field, self.seed)
        length = min(self.sequence_length, ir.layers().max_positions)
        sequences = tokenize_corpus(corpus, load_tokenizer(ir.checkpoint.path), self.tokens, length)
        release_memory()
        started = time.perf_counter()
        model = load_model(ir.checkpoint.path, OBSERVER, context.device)
        context.costs["load"] = time.perf_counter() - started
        embeddings: Any = model.get_input_embeddings()
        vocabulary = embeddings.weight.shape[0]
        if int(max(s.max() for s in sequences)) >= vocabulary:
            raise CheckpointError(
                f"the tokenizer in {ir.checkpoint.path} has ids beyond the model's {vocabulary} embeddings"
            )
        context.models["source"] = model
        layers = {layer.index: layer.num_key_value_heads for layer in ir.layers().compiled}
        head = min(ir.scheme.window.sink, self.sample_length // 8)
        recorder = Recorder(
            layers, ir.scheme.targets(), self.sample_sequences, self.sample_length, head, self.sample_queries
        )
        batches = _batches(sequences, max(1, self.sequence_length // length))
        started = time.perf_counter()
        with torch.inference_mode(), recording(recorder):
            for batch in context.track(batches, "calibrate", "tok", lambda b: b.numel()):
                model.base_model(batch.to(context.device), use_cache=False)
        context.costs["forward"] = time.perf_counter() - started - recorder.seconds
        statistics: dict[str, Tensor] = {}
        for index, layer in sorted(recorder.layers.items()):
            statistics |= layer.tensors(index)
            statistics |= layer.sample().tensors(index)
        _refuse_non_finite(ir, statistics)
        record = CalibrationRecord(
            text=corpus.name, text_sha256=corpus.sha256, tokens=self.tokens, sequence_length=length, seed=self.seed
        )
        return PassResult(replace(ir, statistics=statistics, calibration=record), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """Every compiled layer was observed."""
        if not ir.scheme.calibrates():
            return None
        missing = [x.index for x in ir.layers().compiled if f"layers.{x.index}.sample_k" not in ir.statistics]
        return f"layers {missing} were never observed during calibration" if missing else None


def _batches(sequences: list[Tensor], size: int) -> list[Tensor]:
    """Equally long sequences stacked ``[B, T]``, at most `size` together; a shorter last one by itself."""
    full = [s for s in sequences if len(s) == len(sequences[0])]
    rest = [s[None] for s in sequences[len(full) :]]
    return [torch.stack(full[i : i + size]) for i in range(0, len(full), size)] + rest


def _refuse_non_finite(ir: IR, statistics: dict[str, Tensor]) -> None:
    for layer in ir.layers().compiled:
        bad = [n for n, t in statistics.items() if n.startswith(f"layers.{layer.index}.") and not t.isfinite().all()]
        if bad:
            culprit = next(ir.checkpoint.non_finite(layer.prefix + "."), None) or next(ir.checkpoint.non_finite(), None)
            if culprit:
                raise CheckpointError(
                    f"tensor {culprit} in {ir.checkpoint.path} holds NaN or infinity; repair the checkpoint"
                )
            raise CalibrationError(
                f"layer {layer.index} ({layer.prefix}): attention activations are NaN or infinite on the calibration text; "
                "the model overflows in its dtype"
            )
