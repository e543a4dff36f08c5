"""Resident memory of a conversion: measured, and given back between passes."""

import ctypes
import gc
import threading

import psutil


class PeakMemory:
    """The largest resident memory of this process above what it had on entry, sampled every 20 ms, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> "PeakMemory":
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._start)


def release_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc keeps what a pass has freed)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
