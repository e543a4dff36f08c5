"""Doing something when a module is imported, without importing it now: `import kvcompile` stays quick."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` right after the module `name` has been executed; at once where that is past."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds one module, once, as the other finders do, and lets its loader call back."""

    def __init__(self, name: str, then: Callable[[], object]):
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute, then = spec.loader.exec_module, self.then

            def exec_module(module: ModuleType) -> None:
                execute(module)
                then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
