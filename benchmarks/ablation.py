"""What each part of `kvc-int2` brings, and what did not help: KL of variants on the reference models, real packed cache.

    python -m benchmarks.ablation --shared ../shared --model qwen3-32m --out benchmarks/results/cpu/ablation.jsonl
    python -m benchmarks.ablation --table benchmarks/results/cpu/ablation.jsonl

Windows and positions are those of `reference_quality.json`: four windows of 2048 tokens, and two of 8192 for the rows that
are marked long. Ratios are to `oscar-int2` with one rotation per layer, which has the same bits and windows.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import kvcompile
from benchmarks.quality import calibration_file, measure

BASELINE = "oscar-int2, one rotation per layer"
SPREAD = ["calibration.positions=spread", "calibration.sample_sequences=4", "calibration.sample_queries=128"]
CENTER = ["key.center=true", "value.center=true"]
FEEDBACK = [
    "key.quantizer.rounding=error_feedback", "value.quantizer.rounding=error_feedback",
    "key.quantizer.damping=0.05", "value.quantizer.damping=0.05",
]  # fmt: skip
WINDOWS = {2048: 4, 8192: 2}

ROWS: list[tuple[str, str, list[str], bool]] = [
    (BASELINE, "oscar-int2", ["key.rotation.scope=layer", "value.rotation.scope=layer"], True),
    ("oscar-int2 (per KV head)", "oscar-int2", [], True),
    ("+ positions spread", "oscar-int2", SPREAD, True),
    ("+ centring", "oscar-int2", [*SPREAD, *CENTER], True),
    ("+ error feedback, metric C_Q", "oscar-int2", [*SPREAD, *CENTER, *FEEDBACK, "key.quantizer.metric=query"], True),
    ("+ attention metric", "oscar-int2", [*SPREAD, *CENTER, *FEEDBACK], True),
    ("+ balanced basis = kvc-int2", "kvc-int2", [], True),
    ("kvc-int2 without spread positions", "kvc-int2", ["calibration.positions=start"], True),
    ("kvc-int2 without centring", "kvc-int2", ["key.center=false", "value.center=false"], True),
    ("kvc-int2 without feedback", "kvc-int2", ["key.quantizer.rounding=nearest", "value.quantizer.rounding=nearest"], False),
    ("kvc-int2 with feedback on keys only", "kvc-int2", ["value.quantizer.rounding=nearest"], False),
    ("kvc-int2 with metric C_Q", "kvc-int2", ["key.quantizer.metric=query"], False),
    ("kvc-int2 with Hadamard only", "kvc-int2", ["key.rotation.kind=hadamard", "value.rotation.kind=hadamard"], True),
    ("kvc-int2, one basis per layer", "kvc-int2", ["key.rotation.scope=layer", "value.rotation.scope=layer"], False),
    ("kvc-int2 without permutation", "kvc-int2", ["key.rotation.permutation=none", "value.rotation.permutation=none"], False),
    ("kvc-int2, balance 0.25", "kvc-int2", ["key.rotation.balance=0.25", "value.rotation.balance=0.25"], False),
    ("kvc-int2, balance 1", "kvc-int2", ["key.rotation.balance=1", "value.rotation.balance=1"], False),
    ("kvc-int2, damping 0.2", "kvc-int2", ["key.quantizer.damping=0.2", "value.quantizer.damping=0.2"], False),
    ("kvc-int2, no clip", "kvc-int2", ["key.clip.kind=none", "value.clip.kind=none"], False),
    ("kvc-int2, clip fixed at 0.96/0.92", "kvc-int2", ["key.clip.ratio=0.96", "value.clip.ratio=0.92"], False),
    ("kvc-int2, integer zero point", "kvc-int2", [
        "key.quantizer.zero_point=integer", "value.quantizer.zero_point=integer",
    ], False),
    ("oscar-int2, centred, Lloyd-Max levels", "oscar-int2", [
        *SPREAD, *CENTER, "key.clip.kind=none", "value.clip.kind=none",
        *(f"{half}.quantizer.{field}" for half in ("key", "value") for field in ("zero_point=none", "levels=lloyd_max")),
    ], False),
    ("kvc-int2, groups of 64", "kvc-int2", ["key.quantizer.group_size=64", "value.quantizer.group_size=64"], True),
    ("oscar-int2 per layer, groups of 64", "oscar-int2", [
        "key.rotation.scope=layer", "value.rotation.scope=layer", "key.quantizer.group_size=64", "value.quantizer.group_size=64",
    ], True),
    ("kvc-int2, 512 recent tokens in layers 0-1", "kvc-int2", ['layers."0-1".window.recent=512'], False),
    ("kvc-int2, keys of layers 0-1 at 4 bits", "kvc-int2", ['layers."0-1".key.quantizer.bits=4'], False),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", default="0/1", help="i/n: only every n-th row, from row i; to run rows side by side")
    parser.add_argument("--table", type=Path, help="print the table of a finished run and stop")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    first, step = map(int, options.share.split("/"))
    for name in options.model:
        for label, scheme, overrides, long in ROWS[first::step]:
            record = run(options.shared, name, scheme, overrides, [2048, 8192] if long else [2048])
            line = json.dumps({"model": name, "row": label, "scheme": scheme, "set": overrides, **record})
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")


def run(shared: Path, name: str, scheme: str, overrides: list[str], lengths: list[int]) -> dict[str, object]:
    """Convert and measure one variant of one model."""
    with tempfile.TemporaryDirectory() as folder:
        text = calibration_file(shared, Path(folder))
        started = time.perf_counter()
        made = kvcompile.convert(
            shared / "models" / name, Path(folder) / "out", scheme, overrides=overrides, calibration=text
        )
        assert made.manifest is not None
        record: dict[str, object] = {"bits_128k": round(made.manifest.bits_per_element["128k"], 3)}
        record["convert_seconds"] = round(time.perf_counter() - started, 1)
        for length in lengths:
            found = measure(Path(folder) / "out", shared, WINDOWS[length], length)
            record[f"kl_{length}"] = round(found.kl, 5)
            record[f"agreement_{length}"] = round(found.agreement, 4)
        return record


def table(records: list[dict[str, object]]) -> str:
    """Markdown: KL per model and length, and the geometric mean of the ratios to the baseline."""
    models = sorted({str(r["model"]) for r in records})
    columns = [(model, length) for length in WINDOWS for model in models]
    kl = {(r["row"], r["model"], n): r[f"kl_{n}"] for r in records for n in WINDOWS if f"kl_{n}" in r}
    lines = [
        "| variant | " + " | ".join(f"{model} {n // 1024}k" for model, n in columns) + " | ratio 2k | ratio 8k |",
        "|---" * (len(columns) + 3) + "|",
    ]
    measured = {r["row"] for r in records}
    for row in (label for label, *_ in ROWS if label in measured):
        values = [kl.get((row, *column)) for column in columns]
        ratios = [_ratio(kl, row, models, n) for n in WINDOWS]
        cells = [f"{v:.5f}" if isinstance(v, float) else "" for v in values] + [f"{r:.2f}" if r else "" for r in ratios]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(kl: dict[tuple[object, ...], object], row: str, models: list[str], length: int) -> float | None:
    pairs = [(kl.get((row, model, length)), kl.get((BASELINE, model, length))) for model in models]
    if not all(isinstance(a, float) and isinstance(b, float) for a, b in pairs):
        return None
    return math.exp(sum(math.log(a / b) for a, b in pairs) / len(pairs))  # type: ignore[operator]


if __name__ == "__main__":
    main()
