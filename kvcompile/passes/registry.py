"""Passes by name: how a scheme's list of names becomes a list of configured passes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompile.errors import SchemeError
from kvcompile.passes.base import Pass
from kvcompile.passes.calibrate import CalibratePass
from kvcompile.passes.center import CenterPass
from kvcompile.passes.centroids import CentroidsPass
from kvcompile.passes.clip import ClipPass
from kvcompile.passes.collection import SharedStatistics
from kvcompile.passes.correction import CorrectionPass
from kvcompile.passes.emit import EmitPass
from kvcompile.passes.feedback import FeedbackPass
from kvcompile.passes.fold import FoldPass
from kvcompile.passes.inventory import InventoryPass
from kvcompile.passes.rotations import RotationsPass
from kvcompile.passes.verify import VerifyPass
from kvcompile.scheme import Scheme


@dataclass(frozen=True)
class CalibrationInput:
    """What the user says about calibration (None and 0 leave it to the scheme), and statistics that there are already."""

    text: Path | None = None
    field: str = "text"
    tokens: int | None = None
    seed: int = 0
    shared: SharedStatistics | None = None


def _calibrate(scheme: Scheme, given: CalibrationInput) -> CalibratePass:
    plan = scheme.calibration
    tokens = given.tokens or plan.tokens
    return CalibratePass(
        given.text, given.field, tokens, plan.sequence_length, plan.positions, plan.sample_sequences, plan.sample_length,
        plan.sample_queries, given.seed, given.shared,
    )  # fmt: skip


_FACTORIES: dict[str, tuple[type, Callable[[Scheme, CalibrationInput], Pass]]] = {
    "inventory": (InventoryPass, lambda scheme, given: InventoryPass()),
    "calibrate": (CalibratePass, _calibrate),
    "rotations": (RotationsPass, lambda scheme, given: RotationsPass()),
    "center": (CenterPass, lambda scheme, given: CenterPass()),
    "centroids": (CentroidsPass, lambda scheme, given: CentroidsPass()),
    "feedback": (FeedbackPass, lambda scheme, given: FeedbackPass()),
    "clip": (ClipPass, lambda scheme, given: ClipPass()),
    "correction": (CorrectionPass, lambda scheme, given: CorrectionPass(given.seed)),
    "fold": (FoldPass, lambda scheme, given: FoldPass()),
    "verify": (VerifyPass, lambda scheme, given: VerifyPass()),
    "emit": (EmitPass, lambda scheme, given: EmitPass()),
}


def pass_names() -> list[str]:
    """All registered passes, in their usual order."""
    return list(_FACTORIES)


def pass_class(name: str) -> Any:
    """The class of a registered pass; raises SchemeError for an unknown name."""
    if name not in _FACTORIES:
        raise SchemeError(f"unknown pass '{name}'; there are {', '.join(_FACTORIES)}")
    return _FACTORIES[name][0]


def build_passes(scheme: Scheme, given: CalibrationInput) -> list[Pass]:
    """The scheme's passes in order, configured."""
    for name in scheme.passes:
        pass_class(name)
    return [_FACTORIES[name][1](scheme, given) for name in scheme.passes]
