"""`kvcompile convert`."""

from pathlib import Path

import click
from rich.console import Console

from kvcompile.cli.console import ConsoleInstrument, cost_table, tracker
from kvcompile.errors import OutputError
from kvcompile.passes.collection import assist
from kvcompile.passes.convert import convert
from kvcompile.passes.dump import DumpIR
from kvcompile.passes.ranks import Ranks
from kvcompile.scheme import DEFAULT_SCHEME


@click.command("convert")
@click.argument("model")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="Directory to create.")
@click.option("-s", "--scheme", default=DEFAULT_SCHEME, show_default=True, help="Built-in scheme or TOML file.")
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override one field of the scheme; repeatable."
)
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="Text file, JSONL file or folder  [default: bundled text]."
)
@click.option("--calibration-field", default="text", show_default=True, help="Field that holds the text in JSONL.")
@click.option("--calibration-tokens", type=click.IntRange(1), help="Tokens to calibrate on  [default: the scheme's].")
@click.option("--seed", default=0, show_default=True, help="Order in which calibration documents are drawn.")
@click.option("--device", default="cpu", show_default=True, help="Where calibration runs, for example cuda.")
@click.option("--device-map", help="Spread the model over several devices in this process, for example auto.")
@click.option("--low-memory/--no-low-memory", default=None,
              help="Keep one decoder layer in memory at a time  [default: where the weights would not fit].")  # fmt: skip
@click.option(
    "--spill", is_flag=True, help="With --low-memory, also keep hidden states between layers in files beside OUT."
)
@click.option("--weights", type=click.Choice(["fold", "overlay"]), default="fold", show_default=True,
              help="Fold value rotations into W_V and W_O, or write only the sidecar over untouched weights, "
              "as it is done with weights that cannot be folded.")  # fmt: skip
@click.option("--import-rotations", nargs=2, type=click.Path(path_type=Path), metavar="K.pt V.pt",
              help="Take these rotations (files of the OSCAR fork of SGLang) instead of solving them.")  # fmt: skip
@click.option(
    "--allow-pickle", is_flag=True, help="Read weights in .bin or .pt files too, without running code in them."
)
@click.option("--dry-run", is_flag=True, help="Check model, scheme and output, print the plan, write nothing.")
@click.option("--resume", is_flag=True, help="Continue an interrupted conversion.")
@click.option("--force", is_flag=True, help="Replace an existing artifact.")
@click.option("--dump-ir", type=click.Path(path_type=Path), help="Write the IR after every pass into this folder.")
@click.option("--stop-after", metavar="PASS", help="Stop after this pass; nothing is published.")
def convert_command(
    model: str,
    out: Path,
    scheme: str,
    overrides: tuple[str, ...],
    calibration: Path | None,
    calibration_field: str,
    calibration_tokens: int | None,
    seed: int,
    device: str,
    device_map: str | None,
    low_memory: bool | None,
    spill: bool,
    weights: str,
    import_rotations: tuple[Path, Path] | None,
    allow_pickle: bool,
    dry_run: bool,
    resume: bool,
    force: bool,
    dump_ir: Path | None,
    stop_after: str | None,
) -> None:
    """Convert MODEL (a checkpoint directory or a Hugging Face id) so that its KV cache is packed.

    \b
    Example:
      kvcompile convert path/to/model --scheme oscar-int2 -o out/
      kvcompile convert path/to/model --scheme oscar-int2 -o out/ --set key.rotation.scope=layer
      torchrun --nproc-per-node 2 -m kvcompile convert path/to/model -o out/
    """
    ranks = Ranks() if Ranks.expected() else None
    if ranks is not None and ranks.rank > 0:
        assist(ranks)
        return
    console = Console(stderr=True)
    try:
        instruments = [ConsoleInstrument(console), *([DumpIR(dump_ir)] if dump_ir else [])]
    except OSError as error:
        reason = f"--dump-ir {dump_ir} is no folder that can be written ({error.strerror}); choose another"
        raise OutputError(reason) from error
    result = convert(
        model,
        out,
        scheme,
        overrides=overrides,
        calibration=calibration,
        calibration_field=calibration_field,
        calibration_tokens=calibration_tokens,
        seed=seed,
        device=device,
        device_map=device_map,
        low_memory=low_memory,
        spill=spill,
        weights="overlay" if weights == "overlay" else "fold",
        import_rotations=import_rotations,
        allow_pickle=allow_pickle,
        dry_run=dry_run,
        resume=resume,
        force=force,
        stop_after=stop_after,
        instruments=instruments,
        track=tracker(console),
        ranks=ranks,
    )
    if ranks is not None:
        ranks.dismiss()
    if result.ir.weights != weights:
        click.echo(f"weights: {result.ir.layers().weights}; {result.ir.layers().fold}")
    if result.manifest is None:
        layers = result.ir.layers()
        state = "dry run" if dry_run else f"stopped after {stop_after}"
        click.echo(
            f"{state}: {layers.architecture}, {len(layers.compiled)} of {len(layers.layers)} layers would be packed with "
            f"{result.ir.scheme.name}; passes {', '.join(result.ir.scheme.passes)}; no output was written to {out}"
        )
        return
    console.print(cost_table(result))
    bits = ", ".join(f"{value:.2f} at {label}" for label, value in result.manifest.bits_per_element.items())
    layers = result.ir.layers()
    click.echo(
        f"wrote {result.out}: {len(layers.compiled)} of {len(layers.layers)} layers packed, bits per element {bits}"
    )
    for note in sorted({layer.note for layer in layers.compiled if layer.note}):
        click.echo(f"  note: {note}")
