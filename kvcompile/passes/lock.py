"""A lock on a directory, which the kernel lets go of when its holder ends, however it ends."""

import os
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows, where two runs are not kept apart
    fcntl = None  # type: ignore[assignment]


class DirectoryLock:
    """The right to work in `directory`, held through a file `lock` in it.

    The file's presence means nothing: a killed holder leaves it behind, unlocked.
    """

    def __init__(self, directory: Path):
        self.directory, self.path = directory, directory / "lock"
        self._file: IO[bytes] | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def take(self) -> bool:
        """Make the directory and take the lock; False where another process, or another object of this one, has it."""
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                file = open(self.path, "ab")  # noqa: SIM115 - stays open while the lock is held
            except FileNotFoundError:
                continue  # the last holder has removed the directory just now
            if not _lock(file):
                file.close()
                return False
            if self._is_there(file):
                self._file = file
                return True
            file.close()  # the last holder has removed it just now

    def release(self) -> None:
        """Remove the file, then let go: whoever waits for the old file sees that it is gone."""
        if self._file is not None:
            if self._is_there(self._file):
                self.path.unlink()
            self._file.close()
            self._file = None

    def _is_there(self, file: IO[bytes]) -> bool:
        """Whether an open file is the one that the directory holds now."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False


def _lock(file: IO[bytes]) -> bool:
    """Whether the file is locked now; a file system without locks keeps nobody apart."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
