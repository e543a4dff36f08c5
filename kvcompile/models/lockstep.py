"""Several forward passes abreast: a layer is passed by one after another, and none goes on before all have passed it.

Each forward pass is a coroutine: a thread that runs only while the one that drives it waits, so nothing is ever concurrent.
A hook stops it in front of every layer. So a layer has to be there once, however many forward passes there are, and no model
has to be taken apart for that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")


class _Cancelled(BaseException):
    """Unwinds a forward pass that nobody will resume; not an Exception, so that no model catches it."""


class _Coroutine(Generic[T]):
    """A call in a thread of its own, which runs from `resume` to its next `pause`, or to its end."""

    def __init__(self, call: Callable[[], T]):
        self.layer: int | None = None
        self.result: T | None = None
        self._call, self._cancelled = call, False
        self._error: BaseException | None = None
        self._resumed, self._paused = Semaphore(0), Semaphore(0)
        self._thread: Thread | None = None

    def resume(self) -> None:
        """Let it run until it pauses or ends; raises what it raised."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="kvcompile forward pass", daemon=True)
            self._thread.start()
        else:
            self._resumed.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def pause(self, layer: int) -> None:
        """Wait in front of a layer; called from its own thread."""
        self.layer = layer
        self._paused.release()
        self._resumed.acquire()
        if self._cancelled:
            raise _Cancelled

    def cancel(self) -> None:
        """Unwind it, if it has not ended, and wait for that: one layer's work at most."""
        self._cancelled = True
        self._resumed.release()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.layer = None
            self._paused.release()


def run_abreast(
    layers: Sequence[nn.Module],
    order: Iterable[int],
    calls: Sequence[Callable[[], T]],
    holding: Callable[[int], AbstractContextManager[Any]],
    entering: Callable[[int, int], None],
) -> list[T]:
    """The results of `calls`, each a forward pass through all of `layers` in `order`, which is iterated as they go.

    A layer is passed within ``holding(layer)``, right after ``entering(call, layer)``. Whatever a call raises is raised here,
    and the others are unwound. Raises RuntimeError for a model that does not call its layers once each in this order.
    """
    coroutines = [_Coroutine(call) for call in calls]
    running: list[_Coroutine[T]] = []

    def proceed(coroutine: _Coroutine[T]) -> None:
        running[:] = [coroutine]
        coroutine.resume()

    def expect(layer: int | None) -> None:
        for coroutine in coroutines:
            if coroutine.layer != layer:
                raise RuntimeError(
                    f"a forward pass stands at layer {coroutine.layer}, not {layer}: layers out of order"
                )

    with _stopping(layers, lambda layer: running[0].pause(layer)):
        try:
            for coroutine in coroutines:
                proceed(coroutine)
            for layer in order:
                expect(layer)
                with holding(layer):
                    for index, coroutine in enumerate(coroutines):
                        entering(index, layer)
                        proceed(coroutine)
            expect(None)
        finally:
            for coroutine in coroutines:
                coroutine.cancel()
    return [coroutine.result for coroutine in coroutines]  # type: ignore[misc]


@contextmanager
def _stopping(layers: Sequence[nn.Module], stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` with a layer's index whenever it is about to run."""

    def hook(layer: int) -> Callable[..., None]:
        return lambda *_: stop(layer)

    handles = [module.register_forward_pre_hook(hook(layer)) for layer, module in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
