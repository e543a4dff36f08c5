"""How do time and memory of a conversion grow with the checkpoint, under a hard limit of memory?

    python -m benchmarks.size --out benchmarks/results/cpu

Makes llama-like checkpoints with random BF16 weights in shards of 2 GB (layers of 625 MB, 4096 wide), converts each with the
default scheme, verification included, in a process of its own under RLIMIT_DATA, the kernel's limit on private memory, and
deletes it; one decoder layer is in memory at a time. `--resident` sizes are converted without a
limit and with all weights in memory, for comparison. `--out` adds to the rows that are there; `--sizes "" --resident ""` only
draws them. Memory is that of the whole process, imports included, sampled every
20 ms: resident memory, and the part of it that is not a file's (what the system cannot take back).
"""

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import psutil
import torch
import transformers
from matplotlib.figure import Figure
from safetensors.torch import save_file

from benchmarks.plots import save
from kvcompile.evaluate.pictures import COLOURS, STYLE

EXAMPLE = Path(__file__).parents[1] / "examples" / "checkpoint"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 4096, "hidden_size": 4096,
    "intermediate_size": 22016, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False, "rope_theta": 1e4,
}  # fmt: skip
ROWS, COLUMNS, INNER, KV = CONFIG["vocab_size"], CONFIG["hidden_size"], CONFIG["intermediate_size"], 1024
LAYER = {
    "self_attn.q_proj": (COLUMNS, COLUMNS), "self_attn.k_proj": (KV, COLUMNS), "self_attn.v_proj": (KV, COLUMNS),
    "self_attn.o_proj": (COLUMNS, COLUMNS), "mlp.gate_proj": (INNER, COLUMNS), "mlp.up_proj": (INNER, COLUMNS),
    "mlp.down_proj": (COLUMNS, INNER), "input_layernorm": (COLUMNS,), "post_attention_layernorm": (COLUMNS,),
}  # fmt: skip
LAYER_BYTES = 2 * sum(torch.Size(shape).numel() for shape in LAYER.values())
SHARD_BYTES = 2e9
CONVERT = """
import json, sys, torch
torch.set_num_threads(int(sys.argv[4]))
from kvcompile.passes.convert import convert
low_memory = sys.argv[5] == "streamed"
result = convert(sys.argv[1], sys.argv[2], calibration_tokens=int(sys.argv[3]), low_memory=low_memory)
print(json.dumps({"stages": result.seconds, "bytes": result.checkpoint_bytes, **result.ir.summary}))
"""


def make_checkpoint(path: Path, gigabytes: float, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> int:
    """A checkpoint of about this size, with weights drawn on `device`; its number of layers."""
    path.mkdir(parents=True)
    size = dtype.itemsize
    layers = max(1, round((gigabytes * 1e9 - 2 * size * ROWS * COLUMNS) / (LAYER_BYTES // 2 * size)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLE / name, path / name)
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers, "dtype": str(dtype)[6:]}))
    shapes = {"model.embed_tokens": (ROWS, COLUMNS), "model.norm": (COLUMNS,), "lm_head": (ROWS, COLUMNS)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in LAYER.items()}
    generator, index, shard, held = torch.Generator(device).manual_seed(0), {}, {}, 0
    pending = list(shapes.items())
    for position, (name, shape) in enumerate(pending):
        weight = torch.empty(shape, dtype=dtype, device=device).normal_(0, shape[-1] ** -0.5, generator=generator)
        shard[f"{name}.weight"] = (weight if len(shape) > 1 else weight + 1).cpu()
        held += size * weight.numel()
        if held >= SHARD_BYTES or position == len(pending) - 1:
            file = f"model-{len(set(index.values())):05}.safetensors"
            save_file(shard, path / file)
            index |= dict.fromkeys(shard, file)
            shard, held = {}, 0
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return layers


def measure(model: Path, out: Path, tokens: int, threads: int, limit: float | None) -> dict:
    """One conversion in a process of its own: seconds by pass, and its peaks of memory in bytes."""
    command = [sys.executable, "-c", CONVERT, model, out, tokens, threads, "streamed" if limit else "resident"]

    def confine() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))

    with tempfile.TemporaryFile("w+") as said:
        started = time.perf_counter()
        process = subprocess.Popen([str(c) for c in command], stdout=said, preexec_fn=confine)
        peak, anonymous = 0, 0
        while process.poll() is None:
            try:
                memory = psutil.Process(process.pid).memory_info()
            except psutil.NoSuchProcess:
                break
            peak, anonymous = max(peak, memory.rss), max(anonymous, memory.rss - memory.shared)
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        if process.wait():
            raise SystemExit(f"the conversion of {model} failed with {process.returncode}")
        said.seek(0)
        report = json.loads(said.read().splitlines()[-1])
    return {"seconds": seconds, "peak_rss": peak, "peak_private": anonymous, "limit": limit, **report}


