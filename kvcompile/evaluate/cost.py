"""What a cache costs on this machine: bytes per token, milliseconds to encode, milliseconds to decode."""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcompile.runtime.cache import PackedCache, PackedLayer, dense_bytes

CONTEXT = 4096
ENCODED = 1024
STEPS = 7


@dataclass(frozen=True)
class Cost:
    """Measured with one sequence of `tokens` tokens.

    `bytes_per_token` is what the cache holds over its tokens, windows included; `decode_ms` a whole step of the model
    (median); `encode_ms` rotating, quantizing and packing 1024 tokens in all layers, None where nothing is encoded.
    """

    tokens: int
    bytes_per_token: float
    encode_ms: float | None
    decode_ms: float


def measure_cost(model: PreTrainedModel, cache: Cache, ids_T: Tensor) -> Cost:
    """Fill the fresh `cache` by one prefill, then decode; `ids_T` are repeated up to 4096 tokens, if the model takes so many."""
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", CONTEXT + STEPS))
    tokens = max(1, min(CONTEXT, limit - STEPS))
    ids_BT = ids_T.repeat(-(-(tokens + STEPS) // len(ids_T)))[None, : tokens + STEPS].to(model.device)
    step: Any = partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
    with torch.inference_mode():
        step(ids_BT[:, :tokens])
        held = cache.nbytes() if isinstance(cache, PackedCache) else dense_bytes(cache.layers)
        took = [_milliseconds(partial(step, ids_BT[:, t : t + 1]), model.device) for t in range(tokens, tokens + STEPS)]
        layers = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
        encoding = sum(_encode_ms(layer, model.device) for layer in layers) if layers else None
    return Cost(tokens, held / tokens, encoding, statistics.median(took))


def _encode_ms(layer: PackedLayer, device: torch.device) -> float:
    """Random rows of one layer through everything that is done before they are attended to again."""
    storage, geometry = layer.plan.storage, layer.store.geometry
    generator = torch.Generator().manual_seed(0)
    shape = (1, geometry.num_key_value_heads, ENCODED, geometry.head_dim)
    k_BKTD, v_BKTD = (torch.randn(shape, generator=generator).to(device) for _ in "kv")
    blocks = ENCODED // geometry.block
    pages_PKX = torch.empty(blocks, shape[1], geometry.page_bytes, dtype=torch.uint8, device=device)
    ids_N = torch.arange(blocks, device=device)

    def encode(count: int) -> None:
        stored = layer.backend.stored_rows(k_BKTD, v_BKTD, layer.plan)
        k_NKTD, v_NKTD = (x[0].unflatten(1, (blocks, geometry.block)).transpose(0, 1)[:count] for x in stored)
        layer.backend.write_pages(k_NKTD, v_NKTD, storage.fmt, storage.tables, pages_PKX, ids_N[:count])

    encode(1)
    return _milliseconds(partial(encode, blocks), device)


def _milliseconds(work: Any, device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - started)
