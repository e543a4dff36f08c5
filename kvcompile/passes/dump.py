"""The instrument behind `--dump-ir`: what the IR holds after every pass, for people who debug passes."""

import json
from pathlib import Path

from safetensors.torch import save_file

from kvcompile.passes.base import Instrument, Pass, PassResult


class DumpIR(Instrument):
    """Writes ``{nn}-{pass}.safetensors`` (statistics and tensors) and ``{nn}-{pass}.json`` (the rest)."""

    def __init__(self, directory: Path):
        self.directory, self.count = directory, 0
        directory.mkdir(parents=True, exist_ok=True)

    def after(self, step: Pass, result: PassResult, seconds: float) -> None:
        """Write one pass's result."""
        ir = result.ir
        stem = self.directory / f"{self.count:02d}-{step.name}"
        self.count += 1
        tensors = {n: t.contiguous() for n, t in [*ir.statistics.items(), *ir.tensors.items()]}
        save_file(tensors, stem.with_suffix(".safetensors"))
        document = {
            "pass": step.name,
            "seconds": round(seconds, 3),
            "modified": result.modified,
            "layers": [layer.__dict__ for layer in ir.layers().layers],
            "folds": [fold.__dict__ for fold in ir.folds],
            "metrics": {str(i): dict(m) for i, m in ir.metrics.items()},
            "summary": dict(ir.summary),
        }
        stem.with_suffix(".json").write_text(json.dumps(document, indent=1), "utf-8")
