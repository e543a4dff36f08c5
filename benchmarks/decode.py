"""A whole decoding step of a model of Qwen3-8B's shape with random weights: packed cache against BF16, on one GPU.

    python -m benchmarks.decode --out benchmarks/results/h200 [--layers 36] [--cases 32x16k,1x100k,...] [--no-hf]
    python -m benchmarks.decode --plot benchmarks/results/h200/decode.csv

Sides, one after the other, each with the memory to itself and the same model:

- INT2: the runtime's own cache and step graph under kvc-int2 with random calibration, its pages random and scattered.
- BF16: a cache allocated in advance that takes the token in place, SDPA cuDNN over exactly the context, heads not repeated, the
  step in a CUDA graph.
- transformers, eager: DynamicCache with SDPA, and QuantizedCache at 2 bits where quanto or HQQ is installed.

A time is the mean over steps by the clock on the wall, host work and demotions included. What is not attention is the same step
with the attention replaced by a copy of the query. KV bytes are what the allocator gave for the cache. Writes decode.csv (after
every side), decode.md and decode.svg. Without a GPU a tiny model shows that the script runs.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    QuantizedCache,
)
from transformers.cache_utils import Cache, CacheLayerMixin

from benchmarks import gpu
from benchmarks.gpu import DEVICE, rows
from kvcompile.evaluate.uncalibrated import Shape, fill, geometry_of, random_cache
from kvcompile.runtime.cache import ATTENTION, PackedLayer
from kvcompile.runtime.graph import StepGraph
from kvcompile.runtime.norms import fuse_norms
from kvcompile.scheme import load_scheme

SCHEME = "kvc-int2"
INT2, BF16, DYNAMIC, QUANTIZED = "INT2", "BF16, SDPA cuDNN", "DynamicCache, eager", "QuantizedCache, eager"
ON_GPU = DEVICE == "cuda"
CASES: dict[str, tuple[int | None, int]] = {  # batch (None: what fits the budget) and context
    "32x16k": (32, 16384),
    "32x8k": (32, 8192),
    "1x100k": (1, 102400),
    "2x100k": (2, 102400),
    "40GBx100k": (None, 102400),
}
BUDGET = 40e9
STEPS, EAGER_STEPS, WARM_UP = (128, 8, 3) if ON_GPU else (2, 2, 1)
ROOM = 4 * STEPS
"""Tokens that a packed cache has pages for beyond the context: two runs of steps and their warm-ups."""
REFERENCE_MS = {"32x16k": 22.9, "32x8k": 14.4, "1x100k": 8.8, "2x100k": 12.3}
"""A plain BF16 step with cuDNN attention, as issue 4 has it."""
FASTER = {"32x16k": 2.3, "1x100k": 1.4}
THROUGHPUT, OTHER = 6.0, 1.1
SIZES = (
    {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8,
     "head_dim": 128}
    if ON_GPU
    else {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 32}
)  # fmt: skip


def best_bf16(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """SDPA cuDNN over all keys, no head repeated."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if ON_GPU else SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def copied_query(module: torch.nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """In place of attention."""
    return query.transpose(1, 2).contiguous(), None


for _name, _function in (("best_bf16", best_bf16), ("copied_query", copied_query)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, lambda *args, **kwargs: None)


class FixedLayer(CacheLayerMixin):
    """A BF16 layer of exactly `context` random tokens; the step's token is written in place of the last."""

    is_sliding = False

    def __init__(self, batch: int, context: int, shape: Shape):
        super().__init__()
        self.keys, self.values = (rows(batch, shape.kv_heads, context, shape.head_dim) for _ in "kv")
        self.last = torch.tensor([context - 1], device=DEVICE)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Done already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.last, key_states)
        self.values.index_copy_(2, self.last, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name up to transformers 5.17


@dataclass
class Memory:
    """Bytes by the allocator: held when a cache was built beyond what was held before, and at the peak of its steps."""

    before: int
    kv_bytes: int = 0

    @classmethod
    def now(cls) -> "Memory":
        gpu.release()
        return cls(allocated("current"))

    def cache_is_built(self) -> None:
        gpu.release()
        self.kv_bytes = allocated("current") - self.before
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()


def allocated(kind: str) -> int:
    return torch.cuda.memory_stats()[f"allocated_bytes.all.{kind}"] if ON_GPU else 0


def build_model(layers: int) -> Any:
    """Random weights in bfloat16, made where they stay."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", **SIZES, num_hidden_layers=layers, max_position_embeddings=131072, tie_word_embeddings=False
    )
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    fuse_norms(model)  # as `load` does; for both sides
    return model.eval().requires_grad_(False)


def shape_of(model: Any) -> Shape:
    c = model.config
    return Shape(c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim)


def mean_ms(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Milliseconds of a step by the clock on the wall, and the median by the device's clock."""
    for _ in range(WARM_UP):
        step()
    if not ON_GPU:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        mean = (time.perf_counter() - started) * 1e3 / steps
        return mean, mean
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    mean = (time.perf_counter() - started) * 1e3 / steps
    return mean, statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def finite(logits: Tensor) -> str:
    """A note where a step went wrong."""
    return "" if bool(logits.isfinite().all()) else "logits are not finite"


def time_int2(model: Any, batch: int, context: int) -> dict[str, Any]:
    """The runtime's step."""
    memory = Memory.now()
    cache = random_cache(load_scheme(SCHEME), shape_of(model), torch.device(DEVICE))
    fill(cache, batch, context, room=ROOM)
    memory.cache_is_built()
    ids_B1 = torch.randint(model.config.vocab_size, (batch, 1), device=DEVICE)
    graph = StepGraph(model, cache, capture=ON_GPU)
    note = finite(graph(ids_B1).logits)
    ms, median = mean_ms(lambda: graph(ids_B1), STEPS)
    found = result(batch, ms, median, memory)
    del graph
    with attention_left_out(cache):
        graph = StepGraph(model, cache, capture=ON_GPU)
        found["other_ms"], _ = mean_ms(lambda: graph(ids_B1), STEPS)
    return found | {"note": note}


@contextmanager
def attention_left_out(cache: Any) -> Iterator[None]:
    """While this lasts, the layers of a packed cache append as always, and return the rotated query for attention."""
    packed = [layer for layer in cache.layers if isinstance(layer, PackedLayer)]
    original = packed[0].backend

    class Copying(type(original)):  # type: ignore[misc]
        """The same backend without attention."""

        def attend(self, q_BHD: Tensor, layer: Any, *_: Any) -> tuple[Tensor, Tensor]:
            return q_BHD.float().clone(), q_BHD[..., 0].float()

    copying = Copying()
    for layer in packed:
        layer.backend = copying
    try:
        yield
    finally:
        for layer in packed:
            layer.backend = original


def time_bf16(model: Any, batch: int, context: int) -> dict[str, Any]:
    """The best that BF16 can do in the same model."""
    memory = Memory.now()
    shape = shape_of(model)
    cache = Cache(layers=[FixedLayer(batch, context, shape) for _ in range(shape.layers)])
    memory.cache_is_built()
    ids_B1 = torch.randint(model.config.vocab_size, (batch, 1), device=DEVICE)
    positions_B1 = torch.full_like(ids_B1, context - 1)
    outputs: dict[str, Tensor] = {}

    def step() -> None:
        output = model(input_ids=ids_B1, position_ids=positions_B1, past_key_values=cache, use_cache=True)
        outputs["logits"] = output.logits

    found: dict[str, Any] = {}
    for name in ("best_bf16", "copied_query"):
        model.set_attn_implementation(name)
        try:
            replay = gpu.captured([step])
            replay()
            note = finite(outputs["logits"])
            ms, median = mean_ms(replay, STEPS)
        finally:
            model.set_attn_implementation(ATTENTION)
        if name == "best_bf16":
            found = result(batch, ms, median, memory) | {"note": note}
        else:
            found["other_ms"] = ms
        outputs.clear()
        del replay
        gpu.release()
    return found


def time_eager(model: Any, batch: int, context: int, cache: Any) -> dict[str, Any]:
    """A cache of transformers' own, run as transformers runs it."""
    memory = Memory.now()
    shape = shape_of(model)
    for layer in range(shape.layers):
        k_BKTD, v_BKTD = (rows(batch, shape.kv_heads, context, shape.head_dim) for _ in "kv")
        cache.update(k_BKTD, v_BKTD, layer)
        del k_BKTD, v_BKTD
    memory.cache_is_built()
    ids_B1 = torch.randint(model.config.vocab_size, (batch, 1), device=DEVICE)
    model.set_attn_implementation("sdpa")
    try:
        ms, median = mean_ms(lambda: model(ids_B1, past_key_values=cache, use_cache=True), EAGER_STEPS)
    finally:
        model.set_attn_implementation(ATTENTION)
    return result(batch, ms, median, memory)


def time_quantized(model: Any, batch: int, context: int) -> dict[str, Any]:
    """transformers' 2-bit cache, where one of its libraries is installed."""
    missing = []
    for backend, axis in (("quanto", 0), ("hqq", 1)):
        try:
            cache = QuantizedCache(backend, model.config, nbits=2, axis_key=axis, axis_value=axis)
        except ImportError:
            missing.append(backend)
            continue
        return time_eager(model, batch, context, cache) | {"note": backend}
    raise RuntimeError(f"{' and '.join(missing)} are not installed")


def result(batch: int, ms: float, median: float, memory: Memory) -> dict[str, Any]:
    return {
        "batch": batch, "ms": ms, "ms_median": median, "other_ms": math.nan, "tokens_per_second": 1e3 * batch / ms,
        "kv_bytes": memory.kv_bytes, "peak_bytes": allocated("peak"), "note": "",
    }  # fmt: skip


def batch_within_budget(side: str, shape: Shape, context: int) -> int:
    """Most requests of `context` tokens whose keys and values take at most 40 GB."""
    token = 4 * shape.kv_heads * shape.head_dim
    row = token * context
    if side == INT2:
        g = geometry_of(load_scheme(SCHEME), shape)
        row = shape.kv_heads * g.full_pages(context + ROOM) * g.page_bytes + token * (g.sink + g.ring)
    budget = BUDGET if ON_GPU else 3.5 * token * context * shape.layers
    return max(1, int(budget // (row * shape.layers)))


def markdown(found: Sequence[dict[str, Any]], layers: int) -> str:
    """Every side of every case, and what issue 4 asks for beside what was reached."""

    def get(case: str, side: str) -> dict[str, Any]:
        return next((r for r in found if (r["case"], r["side"]) == (case, side) and not math.isnan(r["ms"])), {})

    def show(value: float, digits: int = 2) -> str:
        return "–" if math.isnan(value) else f"{value:.{digits}f}"

    lines = [
        "# A whole decoding step", "", gpu.machine(), "", f"`{gpu.command()}`", "",
        f"A model of Qwen3-8B's shape ({layers} layers) with random weights, {SCHEME}. ms: mean over {STEPS} steps "
        f"({EAGER_STEPS} eager ones), host work and demotions included. KV and peak GB are the allocator's.", "",
    ]  # fmt: skip
    header = ["case", "cache", "batch", "ms", "median", "not attention, ms", "tokens/s", "KV GB", "peak GB", "note"]
    body = [
        [r["case"], r["side"], r["batch"], show(r["ms"]), show(r["ms_median"]), show(r["other_ms"]),
         show(r["tokens_per_second"], 1), show(r["kv_bytes"] / 1e9), show(r["peak_bytes"] / 1e9, 1), r["note"]]
        for r in found
    ]  # fmt: skip
    lines += gpu.table(header, body)
    body = []
    for case, (batch, _) in CASES.items():
        ours, theirs = get(case, INT2), get(case, BF16)
        if not ours or not theirs:
            continue
        quantity = "ms" if batch else "tokens_per_second"
        ratio = theirs["ms"] / ours["ms"] if batch else ours["tokens_per_second"] / theirs["tokens_per_second"]
        target = FASTER.get(case) if batch else THROUGHPUT
        rest, smaller = ours["other_ms"] / theirs["other_ms"], theirs["kv_bytes"] / max(ours["kv_bytes"], 1)
        body.append(
            [case, "faster" if batch else "throughput", f"**{ratio:.2f}x**", f"{target}x" if target else "",
             show(theirs[quantity]), REFERENCE_MS.get(case, ""), show(ours[quantity]),
             f"{rest:.2f}x", f"{OTHER}x", f"{smaller:.2f}x"]
        )  # fmt: skip
    header = ["case", "INT2 against BF16", "reached", "at least", "BF16", "BF16 in issue 4, ms", "INT2", "not attention",
              "at most", "smaller"]  # fmt: skip
    lines += ["", "## Against the best BF16 step", "", *gpu.table(header, body), ""]
    return "\n".join(lines)


def draw(csv: Path) -> None:
    """decode.svg beside the CSV, where matplotlib is installed."""
    try:
        from benchmarks.plots import draw_decode
    except ImportError as error:
        print(f"no picture ({error}); draw it later with --plot {csv}", flush=True)
        return
    print(f"drew {draw_decode(csv)}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="only draw the picture of an earlier run")
    parser.add_argument("--layers", type=int, default=36 if ON_GPU else 2)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--no-hf", action="store_true", help="leave transformers' own caches out")
    options = parser.parse_args()
    if options.plot:
        return draw(options.plot)
    if not options.out:
        parser.error("give --out or --plot")
    options.out.mkdir(parents=True, exist_ok=True)
    started, found = time.time(), []
    model = build_model(options.layers)
    shape = shape_of(model)
    print(f"{gpu.machine()}; model built in {time.time() - started:.0f} s", flush=True)
    sides: dict[str, Callable[[int, int], dict[str, Any]]] = {
        INT2: lambda batch, context: time_int2(model, batch, context),
        BF16: lambda batch, context: time_bf16(model, batch, context),
    }
    if not options.no_hf:
        sides[DYNAMIC] = lambda batch, context: time_eager(model, batch, context, DynamicCache(config=model.config))
        sides[QUANTIZED] = lambda batch, context: time_quantized(model, batch, context)
    for case in options.cases.split(","):
        asked, context = CASES[case] if ON_GPU else (CASES[case][0] and min(CASES[case][0] or 1, 3), 700)
        for side, measure in sides.items():
            if asked is None and side not in (INT2, BF16):
                continue
            batch = asked or batch_within_budget(side, shape, context)
            try:
                record = measure(batch, context)
            except (
                Exception
            ) as error:  # a baseline may be absent, or not fit; the others are to be measured all the same
                record = result(batch, math.nan, math.nan, Memory(0))
                record["note"] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            found.append({"case": case, "side": side, "context": context, **record})
            gpu.release()
            gpu.write_csv(options.out / "decode.csv", found)
            (options.out / "decode.md").write_text(markdown(found, options.layers))
            print(f"  {case} {side}: batch {batch}, {record['ms']:.2f} ms, not attention {record['other_ms']:.2f} ms, "
                  f"{record['kv_bytes'] / 1e9:.2f} GB {record['note']} ({time.time() - started:.0f} s)", flush=True)  # fmt: skip
    draw(options.out / "decode.csv")
    print((options.out / "decode.md").read_text())


if __name__ == "__main__":
    main()