def table(rows: list[dict]) -> list[str]:
    lines = [
        "| checkpoint, GB | layers | weights in memory | limit, GB | seconds | calibrate | verify | emit "
        "| peak RSS, GB | private, GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        how, limit = ("one layer", f"{r['limit'] / 1e9:.1f}") if r["limit"] else ("all", "")
        stages = " | ".join(f"{r['stages'][name]:.0f}" for name in ("calibrate", "verify", "emit"))
        lines.append(
            f"| {r['bytes'] / 1e9:.2f} | {r['layers']} | {how} | {limit} | {r['seconds']:.0f} | {stages} "
            f"| {r['peak_rss'] / 1e9:.2f} | {r['peak_private'] / 1e9:.2f} |"
        )
    return lines


def draw(rows: list[dict], path: Path) -> Path:
    """Seconds and memory against the size of the checkpoint."""
    with mpl.rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for streamed, name, colour in ((True, "one layer in memory", COLOURS[0]), (False, "all weights", COLOURS[1])):
            chosen = sorted((r for r in rows if bool(r["limit"]) == streamed), key=lambda r: r["bytes"])
            sizes = [r["bytes"] / 1e9 for r in chosen]
            left.plot(sizes, [r["seconds"] for r in chosen], "-o", ms=4, color=colour, label=name)
            right.plot(
                sizes, [r["peak_rss"] / 1e9 for r in chosen], "-o", ms=4, color=colour, label=f"{name}: resident"
            )
            if streamed:
                right.plot(sizes, [r["peak_private"] / 1e9 for r in chosen], "--", color=colour, label="of it private")
                for r in chosen[-1:]:
                    right.axhline(r["limit"] / 1e9, color="grey", lw=1, label="limit")
        left.set(xlabel="checkpoint, GB", ylabel="seconds", xlim=0, ylim=0)
        right.set(xlabel="checkpoint, GB", ylabel="peak memory, GB", xlim=0, ylim=0)
        right.legend(frameon=False)
        return save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,3,6,12", help="GB of the checkpoints that are converted under the limit")
    parser.add_argument("--resident", default="1,3", help="GB of those that are converted without it, all in memory")
    parser.add_argument("--limit", type=float, default=4.0, help="GB of private memory")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are made")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = [(float(size), options.limit * 1e9) for size in options.sizes.split(",") if size]
    wanted += [(float(size), None) for size in options.resident.split(",") if size]
    recorded = options.out / "size.jsonl" if options.out else None
    rows = read(recorded) if recorded and recorded.exists() else []
    for size in dict.fromkeys(size for size, _ in wanted):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            model = Path(folder) / "model"
            layers = make_checkpoint(model, size)
            for limit in [limit for other, limit in wanted if other == size]:
                out = Path(folder) / "out"
                row = {
                    "layers": layers, "tokens": options.tokens, "threads": options.threads,
                    "machine": platform.processor() or platform.machine(), "torch": torch.__version__,
                    "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d"),
                    **measure(model, out, options.tokens, options.threads, limit),
                }  # fmt: skip
                shutil.rmtree(out)
                rows.append(row)
                print(table([row])[-1], flush=True)
                if recorded:
                    recorded.parent.mkdir(parents=True, exist_ok=True)
                    with recorded.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    rows.sort(key=lambda row: (row["limit"] is None, row["bytes"]))
    first = rows[0]
    lines = [
        f"# Size of the checkpoint against time and memory ({first['tokens']} calibration tokens, verification included)",
        "",
        f"{first['machine']}, {first['threads']} threads, torch {first['torch']}, transformers {first['transformers']}, "
        f"{first['date']}; `python -m benchmarks.size --tokens {first['tokens']} --threads {first['threads']}`",
        "",
        *table(rows),
    ]
    print("\n".join(lines))
    if recorded:
        recorded.with_suffix(".md").write_text("\n".join(lines) + "\n")
        draw(rows, recorded)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
