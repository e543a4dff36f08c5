"""The packed storage behind a cache: pages, page tables and BF16 windows of all layers that share one geometry.

Shapes: L layers, B batch rows, K KV heads, D head_dim, S sink slots, W ring slots, P pages in the pool, N table columns,
X page bytes, T new tokens.

All layers advance together, so lengths and page tables are kept once. A row of n tokens has
``max(0, ceil((n - S - recent) / 64) - 1)`` full pages: between `recent` + 1 and `recent` + 64 tokens stay in the ring, and
that depends on n alone, so prefill and step-by-step decoding store the same bytes. Padding takes no slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.codec import PAGE_TOKENS, LayerCache, PageFormat, decode_pages
from kvcompile.errors import CacheError
from kvcompile.runtime.backend import Backend

_SPARE = 8
"""When the pool is full it grows by an eighth."""


@dataclass(frozen=True)
class Geometry:
    """What the layers of a store share."""

    num_key_value_heads: int
    head_dim: int
    sink: int
    recent: int
    page_bytes: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise CacheError(f"windows cannot be negative: sink {self.sink}, recent {self.recent}")

    @property
    def ring(self) -> int:
        """Ring slots: the recent window and one page, rounded up to whole pages so that a page never wraps."""
        return -(-(self.recent + PAGE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS

    def full_pages(self, num_tokens: int) -> int:
        """Pages that a row of `num_tokens` tokens has."""
        return max(0, -(-(num_tokens - self.sink - self.recent) // PAGE_TOKENS) - 1)


class PackedStore:
    """Pages and windows of L layers for a batch whose rows may have different lengths."""

    def __init__(self, geometry: Geometry, formats: Sequence[PageFormat], backend: Backend, device: torch.device):
        self.geometry, self.formats, self.backend, self.device = geometry, list(formats), backend, device
        self.reset()

    def reset(self) -> None:
        """Forget everything and release the memory."""
        g = self.geometry
        self.num_tokens: list[int] = []
        self.num_pages: list[int] = []
        self.tables: list[list[int]] = []
        self.references: list[int] = []
        self.free: list[int] = []
        self.pages_LPKX = torch.empty(
            len(self.formats), 0, g.num_key_value_heads, g.page_bytes, dtype=torch.uint8, device=self.device
        )
        self.windows: dict[str, Tensor] = {}
        self.runs: list[list[int]] = []
        self.grown: list[int] = []
        self.kept: list[Tensor | None] = []
        self.steps = self.pending = 0
        self.one_by_one = False
        self._device_state: tuple[Tensor, Tensor, Tensor] | None = None

    # -- one step of the model: begin once, then append for every layer -------------------------------------------

    def begin(self, real_BT: Tensor | None, batch: int, length: int) -> None:
        """Start a step of `length` columns; `real_BT` marks real tokens, None means all. Takes the pages it will need.

        Where no row gains more than one token, the page that leaves a ring is encoded now, for all layers, before the
        token takes a slot. Longer runs are encoded by `append`.
        """
        self.commit()
        if not self.windows:
            self._allocate(batch)
        if batch != len(self.num_tokens):
            raise CacheError(
                f"the cache holds {len(self.num_tokens)} rows, but this step has {batch}; start a new cache"
            )
        columns = [[True] * length] * batch if real_BT is None else real_BT.tolist()
        for runs, row in zip(self.runs, columns, strict=True):
            _extend_runs(runs, row)
        self.grown = [sum(row) for row in columns]
        self.kept = [None if all(row) else self._index([t for t, real in enumerate(row) if real]) for row in columns]
        wanted = [self._pages_after(row) - have for row, have in enumerate(self.num_pages)]
        if sum(wanted) > len(self.free):
            self._grow(max(sum(wanted) - len(self.free), self.pages_LPKX.shape[1] // _SPARE))
        for row, count in enumerate(wanted):
            self.tables[row] += [self._take_page() for _ in range(count)]
        self.one_by_one = length == 1
        self.steps += 1
        self.pending = len(self.formats)
        if self.one_by_one:
            for row in (row for row, count in enumerate(wanted) if count):
                self._demote(row)
            self._plan_slots()

    def append(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Store the rotated bfloat16 rows of this step in one layer; columns that are padding are passed over."""
        self.pending -= 1
        if self.one_by_one:
            for kind, rows, slots in self._slots:
                self.windows[f"{kind}_k"][layer][rows, :, slots] = k_BKTD[rows, :, 0]
                self.windows[f"{kind}_v"][layer][rows, :, slots] = v_BKTD[rows, :, 0]
            return
        for row, kept in enumerate(self.kept):
            k_KTD, v_KTD = k_BKTD[row], v_BKTD[row]
            if kept is not None:
                k_KTD, v_KTD = k_KTD[:, kept], v_KTD[:, kept]
            self._append_run(layer, row, k_KTD, v_KTD)

    def commit(self) -> None:
        """Count the tokens of the last step, which every layer must have appended by now.

        Raises CacheError after a step that failed half way.
        """
        if self.pending:
            raise CacheError(
                "the last step failed before every layer had stored it; reset() the cache or start a new one"
            )
        for row, grown in enumerate(self.grown):
            self.num_pages[row] = self._pages_after(row)
            self.num_tokens[row] += grown
        self.grown = [0] * len(self.num_tokens)
        self._device_state = None

    def _pages_after(self, row: int) -> int:
        """Pages of a row once the current step is counted; a cropped row may have more than its length asks for."""
        return max(self.num_pages[row], self.geometry.full_pages(self.num_tokens[row] + self.grown[row]))

    def _demote(self, row: int) -> None:
        """Encode a row's oldest 64 ring tokens into its next page, in every layer."""
        slot = self.num_pages[row] * PAGE_TOKENS % self.geometry.ring
        page, block = self._index([self.tables[row][self.num_pages[row]]]), slice(slot, slot + PAGE_TOKENS)
        for layer, fmt in enumerate(self.formats):
            k_NKTD = self.windows["recent_k"][layer, row : row + 1, :, block]
            v_NKTD = self.windows["recent_v"][layer, row : row + 1, :, block]
            self.backend.write_pages(k_NKTD, v_NKTD, fmt, self.pages_LPKX[layer], page)
        self.num_pages[row] += 1

    def _plan_slots(self) -> None:
        """Where each row's single token goes: window, rows and slots, the same in every layer."""
        sink, ring = self.geometry.sink, self.geometry.ring
        rows = [row for row, grown in enumerate(self.grown) if grown]
        young = [row for row in rows if self.num_tokens[row] < sink]
        old = [row for row in rows if self.num_tokens[row] >= sink]
        plans = [("sink", young, [self.num_tokens[row] for row in young])]
        plans += [("recent", old, [(self.num_tokens[row] - sink) % ring for row in old])]
        self._slots = [(kind, self._index(rows), self._index(slots)) for kind, rows, slots in plans if rows]

    def _append_run(self, layer: int, row: int, k_KTD: Tensor, v_KTD: Tensor) -> None:
        """A run of tokens of one row: sink, whole pages (with what waits in the ring), and the rest into the ring."""
        g, before, pages = self.geometry, self.num_tokens[row], self.num_pages[row]
        to_sink = min(max(g.sink - before, 0), k_KTD.shape[1])
        if to_sink:
            self.windows["sink_k"][layer, row, :, before : before + to_sink] = k_KTD[:, :to_sink]
            self.windows["sink_v"][layer, row, :, before : before + to_sink] = v_KTD[:, :to_sink]
        waiting = self._ring_slots(row)
        ring_k, ring_v = self.windows["recent_k"][layer, row], self.windows["recent_v"][layer, row]
        k_KTD = torch.cat([ring_k[:, waiting], k_KTD[:, to_sink:]], dim=1)
        v_KTD = torch.cat([ring_v[:, waiting], v_KTD[:, to_sink:]], dim=1)
        new_pages = self._pages_after(row) - pages
        paged = new_pages * PAGE_TOKENS
        if new_pages:
            ids = self._index(self.tables[row][pages : pages + new_pages])
            k_NKTD = k_KTD[:, :paged].unflatten(1, (new_pages, PAGE_TOKENS)).transpose(0, 1)
            v_NKTD = v_KTD[:, :paged].unflatten(1, (new_pages, PAGE_TOKENS)).transpose(0, 1)
            self.backend.write_pages(k_NKTD, v_NKTD, self.formats[layer], self.pages_LPKX[layer], ids)
        slots = (torch.arange(k_KTD.shape[1] - paged, device=self.device) + (pages + new_pages) * PAGE_TOKENS) % g.ring
        ring_k[:, slots] = k_KTD[:, paged:]
        ring_v[:, slots] = v_KTD[:, paged:]

    # -- reading ---------------------------------------------------------------------------------------------------

    def stored_tokens(self) -> list[int]:
        """Real tokens of every row, those of the last step counted."""
        return [stored + grown for stored, grown in zip(self.num_tokens, self.grown, strict=True)]

    def layer(self, layer: int) -> LayerCache:
        """What a decode kernel reads of one layer.

        In a step of one token a row it counts that token, which has been appended. In a longer step it is the state
        before the step: a chunk attends to history and to itself before it is stored.
        """
        if self._device_state is None:
            width = max((len(t) for t in self.tables), default=0)
            lengths = [n + grown * self.one_by_one for n, grown in zip(self.num_tokens, self.grown, strict=True)]
            table = [t + [0] * (width - len(t)) for t in self.tables]
            self._device_state = (
                torch.tensor(table, dtype=torch.int32, device=self.device).reshape(len(table), width),
                torch.tensor(self.num_pages, dtype=torch.int32, device=self.device),
                torch.tensor(lengths, dtype=torch.int32, device=self.device),
            )
        table_BN, num_pages_B, num_tokens_B = self._device_state
        w = self.windows
        return LayerCache(
            self.formats[layer], self.pages_LPKX[layer], table_BN, num_pages_B, num_tokens_B,
            w["sink_k"][layer], w["sink_v"][layer], w["recent_k"][layer], w["recent_v"][layer],
        )  # fmt: skip

    def nbytes(self) -> int:
        """Bytes of all tensors that hold keys and values: pages and windows."""
        return self.pages_LPKX.nbytes + sum(window.nbytes for window in self.windows.values())

    # -- editing rows ----------------------------------------------------------------------------------------------

    def select(self, rows: list[int]) -> None:
        """Make the batch the given rows, repeated or dropped as listed; pages are shared, windows are copied."""
        self.commit()
        if not self.windows:
            return
        for row in rows:
            for page in self.tables[row]:
                self.references[page] += 1
        for table in self.tables:
            self._release(table)
        index = self._index(rows)
        self.tables = [list(self.tables[row]) for row in rows]
        self.num_pages = [self.num_pages[row] for row in rows]
        self.num_tokens = [self.num_tokens[row] for row in rows]
        self.runs = [list(self.runs[row]) for row in rows]
        with torch.inference_mode(False):
            self.windows = {name: window.index_select(1, index) for name, window in self.windows.items()}
        self.grown = [0] * len(rows)

    def crop(self, columns: int) -> None:
        """Drop the last `columns` columns of the batch; a row loses those of them that were real tokens.

        Tokens of a page that is cut return to the ring as the page decodes them; nothing else loses precision, and a crop
        by less than the recent window touches no page.
        """
        self.commit()
        for row, runs in enumerate(self.runs):
            remaining = self.num_tokens[row] - _shorten_runs(runs, columns)
            history = max(remaining - self.geometry.sink, 0)
            kept_pages = min(self.num_pages[row], history // PAGE_TOKENS)
            if kept_pages < self.num_pages[row]:
                self._unpack_into_ring(row, kept_pages, history - kept_pages * PAGE_TOKENS)
            self._release(self.tables[row][kept_pages:])
            del self.tables[row][kept_pages:]
            self.num_pages[row], self.num_tokens[row] = kept_pages, remaining

    def _unpack_into_ring(self, row: int, page: int, count: int) -> None:
        """Decode the first `count` tokens of the row's page number `page` into their ring slots, in every layer."""
        slot = page * PAGE_TOKENS % self.geometry.ring
        for layer, fmt in enumerate(self.formats):
            k_KTD, v_KTD = decode_pages(self.pages_LPKX[layer, self.tables[row][page]], fmt)
            self.windows["recent_k"][layer, row, :, slot : slot + count] = k_KTD[:, :count].bfloat16()
            self.windows["recent_v"][layer, row, :, slot : slot + count] = v_KTD[:, :count].bfloat16()

    # -- slots and pages -------------------------------------------------------------------------------------------

    def _allocate(self, batch: int) -> None:
        g, layers = self.geometry, len(self.formats)
        for name, slots in (("sink", g.sink), ("recent", g.ring)):
            for half in "kv":
                shape = (layers, batch, g.num_key_value_heads, slots, g.head_dim)
                with torch.inference_mode(False):  # so that later steps may run outside of it
                    self.windows[f"{name}_{half}"] = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self.num_tokens, self.num_pages, self.grown = [0] * batch, [0] * batch, [0] * batch
        self.runs = [[0] for _ in range(batch)]
        self.tables = [[] for _ in range(batch)]

    def _ring_slots(self, row: int) -> Tensor:
        """Ring slots of a row's tokens that are in no page yet, in order."""
        first, last = self.num_pages[row] * PAGE_TOKENS, max(self.num_tokens[row] - self.geometry.sink, 0)
        return torch.arange(first, max(first, last), device=self.device) % self.geometry.ring

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _take_page(self) -> int:
        page = self.free.pop()
        self.references[page] = 1
        return page

    def _grow(self, pages: int) -> None:
        have = self.pages_LPKX.shape[1]
        shape = (self.pages_LPKX.shape[0], have + pages, *self.pages_LPKX.shape[2:])
        with torch.inference_mode(False):
            larger = torch.empty(shape, dtype=torch.uint8, device=self.device)
        larger[:, :have] = self.pages_LPKX
        self.pages_LPKX = larger
        self.free += reversed(range(have, have + pages))
        self.references += [0] * pages

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)


def _extend_runs(runs: list[int], row: list[bool]) -> None:
    """Append columns to a run-length code that alternates padding, real, padding, ... and starts with padding."""
    for real in row:
        if real == (len(runs) % 2 == 0):
            runs[-1] += 1
        else:
            runs.append(1)


def _shorten_runs(runs: list[int], columns: int) -> int:
    """Take the last `columns` columns off a run-length code; how many of them were real."""
    real = 0
    while columns and runs:
        cut = min(columns, runs[-1])
        real += cut if len(runs) % 2 == 0 else 0
        runs[-1] -= cut
        columns -= cut
        if runs[-1] == 0 and len(runs) > 1:
            runs.pop()
        elif runs[-1] == 0:
            break
    return real
