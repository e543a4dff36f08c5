"""Long use of one packed cache, and a second opinion on what it holds.

A `Witness` sees the rows that every layer stores and every edit of the batch, and keeps all of them in bfloat16. What the cache
must hold follows from them by the rules of docs/manifest.md: which token is in the sink, in which page, in which slot of the
ring. A `Session` does what conversations do: prompts, padded ones too, new tokens, beams, rows that end, cropping.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kvcompile
from kvcompile.codec import decode_pages, encode_pages
from kvcompile.codec.layer import attend_layer
from kvcompile.errors import CacheError
from kvcompile.runtime.cache import PackedCache
from kvcompile.runtime.plan import Capacity
from kvcompile.runtime.store import PackedStore


@dataclass
class Row:
    """One row of the batch: which columns were real tokens, the rows ``[L, 2, K, D]`` of these, and how many pages they fill."""

    real: list[bool] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    pages: int = 0

    def copy(self) -> "Row":
        return Row(list(self.real), list(self.tokens), self.pages)


class Witness:
    """What one store of a cache must hold."""

    def __init__(self, store: PackedStore):
        self.store, self.rows = store, []
        self._step: dict[int, Tensor] = {}
        self._append = store.append
        store.append = self._see  # type: ignore[method-assign]

    def _see(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        self._step[layer] = torch.stack([k_BKTD, v_BKTD], dim=1).bfloat16().clone()
        self._append(layer, k_BKTD, v_BKTD)

    def stepped(self, real_BT: list[list[bool]]) -> None:
        """All layers have stored a step of these columns."""
        self.rows = self.rows or [Row() for _ in real_BT]
        x_LB2KTD = torch.stack([self._step[layer] for layer in range(len(self.store.layers))])
        self._step = {}
        for b, (row, real) in enumerate(zip(self.rows, real_BT, strict=True)):
            row.real += real
            row.tokens += [x for x, kept in zip(x_LB2KTD[:, b].unbind(dim=3), real, strict=True) if kept]
            row.pages = max(row.pages, self.store.geometry.full_pages(len(row.tokens)))

    def select(self, rows: list[int]) -> None:
        self.rows = [self.rows[row].copy() for row in rows]

    def crop(self, columns: int) -> None:
        """The tokens of a page that is cut come back as the page decodes them."""
        g = self.store.geometry
        for row in self.rows:
            removed = sum(row.real[len(row.real) - columns :])
            remaining = len(row.tokens) - removed
            history = max(remaining - g.sink, 0)
            if history // g.block < row.pages:
                row.pages = history // g.block
                first = g.sink + row.pages * g.block
                x_L2KTD = self._decoded(row, row.pages)
                row.tokens[first:remaining] = x_L2KTD[..., : remaining - first, :].unbind(dim=3)
            del row.tokens[remaining:]
            del row.real[len(row.real) - columns :]

    def check(self) -> None:
        """Raise AssertionError unless the store holds every row as the rules say, byte for byte, and no page is lost."""
        store, g = self.store, self.store.geometry
        store.commit()
        assert store.num_tokens == [len(row.tokens) for row in self.rows]
        assert store.num_pages == [row.pages for row in self.rows]
        self.check_pool()
        for b, row in enumerate(self.rows):
            assert len(store.tables[b]) == row.pages
            if not row.tokens:
                continue
            x_L2KTD = self._stacked(row, 0, len(row.tokens))
            paged = g.sink + row.pages * g.block
            slots = [(t - g.sink) % g.ring for t in range(paged, len(row.tokens))]
            for layer in range(len(store.layers)):
                for name, x_KTD in (("k", x_L2KTD[layer, 0]), ("v", x_L2KTD[layer, 1])):
                    sink, ring = store.windows[f"sink_{name}"][layer, b], store.windows[f"recent_{name}"][layer, b]
                    count = min(g.sink, len(row.tokens))
                    assert torch.equal(sink[:, :count], x_KTD[:, :count])
                    assert torch.equal(ring[:, slots], x_KTD[:, paged:])
                if row.pages:
                    expected_NKX = self._encoded(x_L2KTD[layer, :, :, g.sink : paged], layer)
                    assert torch.equal(store.pages_LPKX[layer, store.tables[b]], expected_NKX)

    def check_pool(self) -> None:
        """Every page is free, or held by as many rows as its count says."""
        held = [page for table in self.store.tables for page in table]
        counts = [0] * len(self.store.references)
        for page in held:
            counts[page] += 1
        assert counts == self.store.references
        assert sorted(self.store.free) == [page for page, count in enumerate(counts) if not count]

    def rebuilt(self, row: Row) -> PackedStore:
        """A new store that is given the tokens of one row at once."""
        store = PackedStore(self.store.geometry, self.store.layers, self.store.backend, self.store.device, Capacity())
        store.begin(None, 1, len(row.tokens))
        x_L2KTD = self._stacked(row, 0, len(row.tokens))
        for layer in range(len(store.layers)):
            store.append(layer, x_L2KTD[layer, 0][None], x_L2KTD[layer, 1][None])
        store.commit()
        return store

    def check_against_rebuilt(self, draw: torch.Generator) -> None:
        """Raise AssertionError unless pages and attention are those of a new cache with the same tokens.

        A row that was cropped may have pages more than a new one, whose tokens a new one holds exactly.
        """
        for b, row in enumerate(self.rows):
            if len(row.tokens) < 2:
                continue
            fresh = self.rebuilt(row)
            pages = fresh.num_pages[0]
            assert pages <= row.pages
            ours, theirs = self.store.tables[b][:pages], fresh.tables[0]
            assert torch.equal(self.store.pages_LPKX[:, ours], fresh.pages_LPKX[:, theirs])
            for layer in range(len(self.store.layers)):
                g, stored = self.store.geometry, self.store.layer(layer)
                q_BHD = torch.randn(len(self.rows), 2 * g.num_key_value_heads, g.head_dim, generator=draw)
                out_BHD, lse_BH = self.store.backend.attend(q_BHD, stored, g.head_dim**-0.5)
                source = fresh.layer(layer) if pages == row.pages else None
                if source is not None:
                    want_BHD, want_BH = attend_layer(q_BHD[b : b + 1], source, g.head_dim**-0.5)
                    assert torch.allclose(out_BHD[b], want_BHD[0], atol=2e-4, rtol=2e-4)
                    assert torch.allclose(lse_BH[b], want_BH[0], atol=2e-4, rtol=2e-4)

    def _stacked(self, row: Row, first: int, last: int) -> Tensor:
        return torch.stack(row.tokens[first:last], dim=3)

    def _encoded(self, x_2KTD: Tensor, layer: int) -> Tensor:
        """The pages ``[N, K, X]`` of so many whole blocks."""
        storage = self.store.layers[layer]
        k_NKTD, v_NKTD = x_2KTD.float().unflatten(2, (-1, self.store.geometry.block)).movedim(2, 1)
        return encode_pages(k_NKTD, v_NKTD, storage.fmt, storage.tables)

    def _decoded(self, row: Row, page: int) -> Tensor:
        """What a page gives back, ``[L, 2, K, block, D]``."""
        g = self.store.geometry
        first = g.sink + page * g.block
        x_L2KTD = self._stacked(row, first, first + g.block)
        parts = []
        for layer, storage in enumerate(self.store.layers):
            k_NKTD, v_NKTD = decode_pages(self._encoded(x_L2KTD[layer], layer), storage.fmt, storage.tables)
            parts.append(torch.stack([k_NKTD[0], v_NKTD[0]]))
        return torch.stack(parts).bfloat16()


class Session:
    """Conversations on one cache after another, or on one that is emptied: `tokens` counts what was stored, in all rows."""

    def __init__(self, model: Any, seed: int, real_model: bool):
        self.model, self.real_model = model, real_model
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.tokens = self.edits = self.full = self.checks = self.pages = 0
        self.cache: PackedCache | None = None

    def conversation(self, tokens: int, *, keep: bool = False) -> PackedCache:
        """About so many tokens of one to four rows; with `keep` the cache of the last conversation is emptied and used."""
        draw = self.draw
        if not keep or self.cache is None:
            limit = draw.choice([None, None, 500])
            self.cache = kvcompile.new_cache(
                self.model, sink=draw.choice([0, 16, 64]), recent=draw.choice([0, 64, 256]), max_tokens=limit
            )
            self.witness = Witness(self.cache.stores[0])
        elif self.cache.stores[0].windows:
            self._edit("crop", self._columns())
            assert len(self.witness.store.free) == len(self.witness.store.references)
            if draw.random() < 0.5:
                self.cache.reset()
                assert self.cache.nbytes() == 0
        if not self.witness.store.windows:
            self.witness.rows = []
        batch, end = len(self.witness.rows) or draw.randint(1, 4), self.tokens + tokens
        self._feed(batch, draw.randint(1, 200), padded=draw.random() < 0.5, same=draw.random() < 0.5)
        while self.tokens < end:
            self._next()
        self._check()
        return self.cache

    def _next(self) -> None:
        draw, batch = self.draw, len(self.witness.rows)
        columns = self._columns()
        if not columns:
            self._feed(batch, draw.randint(1, 200))
            return
        match draw.choices(
            ["steps", "chunk", "short crop", "crop", "beams", "select", "check"], [12, 4, 3, 0.5, 2, 1, 2]
        )[0]:
            case "steps":
                for _ in range(draw.randint(1, 90)):
                    self._feed(batch, 1)
            case "chunk":
                self._feed(batch, draw.randint(2, 300), padded=draw.random() < 0.5)
            case "short crop":
                self._edit("crop", draw.randint(1, min(48, columns)))
            case "crop":
                self._edit("crop", draw.randint(1, columns))
            case "beams":
                self._edit("select", [draw.randrange(batch) for _ in range(batch)])
            case "select":
                size = draw.randint(1, 4)
                self._edit("select", [draw.randrange(batch) for _ in range(size)])
            case "check":
                self._check()

    def _columns(self) -> int:
        return len(self.witness.rows[0].real) if self.witness.rows else 0

    def _edit(self, what: str, argument: Any) -> None:
        assert self.cache is not None
        self.edits += 1
        if what == "crop":
            self.cache.crop(-argument)
            self.witness.crop(argument)
        else:
            self.cache.reorder_cache(torch.tensor(argument))
            self.witness.select(argument)
        self.witness.check_pool()

    def _feed(self, batch: int, length: int, padded: bool = False, same: bool = False) -> None:
        """One step of the model; a pool of fixed size may be full, and then rows are cropped."""
        draw, past = self.draw, [row.real for row in self.witness.rows] or [[] for _ in range(batch)]
        real = [[True] * length for _ in range(batch)]
        for row in real[1:] if padded else []:
            padding = draw.randint(0, length - 1)
            row[:padding] = [False] * padding
        mask = torch.tensor([[*old, *new] for old, new in zip(past, real, strict=True)]).long()
        step = self._model_step if self.real_model else self._row_step
        try:
            with torch.inference_mode():
                step(batch, length, None if mask.all() else mask, same)
        except CacheError as error:
            if "page pool is full" not in str(error):
                raise
            self.full += 1
            self._edit("crop", self._columns())
            return
        self.witness.stepped(real)
        self.tokens += sum(map(sum, real))

    def _model_step(self, batch: int, length: int, mask: Tensor | None, same: bool) -> None:
        ids = torch.randint(2, 4000, (1 if same else batch, length), generator=self.generator).expand(batch, length)
        if length == 1 and getattr(self, "logits", None) is not None and len(self.logits) == batch:
            ids = self.logits.argmax(-1, keepdim=True)
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, -length:]
        out = self.model(ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True)
        self.logits = out.logits[:, -1]
        assert self.logits.isfinite().all()

    def _row_step(self, batch: int, length: int, mask: Tensor | None, same: bool) -> None:
        """Random queries, keys and values through the same update and attention as the model's."""
        assert self.cache is not None
        for index, layer in enumerate(self.cache.layers):
            g = layer.store.geometry
            heads = 2 * g.num_key_value_heads
            shape = 1 if same else batch, heads + 2 * g.num_key_value_heads, length, g.head_dim
            x = torch.randn(shape, generator=self.generator).bfloat16().expand(batch, -1, -1, -1)
            q, k, v = x.split([heads, g.num_key_value_heads, g.num_key_value_heads], dim=1)
            rows, _ = layer.update(k, v)
            out = layer.attend(q, rows, mask, g.head_dim**-0.5, self.model.model.layers[index].self_attn)
            assert out.isfinite().all()

    def _check(self) -> None:
        self.checks += 1
        self.pages += sum(row.pages for row in self.witness.rows)
        self.witness.check()
        self.witness.check_against_rebuilt(self.generator)
