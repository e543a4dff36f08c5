"""Conversion on one GPU and on two: seconds, and how far the statistics of calibration are apart.

    python -m benchmarks.devices --out benchmarks/results/h200 [--folder FOLDER] [--size 9] [--exact-size 2]

A llama-like checkpoint with random BF16 weights (9 GB are 4.5 billion) is converted by the command on one GPU, by two processes
of torchrun, and by one process that spreads the model over both GPUs; then a small one with float32 weights, where rounding
hides nothing. Makes and deletes what it needs in `--folder`; writes devices.json and devices.md. Needs two GPUs.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import gpu
from benchmarks.size import make_checkpoint

PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
WAYS = {
    "one GPU": ([*PYTHON, "kvcompile"], ["--device", "cuda"]),
    "two processes (torchrun)": ([*TORCHRUN, "kvcompile"], []),
    "one process, two GPUs (--device-map auto)": ([*PYTHON, "kvcompile"], ["--device", "cuda", "--device-map", "auto"]),
}  # fmt: skip
STAGES = ("calibrate", "verify", "emit")


def convert(model: Path, folder: Path, way: str, tokens: int) -> dict[str, Any]:
    """One conversion; its seconds as a whole and by pass, and the folder with what calibration found."""
    launcher, options = WAYS[way]
    dump = folder / "ir"
    target = ["-o", folder / "out", "--dump-ir", dump, "--calibration-tokens", tokens]
    command = [*launcher, "convert", model, *target, *options]
    started = time.perf_counter()
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if result.returncode:
        raise SystemExit(f"{way} failed: {result.stdout[-1500:]}{result.stderr[-3000:]}")
    passes = [json.loads(file.read_text()) for file in sorted(dump.glob("*.json"))]
    return {"way": way, "seconds": seconds, "passes": {x["pass"]: x["seconds"] for x in passes}, "dump": dump}


def largest_difference(one: Path, other: Path) -> tuple[float, str]:
    """The largest relative difference (of norms) of a statistic that calibration leaves, and its name."""
    files = [next(folder.glob("*-calibrate.safetensors")) for folder in (one, other)]
    ours, theirs = (load_file(file) for file in files)
    if set(ours) != set(theirs):
        raise SystemExit(f"statistics differ in {sorted(set(ours) ^ set(theirs))[:4]}")
    apart = {
        name: float((x.double() - theirs[name].double()).norm() / x.double().norm().clamp_min(1e-30))
        for name, x in ours.items()
    }
    name = max(apart, key=lambda x: apart[x])
    return apart[name], name


def measure(model: Path, folder: Path, tokens: int) -> Iterator[dict[str, Any]]:
    """All ways, compared with the first."""
    found: list[dict[str, Any]] = []
    for index, way in enumerate(WAYS):
        row = convert(model, folder / str(index), way, tokens)
        if found:
            row["apart"], row["where"] = largest_difference(found[0]["dump"], row["dump"])
        shutil.rmtree(folder / str(index) / "out")
        found.append(row)
        print({k: v for k, v in row.items() if k != "dump"}, flush=True)
        yield row


def markdown(sections: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["# Conversion on one GPU and on two", "", gpu.machine(), "", f"`{gpu.command()}`", ""]
    header = ["way", "seconds", *STAGES, "statistics apart from one GPU's", "in"]
    for title, found in sections.items():
        rows = [
            [r["way"], f"{r['seconds']:.1f}", *(f"{r['passes'].get(name, 0):.1f}" for name in STAGES),
             f"{r['apart']:.1e}" if "apart" in r else "", r.get("where", "")]
            for r in found
        ]  # fmt: skip
        lines += [f"## {title}", "", *gpu.table(header, rows), ""]
    lines.append(
        "Seconds: the command as a whole, imports and the start of processes included; then three of its passes."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made  [default: a temporary folder]")
    parser.add_argument("--size", type=float, default=9, help="GB of the BF16 checkpoint")
    parser.add_argument("--exact-size", type=float, default=2, help="GB of the float32 checkpoint")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to calibrate on")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("this needs two GPUs")
    options.out.mkdir(parents=True, exist_ok=True)
    sections: dict[str, list[dict[str, Any]]] = {}
    for size, dtype in ((options.size, torch.bfloat16), (options.exact_size, torch.float32)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            started = time.perf_counter()
            layers = make_checkpoint(Path(folder) / "model", size, dtype, "cuda")
            parameters = size * 1e9 / dtype.itemsize
            print(f"{layers} layers, made in {time.perf_counter() - started:.0f} s", flush=True)
            title = (
                f"{parameters / 1e9:.1f} billion parameters, {str(dtype)[6:]}, {layers} layers, {options.tokens} tokens"
            )
            for row in measure(Path(folder) / "model", Path(folder), options.tokens):
                sections.setdefault(title, []).append(row)
                (options.out / "devices.json").write_text(json.dumps(sections, indent=1, default=str) + "\n")
                (options.out / "devices.md").write_text(markdown(sections))
    print(markdown(sections))


if __name__ == "__main__":
    main()
