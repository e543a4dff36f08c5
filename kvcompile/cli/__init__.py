"""The command line: one file per command, each a thin layer over the Python function of the same name."""

from kvcompile.cli.main import main

__all__ = ["main"]
