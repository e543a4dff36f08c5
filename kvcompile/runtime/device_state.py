"""What kernels read of a store's bookkeeping: page tables and lengths on the device, at addresses that stay.

Shapes: B batch rows, N page-table columns.

The host's lists are the truth; nothing is read back. A step sends what changed in one copy: the lengths, and with them the
tables when a row has new pages. On CUDA that copy is asynchronous, from pinned memory which torch keeps until it is done, so the
host may run several steps ahead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 16
"""Fewest columns of a table: a thousand tokens."""


class DeviceState:
    """`table_BN`, `num_pages_B` and `num_tokens_B` (int32), parts of one tensor; N grows in powers of two."""

    def __init__(self, batch: int, columns: int, device: torch.device):
        self.device = device
        self._lengths: list[int] = []
        self._allocate(batch, columns)

    @property
    def address(self) -> tuple[int, ...]:
        """What a CUDA graph that reads this state depends on."""
        return self._state.data_ptr(), *self.table_BN.shape

    def write_pages(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Let `pages` be the row's pages from number `first` on."""
        self.widen(first + len(pages))
        if pages:
            self._host_table_BN[row, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._tables_changed = True

    def widen(self, columns: int) -> None:
        """Let tables have at least so many columns; the address changes if they had fewer."""
        batch, have = self._host_table_BN.shape
        if columns > have:
            old_BN = self._host_table_BN
            self._allocate(batch, columns)
            self._host_table_BN[:, :have] = old_BN

    def send(self, num_pages: list[int], num_tokens: list[int]) -> None:
        """Bring the device up to date, without waiting for it."""
        lengths = num_pages + num_tokens
        if lengths == self._lengths and not self._tables_changed:
            return
        batch, aligned = len(num_pages), _aligned(len(num_pages))
        size = self._state.shape[0] if self._tables_changed else 2 * aligned
        staged = torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        staged[: 2 * aligned].view(2, aligned)[:, :batch] = torch.tensor(lengths, dtype=torch.int32).view(2, batch)
        if self._tables_changed:
            staged[2 * aligned :] = self._host_table_BN.flatten()
        self._state[:size].copy_(staged, non_blocking=True)
        self._lengths, self._tables_changed = lengths, False

    def _allocate(self, batch: int, columns: int) -> None:
        columns = max(_COLUMNS, 1 << max(columns - 1, 0).bit_length())
        with torch.inference_mode(False):  # so that later steps may run outside of it
            parts = [_aligned(batch), _aligned(batch), batch * columns]
            self._state = torch.zeros(sum(parts), dtype=torch.int32, device=self.device)
            self._host_table_BN = torch.zeros(batch, columns, dtype=torch.int32)
            num_pages, num_tokens, table = self._state.split(parts)
            self.num_pages_B, self.num_tokens_B = num_pages[:batch], num_tokens[:batch]
            self.table_BN = table.view(batch, columns)
        self._tables_changed = True


def _aligned(count: int) -> int:
    """So many numbers, rounded up to 128 bytes: kernels are compiled for aligned addresses."""
    return -(-count // 32) * 32


def to_device(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """A list as a tensor on the device, without waiting for the device."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
