"""The page pool of a store: which pages are taken, by how many rows, and which rows have come to hold the same pages.

Shapes: L layers, P pages in the pool, K KV heads, X page bytes, N pages of a list.

A page number stands for one page in every layer. A page that is taken is written once and never altered until its last row lets
go of it, so rows may share it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.errors import CacheError
from kvcompile.runtime.device_state import to_device

_SPARE = 8
"""A full pool grows by an eighth."""
_PART = 1024
"""Pages that are compared at a time."""
_PRIME = 0x01000193


class PagePool:
    """Pages of all layers in one tensor, with reference counts; of fixed size, or growing when it is full."""

    def __init__(self, num_layers: int, num_heads: int, page_bytes: int, device: torch.device):
        self.references: list[int] = []
        self.free: list[int] = []
        self.pages_LPKX = torch.empty(num_layers, 0, num_heads, page_bytes, dtype=torch.uint8, device=device)

    def make_room(self, count: int, *, fixed: bool = False) -> None:
        """See to it that `count` pages are free. Raises CacheError where a fixed pool has fewer."""
        missing = count - len(self.free)
        if missing <= 0:
            return
        have = self.pages_LPKX.shape[1]
        if fixed:
            raise CacheError(
                f"the page pool is full: {len(self.free)} of {have} pages are free and this step needs {count}; make the "
                "cache with a larger max_tokens, or drop rows or columns of it (batch_select_indices, crop)"
            )
        self.grow(max(missing, have // _SPARE))

    def grow(self, pages: int) -> None:
        """Add free pages; the pool's address changes."""
        have = self.pages_LPKX.shape[1]
        shape = (self.pages_LPKX.shape[0], have + pages, *self.pages_LPKX.shape[2:])
        with torch.inference_mode(False):  # so that later steps may run outside of it
            larger = torch.empty(shape, dtype=torch.uint8, device=self.pages_LPKX.device)
        larger[:, :have] = self.pages_LPKX
        self.pages_LPKX = larger
        self.free += reversed(range(have, have + pages))
        self.references += [0] * pages

    def take(self, count: int) -> list[int]:
        """Free pages for one row; there must be room."""
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Let one more row hold pages that are taken."""
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let one row go of pages; those that nobody holds any more become free."""
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)

    def share_prefixes(self, tables: list[list[int]], fresh: Sequence[range]) -> list[int]:
        """Let rows hold one copy of equal leading pages; the rows whose table has changed.

        `fresh` are the places in each row's table that were just written, the last of it. A page is shared when all pages
        before it are and its bytes are equal in every layer. The device is read once, or twice where digests agree.
        """
        pages = [table[place] for table, places in zip(tables, fresh, strict=True) for place in places]
        digests = iter(self._digests(to_device(pages, self.pages_LPKX.device)))
        known: dict[tuple[int, int], int] = {}  # (page before, digest) to the first such page
        pairs = []
        for row, places in enumerate(fresh):
            before = tables[row][places.start - 1] if places.start else -1
            for place in places:
                before = known.setdefault((before, next(digests)), tables[row][place])
                if before != tables[row][place]:
                    pairs.append((row, place, before))
        if not pairs:
            return []
        equal = self._equal([tables[row][place] for row, place, _ in pairs], [page for *_, page in pairs])
        different, changed = set(), []
        for (row, place, page), same in zip(pairs, equal, strict=True):
            if not same:
                different.add(row)
            elif row not in different:
                self.share([page])
                self.release([tables[row][place]])
                tables[row][place] = page
                changed.append(row)
        return sorted(set(changed))

    def _digests(self, ids_N: Tensor) -> list[int]:
        """A number per page that equal pages have in common, from the first layer's bytes."""
        num_words = self.pages_LPKX[0, 0].numel() // 4
        weights_X = torch.arange(1, num_words + 1, dtype=torch.int32, device=ids_N.device) * _PRIME
        sums = []
        for part_N in ids_N.split(_PART):
            words_NX = self.pages_LPKX[0][part_N].flatten(1).view(torch.int32)
            sums.append((words_NX * weights_X).sum(dim=1))
        return torch.cat(sums).tolist()

    def _equal(self, left: list[int], right: list[int]) -> list[bool]:
        """Which pairs of pages have the same bytes in every layer."""
        left_N, right_N = (to_device(pages, self.pages_LPKX.device) for pages in (left, right))
        equal = []
        for a_N, b_N in zip(left_N.split(_PART), right_N.split(_PART), strict=True):
            layers = [(x_PKX[a_N] == x_PKX[b_N]).flatten(1).all(dim=1) for x_PKX in self.pages_LPKX]
            equal.append(torch.stack(layers).all(dim=0))
        return torch.cat(equal).tolist()
