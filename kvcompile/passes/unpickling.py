"""For the time of a conversion: a copy of a pickled checkpoint in safetensors, beside the output."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcompile.checkpoint import write_as_safetensors
from kvcompile.errors import OutputError
from kvcompile.passes.lock import DirectoryLock


@contextmanager
def safetensors_copy(source: Path, out: Path) -> Iterator[Path]:
    """The pickled checkpoint `source` in safetensors, in ``.{out}.unpickled/``, which goes again.

    The copy is the same for every run, so that an interrupted conversion resumes.
    """
    out = out.absolute()
    folder = out.parent / f".{out.name}.unpickled"
    lock = DirectoryLock(folder)
    if not lock.take():
        raise OutputError(
            f"another conversion is writing {out} (it works in {folder}); wait for it, or choose another path"
        )
    copy = folder / source.resolve().name
    try:
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        write_as_safetensors(source, copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        lock.release()
        with suppress(OSError):
            folder.rmdir()
