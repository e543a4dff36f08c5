"""Decode with the packed cache against BF16 caches on this CPU: milliseconds per token and bytes of cache.

    python benchmarks/decode_cpu.py --model ../shared/models/qwen3-32m --contexts 4096,16384 --out benchmarks/results/cpu

Contenders, all in one process and taking turns: the packed cache; transformers' DynamicCache with SDPA (what a user has
today); and the fair baseline, a preallocated BF16 cache that is not copied at every step, attended by SDPA with the query
heads of a KV head viewed as query rows. Bytes are those of the tensors allocated.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

import kvcompile
from kvcompile.models import load_model


class RoomyLayer(DynamicLayer):
    """A BF16 layer with room to grow: appending copies one token, not the whole history."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            shape = (*key_states.shape[:2], key_states.shape[2] + 1024, key_states.shape[3])
            self.room = torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype)
            self.length = 0
        end = self.length + key_states.shape[2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, self.length : end] = states
        self.length = end
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values


def grouped_sdpa(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """SDPA that reads every key once: the query heads of a KV head are rows of one product."""
    if query.shape[2] == 1:
        rows = query.view(query.shape[0], key.shape[1], -1, query.shape[-1])
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, scale=scaling)
        return out.reshape(query.shape[0], 1, -1, query.shape[-1]), None
    return transformers.integrations.sdpa_attention.sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


AttentionInterface.register("grouped_sdpa", grouped_sdpa)
AttentionMaskInterface.register("grouped_sdpa", sdpa_mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--contexts", default="4096,16384")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kvcompile.convert(options.model, Path(folder) / "out")
        packed_model, _ = kvcompile.load(Path(folder) / "out")
        models = {
            "packed INT2": packed_model,
            "BF16, DynamicCache + SDPA": load_model(options.model, "sdpa"),
            "BF16, preallocated + grouped SDPA": load_model(options.model, "grouped_sdpa"),
        }
        records = [measure(models, int(context), options.steps) for context in options.contexts.split(",")]
    lines = [
        f"# Decode on a CPU, {options.model.name}, batch 1",
        "",
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}; `{' '.join(['python', *sys.argv])}`",
        "",
        "| context | cache | ms per token, median | fastest | cache MiB | of BF16 |",
        "|---|---|---|---|---|---|",
    ]
    for record in records:
        dense = record["BF16, DynamicCache + SDPA"]["bytes"]
        for name, found in record.items():
            if isinstance(found, dict):
                lines.append(
                    f"| {record['context']} | {name} | {found['ms']:.2f} | {found['fastest']:.2f} | {found['bytes'] / 2**20:.2f} "
                    f"| {found['bytes'] / dense:.3f} |"
                )
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "decode.md").write_text("\n".join(lines) + "\n")
        (options.out / "decode.json").write_text(json.dumps(records, indent=1) + "\n")


def measure(models: dict, context: int, steps: int) -> dict:
    """Milliseconds per token and bytes at one context length."""
    ids = torch.randint(2, 4000, (1, context), generator=torch.Generator().manual_seed(0))
    caches: dict[str, Any] = {}
    for name, model in models.items():
        if name.startswith("packed"):
            caches[name] = kvcompile.new_cache(model)
        else:
            caches[name] = DynamicCache(config=model.config)
            if "preallocated" in name:
                caches[name].layers = [RoomyLayer() for _ in caches[name].layers]
        with torch.inference_mode():
            model.base_model(ids, past_key_values=caches[name], use_cache=True)
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for step in range(steps + 5):
            for name, model in models.items():
                started = time.perf_counter()
                model(ids[:, step : step + 1], past_key_values=caches[name], use_cache=True)
                if step >= 5:
                    times[name].append((time.perf_counter() - started) * 1e3)
    record: dict[str, Any] = {"context": context}
    for name, cache in caches.items():
        nbytes = (
            cache.nbytes() if name.startswith("packed") else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
        )
        record[name] = {"ms": statistics.median(times[name]), "fastest": min(times[name]), "bytes": nbytes}
    return record


if __name__ == "__main__":
    main()
