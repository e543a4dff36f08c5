"""Running converted checkpoints: packed caches, backends, and the integration with transformers."""

from kvcompile.runtime.cache import PackedCache
from kvcompile.runtime.graph import StepGraph
from kvcompile.runtime.load import attach, load, new_cache

__all__ = ["PackedCache", "StepGraph", "attach", "load", "new_cache"]
