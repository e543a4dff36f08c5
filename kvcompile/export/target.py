"""Stand-in for the contract of the branch `exports`: DELETE THIS FILE ON MERGE, theirs is the one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Notes:
    """What a view says about itself; entries of the first three read ``what: how``."""

    carried: tuple[str, ...]
    approximated: tuple[str, ...]
    refused: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
