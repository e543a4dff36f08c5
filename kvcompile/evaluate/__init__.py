"""Measures of a converted checkpoint, each through the real packed cache."""

from kvcompile.evaluate.divergence import Divergence, divergence, reference_logits
from kvcompile.evaluate.evaluation import Evaluation, Quality, evaluate
from kvcompile.evaluate.inspection import Inspection, inspect
from kvcompile.evaluate.retrieval import Finding, Retrieval, Trial, make_trials, retrieval, retrieves
from kvcompile.evaluate.teacher_forcing import chunk_ends, teacher_forced
from kvcompile.evaluate.verification import Verification, verify

__all__ = [
    "Divergence",
    "Evaluation",
    "Finding",
    "Inspection",
    "Quality",
    "Retrieval",
    "Trial",
    "Verification",
    "chunk_ends",
    "divergence",
    "evaluate",
    "inspect",
    "make_trials",
    "reference_logits",
    "retrieval",
    "retrieves",
    "teacher_forced",
    "verify",
]
