"""`kvcompile bench`: how fast a model decodes from its packed cache on this machine, and from a BF16 one, and what they hold.

Shapes: B batch rows, K KV heads, H query heads, D head_dim.

Both caches serve one bfloat16 model and take turns, step by step. The packed one runs as `generate` runs it (on CUDA its steps
are replays of a CUDA graph), the other is transformers' DynamicCache with SDPA.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvcompile.errors import KvCompileError
from kvcompile.evaluate.evaluation import Track, untracked
from kvcompile.evaluate.uncalibrated import Shape, fill, random_cache
from kvcompile.models import resolve_device
from kvcompile.runtime import load, new_cache
from kvcompile.runtime.cache import PackedCache, dense_bytes, packed_attention
from kvcompile.runtime.graph import StepGraph, can_capture
from kvcompile.scheme import DEFAULT_SCHEME, load_scheme

BF16 = "bf16"
PACKED = "packed"
CHUNK = 1024
"""Tokens of a prefill that go through the model at once."""
WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Decoding one token per row behind `context` tokens with one of the caches; `cache_bytes` are those that it holds."""

    context: int
    batch: int
    cache: str
    median_ms: float
    p90_ms: float
    tokens_per_second: float
    cache_bytes: int


@dataclass(frozen=True)
class Bench:
    """What was measured on which machine; `steps` were timed for each of the `timings`."""

    subject: str
    measured: str
    scheme: str
    backend: str
    device: str
    steps: int
    timings: tuple[Timing, ...]

    def ratios(self, packed: Timing) -> tuple[float, float]:
        """How many times faster (median) and smaller than BF16 the packed cache of `packed` is."""
        case = packed.context, packed.batch, BF16
        dense = next(x for x in self.timings if (x.context, x.batch, x.cache) == case)
        return dense.median_ms / packed.median_ms, dense.cache_bytes / packed.cache_bytes


