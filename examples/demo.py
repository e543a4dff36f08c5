"""The whole of kvcompile on the bundled example: convert, verify, generate from packed pages beside BF16, and measure.

Run by `make demo`. Everything shown is measured in this run, on the real packed cache.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

import kvcompile
from kvcompile.cli.console import ConsoleInstrument
from kvcompile.evaluate import divergence, make_trials, reference_logits, retrieves
from kvcompile.scheme import DEFAULT_SCHEME

HERE = Path(__file__).parent
SOURCE, OUT = HERE / "checkpoint", HERE.parent / ".demo" / DEFAULT_SCHEME
PROMPT_TOKENS, NEW_TOKENS = 1536, 96
KL_TOKENS, KL_START = 1024, 512
console = Console(width=110)
seconds: dict[str, float] = {}


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Time a stage and announce it."""
    console.rule(f"[bold]{name}")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def main() -> None:
    """Run all stages and print the table."""
    shutil.rmtree(OUT, ignore_errors=True)
    with stage("convert"):
        instrument = ConsoleInstrument(console)
        converted = kvcompile.convert(SOURCE, OUT, instruments=[instrument], track=instrument.track)
    with stage("verify"):
        for check in kvcompile.verify(OUT, SOURCE).checks:
            console.print(f"ok: {check}", highlight=False)
    with stage("generate"):
        model, tokenizer = kvcompile.load(OUT)
        text = (HERE / "heldout.txt").read_text("utf-8")
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
        prompt = ids[:, :PROMPT_TOKENS]
        packed, dense = kvcompile.new_cache(model), DynamicCache(config=model.config)
        outputs = {
            name: model.generate(
                prompt, past_key_values=cache, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
            )
            for name, cache in (("packed", packed), ("bf16", dense))
        }  # fmt: skip
        for name, output in outputs.items():
            console.print(
                f"[bold]{name:<6}[/bold] ...{tokenizer.decode(output[0, PROMPT_TOKENS:])[:300]!r}", highlight=False
            )
        equal = (outputs["packed"] == outputs["bf16"])[0, PROMPT_TOKENS:]
        same = int(equal.long().cumprod(0).sum())  # after the first other token, the texts are different texts
    with stage("measure KL"), Progress(console=console, transient=True) as progress:
        task = progress.add_task("decode, teacher-forced", total=KL_TOKENS)
        window = ids[:, -KL_TOKENS:]  # not seen in generation, nor in training or calibration
        found = divergence(
            model,
            kvcompile.new_cache(model),
            window,
            reference_logits(model, window),
            prefill=256,
            start=KL_START,
            on_step=lambda t: progress.update(task, completed=t),
        )
    with stage("retrieve a planted number"):
        words = ["amber", "river", "copper", "meadow", "lantern", "harbour"]
        trials = make_trials(text, words, characters=5000, count=12)
        hits, dense_hits = (
            sum(retrieves(model, tokenizer, make_cache(), trial) for trial in trials)
            for make_cache in (lambda: kvcompile.new_cache(model), lambda: DynamicCache(config=model.config))
        )

    assert converted.manifest is not None
    dense_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)
    context = PROMPT_TOKENS + NEW_TOKENS
    elements = dense_bytes / 2
    table = Table(
        "measure",
        "packed INT2",
        "BF16",
        title=f"{DEFAULT_SCHEME} on the bundled example, {model.kvcompile.backend.name} backend",
    )
    at_128k = converted.manifest.bits_per_element["128k"]
    table.add_row(f"cache bytes at {context} tokens (allocated)", f"{packed.nbytes():,}", f"{dense_bytes:,}")
    table.add_row(f"bits per element at {context} tokens (allocated)", f"{packed.nbytes() * 8 / elements:.2f}", "16.00")
    table.add_row("bits per element at 128k (from the scheme)", f"{at_128k:.2f}", "16.00")
    table.add_row("KL to the unquantized model (nats/token)", f"{found.kl:.4f}", "0")
    table.add_row("same top token, teacher-forced", f"{found.agreement:.1%}", "100%")
    table.add_row("greedy tokens generated before the first difference", f"{same} of {NEW_TOKENS}", "")
    table.add_row("perplexity", f"{found.perplexity:.2f}", f"{found.reference_perplexity:.2f}")
    table.add_row("planted numbers retrieved", f"{hits} of {len(trials)}", f"{dense_hits} of {len(trials)}")
    table.add_section()
    for name, took in seconds.items():
        table.add_row(f"seconds: {name}", f"{took:.1f}", "")
    for name, took in converted.seconds.items():
        table.add_row(f"  of convert: {name}", f"{took:.2f}", "")
    console.print(table)
    console.print(f"The converted checkpoint is in {OUT}", highlight=False)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
