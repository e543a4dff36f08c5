"""kvcompile: the compiler for KV caches."""

from kvcompile.version import __version__

__all__ = ["__version__"]
