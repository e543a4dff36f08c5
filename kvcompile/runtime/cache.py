"""A `transformers.Cache` whose compiled layers are packed pages, and the attention function that reads them.

A layer's `update` hands the new rows on instead of dense tensors; the registered attention function receives them
together with the padding mask, stores them and attends. Layers that are not compiled keep the cache transformers gives.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvcompile.errors import CacheError
from kvcompile.models.attention import Softmax, dense_attention
from kvcompile.runtime.backend import Backend
from kvcompile.runtime.plan import LayerPlan
from kvcompile.runtime.store import PackedStore

__all__ = ["ATTENTION", "LayerPlan", "NewRows", "PackedCache", "PackedLayer", "dense_bytes"]

ATTENTION = "kvcompile"
"""Name under which attention and mask functions are registered: ``attn_implementation=ATTENTION``."""


class NewRows:
    """Keys and values ``[B, K, T, D]`` of the current step, on their way from `update` to the attention function."""

    def __init__(self, layer: "PackedLayer", k_BKTD: Tensor, v_BKTD: Tensor):
        self.layer, self.k_BKTD, self.v_BKTD = layer, k_BKTD, v_BKTD


class PackedLayer(CacheLayerMixin):
    """One compiled layer of a `PackedCache`: a position in a store that several layers share."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, plan: LayerPlan, store: PackedStore, position: int, backend: Backend):
        super().__init__()
        self.plan, self.store, self.position, self.backend = plan, store, position, backend
        self.columns, self.steps = 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store allocates when the first step begins."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take the step's rows ``[B, K, T, D]``; what is returned is for our attention function only."""
        self.is_initialized = True
        rows = NewRows(self, key_states, value_states)
        return rows, rows

    @torch.no_grad()
    def attend(
        self,
        q_BHTD: Tensor,
        rows: NewRows,
        mask_BN: Tensor | None,
        scaling: float,
        module: nn.Module,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Store the step's rows and attend with its queries; ``[B, T, H, D]`` in the query's dtype.

        `mask_BN` marks real tokens, of the past and of this step. `softcap` caps logits, `sinks_H` are further logits in the
        denominator. Raises CacheError before anything is stored when the mask does not fit what the cache holds.
        """
        softmax = Softmax(scaling, softcap, sinks_H)
        batch, _, length, _ = q_BHTD.shape
        store, plan = self.store, self.plan
        if self.steps == store.steps:
            store.begin(self._real_tokens(mask_BN, length), batch, length)
        self.steps += 1
        if length == 1:
            out_BHTD = self._restore(*self._decode(q_BHTD, rows, softmax), softmax, q_BHTD.dtype)
        elif not any(store.num_tokens):
            out_BHTD = self._attend_exactly(q_BHTD, rows, softmax, module)
            store.append(self.position, *self.backend.stored_rows(rows.k_BKTD, rows.v_BKTD, plan))
        else:
            k_BKTD, v_BKTD = self.backend.stored_rows(rows.k_BKTD, rows.v_BKTD, self.plan)
            q_rotated = self._rotate(q_BHTD, plan.query_rotation)
            attended = self._attend_chunk(q_rotated, k_BKTD, v_BKTD, softmax)
            out_BHTD = self._restore(*attended, softmax, q_BHTD.dtype)
            store.append(self.position, k_BKTD, v_BKTD)
        self.columns += length
        return out_BHTD.transpose(1, 2).contiguous()

    def _decode(self, q_BHTD: Tensor, rows: NewRows, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Store one token per row, then attend to all that is stored; nothing is read back where the backend has kernels.

        The output ``[B, H, 1, D]`` in the stored basis, and the log-sum-exp ``[B, H, 1]`` of its logits.
        """
        store = self.store
        stored = store.layer(self.position)
        q_BHD = None
        if store.every_row_grows:  # the kernel writes a token to every row
            q_BHD = self.backend.append(q_BHTD, rows.k_BKTD, rows.v_BKTD, self.plan, stored)
        if q_BHD is None:
            store.append(self.position, *self.backend.stored_rows(rows.k_BKTD, rows.v_BKTD, self.plan))
            q_BHD = self._rotate(q_BHTD, self.plan.query_rotation)[:, :, 0]
        else:
            store.appended()
        if softmax.plain:
            out_BHD, lse_BH = self.backend.attend(q_BHD, stored, softmax.scaling)
        else:
            shift_BH = self._shift(q_BHD, softmax)
            out_BHD, lse_BH = self.backend.attend(q_BHD, stored, softmax.scaling, softmax.softcap, shift_BH)
            if softmax.softcap is None and shift_BH is not None:
                lse_BH = lse_BH + shift_BH
        tokens_BT, lse_BHT = stored.num_tokens_B[:, None], lse_BH[:, :, None]
        return self._correct(out_BHD[:, :, None], lse_BHT, tokens_BT, q_BHD[:, :, None]), lse_BHT

    def _shift(self, q_BHD: Tensor, softmax: Softmax) -> Tensor | None:
        """What the mean of the stored keys would add to every logit ``[B, H]`` of rotated queries; None for no mean."""
        mean_KD = self.plan.key_mean
        if mean_KD is None:
            return None
        return (q_BHD * mean_KD.repeat_interleave(q_BHD.shape[1] // len(mean_KD), dim=0)).sum(-1) * softmax.scaling

    def _real_tokens(self, mask_BN: Tensor | None, length: int) -> Tensor | None:
        """The columns of the mask that belong to this step; its past must be what was stored."""
        if mask_BN is None:
            return None
        if mask_BN.ndim != 2:
            raise CacheError(
                "the packed cache takes a 2-D attention_mask (padding); a 4-D mask cannot be applied to packed pages"
            )
        end = self.columns + length
        if mask_BN.shape[1] < end:
            raise CacheError(
                f"attention_mask has {mask_BN.shape[1]} columns, but the cache holds {self.columns} and {length} are new: "
                "give one column per token, past ones included"
            )
        stored = self.store.stored_tokens()
        if stored and mask_BN[:, : self.columns].sum(dim=1).tolist() != stored:
            raise CacheError(
                "attention_mask hides or shows past tokens otherwise than when they were stored; a packed cache cannot "
                "forget single tokens: keep the mask of earlier steps, or start a new cache"
            )
        return mask_BN[:, self.columns : end].bool()

    def _attend_exactly(self, q_BHTD: Tensor, rows: NewRows, softmax: Softmax, module: nn.Module) -> Tensor:
        """A first chunk: causal attention over its own unquantized rows, padding left out row by row."""
        special = softmax.scaling, softmax.softcap, softmax.sinks_H
        if all(kept is None for kept in self.store.kept):
            out_BTHD, _ = dense_attention(module, q_BHTD, rows.k_BKTD, rows.v_BKTD, None, *special)
            return out_BTHD.transpose(1, 2)
        out_BHTD = torch.zeros_like(q_BHTD)
        for row, kept in enumerate(self.store.kept):
            columns = slice(None) if kept is None else kept
            q, k, v = (x[row : row + 1, :, columns] for x in (q_BHTD, rows.k_BKTD, rows.v_BKTD))
            if q.shape[2]:
                out_BTHD, _ = dense_attention(module, q, k, v, None, *special)
                out_BHTD[row, :, columns] = out_BTHD[0].transpose(0, 1)
        return out_BHTD

    def _attend_chunk(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Several tokens on a stored history: each row's history is decoded, then attended together with the chunk.

        The output ``[B, H, T, D]`` in the stored basis, and the log-sum-exp ``[B, H, T]`` of its logits where that is needed;
        it is infinite for padding.
        """
        out_BHTD = torch.zeros_like(q_BHTD)
        lse_BHT = torch.full(q_BHTD.shape[:3], torch.inf, device=q_BHTD.device)
        tokens_BT = torch.full((q_BHTD.shape[0], q_BHTD.shape[2]), torch.inf, device=q_BHTD.device)
        stored = self.store.layer(self.position)
        for row, kept in enumerate(self.store.kept):
            columns = slice(None) if kept is None else kept
            q_KXD = q_BHTD[row, :, columns].float().unflatten(0, (k_BKTD.shape[1], -1)).flatten(1, 2)
            history_k, history_v = stored.dense_row(row)
            k_KTD = torch.cat([history_k, k_BKTD[row, :, columns].float()], dim=1)
            v_KTD = torch.cat([history_v, v_BKTD[row, :, columns].float()], dim=1)
            new, total = k_KTD.shape[1] - history_k.shape[1], k_KTD.shape[1]
            visible_nT = torch.ones(new, total, dtype=torch.bool, device=q_KXD.device).tril(total - new)
            visible_XT = visible_nT.repeat(q_BHTD.shape[1] // k_BKTD.shape[1], 1)
            if self.plan.storage.correction is None and softmax.plain:
                out_KXD = nn.functional.scaled_dot_product_attention(
                    q_KXD[None], k_KTD[None], v_KTD[None], visible_XT, scale=softmax.scaling
                )[0]
            else:
                if not softmax.plain and self.plan.key_mean is not None:  # a plain softmax does not notice the mean
                    k_KTD = k_KTD + self.plan.key_mean[:, None]
                logits_KXT = softmax.logits(q_KXD @ k_KTD.mT).masked_fill_(~visible_XT, -torch.inf)
                lse_BHT[row, :, columns] = logits_KXT.logsumexp(dim=-1).reshape(-1, new)
                tokens_BT[row, columns] = visible_nT.sum(dim=1).float()
                out_KXD = logits_KXT.softmax(dim=-1) @ v_KTD
            out_BHTD[row, :, columns] = out_KXD.reshape(-1, new, q_BHTD.shape[-1])
        return self._correct(out_BHTD, lse_BHT, tokens_BT, q_BHTD), lse_BHT

    def _correct(self, out_BHTD: Tensor, lse_BHT: Tensor, tokens_BT: Tensor, q_BHTD: Tensor) -> Tensor:
        """Add the layer's linear correction, if it has one."""
        correction = self.plan.storage.correction
        if correction is None:
            return out_BHTD
        return self.store.states[self.position].correct(out_BHTD, lse_BHT, tokens_BT, q_BHTD, correction)

    def _rotate(self, x_BHTD: Tensor, r_KDD: Tensor | None) -> Tensor:
        return x_BHTD.float() if r_KDD is None else self.backend.rotate(x_BHTD, r_KDD)

    def _restore(self, out_BHTD: Tensor, lse_BHT: Tensor, softmax: Softmax, dtype: torch.dtype) -> Tensor:
        """Back from the basis of the stored values: their mean is added (probabilities sum to 1), an online rotation undone.

        A folded rotation is undone by W_O. Attention sinks take their share at last, in any basis.
        """
        mean_KD, r_KDD = self.plan.value_mean, self.plan.output_rotation
        if mean_KD is not None:
            out_BHTD = (out_BHTD.unflatten(1, (mean_KD.shape[0], -1)) + mean_KD[:, None, None]).flatten(1, 2)
        if r_KDD is not None:
            out_BHTD = self.backend.rotate(out_BHTD.to(dtype), r_KDD)
        if softmax.sinks_H is not None:
            out_BHTD = out_BHTD * softmax.kept(lse_BHT)[..., None]
        return out_BHTD.to(dtype)

    # -- what transformers asks of a cache layer -------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included, as transformers counts."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask for the next step."""
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.17

    def reset(self) -> None:
        """Forget everything; the store is shared, so the layers of a cache must be reset together."""
        self.columns, self.steps = 0, 0
        self.store.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Only whole caches can be cropped, because layers share their page tables."""
        raise CacheError("crop the PackedCache, not one of its layers: layers share their page tables")

    reorder_cache = batch_repeat_interleave = batch_select_indices = crop  # type: ignore[assignment]


class PackedCache(Cache):
    """Packed pages for compiled layers, transformers' own layers for the others; made by `kvcompile.new_cache`."""

    def __init__(self, layers: Sequence[CacheLayerMixin]):
        super().__init__(layers=list(layers))
        packed = [layer for layer in layers if isinstance(layer, PackedLayer)]
        self.stores: list[PackedStore] = list({id(layer.store): layer.store for layer in packed}.values())
        self._packed = packed

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens in every row, so that pools and tables keep their addresses until then."""
        for store in self.stores:
            store.reserve(tokens)

    # -- steps that run outside of the layers (`kvcompile.runtime.graph`) ------------------------------------------------

    @property
    def captures(self) -> bool:
        """Whether a step of one token per row can be held by a CUDA graph: every layer packed and read by kernels alone."""
        plans = [layer.plan.storage for layer in self._packed]
        kernels = all(
            layer.backend.captures(storage.fmt) and storage.correction is None
            for layer, storage in zip(self._packed, plans, strict=True)
        )
        return kernels and not self._others()

    @property
    def address(self) -> tuple[int, ...]:
        """What such a graph depends on: addresses of pages, windows, tables and lengths."""
        return tuple(part for store in self.stores for part in store.address)

    def begin_token(self, batch: int) -> None:
        """Start a step of one real token per row: pages are taken and written, lengths and tables are on their way."""
        for store in self.stores:
            store.begin(None, batch, 1)

    def count_token(self, count: int = 1) -> None:
        """Count a step of one token per row in every layer, as its `attend` does; with -1 take that back."""
        for layer in self._packed:
            layer.columns += count
            layer.steps += count
            layer.store.appended(count)

    def nbytes(self) -> int:
        """Bytes that the cached keys and values take, windows and unpacked layers included."""
        return sum(store.nbytes() for store in self.stores) + dense_bytes(self._others())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row b the continuation of row ``beam_idx[b]``: pages are shared, windows copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        for store in self.stores:
            store.select(indices.tolist())
        for layer in self._others():
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(indices)
            else:  # linear attention: its states follow any order, also one that leaves rows out
                layer.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        rows = torch.arange(max(len(store.num_tokens) for store in self.stores))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` columns; a positive number is the length to keep."""
        length, tokens_to_remove = self.get_seq_length(), int(tokens_to_remove)  # transformers may hand over a tensor
        removed = min(-tokens_to_remove if tokens_to_remove <= 0 else max(length - tokens_to_remove, 0), length)
        for layer in self._others():  # first, because a sliding layer may refuse
            layer.crop(-removed)
        for store in self.stores:
            store.crop(removed)
        for layer in self._packed:
            layer.columns -= removed

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        layer: Any = self.layers[layer_idx]
        counting = isinstance(layer, CacheLayerMixin)  # a layer with linear attention does not count
        return layer.get_seq_length() if counting else self._packed[0].columns

    def _others(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PackedLayer)]


def dense_bytes(layers: Sequence[Any]) -> int:
    """Bytes of the keys, values and states in transformers' own cache layers."""
    held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values", *_STATES)]
    return sum(tensor.nbytes for entry in held for tensor in _tensors(entry))


_STATES = ("conv_states", "recurrent_states")
"""What layers with linear attention hold in place of keys and values."""


def _tensors(held: Any) -> list[Tensor]:
    """The tensors in what a cache layer holds under one name: one, several by index, or none yet."""
    several = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else [held]
    return [tensor for tensor in several if isinstance(tensor, Tensor)]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewRows,
    value: Tensor | NewRows,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: packed layers through their cache, everything else through `dense_attention`.

    `attention_mask` is what `packed_mask` returned: None, a padding mask ``[B, n]``, or an ordinary 4-D mask. `softcap` and
    `s_aux` (attention sinks) come from the families that have them.
    """
    if isinstance(key, NewRows):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return key.layer.attend(query, key, attention_mask, scale, module, softcap, s_aux), None
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    length, total = query.shape[2], key.shape[2]
    if (attention_mask is None and 1 < length < total) or (attention_mask is not None and attention_mask.ndim == 2):
        attention_mask = sdpa_mask(
            query.shape[0], length, total, q_offset=total - length, attention_mask=attention_mask, device=query.device,
            allow_is_causal_skip=length == total,
        )  # fmt: skip
    return dense_attention(module, query, key, value, attention_mask, scaling, softcap, s_aux, **kwargs)


def packed_mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any
) -> Tensor | None:
    """The registered mask function: the padding mask itself where attention is causal, or SDPA's mask.

    The latter is for windows, for caches allocated in advance, and for what is not causal: vision towers, and images in a
    prompt that attend to themselves (a packed layer refuses such a mask).
    """
    unfilled = kwargs.get("kv_length") != kwargs.get("q_offset", 0) + kwargs.get("q_length", 0)
    causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if local_size is not None or unfilled or not causal:
        kwargs |= {"attention_mask": attention_mask, "local_size": local_size}
        if unfilled:
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(*args, **kwargs)
    return attention_mask


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)
