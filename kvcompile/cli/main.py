"""The `kvcompile` command: its group, and the one place where errors become a sentence and an exit code."""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from kvcompile.errors import KvCompileError
from kvcompile.version import __version__

COMMANDS = {
    "convert": "Convert MODEL (a checkpoint directory or a Hugging Face id) so that its KV cache is packed.",
    "verify": "Check that ARTIFACT is whole and, with --source, that it is the same model.",
    "diff": "Compare two artifacts, or an artifact with its source; the exit code is 0 where they are the same, 1 where not.",
    "inspect": "Show which layers of a model or artifact have a KV cache, and what it costs in BF16 and packed.",
    "generate": "Continue a prompt with a converted model, its cache packed; text streams as it comes.",
    "eval": "Measure ARTIFACT through its packed cache: perplexity, KL and agreement, retrieval by depth and length.",
    "bench": "Time decoding from the packed cache of ARTIFACT, or of a --shape, against a BF16 cache on this machine.",
    "compare": "Convert MODEL with several schemes, measure each, and write one report.",
    "export": "Write ARTIFACT as other software wants it, with notes of what that view cannot carry.",
    "push": "Upload ARTIFACT to the Hugging Face model repository REPO (owner/name).",
    "schemes": "List, show or validate schemes.",
    "passes": "List or explain the passes that a conversion is made of.",
}
"""Every command with the first sentence of its help, so that the group's help need not import it."""


_LONGEST = 4000
"""Characters of an error that are printed."""


class LazyGroup(click.Group):
    """Loads a command's module when it is called, so that `--help` does not import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"kvcompile.cli.{cmd_name}"), f"{cmd_name}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands with their summaries, none of them imported."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvcompile")
def cli() -> None:
    """kvcompile: the compiler for KV caches.

    Converts a Hugging Face decoder checkpoint into one whose KV cache takes 2-4 bits per element.

    \b
    Example:
      kvcompile convert path/to/model -o out/
      kvcompile verify out/ --source path/to/model
      kvcompile generate out/ --prompt "Once upon a time"
    """


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as an interrupt does: half-written files go, finished stages stay."""


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises Terminated inside."""

    def terminate(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a KvCompileError is printed as one sentence and exits with 1.

    An interrupt exits with 130, SIGTERM with 143.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with _terminable():
            code: Any = cli.main(args=arguments, prog_name="kvcompile", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KvCompileError as error:
        sys.exit(_say(str(error), error))
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error  # click raises Abort from the interrupt, which has the notes
        _say("interrupted", cause)
        sys.exit(143 if isinstance(cause, Terminated) else 130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        sys.exit(_say(f"{error.filename}: {error.strerror}" if error.filename else str(error), error))


def _say(message: str, error: BaseException) -> int:
    """Print an error and its notes to stderr; the exit code."""
    click.echo(f"error: {_printable(message)}", err=True)
    for note in getattr(error, "__notes__", []):
        click.echo(f"  {_printable(note)}", err=True)
    return 1


def _printable(message: str) -> str:
    """One line, of reasonable length, without control characters: names in a message may come from hostile files."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message[:_LONGEST])
    return shown if len(message) <= _LONGEST else f"{shown} ..."
