"""The packed storage behind a cache: pages, page tables and BF16 windows of all layers that share one geometry.

Shapes: L layers, B batch rows, K KV heads, D head_dim, S sink slots, W ring slots, P pages in the pool, N table columns,
X page bytes, T new tokens.

All layers advance together, so lengths and page tables are kept once. A page takes a block of P = 64 or 128 tokens. A row
of n tokens has ``max(0, ceil((n - S - recent) / P) - 1)`` full pages: between `recent` + 1 and `recent` + P tokens stay in
the ring, and that depends on n alone, so prefill and step-by-step decoding store the same bytes. Padding takes no slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.codec import NO_PAGE_TABLES, LayerCache, PageFormat, PageTables, decode_pages
from kvcompile.codec.correction import Correction, CorrectionStates
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
class Storage:
    """How one layer is stored: its page format, the tables its rows are coded with, and its correction, if it has one."""

    fmt: PageFormat
    tables: PageTables = NO_PAGE_TABLES
    correction: Correction | None = None


class PackedStore:
    """Pages and windows of L layers for a batch whose rows may have different lengths."""

    def __init__(self, geometry: Geometry, layers: Sequence[Storage], backend: Backend, device: torch.device):
        self.geometry, self.layers, self.backend, self.device = geometry, list(layers), backend, device
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
            len(self.layers), 0, g.num_key_value_heads, g.page_bytes, dtype=torch.uint8, device=self.device
        )
        self.windows: dict[str, Tensor] = {}
        self.states: dict[int, CorrectionStates] = {}
        self.runs: list[list[int]] = []
        self.grown: list[int] = []
        self.kept: list[Tensor | None] = []
        self.steps = self.pending = 0
        self.one_by_one = False
        self._device_state: tuple[Tensor, Tensor, Tensor] | None = None

    # -- one step of the model: begin once, then append for every layer -------------------------------------------

    def begin(self, real_BT: Tensor | None, batch: int, length: int) -> None:
        """Start a step of `length` columns; `real_BT` marks real tokens, None means all. Takes the pages it will need.

        The page that leaves a ring when the first of the new tokens comes is encoded now, for all layers: every token of
        the step sees the history as its first token does. Further pages are encoded by `append`.
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
        self.pending = len(self.layers)
        for row, grown in enumerate(self.grown):
            if self.num_pages[row] < self.geometry.full_pages(self.num_tokens[row] + min(grown, 1)):
                self._demote(row)
        if self.one_by_one:
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
        """Encode a row's oldest block of ring tokens into its next page, in every layer."""
        slot = self.num_pages[row] * self.geometry.block % self.geometry.ring
        page, block = self._index([self.tables[row][self.num_pages[row]]]), slice(slot, slot + self.geometry.block)
        for layer in range(len(self.layers)):
            k_NKTD = self.windows["recent_k"][layer, row : row + 1, :, block]
            v_NKTD = self.windows["recent_v"][layer, row : row + 1, :, block]
            self._write_pages(layer, row, k_NKTD, v_NKTD, page)
        self.num_pages[row] += 1

    def _write_pages(self, layer: int, row: int, k_NKTD: Tensor, v_NKTD: Tensor, ids_N: Tensor) -> None:
        """Encode blocks of one row of one layer, and let its correction see what the pages made of them."""
        storage, pages_PKX = self.layers[layer], self.pages_LPKX[layer]
        self.backend.write_pages(k_NKTD, v_NKTD, storage.fmt, storage.tables, pages_PKX, ids_N)
        if storage.correction is not None:
            decoded_k, decoded_v = decode_pages(pages_PKX[ids_N], storage.fmt, storage.tables)
            self.states[layer].add(row, storage.correction, k_NKTD, decoded_k, decoded_v)

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
        paged = new_pages * g.block
        if new_pages:
            ids = self._index(self.tables[row][pages : pages + new_pages])
            k_NKTD = k_KTD[:, :paged].unflatten(1, (new_pages, g.block)).transpose(0, 1)
            v_NKTD = v_KTD[:, :paged].unflatten(1, (new_pages, g.block)).transpose(0, 1)
            self._write_pages(layer, row, k_NKTD, v_NKTD, ids)
        slots = (torch.arange(k_KTD.shape[1] - paged, device=self.device) + (pages + new_pages) * g.block) % g.ring
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
            self.layers[layer].fmt, self.pages_LPKX[layer], table_BN, num_pages_B, num_tokens_B,
            w["sink_k"][layer], w["sink_v"][layer], w["recent_k"][layer], w["recent_v"][layer],
            self.layers[layer].tables,
        )  # fmt: skip

    def nbytes(self) -> int:
        """Bytes of all tensors that hold keys and values: pages, windows, and the states of corrections."""
        held = [*self.windows.values(), *(x for states in self.states.values() for x in states.tensors())]
        return self.pages_LPKX.nbytes + sum(tensor.nbytes for tensor in held)

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
            self.states = {layer: states.select(index) for layer, states in self.states.items()}
        self.grown = [0] * len(rows)

    def crop(self, columns: int) -> None:
        """Drop the last `columns` columns of the batch; a row loses those of them that were real tokens.

        Tokens of a page that is cut return to the ring as the page decodes them; nothing else loses precision, and a crop
        by less than the recent window touches no page. Raises CacheError where a correction would have to forget a page.
        """
        self.commit()
        if self.states and any(
            self.num_pages[row] * self.geometry.block + self.geometry.sink > self.num_tokens[row] - columns
            for row in range(len(self.num_tokens))
        ):
            raise CacheError(
                "a cache with linear correction cannot be cropped into its pages: the states cannot forget; "
                "crop by fewer tokens than the recent window holds, or start a new cache"
            )
        for row, runs in enumerate(self.runs):
            remaining = self.num_tokens[row] - _shorten_runs(runs, columns)
            history = max(remaining - self.geometry.sink, 0)
            kept_pages = min(self.num_pages[row], history // self.geometry.block)
            if kept_pages < self.num_pages[row]:
                self._unpack_into_ring(row, kept_pages, history - kept_pages * self.geometry.block)
            self._release(self.tables[row][kept_pages:])
            del self.tables[row][kept_pages:]
            self.num_pages[row], self.num_tokens[row] = kept_pages, remaining

    def _unpack_into_ring(self, row: int, page: int, count: int) -> None:
        """Decode the first `count` tokens of the row's page number `page` into their ring slots, in every layer."""
        slot = page * self.geometry.block % self.geometry.ring
        for layer, storage in enumerate(self.layers):
            k_KTD, v_KTD = decode_pages(self.pages_LPKX[layer, self.tables[row][page]], storage.fmt, storage.tables)
            self.windows["recent_k"][layer, row, :, slot : slot + count] = k_KTD[:, :count].bfloat16()
            self.windows["recent_v"][layer, row, :, slot : slot + count] = v_KTD[:, :count].bfloat16()

    # -- slots and pages -------------------------------------------------------------------------------------------

    def _allocate(self, batch: int) -> None:
        g, layers = self.geometry, len(self.layers)
        for name, slots in (("sink", g.sink), ("recent", g.ring)):
            for half in "kv":
                shape = (layers, batch, g.num_key_value_heads, slots, g.head_dim)
                with torch.inference_mode(False):  # so that later steps may run outside of it
                    self.windows[f"{name}_{half}"] = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        for layer, storage in enumerate(self.layers):
            if storage.correction is not None:
                with torch.inference_mode(False):
                    self.states[layer] = CorrectionStates.zeros(storage.correction, batch, g.head_dim, self.device)
        self.num_tokens, self.num_pages, self.grown = [0] * batch, [0] * batch, [0] * batch
        self.runs = [[0] for _ in range(batch)]
        self.tables = [[] for _ in range(batch)]

    def _ring_slots(self, row: int) -> Tensor:
        """Ring slots of a row's tokens that are in no page yet, in order."""
        first, last = self.num_pages[row] * self.geometry.block, max(self.num_tokens[row] - self.geometry.sink, 0)
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
