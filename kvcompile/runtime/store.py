"""The packed storage behind a cache: pages, page tables and BF16 windows of all layers that share one geometry.

Shapes: L layers, B batch rows, K KV heads, D head_dim, S sink slots, W ring slots, P pages in the pool, N table columns,
X page bytes, T new tokens.

All layers advance together, so lengths and page tables are kept once. A page takes a block of P = 64 or 128 tokens. A row
of n tokens has ``max(0, ceil((n - S - recent) / P) - 1)`` full pages: between `recent` + 1 and `recent` + P tokens stay in
the ring, and that depends on n alone, so prefill and step-by-step decoding store the same bytes. Padding takes no slot.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcompile.codec import LayerCache, decode_pages
from kvcompile.codec.correction import CorrectionStates
from kvcompile.errors import CacheError
from kvcompile.runtime.backend import Backend
from kvcompile.runtime.device_state import DeviceState, to_device
from kvcompile.runtime.plan import Capacity, Geometry, Storage
from kvcompile.runtime.pool import PagePool
from kvcompile.runtime.runs import extend_runs, shorten_runs

__all__ = ["Capacity", "Geometry", "PackedStore", "Storage"]


class PackedStore:
    """Pages and windows of L layers for a batch whose rows may have different lengths."""

    def __init__(
        self,
        geometry: Geometry,
        layers: Sequence[Storage],
        backend: Backend,
        device: torch.device,
        capacity: Capacity = Capacity(),  # noqa: B008 - frozen
    ):
        self.geometry, self.layers, self.backend, self.device = geometry, list(layers), backend, device
        self.capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Forget everything and release the memory."""
        g = self.geometry
        self.num_tokens: list[int] = []
        self.num_pages: list[int] = []
        self.tables: list[list[int]] = []
        self.pool = PagePool(len(self.layers), g.num_key_value_heads, g.page_bytes, self.device)
        self.windows: dict[str, Tensor] = {}
        self.states: dict[int, CorrectionStates] = {}
        self.runs: list[list[int]] = []
        self.grown: list[int] = []
        self.kept: list[Tensor | None] = []
        self.steps = self.pending = 0
        self.one_by_one = False
        self._planned: list[tuple[str, Tensor, Tensor]] | None = None
        self._state = DeviceState(0, 0, self.device)

    @property
    def pages_LPKX(self) -> Tensor:  # noqa: N802 - a tensor's name
        """The pool's tensor."""
        return self.pool.pages_LPKX

    @property
    def free(self) -> list[int]:
        """Pages that no row holds."""
        return self.pool.free

    @property
    def references(self) -> list[int]:
        """How many rows hold each page."""
        return self.pool.references

    @property
    def address(self) -> tuple[int, ...]:
        """What a CUDA graph of a one-token step depends on: it changes when the pool, a table or the windows are replaced."""
        windows = (window.data_ptr() for window in self.windows.values())
        return len(self.num_tokens), self.pages_LPKX.data_ptr(), *windows, *self._state.address

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
        grown = [sum(row) for row in columns]
        wanted = [self._pages_after(row, grown[row]) - have for row, have in enumerate(self.num_pages)]
        self.pool.make_room(sum(wanted), fixed=self.capacity.fixed)
        for runs, row in zip(self.runs, columns, strict=True):
            extend_runs(runs, row)
        self.grown = grown
        self.kept = [None if all(row) else self._index([t for t, real in enumerate(row) if real]) for row in columns]
        for row, count in enumerate(wanted):
            if count:
                pages = self.pool.take(count)
                self._state.write_pages(row, len(self.tables[row]), pages)
                self.tables[row] += pages
        self.one_by_one = length == 1
        self.steps += 1
        self.pending = len(self.layers)
        full = [self.geometry.full_pages(n + min(new, 1)) for n, new in zip(self.num_tokens, grown, strict=True)]
        self._demote([row for row, pages in enumerate(full) if self.num_pages[row] < pages])
        if self.one_by_one:
            self._send_state()

    @property
    def every_row_grows(self) -> bool:
        """Whether the current step brings one token to every row."""
        return self.one_by_one and all(self.grown)

    def append(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Store the rotated bfloat16 rows of this step in one layer; columns that are padding are passed over."""
        if self.one_by_one:
            for kind, rows, slots in self._slots():
                self.windows[f"{kind}_k"][layer][rows, :, slots] = k_BKTD[rows, :, 0]
                self.windows[f"{kind}_v"][layer][rows, :, slots] = v_BKTD[rows, :, 0]
        else:
            for row, kept in enumerate(self.kept):
                k_KTD, v_KTD = k_BKTD[row], v_BKTD[row]
                if kept is not None:
                    k_KTD, v_KTD = k_KTD[:, kept], v_KTD[:, kept]
                self._append_run(layer, row, k_KTD, v_KTD)
        self.appended()

    def appended(self, count: int = 1) -> None:
        """So many more layers have stored this step's rows."""
        self.pending -= count
        if not self.pending and not self.one_by_one and len(self.grown) > 1:
            self._share_prefixes()

    def commit(self) -> None:
        """Count the tokens of the last step, which every layer must have appended by now.

        Raises CacheError after a step that failed half way.
        """
        if self.pending:
            raise CacheError(
                "the last step failed before every layer had stored it; reset() the cache or start a new one"
            )
        for row, grown in enumerate(self.grown):
            self.num_pages[row] = self._pages_after(row, grown)
            self.num_tokens[row] += grown
        self.grown = [0] * len(self.num_tokens)
        self._planned = None

    def _pages_after(self, row: int, grown: int) -> int:
        """Pages of a row once it has grown; a cropped row may have more than its length asks for."""
        return max(self.num_pages[row], self.geometry.full_pages(self.num_tokens[row] + grown))

    def _demote(self, rows: list[int]) -> None:
        """Encode the oldest block of ring tokens of some rows into their next pages, in every layer."""
        if not rows:
            return
        block, ring = self.geometry.block, self.geometry.ring
        places = [self.num_pages[row] * block % ring // block for row in rows]
        pages = [self.tables[row][self.num_pages[row]] for row in rows]
        row_N, place_N, ids_N = self._index([*rows, *places, *pages]).split(len(rows))
        k_LBKWD, v_LBKWD = self.windows["recent_k"], self.windows["recent_v"]
        self.backend.demote(self.layers, k_LBKWD, v_LBKWD, row_N, place_N, self.pages_LPKX, ids_N)
        for layer in self.states:
            for row, place, page_1 in zip(rows, places, ids_N.split(1), strict=True):
                k_NKTD = k_LBKWD[layer, row : row + 1, :, place * block : (place + 1) * block]
                self._correct(layer, row, k_NKTD, page_1)
        for row in rows:
            self.num_pages[row] += 1

    def _correct(self, layer: int, row: int, k_NKTD: Tensor, ids_N: Tensor) -> None:
        """Let a layer's correction see what new pages made of their keys and values."""
        storage = self.layers[layer]
        assert storage.correction is not None
        decoded_k, decoded_v = decode_pages(self.pages_LPKX[layer][ids_N], storage.fmt, storage.tables)
        self.states[layer].add(row, storage.correction, k_NKTD, decoded_k, decoded_v)

    def _slots(self) -> list[tuple[str, Tensor, Tensor]]:
        """Where each row's single token goes: window, rows and slots, the same in every layer."""
        if self._planned is None:
            sink, ring = self.geometry.sink, self.geometry.ring
            rows = [row for row, grown in enumerate(self.grown) if grown]
            young = [row for row in rows if self.num_tokens[row] < sink]
            old = [row for row in rows if self.num_tokens[row] >= sink]
            plans = [("sink", young, [self.num_tokens[row] for row in young])]
            plans += [("recent", old, [(self.num_tokens[row] - sink) % ring for row in old])]
            self._planned = [(kind, self._index(rows), self._index(slots)) for kind, rows, slots in plans if rows]
        return self._planned

    def _share_prefixes(self) -> None:
        """After a step of several tokens: rows whose new pages continue equal prefixes equally keep one copy of them."""
        starts, tables = self.num_pages, self.tables
        fresh = [range(start, self._pages_after(row, self.grown[row])) for row, start in enumerate(starts)]
        if sum(map(bool, fresh)) > 1:
            for row in self.pool.share_prefixes(tables, fresh):
                self._state.write_pages(row, starts[row], tables[row][starts[row] :])

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
        new_pages = self._pages_after(row, self.grown[row]) - pages
        paged = new_pages * g.block
        if new_pages:
            ids = self._index(self.tables[row][pages : pages + new_pages])
            k_NKTD = k_KTD[:, :paged].unflatten(1, (new_pages, g.block)).transpose(0, 1)
            v_NKTD = v_KTD[:, :paged].unflatten(1, (new_pages, g.block)).transpose(0, 1)
            storage = self.layers[layer]
            self.backend.write_pages(k_NKTD, v_NKTD, storage.fmt, storage.tables, self.pages_LPKX[layer], ids)
            if storage.correction is not None:
                self._correct(layer, row, k_NKTD, ids)
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
        self._send_state()
        w, state = self.windows, self._state
        return LayerCache(
            self.layers[layer].fmt, self.pages_LPKX[layer], state.table_BN, state.num_pages_B, state.num_tokens_B,
            w["sink_k"][layer], w["sink_v"][layer], w["recent_k"][layer], w["recent_v"][layer],
            self.layers[layer].tables,
        )  # fmt: skip

    def _send_state(self) -> None:
        counted = self.stored_tokens() if self.one_by_one else self.num_tokens
        self._state.send(self.num_pages, counted)

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
            self.pool.share(self.tables[row])
        for table in self.tables:
            self.pool.release(table)
        index = self._index(rows)
        self.tables = [list(self.tables[row]) for row in rows]
        self.num_pages = [self.num_pages[row] for row in rows]
        self.num_tokens = [self.num_tokens[row] for row in rows]
        self.runs = [list(self.runs[row]) for row in rows]
        with torch.inference_mode(False):
            self.windows = {name: window.index_select(1, index) for name, window in self.windows.items()}
            self.states = {layer: states.select(index) for layer, states in self.states.items()}
        self.grown = [0] * len(rows)
        self._state = DeviceState(len(rows), self._columns(), self.device)
        for row, table in enumerate(self.tables):
            self._state.write_pages(row, 0, table)

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
            remaining = self.num_tokens[row] - shorten_runs(runs, columns)
            history = max(remaining - self.geometry.sink, 0)
            kept_pages = min(self.num_pages[row], history // self.geometry.block)
            if kept_pages < self.num_pages[row]:
                self._unpack_into_ring(row, kept_pages, history - kept_pages * self.geometry.block)
            self.pool.release(self.tables[row][kept_pages:])
            del self.tables[row][kept_pages:]
            self.num_pages[row], self.num_tokens[row] = kept_pages, remaining

    def _unpack_into_ring(self, row: int, page: int, count: int) -> None:
        """Decode the first `count` tokens of the row's page number `page` into their ring slots, in every layer."""
        slot = page * self.geometry.block % self.geometry.ring
        for layer, storage in enumerate(self.layers):
            k_KTD, v_KTD = decode_pages(self.pages_LPKX[layer, self.tables[row][page]], storage.fmt, storage.tables)
            self.windows["recent_k"][layer, row, :, slot : slot + count] = k_KTD[:, :count].bfloat16()
            self.windows["recent_v"][layer, row, :, slot : slot + count] = v_KTD[:, :count].bfloat16()

    # -- room ------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens in every row, at once or when the first step fixes the batch; a fixed pool stays."""
        if self.capacity.fixed:
            return
        self.capacity = Capacity(max(tokens, self.capacity.tokens))
        if self.windows:
            pages = self.geometry.full_pages(tokens)
            self.pool.make_room(sum(max(pages - len(table), 0) for table in self.tables))
            self._state.widen(pages)

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
        pages = g.full_pages(self.capacity.tokens)
        if pages:
            self.pool.grow(batch * pages)
        self._state = DeviceState(batch, self._columns(), self.device)

    def _columns(self) -> int:
        """Columns that page tables start with."""
        return max(self.geometry.full_pages(self.capacity.tokens), *map(len, self.tables), 0)

    def _ring_slots(self, row: int) -> Tensor:
        """Ring slots of a row's tokens that are in no page yet, in order."""
        first, last = self.num_pages[row] * self.geometry.block, max(self.num_tokens[row] - self.geometry.sink, 0)
        return torch.arange(first, max(first, last), device=self.device) % self.geometry.ring

    def _index(self, values: list[int]) -> Tensor:
        return to_device(values, self.device)
