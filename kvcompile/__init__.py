"""kvcompile: the compiler for KV caches.

>>> import kvcompile
>>> kvcompile.convert("path/to/model", "out", "oscar-int2")
>>> model, tokenizer = kvcompile.load("out")
>>> cache = kvcompile.new_cache(model)

The functions below are loaded on first use, so that importing the package (and the command's `--help`) stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcompile.hook import when_imported
from kvcompile.version import __version__

if TYPE_CHECKING:
    from kvcompile.evaluate import inspect, verify
    from kvcompile.evaluate.comparison import compare
    from kvcompile.evaluate.difference import diff
    from kvcompile.passes.convert import convert
    from kvcompile.runtime.cache import PackedCache
    from kvcompile.runtime.generate import generate
    from kvcompile.runtime.load import load, new_cache
    from kvcompile.scheme import load_scheme

_HOMES = {
    "PackedCache": "kvcompile.runtime",
    "compare": "kvcompile.evaluate.comparison",
    "convert": "kvcompile.passes.convert",
    "diff": "kvcompile.evaluate.difference",
    "generate": "kvcompile.runtime.generate",
    "inspect": "kvcompile.evaluate",
    "load": "kvcompile.runtime",
    "load_scheme": "kvcompile.scheme",
    "new_cache": "kvcompile.runtime",
    "verify": "kvcompile.evaluate",
}

__all__ = [
    "PackedCache",
    "__version__",
    "compare",
    "convert",
    "diff",
    "generate",
    "inspect",
    "load",
    "load_scheme",
    "new_cache",
    "verify",
]


when_imported("transformers.quantizers.auto", lambda: import_module("kvcompile.quantizer"))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvcompile' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
