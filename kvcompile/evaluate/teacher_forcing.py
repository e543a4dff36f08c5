"""Teacher-forced decoding in chunks that gives the logits of decoding token by token, some twenty times faster.

A token that is decoded sees its row's history as pages and windows stood when it came. Pages are made at fixed places: the
token at position ``t`` sees k pages when ``S + R + k P <= t < S + R + (k + 1) P`` (sink S, recent R, pages of P tokens). A
chunk that does not cross such a place sees the same pages as each of its tokens would alone, so nothing changes but the
order of float additions, and that a chunk's own rows are not yet rounded by a decode kernel.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


def chunk_ends(cache: Cache, length: int, *, prefill: int | None = None, stepwise: bool = False) -> list[int]:
    """Where to cut `length` tokens for `cache`: the end of every chunk, the last one `length`.

    The first chunk is attended exactly, so it ends where the smallest window does (after one token if there is none), or
    at `prefill` where that is sooner. Later ones end wherever some layer makes a page; `stepwise` cuts after every token.
    A cache without pages takes everything at once.
    """
    geometries = [store.geometry for store in getattr(cache, "stores", ())]
    if not geometries and not stepwise:
        return [length]
    first = max(min((g.sink + g.recent for g in geometries), default=1), 1)
    first = min(first, length, first if prefill is None else max(prefill, 1))
    if stepwise:
        return list(range(first, length + 1))
    ends = {first, length}
    for g in geometries:
        ends |= set(range(g.sink + g.recent, length, g.block))
    return sorted(end for end in ends if first <= end <= length)


def first_page(cache: Cache) -> int | None:
    """The position of the first token that sees a page in some layer, or None for a cache without pages."""
    return min(
        (s.geometry.sink + s.geometry.recent + s.geometry.block for s in getattr(cache, "stores", ())), default=None
    )


def teacher_forced(
    model: PreTrainedModel, cache: Cache, ids_BT: Tensor, *, prefill: int | None = None, stepwise: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Feed `ids_BT` through `cache`; yields each chunk's first position and its logits ``[B, C, V]``."""
    begin = 0
    forward: Any = model
    for end in chunk_ends(cache, ids_BT.shape[1], prefill=prefill, stepwise=stepwise):
        with torch.inference_mode():
            chunk_BC = ids_BT[:, begin:end].to(model.device)
            yield begin, forward(chunk_BC, past_key_values=cache, use_cache=True).logits
        begin = end
