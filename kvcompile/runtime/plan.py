"""What the runtime does to compiled layers: where and how rows are stored, and the maps into and out of the stored basis.

Shapes: K KV heads, D head_dim.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from kvcompile.codec import NO_PAGE_TABLES, PageFormat, PageTables
from kvcompile.codec.correction import Correction
from kvcompile.errors import CacheError

if TYPE_CHECKING:
    from kvcompile.kernels.triton_append import TokenMaps


@dataclass(frozen=True)
class Storage:
    """How one layer is stored: its page format, the tables its rows are coded with, and its correction, if it has one."""

    fmt: PageFormat
    tables: PageTables = NO_PAGE_TABLES
    correction: Correction | None = None


@dataclass(frozen=True)
class Geometry:
    """What the layers of a store share."""

    num_key_value_heads: int
    head_dim: int
    sink: int
    recent: int
    page_bytes: int
    block: int = 64

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise CacheError(f"windows cannot be negative: sink {self.sink}, recent {self.recent}")

    @property
    def ring(self) -> int:
        """Ring slots: the recent window and one page, rounded up to whole pages so that a page never wraps."""
        return -(-(self.recent + self.block) // self.block) * self.block

    def full_pages(self, num_tokens: int) -> int:
        """Pages that a row of `num_tokens` tokens has."""
        return max(0, -(-(num_tokens - self.sink - self.recent) // self.block) - 1)


@dataclass(frozen=True)
class Capacity:
    """Tokens per row to make room for when the first step fixes the batch; where `fixed`, the pool never grows beyond."""

    tokens: int = 0
    fixed: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """What the runtime does to one compiled layer, float32 on the device: rotations ``[K, D, D]``, means ``[K, D]``.

    None is the identity, or zero. Queries take `query_rotation`, the transposed inverse of the keys' (the same matrix where
    that is orthogonal), attention outputs `output_rotation`, the inverse of the values'. The values' two are set only where
    they are applied online: folded ones need nothing at run time. Means are of rotated rows; a key's may be left out of
    every logit, a value's is added to the output again.
    """

    storage: Storage
    key_rotation: Tensor | None = None
    query_rotation: Tensor | None = None
    value_rotation: Tensor | None = None
    output_rotation: Tensor | None = None
    key_mean: Tensor | None = None
    value_mean: Tensor | None = None

    @cached_property
    def token_maps(self) -> "TokenMaps":
        """The same maps as the append kernel reads them; made once, for the first cache that asks."""
        from kvcompile.kernels.triton_append import TokenMaps

        return TokenMaps.of(self.query_rotation, self.key_rotation, self.value_rotation, self.key_mean, self.value_mean)
