"""Running converted checkpoints: packed caches, backends, and the integration with transformers."""

from kvcompile.runtime.cache import PackedCache
from kvcompile.runtime.load import attach, load, new_cache

__all__ = ["PackedCache", "attach", "load", "new_cache"]
