"""Decode attention on a CPU: compiles attend.c for a geometry with the system's C compiler on first use, and calls it.

The library is kept under ``$XDG_CACHE_HOME/kvcompile`` (``~/.cache/kvcompile``) by a hash of the source, the flags, the
compiler and the processor. Compilers tried: ``$CC`` if it is set, else gcc, cc, clang.

Torch brings its own OpenMP runtime, and two runtimes whose idle threads spin would fight over the cores. The kernel is
therefore linked against the file that torch has loaded; then, where that fails, against the compiler's own, then none.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim.
"""

import ctypes
import hashlib
import itertools
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvcompile.codec import LayerCache, PageFormat
from kvcompile.errors import CacheError

_SOURCE = Path(__file__).with_name("attend.c")
_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffast-math",
    "-shared",
    "-fPIC",
    "-nostartfiles",  # GCC before 13 adds a start file that flushes denormals in the whole process
]
_TUNING = {"x86_64": ["-march=native", "-mprefer-vector-width=512"]}
_DTYPES = (torch.uint8, *3 * [torch.int32], *4 * [torch.bfloat16])
_POINTERS, _SIZES = 10 * [ctypes.c_void_p], [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int]


def attend(q_BHD: Tensor, layer: LayerCache, scaling: float) -> Tensor:
    """What `codec.attend_layer` computes, to about 1e-6: float32 ``[B, H, D]`` in the rotated value basis.

    `q_BHD` holds rotated queries of any float dtype. Uses `torch.get_num_threads()` threads. The tensors of the layer
    are contiguous, in the types that `LayerCache` names; only rows of the page table may lie further apart.
    """
    batch, num_heads, head_dim = q_BHD.shape
    num_kv_heads = layer.pages_PKX.shape[1]
    table_BN, sink_k, recent_k = layer.table_BN, layer.sink_k_BKSD, layer.recent_k_BKWD
    tensors = (
        layer.pages_PKX,
        table_BN,
        layer.num_pages_B,
        layer.num_tokens_B,
        sink_k,
        layer.sink_v_BKSD,
        recent_k,
        layer.recent_v_BKWD,
    )
    for tensor, dtype in zip(tensors, _DTYPES, strict=True):
        if tensor.dtype is not dtype or not (tensor.is_contiguous() or (tensor is table_BN and tensor.stride(1) == 1)):
            raise CacheError(
                f"The CPU kernel reads contiguous {dtype} here, but a tensor {list(tensor.shape)} of the layer is "
                f"{tensor.dtype} with strides {tensor.stride()}; make it so where the cache is allocated."
            )
        if not tensor.is_cpu:
            raise CacheError(f"The CPU kernel was given a layer on {tensor.device}; use the backend of that device.")
    fmt = layer.fmt
    function = _kernel(
        head_dim,
        fmt.key.bits,
        fmt.value.bits,
        fmt.key.group_size,
        fmt.value.group_size,
        num_heads // num_kv_heads,
    )
    q_BHD = q_BHD.to("cpu", torch.float32).contiguous()
    out_BHD = torch.empty_like(q_BHD)
    failed = function(
        q_BHD.data_ptr(),
        *[tensor.data_ptr() for tensor in tensors],
        out_BHD.data_ptr(),
        batch,
        num_kv_heads,
        table_BN.stride(0),
        sink_k.shape[2],
        recent_k.shape[2],
        scaling,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("The CPU kernel could not allocate its partial results.")
    finite_BH = q_BHD.isfinite().all(dim=-1)
    if not finite_BH.all():
        out_BHD[~finite_BH] = float("nan")  # -ffast-math would hide it
    return out_BHD


def supports(fmt: PageFormat) -> bool:
    """Whether the kernel can read this format: key rows of whole 32-bit words, key groups of whole fours."""
    plain = all(
        row.bits in (2, 4) and row.axis == "token" and row.zero_point != "none" and row.token_scale == "none"
        and not row.centroids
        for row in (fmt.key, fmt.value)
    )  # fmt: skip
    return plain and fmt.tokens == 64 and fmt.head_dim * fmt.key.bits % 32 == 0 and fmt.key.group_size % 4 == 0


@cache
def is_available() -> bool:
    """Whether a working compiler was found and the kernel builds."""
    try:
        _kernel(16, 2, 2, 16, 16, 1)
    except CacheError:
        return False
    return True


@cache
def _kernel(
    head_dim: int, key_bits: int, value_bits: int, key_group: int, value_group: int, queries: int
) -> Callable[..., int]:
    """The C function for one geometry."""
    if head_dim * key_bits % 32 or key_group % 4:
        raise CacheError(
            f"The CPU kernel needs key rows of whole 32-bit words and key groups of whole fours, but head_dim is "
            f"{head_dim} at {key_bits} bits in groups of {key_group}; use the codec backend."
        )
    macros = [
        f"-DHEAD_DIM={head_dim}",
        f"-DKEY_BITS={key_bits}",
        f"-DVALUE_BITS={value_bits}",
        f"-DKEY_GROUP={key_group}",
        f"-DVALUE_GROUP={value_group}",
        f"-DQUERIES={queries}",
    ]
    compiler, version = _compiler()
    problem = ""
    for flags in _flag_sets():
        try:
            function = ctypes.CDLL(str(_build(compiler, version, flags + macros))).attend
        except subprocess.CalledProcessError as error:
            problem = problem or error.stderr.strip().split("\n")[0]
        except OSError as error:
            problem = problem or str(error)
        else:
            function.argtypes = [*_POINTERS, *_SIZES, ctypes.c_float, ctypes.c_int]
            return function
    raise CacheError(
        f"The CPU kernel does not build with {shlex.join(compiler)}: {problem}. Set CC to a working GCC or clang and "
        f"XDG_CACHE_HOME to a writable directory, or use the codec backend."
    )


def _flag_sets() -> Iterator[list[str]]:
    """Flags from the best to the plainest."""
    packages = Path(torch.__file__).parents[1]
    runtimes = [*packages.glob("torch/lib/libgomp*.so*"), *packages.glob("torch.libs/libgomp*.so*")]
    openmp = [["-fopenmp", "-Wl,--as-needed", str(path)] for path in runtimes] + [["-fopenmp"], []]
    tuning = [_TUNING.get(platform.machine(), ["-march=native"]), []]
    for tuned, threaded in itertools.product(tuning, openmp):
        yield _FLAGS + tuned + threaded


def _build(compiler: list[str], version: str, flags: list[str]) -> Path:
    """Path of the compiled library, made unless it is there."""
    source = _SOURCE.read_bytes()
    key = hashlib.sha256("\0".join([source.decode(), *compiler, version, *flags, _processor()]).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kvcompile"
    library = folder / f"{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command = [*compiler, str(_SOURCE), "-o", str(made), *flags]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(library)
    return library


@cache
def _compiler() -> tuple[list[str], str]:
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


@cache
def _processor() -> str:
    """What distinguishes the processors that -march=native distinguishes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa")
    return platform.machine() + "\n".join(line for line in lines if line.startswith(names))
