"""The three things a cache needs done, and who can do them: the codec (oracle), the CPU kernel, and Triton.

Shapes as in `kvcompile.codec.layer`. Every backend stores the same bytes and attends to the same numbers; they differ in
speed only. Rows are stored rotated and rounded to bfloat16, and quantization reads the rounded rows.
"""

import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcompile.codec import LayerCache, PageFormat, PageTables, attend_layer, encode_pages
from kvcompile.errors import CacheError


class Backend(Protocol):
    """Rotation, page writing, decode attention."""

    name: str

    def rotate(self, x_BHTD: Tensor, r_KDD: Tensor) -> Tensor:
        """Rows of H = K G heads times their KV head's rotation; float32 ``[B, H, T, D]``."""

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """Encode N blocks of ``fmt.tokens`` rotated rows per KV head into the pages `ids_N` (int64) of the pool."""

    def attend(self, q_BHD: Tensor, layer: LayerCache, scaling: float) -> tuple[Tensor, Tensor]:
        """Attention of one new token per row: output float32 ``[B, H, D]``, log of the softmax denominator ``[B, H]``."""


class CodecBackend:
    """Plain torch on any device: slow, normative."""

    name = "codec"

    def rotate(self, x_BHTD: Tensor, r_KDD: Tensor) -> Tensor:
        """See `Backend.rotate`."""
        x_BKXD = x_BHTD.float().unflatten(1, (r_KDD.shape[0], -1)).flatten(2, 3)
        return (x_BKXD @ r_KDD).unflatten(2, (-1, x_BHTD.shape[2])).flatten(1, 2)

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """See `Backend.write_pages`."""
        pages_PKX[ids_N] = encode_pages(k_NKTD, v_NKTD, fmt, tables)

    def attend(self, q_BHD: Tensor, layer: LayerCache, scaling: float) -> tuple[Tensor, Tensor]:
        """See `Backend.attend`."""
        return attend_layer(q_BHD, layer, scaling)


class CpuBackend(CodecBackend):
    """A decode kernel and error feedback in C, compiled for this machine at first use; the codec for the rest."""

    name = "cpu"

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """See `Backend.write_pages`."""
        from kvcompile.kernels import cpu_encode

        pages_PKX[ids_N] = encode_pages(k_NKTD, v_NKTD, fmt, tables, cpu_encode.feedback_codes)

    def attend(self, q_BHD: Tensor, layer: LayerCache, scaling: float) -> tuple[Tensor, Tensor]:
        """See `Backend.attend`."""
        from kvcompile.kernels import cpu

        if not cpu.supports(layer.fmt):
            return super().attend(q_BHD, layer, scaling)
        return cpu.attend(q_BHD, layer, scaling)


class TritonBackend(CodecBackend):
    """Triton kernels; on CUDA, or anywhere under Triton's interpreter. The codec does what no kernel can yet."""

    name = "triton"

    def rotate(self, x_BHTD: Tensor, r_KDD: Tensor) -> Tensor:
        """See `Backend.rotate`."""
        from kvcompile.kernels import triton_encode

        return triton_encode.rotate_rows(x_BHTD, r_KDD, torch.float32)

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """See `Backend.write_pages`."""
        from kvcompile.kernels import triton_encode

        if triton_encode.supports(fmt):
            triton_encode.write_pages(k_NKTD, v_NKTD, fmt, tables, pages_PKX, ids_N)
        else:
            super().write_pages(k_NKTD, v_NKTD, fmt, tables, pages_PKX, ids_N)

    def attend(self, q_BHD: Tensor, layer: LayerCache, scaling: float) -> tuple[Tensor, Tensor]:
        """See `Backend.attend`."""
        from kvcompile.kernels import triton_decode

        if not triton_decode.supports(layer.fmt):
            return super().attend(q_BHD, layer, scaling)
        return triton_decode.attend(q_BHD, layer, scaling)


def choose_backend(name: str | None, device: torch.device, formats: Sequence[PageFormat]) -> Backend:
    """The named backend, or the fastest for `device` and `formats`: triton on CUDA, else cpu where it runs, else codec.

    A layer whose format a backend has no kernel for is left to the codec.

    Raises CacheError for a name that does not exist or cannot run here.
    """
    if name is None:
        name = "triton" if device.type == "cuda" else "cpu" if _cpu_kernel_runs(device, formats) else "codec"
    if name == "cpu" and not _cpu_kernel_runs(device, formats):
        raise CacheError(
            "backend 'cpu' needs a model on the CPU, a C compiler (install gcc) and a layer that its kernels read (evenly "
            "spaced levels, no centroids, values by token, key rows of whole 32-bit words); choose backend 'codec'"
        )
    if name == "triton" and device.type != "cuda" and not _triton_interprets():
        raise CacheError(
            "backend 'triton' needs a model on a CUDA device (or TRITON_INTERPRET=1); choose 'cpu' or 'codec'"
        )
    backends: dict[str, type[CodecBackend]] = {"codec": CodecBackend, "cpu": CpuBackend, "triton": TritonBackend}
    if name not in backends:
        raise CacheError(f"unknown backend '{name}'; there are {', '.join(backends)}")
    return backends[name]()


def _cpu_kernel_runs(device: torch.device, formats: Sequence[PageFormat]) -> bool:
    from kvcompile.kernels import cpu

    def helps(fmt: PageFormat) -> bool:
        return cpu.supports(fmt) or "error_feedback" in (fmt.key.rounding, fmt.value.rounding)

    return device.type == "cpu" and any(map(helps, formats)) and cpu.is_available()


def _triton_interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
