"""Conversions that are interrupted, or meet a fault, at a chosen one of the Python calls that they make.

Every call counts, of Python functions and of C functions, so there are hundreds of thousands of moments between the first and
the last line of a conversion. A run happens in a process of its own, forked from one that has done the slow imports.
`python -m benchmarks.interruptions` does it many times.
"""

import errno
import gc
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from tests.commands import contents, workspace

ARGUMENTS = ("--calibration-tokens", "256", "--set", "calibration.sequence_length=64")
_PATIENCE = 120.0
_WRITES = ("open", "write", "mkdir", "replace", "rename", "sendfile", "copy_file_range", "serialize_file", "fsync")
_READS = ("readinto", "sendfile", "copy_file_range", "file_digest")


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    "kill -9": ((), _send(signal.SIGKILL)),
    "SIGTERM": ((), _send(signal.SIGTERM)),
    "SIGINT": ((), _send(signal.SIGINT)),
    "pause": ((), _send(signal.SIGSTOP)),
    "full disk": (_WRITES, _raise(errno.ENOSPC)),
    "read error": (_READS, _raise(errno.EIO)),
}
"""By name: the functions whose calls count (none: every call), and what happens at the chosen call."""


class Calls:
    """Counts the calls of this process, and lets a fault happen at one of them."""

    def __init__(self, fault: str, at: int):
        self.names, self.happen = FAULTS[fault]
        self.count, self.at, self.stages = 0, at, {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        if self.names and (event != "c_call" or argument.__name__ not in self.names):
            return
        self.count += 1
        if self.count == self.at:
            self.happen()

    def finished(self, stage: str) -> None:
        """Note how many calls there were until the end of a stage."""
        self.stages[stage] = self.count


def _run(model: Path, out: Path, fault: str, at: int, extra: tuple[str, ...], largest_file: int, log: Path) -> None:
    """What a process does: convert by the command line, quietly."""
    import torch

    from kvcompile.cli.console import ConsoleInstrument
    from kvcompile.cli.main import main
    from kvcompile.passes.workspace import Workspace

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in its background
    gc.freeze()  # passes collect garbage, which takes long only because of all that was imported
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 - until the process ends
    if largest_file:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fault == "kill -9" else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    calls = Calls(fault, at)
    plain = ConsoleInstrument.after

    def after(self: ConsoleInstrument, step: Any, result: Any, seconds: float) -> None:
        plain(self, step, result, seconds)
        calls.finished(step.name)

    def publish(workspace: Workspace, plain: Callable[[Workspace], None] = Workspace.publish) -> None:
        plain(workspace)
        calls.finished("publish")

    ConsoleInstrument.after, Workspace.publish = after, publish  # type: ignore[method-assign]
    sys.setprofile(calls)
    try:
        main(["convert", str(model), "-o", str(out), *ARGUMENTS, *extra])
    finally:
        sys.setprofile(None)
        calls.finished("exit")
        if at == 0:
            log.with_suffix(".json").write_text(json.dumps(calls.stages))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit code (negative: the signal that ended it) and what it said."""

    code: int
    said: str


@dataclass(frozen=True)
class Run:
    """A conversion in a process of its own."""

    process: BaseProcess
    log: Path

    def outcome(self) -> Outcome:
        """Wait for its end."""
        self.process.join(_PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError("the process did not end")
        return Outcome(self.process.exitcode, self.log.read_text())

    def wait_until_stopped(self) -> None:
        """Wait for the fault ``pause``; `resume` ends it."""
        deadline = time.monotonic() + _PATIENCE
        while psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
            assert self.process.is_alive(), self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def resume(self) -> None:
        """Let a paused process go on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


class Conversions:
    """Conversions of one model in forked processes; `folder` is for their logs."""

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder = model, folder
        self._logs = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["tests.interruption", "kvcompile.cli.convert", "transformers.models.qwen3.modeling_qwen3"]
        )

    def start(self, out: Path, *extra: str, fault: str = "kill -9", at: int = 0, largest_file: int = 0) -> "Run":
        """Begin to convert to `out`; at call `at` the fault happens (0: never), and no file grows beyond `largest_file`."""
        self._logs += 1
        log = self.folder / f"{self._logs}.log"
        process = self._context.Process(target=_run, args=(self.model, out, fault, at, extra, largest_file, log))
        process.start()
        return Run(process, log)

    def run(self, out: Path, *extra: str, fault: str = "kill -9", at: int = 0, largest_file: int = 0) -> Outcome:
        """The same, to its end."""
        return self.start(out, *extra, fault=fault, at=at, largest_file=largest_file).outcome()

    def calls(self, out: Path, fault: str) -> dict[str, int]:
        """How many calls that count for a fault were made when each stage of a whole conversion ended."""
        run = self.start(out, fault=fault)
        assert run.outcome().code == 0
        stages: dict[str, int] = json.loads(run.log.with_suffix(".json").read_text())
        return stages


def moments(stages: dict[str, int], count: int, draw: random.Random) -> list[tuple[str, int]]:
    """`count` random calls with the names of their stages, as many in every stage as in any other, or nearly."""
    bounds, first = [], 1
    for name, last in stages.items():
        if last >= first:
            bounds.append((name, first, last))
        first = last + 1
    places = draw.sample(bounds, len(bounds)) * (count // len(bounds) + 1)
    return [(name, draw.randint(first, last)) for name, first, last in places[:count]]


def check_remains(out: Path, expected: dict[str, bytes]) -> bool:
    """Whether an interrupted run has published; raises AssertionError if anything but the whole artifact loads."""
    from kvcompile.artifact import open_artifact
    from kvcompile.errors import KvCompileError

    for directory in (out, workspace(out) / "artifact"):
        with suppress(KvCompileError):
            open_artifact(directory)
            assert contents(directory) == expected, f"{directory} loads and is not what a whole run writes"
    if out.exists():
        assert contents(out) == expected
    return out.exists()


def interrupt_and_resume(
    conversions: Conversions, out: Path, fault: str, at: int, expected: dict[str, bytes]
) -> Outcome:
    """Let a fault happen, check what it left, resume, and check that the result is what a whole run writes."""
    outcome = conversions.run(out, fault=fault, at=at)
    if not check_remains(out, expected):
        assert outcome.code != 0
        assert "Traceback" not in outcome.said, outcome.said
        resumed = conversions.run(out, "--resume")
        assert resumed.code == 0, resumed.said
        assert contents(out) == expected
        assert not workspace(out).exists()
    shutil.rmtree(out)
    shutil.rmtree(workspace(out), ignore_errors=True)
    return outcome
