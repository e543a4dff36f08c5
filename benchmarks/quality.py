"""KL, agreement, perplexity and retrieval of converted reference models, all through the real packed cache.

    python benchmarks/quality.py --shared ../shared --model qwen3-32m --scheme oscar-int2 [--set F=V] [--retrieval 4k,8k]

Windows and positions are those of `reference_quality.json`, whose numbers are printed beside ours.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import kvcompile
from kvcompile.evaluate import Divergence, Retrieval, divergence, reference_logits, retrieval
from kvcompile.evaluate.retrieval import trials_of_length


def reference_windows(shared: Path, tokenizer: object, count: int, length: int) -> Tensor:
    """`count` windows ``[count, length]`` of the held-out books, evenly spaced as reference_quality.json says."""
    text = (shared / "text" / "heldout_books.txt").read_text("utf-8").replace("<|doc|>", "\n")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # type: ignore[operator]
    return torch.stack([ids[i * len(ids) // count :][:length] for i in range(count)])


def calibration_file(shared: Path, folder: Path) -> Path:
    """The first 400,000 characters of the calibration books, as the reference measurement read them."""
    path = folder / "calibration.txt"
    path.write_text(
        (shared / "text" / "calibration_books.txt").read_text("utf-8")[:400_000].replace("<|doc|>", "\n"), "utf-8"
    )
    return path


def measure(out: Path, shared: Path, count: int = 4, length: int = 2048, backend: str | None = None) -> Divergence:
    """Divergence of a converted model on the reference windows, positions past a quarter."""
    model, tokenizer = kvcompile.load(out, backend=backend)
    ids = reference_windows(shared, tokenizer, count, length)
    reference = reference_logits(model, ids)
    return divergence(model, kvcompile.new_cache(model), ids, reference, start=length // 4)


def measure_retrieval(out: Path, shared: Path, tokens: int, trials: int) -> float:
    """Share of planted numbers found at about `tokens` tokens of context."""
    model, tokenizer = kvcompile.load(out)
    haystack = (shared / "text" / "niah_haystack.txt").read_text("utf-8")
    words = json.loads((shared / "text" / "niah_words.json").read_text("utf-8"))
    planted = trials_of_length(haystack, words, tokenizer, tokens, trials)
    findings = retrieval(model, tokenizer, lambda: kvcompile.new_cache(model), planted)
    return Retrieval(tokens, findings).share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--scheme", default="oscar-int2")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--bundled", action="store_true", help="calibrate on the bundled text instead of the books")
    parser.add_argument("--retrieval", default="", help="context lengths such as 4k,8k")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--no-kl", action="store_true")
    parser.add_argument("--out", type=Path, help="append the numbers to this JSON-lines file")
    options = parser.parse_args()
    for name in options.model:
        with tempfile.TemporaryDirectory() as folder:
            text = None if options.bundled else calibration_file(options.shared, Path(folder))
            out = Path(folder) / "out"
            kvcompile.convert(
                options.shared / "models" / name, out, options.scheme, overrides=options.overrides, calibration=text
            )
            record: dict[str, object] = {
                "model": name,
                "scheme": options.scheme,
                "set": options.overrides,
                "bundled": options.bundled,
            }
            started = time.perf_counter()
            if not options.no_kl:
                record |= vars(measure(out, options.shared))
                reference = json.loads((options.shared / "models" / "reference_quality.json").read_text())
                record["reference_kl"] = reference["models"].get(name, {}).get("2k", {}).get("oscar2", {}).get("kl")
            for label in filter(None, options.retrieval.split(",")):
                record[f"retrieval_{label}"] = measure_retrieval(
                    out, options.shared, int(label.rstrip("k")) * 1024, options.trials
                )
            record["seconds"] = round(time.perf_counter() - started, 1)
            print(json.dumps(record), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(
                        json.dumps({**record, "torch": torch.__version__, "threads": torch.get_num_threads()}) + "\n"
                    )


if __name__ == "__main__":
    main()
