"""Pass `calibrate`: one forward pass over the calibration text, streaming second moments and a sample of attention."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvcompile.calibration import read_corpus
from kvcompile.errors import CalibrationError, CheckpointError
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.collection import CalibrationText, Collection, SharedStatistics, collect
from kvcompile.passes.ir import IR


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
    text_field: str = "text"
    tokens: int = 8192
    sequence_length: int = 2048
    positions: str = "start"
    sample_sequences: int = 2
    sample_length: int = 1024
    sample_queries: int = 32
    seed: int = 0
    shared: SharedStatistics | None = field(default=None, repr=False, compare=False)

    def requires(self, ir: IR) -> str | None:
        """An inventory."""
        return None if ir.inventory else "the inventory pass must come first"

    def run(self, ir: IR, context: Context) -> PassResult:
        """Store ``layers.{i}.{target}``, means and attention samples: out of `shared` where it has them, else collected."""
        if not ir.scheme.calibrates():
            return PassResult(ir, modified=False)
        text, wanted = self.text_for(ir), self.collection(ir)
        statistics = self.shared.find(ir.checkpoint, ir.layers(), text, wanted) if self.shared else None
        if statistics is None:
            statistics = collect(ir.checkpoint, ir.layers(), text, wanted, context)
        _refuse_non_finite(ir, statistics)
        return PassResult(replace(ir, statistics=statistics, calibration=text.record()), modified=True)

    def text_for(self, ir: IR) -> CalibrationText:
        """The text, in sequences that the model can take."""
        length = min(self.sequence_length, ir.layers().max_positions)
        corpus = read_corpus(self.text, self.text_field, self.seed)
        last = ir.layers().max_positions if self.positions == "spread" else 0
        return CalibrationText(corpus, self.tokens, length, max(1, self.sequence_length // length), self.seed, last)

    def collection(self, ir: IR) -> Collection:
        """What the scheme needs."""
        head = min(ir.scheme.window.sink, self.sample_length // 8)
        return Collection(ir.scheme.targets(), self.sample_sequences, self.sample_length, head, self.sample_queries)

    def ensures(self, ir: IR) -> str | None:
        """Every compiled layer was observed."""
        if not ir.scheme.calibrates():
            return None
        missing = [x.index for x in ir.layers().compiled if f"layers.{x.index}.sample_k" not in ir.statistics]
        return f"layers {missing} were never observed during calibration" if missing else None


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
