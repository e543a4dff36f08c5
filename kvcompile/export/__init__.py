"""Handing an artifact to other software: one target per file, each right or refusing."""

from kvcompile.export.registry import TARGETS, export, load_target
from kvcompile.export.target import Notes, Options, Target

__all__ = ["TARGETS", "Notes", "Options", "Target", "export", "load_target"]
