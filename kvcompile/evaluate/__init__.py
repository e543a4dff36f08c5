"""Measures of a converted checkpoint, each through the real packed cache."""

from kvcompile.evaluate.divergence import Divergence, divergence, reference_logits
from kvcompile.evaluate.inspection import Inspection, inspect
from kvcompile.evaluate.retrieval import Trial, make_trials, retrieval, retrieves
from kvcompile.evaluate.verification import Verification, verify

__all__ = [
    "Divergence",
    "Inspection",
    "Trial",
    "Verification",
    "divergence",
    "inspect",
    "make_trials",
    "reference_logits",
    "retrieval",
    "retrieves",
    "verify",
]
