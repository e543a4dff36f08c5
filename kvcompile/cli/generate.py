"""`kvcompile generate`."""

import sys
from pathlib import Path
from typing import Any

import click

from kvcompile.errors import KvCompileError
from kvcompile.models import resolve_device
from kvcompile.runtime import load
from kvcompile.runtime.generate import generate


@click.command("generate")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", help="Text to continue  [default: standard input].")
@click.option("-n", "--max-new-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--backend", type=click.Choice(["codec", "cpu", "triton"]), help="[default: the fastest for the device]")
@click.option("--source", type=click.Path(path_type=Path), help="Where an overlay's weights are, if they moved.")
def generate_command(
    artifact: Path,
    prompt: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: str,
    backend: str | None,
    source: Path | None,
) -> None:
    """Continue a prompt with a converted model, its cache packed; text streams as it comes.

    \b
    Example:
      kvcompile generate out/ --prompt "Once upon a time" -n 64
      cat long.txt | kvcompile generate out/
    """
    try:
        text = sys.stdin.read() if prompt is None else prompt
    except UnicodeDecodeError as error:
        raise KvCompileError(f"standard input is not UTF-8 text: {error}") from error
    model, tokenizer = load(artifact, device=resolve_device(device), backend=backend, source=source)
    compiled: Any = model
    backend_name = compiled.kvcompile.backend.name

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    result = generate(
        model,
        tokenizer,
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        on_text=write,
    )
    click.echo()
    click.echo(
        f"[{result.prompt_tokens} + {result.new_tokens} tokens, cache {result.cache_bytes / 2**20:.2f} MiB, "
        f"backend {backend_name}]",
        err=True,
    )
