"""C sources of this package as loaded libraries: compiled with the system's C compiler on first use, and kept.

A library is kept under ``$XDG_CACHE_HOME/kvcompile`` (``~/.cache/kvcompile``) by a hash of the source, the flags, the
compiler and the processor. Compilers tried: ``$CC`` if it is set, else gcc, cc, clang.

Torch brings its own OpenMP runtime, and two runtimes whose idle threads spin would fight over the cores. A kernel is
therefore linked against the file that torch has loaded; then, where that fails, against the compiler's own, then none.
"""

import ctypes
import hashlib
import itertools
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from kvcompile.errors import CacheError

_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-shared",
    "-fPIC",
    "-nostartfiles",  # GCC before 13 adds a start file that flushes denormals in the whole process
    "-lm",
]
_TUNING = {"x86_64": ["-march=native", "-mprefer-vector-width=512"]}


@cache
def load_library(source: str, *flags: str) -> ctypes.CDLL:
    """The C file `source` of this folder, compiled with `flags` for this machine."""
    compiler, version = find_compiler()
    problem = ""
    for machine_flags in _flag_sets():
        try:
            return ctypes.CDLL(str(_build(source, compiler, version, [*_FLAGS, *flags, *machine_flags])))
        except subprocess.CalledProcessError as error:
            problem = problem or error.stderr.strip().split("\n")[0]
        except OSError as error:
            problem = problem or str(error)
    raise CacheError(
        f"The CPU kernel does not build with {shlex.join(compiler)}: {problem}. Set CC to a working GCC or clang and "
        f"XDG_CACHE_HOME to a writable directory, or use the codec backend."
    )


@cache
def find_compiler() -> tuple[list[str], str]:
    """Command and version text of the first compiler that starts."""
    wanted = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else [["gcc"], ["cc"], ["clang"]]
    for command in wanted:
        try:
            return command, subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
    names = ", ".join(shlex.join(command) for command in wanted)
    raise CacheError(
        f"The CPU kernel needs a C compiler and none starts (tried {names}). Install GCC (Debian: apt-get install "
        f"gcc), or set CC to a compiler, or use the codec backend."
    )


def _flag_sets() -> Iterator[list[str]]:
    """Flags from the best to the plainest."""
    packages = Path(torch.__file__).parents[1]
    runtimes = [*packages.glob("torch/lib/libgomp*.so*"), *packages.glob("torch.libs/libgomp*.so*")]
    openmp = [["-fopenmp", "-Wl,--as-needed", str(path)] for path in runtimes] + [["-fopenmp"], []]
    tuning = [_TUNING.get(platform.machine(), ["-march=native"]), []]
    for tuned, threaded in itertools.product(tuning, openmp):
        yield tuned + threaded


def _build(source: str, compiler: list[str], version: str, flags: list[str]) -> Path:
    """Path of the compiled library, made unless it is there."""
    path = Path(__file__).with_name(source)
    text = path.read_text("utf-8")
    key = hashlib.sha256("\0".join([text, *compiler, version, *flags, _processor()]).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kvcompile"
    library = folder / f"{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command = [*compiler, str(path), "-o", str(made), *flags]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(library)
    return library


@cache
def _processor() -> str:
    """What distinguishes the processors that -march=native distinguishes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa")
    return platform.machine() + "\n".join(line for line in lines if line.startswith(names))
