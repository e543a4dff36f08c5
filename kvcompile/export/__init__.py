"""Handing an artifact to other software: one target per file, each right or refusing."""