def bench(
    directory: str | Path,
    *,
    contexts: Sequence[int] = (4096, 16384),
    batches: Sequence[int] = (1,),
    steps: int = 32,
    device: str = "cpu",
    backend: str | None = None,
    source: str | Path | None = None,
    track: Track = untracked,
) -> Bench:
    """Time whole decoding steps of the converted model in `directory`, loaded in bfloat16, behind random tokens.

    Raises KvCompileError for a context that the model cannot take, or a case that does not fit the device.
    """
    model, _ = load(directory, device=resolve_device(device), dtype=torch.bfloat16, backend=backend, source=source)
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", 0) or max(contexts) + steps + WARM_UP)
    _check(contexts, batches, steps, limit - steps - WARM_UP)

    def caches(context: int, batch: int) -> dict[str, Any]:
        made: dict[str, Any] = {PACKED: new_cache(model), BF16: DynamicCache(config=config)}
        made[PACKED].reserve(context + steps + WARM_UP)
        ids_BT = torch.randint(config.vocab_size, (batch, context), device=model.device)
        for name, cache in made.items():
            for ids_Bt in track(
                ids_BT.split(CHUNK, dim=1), f"prefill {batch} x {context:,} {name}", "tok", Tensor.numel
            ):
                model(ids_Bt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return made

    compiled: Any = model
    found = compiled.kvcompile
    timings = _time_cases(model, caches, contexts, batches, steps, config.vocab_size, track)
    return Bench(
        str(directory), "a step of the whole model", found.manifest.scheme.name, found.backend.name,
        _machine(model.device), steps, timings,
    )  # fmt: skip


def bench_shape(
    shape: Shape,
    scheme: str = DEFAULT_SCHEME,
    overrides: Sequence[str] = (),
    *,
    contexts: Sequence[int] = (4096, 16384),
    batches: Sequence[int] = (1,),
    steps: int = 32,
    device: str = "cpu",
    backend: str | None = None,
    track: Track = untracked,
) -> Bench:
    """Time attention alone, of a model of this shape under a scheme, without a checkpoint: random rotations, pages and rows.

    Raises SchemeError for a scheme that does not fit the heads.
    """
    _check(contexts, batches, steps, None)
    chosen, where = load_scheme(scheme, list(overrides)), resolve_device(device)
    model = _AttentionOnly(shape, where)
    backends = []

    def caches(context: int, batch: int) -> dict[str, Any]:
        packed, dense = random_cache(chosen, shape, where, backend), DynamicCache()
        backends.append(packed.stores[0].backend.name)
        fill(packed, batch, context, room=steps + WARM_UP)
        packed.reserve(context + steps + WARM_UP)
        for layer in track(range(shape.layers), f"fill {batch} x {context:,}", "layer", lambda _: 1):
            sizes = batch, shape.kv_heads, context, shape.head_dim
            k_BKTD, v_BKTD = (torch.randn(sizes, device=where, dtype=torch.bfloat16) for _ in "kv")
            dense.update(k_BKTD, v_BKTD, layer)
        return {PACKED: packed, BF16: dense}

    timings = _time_cases(model, caches, contexts, batches, steps, 1, track)
    measured = f"attention of {shape.layers} layer{'s' * (shape.layers > 1)} alone"
    subject = ", ".join(f"{name} {size}" for name, size in vars(shape).items())
    return Bench(subject, measured, chosen.name, backends[0], _machine(where), steps, timings)


def parse_shape(text: str) -> Shape:
    """``"layers=4,heads=32,kv_heads=8,head_dim=128"`` in any order; layers are 1 by default. Raises KvCompileError."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in Shape.__dataclass_fields__ or not number.isdecimal():
            raise KvCompileError(f"'{part}' is no part of a shape; write layers=1,heads=32,kv_heads=8,head_dim=128")
        sizes[name] = int(number)
    if missing := [name for name in Shape.__dataclass_fields__ if name not in sizes and name != "layers"]:
        raise KvCompileError(f"the shape '{text}' lacks {', '.join(missing)}; write heads=32,kv_heads=8,head_dim=128")
    return Shape(**sizes)


def parse_batches(text: str) -> tuple[int, ...]:
    """``"1,4"`` as (1, 4). Raises KvCompileError for anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal():
            raise KvCompileError(f"'{part}' is no batch size; write sizes such as 1,4")
    return tuple(dict.fromkeys(map(int, parts)))


class _AttentionOnly(nn.Module):
    """Stands for a model whose step is nothing but the attention of its layers, over random rows of one token."""

    def __init__(self, shape: Shape, device: torch.device):
        super().__init__()
        self.shape, self.device = shape, device
        self.rows: dict[int, tuple[Tensor, ...]] = {}
        self.num_key_value_groups = shape.heads // shape.kv_heads
        self.is_causal = True

    def forward(self, input_ids: Tensor, past_key_values: Any, **_: Any) -> Any:
        """One token in every row of the batch; the logits are the last layer's output ``[B, 1, H, D]``."""
        batch, s = input_ids.shape[0], self.shape
        if batch not in self.rows:
            self.rows[batch] = tuple(
                torch.randn(batch, heads, 1, s.head_dim, device=self.device, dtype=torch.bfloat16)
                for heads in (s.heads, s.kv_heads, s.kv_heads)
            )
        q_BHTD, k_BKTD, v_BKTD = self.rows[batch]
        for layer in range(s.layers):
            keys, values = past_key_values.update(k_BKTD, v_BKTD, layer)
            out_BTHD = packed_attention(self, q_BHTD, keys, values, None)[0]
        return SimpleNamespace(logits=out_BTHD)


def _check(contexts: Sequence[int], batches: Sequence[int], steps: int, limit: int | None) -> None:
    if not contexts or not batches or min(*contexts, *batches, steps) < 1:
        raise KvCompileError("contexts, batches and steps must be positive; for example --contexts 4096 --batch 1")
    if limit is not None and max(contexts) > limit:
        raise KvCompileError(
            f"cannot time {steps} steps behind {max(contexts)} tokens: the model has {limit + steps + WARM_UP} positions, "
            f"{steps + WARM_UP} of them for the steps; choose --contexts up to {max(limit, 0)}"
        )


def _time_cases(
    model: Any,
    caches: Callable[[int, int], dict[str, Any]],
    contexts: Sequence[int],
    batches: Sequence[int],
    steps: int,
    vocabulary: int,
    track: Track,
) -> tuple[Timing, ...]:
    """Every context with every batch, each with fresh caches."""
    timings: list[Timing] = []
    for context in contexts:
        for batch in batches:
            try:
                with torch.inference_mode():
                    timings += _time(model, caches(context, batch), context, batch, steps, vocabulary, track)
            except torch.OutOfMemoryError as error:
                raise KvCompileError(
                    f"both caches of {batch} x {context} tokens do not fit {model.device}; choose smaller --contexts or "
                    "--batch"
                ) from error
    return tuple(timings)


def _time(
    model: Any, caches: dict[str, Any], context: int, batch: int, steps: int, vocabulary: int, track: Track
) -> list[Timing]:
    """Decode `steps` random tokens per row with caches that take turns."""
    calls = {name: _step(model, cache) for name, cache in caches.items()}
    took: dict[str, list[float]] = {name: [] for name in caches}
    for step in track(range(WARM_UP + steps), f"decode {batch} x {context:,}", "step", lambda _: 1):
        ids_B1 = torch.randint(vocabulary, (batch, 1), device=model.device)
        for name, call in calls.items():
            _wait(model.device)
            started = time.perf_counter()
            call(ids_B1)
            _wait(model.device)
            if step >= WARM_UP:
                took[name].append(1e3 * (time.perf_counter() - started))
    return [
        Timing(
            context, batch, name, statistics.median(ms), sorted(ms)[math.ceil(0.9 * len(ms)) - 1],
            1e3 * batch * len(ms) / sum(ms), _held(caches[name]),
        )
        for name, ms in took.items()
    ]  # fmt: skip


def _step(model: Any, cache: Any) -> Callable[[Tensor], object]:
    """One token per row, the way `generate` of a loaded model decodes it."""
    if can_capture(cache, model):
        return StepGraph(model, cache)
    return lambda ids_B1: model(ids_B1, past_key_values=cache, use_cache=True)


def _held(cache: Any) -> int:
    return cache.nbytes() if isinstance(cache, PackedCache) else dense_bytes(cache.layers)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _machine(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
