"""What does a conversion cost, against loading, one plain forward pass over the calibration tokens, and saving?

    python benchmarks/convert.py --model ../shared/models/qwen3-32m --out benchmarks/results/cpu

The plain parts are measured with transformers alone, logits included, in this process; the conversion (verification
included) in another, so that neither warms the other. Memory is resident memory above that after imports; the smallest
model's is printed too, because it is what libraries take whatever the checkpoint.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

CONVERT = """
import json, sys
from kvcompile.passes.convert import convert
result = convert(sys.argv[1], sys.argv[2])
print(json.dumps({"seconds": result.seconds, "costs": result.costs, "peak": result.peak_bytes, "bytes": result.checkpoint_bytes}))
"""
PLAIN = """
import json, sys, time, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from kvcompile.calibration import read_corpus, tokenize_corpus
from kvcompile.models import load_tokenizer
length = json.loads((Path(sys.argv[1]) / "config.json").read_text())["max_position_embeddings"]
ids = torch.stack(tokenize_corpus(read_corpus(None), load_tokenizer(Path(sys.argv[1])), 8192, min(2048, length)))
t0 = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
t1 = time.perf_counter()
with torch.inference_mode():
    for row in ids:
        model(row[None], use_cache=False)
t2 = time.perf_counter()
model.save_pretrained(sys.argv[2])
print(json.dumps({"load": t1 - t0, "forward": t2 - t1, "save": time.perf_counter() - t2}))
"""


def run(code: str, model: Path, out: Path) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", code, str(model), str(out)], capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def measure(model: Path, repeats: int) -> dict:
    """The medians of interleaved repeats."""
    plain, converted = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            plain.append(run(PLAIN, model, Path(folder) / "plain"))
            converted.append(run(CONVERT, model, Path(folder) / "converted"))
    base = sorted(sum(p.values()) for p in plain)[repeats // 2]
    ours = sorted(converted, key=lambda c: sum(c["seconds"].values()))[repeats // 2]
    total = sum(ours["seconds"].values())
    return {
        "model": model.name, "plain": base, "convert": total, "ratio": total / base, "stages": ours["seconds"],
        "peak_mib": ours["peak"] / 2**20, "checkpoint_mib": ours["bytes"] / 2**20,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records = [measure(model, options.repeats) for model in options.model]
    lines = [
        "# Cost of a conversion (oscar-int2, 8192 calibration tokens, verification included)",
        "",
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}; `{' '.join(['python', *sys.argv])}`",
        "",
        "| model | load + plain forward + save, s | convert, s | ratio | peak memory above imports, MiB | checkpoint, MiB |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['model']} | {r['plain']:.2f} | {r['convert']:.2f} | {r['ratio']:.2f} "
            f"| {r['peak_mib']:.0f} | {r['checkpoint_mib']:.1f} |"
            for r in records
        ),
    ]
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "convert.md").write_text("\n".join(lines) + "\n")
        (options.out / "convert.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
