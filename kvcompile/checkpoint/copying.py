"""Copying a file without its bytes passing through this process, or being written at all where a file system can share them."""

import errno
import os
import shutil
from pathlib import Path

from kvcompile.errors import CheckpointError

_AT_ONCE = 1 << 30
_CANNOT = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
"""What ``copy_file_range`` answers where this kernel or these file systems cannot do it."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that a copy has from its target; any other is taken for one of the source."""


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of `source` to a new file `target`.

    ``copy_file_range`` makes a reflink on btrfs and XFS (nothing is written), a server-side copy on NFS, and copies within the
    kernel elsewhere. Raises CheckpointError when the source cannot be read, OSError when the target cannot be written.
    """
    try:
        _copy(source, target)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise CheckpointError(f"{source} cannot be copied to {target}: {error.strerror}") from error


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reading, open(target, "wb") as writing:
        left = os.fstat(reading.fileno()).st_size
        while left:
            try:
                copied = os.copy_file_range(reading.fileno(), writing.fileno(), min(left, _AT_ONCE))
            except (OSError, AttributeError) as error:
                if isinstance(error, OSError) and error.errno not in _CANNOT:
                    raise
                copied = 0
            if not copied:
                break
            left -= copied
    if left:
        shutil.copyfile(source, target)
