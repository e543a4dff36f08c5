"""Pass `correction`: train the linear correction adapters of every layer (KVLinC, seed 004 section 3.2)."""

from dataclasses import dataclass
from typing import ClassVar

from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR
from kvcompile.scheme.model import LinearCorrection


@dataclass(frozen=True)
class CorrectionPass:
    """Emits ``layers.{i}.correction.query`` ``[H, D, F]`` and ``.key`` ``[K, D, F]``."""

    name: ClassVar[str] = "correction"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = True

    seed: int = 0

    def requires(self, ir: IR) -> str | None:
        """An inventory."""
        return None if ir.inventory else "the inventory pass must come first"

    def run(self, ir: IR, context: Context) -> PassResult:
        """Train layer by layer."""
        if not isinstance(ir.scheme.correction, LinearCorrection):
            return PassResult(ir, modified=False)
        raise NotImplementedError

    def ensures(self, ir: IR) -> str | None:
        """Feature maps for every compiled layer, if the scheme has a correction."""
        return None
