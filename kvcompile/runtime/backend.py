"""The three things a cache needs done, and who can do them: the codec (oracle), the CPU kernel, and Triton.

Shapes as in `kvcompile.codec.layer`. Every backend stores the same bytes and attends to the same numbers; they differ in
speed only. Rows are stored rotated and rounded to bfloat16, and quantization reads the rounded rows.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvcompile.codec import LayerCache, PageFormat, PageTables, attend_chunk, attend_layer, encode_pages
from kvcompile.errors import CacheError

if TYPE_CHECKING:
    from kvcompile.kernels.triton_demote import LayerCoding
    from kvcompile.runtime.plan import LayerPlan, Storage


class Backend(Protocol):
    """Rotation, page writing, decode attention."""

    name: str

    def captures(self, fmt: PageFormat) -> bool:
        """Whether a step of one token per row reads nothing back from the device, so that a CUDA graph can hold it."""

    def rotate(self, x_BHTD: Tensor, r_KDD: Tensor) -> Tensor:
        """Rows of H = K G heads times their KV head's rotation; float32 ``[B, H, T, D]``."""

    def stored_rows(self, k_BKTD: Tensor, v_BKTD: Tensor, plan: "LayerPlan") -> tuple[Tensor, Tensor]:
        """New keys and values as they are stored: rotated, centred, bfloat16 ``[B, K, T, D]``."""

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """Encode N blocks of ``fmt.tokens`` rotated rows per KV head into the pages `ids_N` (int64) of the pool."""

    def demote(
        self,
        layers: Sequence["Storage"],
        recent_k_LBKWD: Tensor,
        recent_v_LBKWD: Tensor,
        row_N: Tensor,
        place_N: Tensor,
        pages_LPKX: Tensor,
        ids_N: Tensor,
    ) -> None:
        """Encode ring slots ``[place P, (place + 1) P)`` of batch row `row_N` into page `ids_N` (all int64), in every layer."""

    def append(
        self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, plan: "LayerPlan", layer: LayerCache
    ) -> Tensor | None:
        """Rotate the one new token (T = 1) that every row of `layer` counts already, and store it in its window slots.

        The rotated queries float32 ``[B, H, D]``, or None, and nothing done, where this backend has no kernel for it.
        """

    def attend(
        self,
        q_BHD: Tensor,
        layer: LayerCache,
        scaling: float,
        softcap: float | None = None,
        shift_BH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of one new token per row: output float32 ``[B, H, D]``, log of the softmax denominator ``[B, H]``.

        `softcap` and `shift_BH` as in `kvcompile.codec.attend_layer`; no kernel caps logits, so the codec does it.
        """

    def attend_chunk(
        self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, layer: LayerCache, row: int, scaling: float
    ) -> Tensor:
        """Attention of T new tokens of a batch row over what it holds and, causally, over one another.

        Float32 ``[H, T, D]``; all in the stored basis.
        """


class CodecBackend:
    """Plain torch on any device: slow, normative."""

    name = "codec"

    def captures(self, fmt: PageFormat) -> bool:
        """See `Backend.captures`."""
        return False

    def rotate(self, x_BHTD: Tensor, r_KDD: Tensor) -> Tensor:
        """See `Backend.rotate`."""
        x_BKXD = x_BHTD.float().unflatten(1, (r_KDD.shape[0], -1)).flatten(2, 3)
        return (x_BKXD @ r_KDD).unflatten(2, (-1, x_BHTD.shape[2])).flatten(1, 2)

    def stored_rows(self, k_BKTD: Tensor, v_BKTD: Tensor, plan: "LayerPlan") -> tuple[Tensor, Tensor]:
        """See `Backend.stored_rows`."""
        maps = ((k_BKTD, plan.key_rotation, plan.key_mean), (v_BKTD, plan.value_rotation, plan.value_mean))
        k_BKTD, v_BKTD = (
            (x.float() if r_KDD is None else self.rotate(x, r_KDD)) - (0 if mean_KD is None else mean_KD[:, None])
            for x, r_KDD, mean_KD in maps
        )
        return k_BKTD.bfloat16(), v_BKTD.bfloat16()

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """See `Backend.write_pages`."""
        pages_PKX[ids_N] = encode_pages(k_NKTD, v_NKTD, fmt, tables)

    def demote(
        self,
        layers: Sequence["Storage"],
        recent_k_LBKWD: Tensor,
        recent_v_LBKWD: Tensor,
        row_N: Tensor,
        place_N: Tensor,
        pages_LPKX: Tensor,
        ids_N: Tensor,
    ) -> None:
        """See `Backend.demote`."""
        for layer, storage in enumerate(layers):
            k_NKTD, v_NKTD = (
                x_LBKWD[layer].unflatten(2, (-1, storage.fmt.tokens))[row_N, :, place_N]
                for x_LBKWD in (recent_k_LBKWD, recent_v_LBKWD)
            )
            self.write_pages(k_NKTD, v_NKTD, storage.fmt, storage.tables, pages_LPKX[layer], ids_N)

    def append(
        self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, plan: "LayerPlan", layer: LayerCache
    ) -> Tensor | None:
        """See `Backend.append`."""
        return None

    def attend(
        self,
        q_BHD: Tensor,
        layer: LayerCache,
        scaling: float,
        softcap: float | None = None,
        shift_BH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.attend`."""
        return attend_layer(q_BHD, layer, scaling, softcap, shift_BH)

    def attend_chunk(
        self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, layer: LayerCache, row: int, scaling: float
    ) -> Tensor:
        """See `Backend.attend_chunk`."""
        return attend_chunk(q_HTD, k_KTD, v_KTD, layer, row, scaling)


class CpuBackend(CodecBackend):
    """A decode kernel and error feedback in C, compiled for this machine at first use; the codec for the rest."""

    name = "cpu"

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """See `Backend.write_pages`."""
        from kvcompile.kernels import cpu_encode

        pages_PKX[ids_N] = encode_pages(k_NKTD, v_NKTD, fmt, tables, cpu_encode.feedback_codes)

    def attend(
        self,
        q_BHD: Tensor,
        layer: LayerCache,
        scaling: float,
        softcap: float | None = None,
        shift_BH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.attend`."""
        from kvcompile.kernels import cpu

        if softcap is not None or not cpu.supports(layer.fmt):
            return super().attend(q_BHD, layer, scaling, softcap, shift_BH)
        return cpu.attend(q_BHD, layer, scaling)


class TritonBackend(CodecBackend):
    """Triton kernels; on CUDA, or anywhere under Triton's interpreter. The codec does what no kernel can yet."""

    name = "triton"

    def __init__(self) -> None:
        self._codings: dict[tuple[int, ...], tuple[list[Storage], LayerCoding | None]] = {}  # keeps its keys' owners
        self._appended: Tensor | None = None

    def captures(self, fmt: PageFormat) -> bool:
        """See `Backend.captures`."""
        from kvcompile.kernels import triton_decode

        return triton_decode.supports(fmt)

    def rotate(self, x_BHTD: Tensor, r_KDD: Tensor) -> Tensor:
        """See `Backend.rotate`."""
        from kvcompile.kernels import triton_encode

        return triton_encode.rotate_rows(x_BHTD, r_KDD, torch.float32)

    def stored_rows(self, k_BKTD: Tensor, v_BKTD: Tensor, plan: "LayerPlan") -> tuple[Tensor, Tensor]:
        """See `Backend.stored_rows`."""
        from kvcompile.kernels import triton_rows

        maps = plan.token_maps
        return triton_rows.map_rows(k_BKTD, maps.key), triton_rows.map_rows(v_BKTD, maps.value)

    def write_pages(
        self, k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
    ) -> None:
        """See `Backend.write_pages`."""
        from kvcompile.kernels import triton_encode

        if triton_encode.supports(fmt):
            triton_encode.write_pages(k_NKTD, v_NKTD, fmt, tables, pages_PKX, ids_N)
        else:
            super().write_pages(k_NKTD, v_NKTD, fmt, tables, pages_PKX, ids_N)

    def demote(
        self,
        layers: Sequence["Storage"],
        recent_k_LBKWD: Tensor,
        recent_v_LBKWD: Tensor,
        row_N: Tensor,
        place_N: Tensor,
        pages_LPKX: Tensor,
        ids_N: Tensor,
    ) -> None:
        """See `Backend.demote`."""
        from kvcompile.kernels import triton_demote

        coding = self._coding(layers, pages_LPKX.device)
        if coding is None:
            super().demote(layers, recent_k_LBKWD, recent_v_LBKWD, row_N, place_N, pages_LPKX, ids_N)
        else:
            triton_demote.demote_pages(coding, recent_k_LBKWD, recent_v_LBKWD, row_N, place_N, pages_LPKX, ids_N)

    def append(
        self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, plan: "LayerPlan", layer: LayerCache
    ) -> Tensor | None:
        """See `Backend.append`."""
        from kvcompile.kernels import triton_append

        q_BHD, k_BKD, v_BKD = (x[:, :, 0] for x in (q_BHTD, k_BKTD, v_BKTD))
        self._appended = triton_append.append_token(q_BHD, k_BKD, v_BKD, plan.token_maps, layer)
        return self._appended

    def attend(
        self,
        q_BHD: Tensor,
        layer: LayerCache,
        scaling: float,
        softcap: float | None = None,
        shift_BH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.attend`."""
        from kvcompile.kernels import triton_decode

        if softcap is not None or not triton_decode.supports(layer.fmt):
            return super().attend(q_BHD, layer, scaling, softcap, shift_BH)
        # `append` writes no lengths, and nothing else comes between it and the attention of the queries that it returned.
        appended, self._appended = self._appended, None
        return triton_decode.attend(q_BHD, layer, scaling, lengths_at_rest=q_BHD is appended)

    def attend_chunk(
        self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, layer: LayerCache, row: int, scaling: float
    ) -> Tensor:
        """See `Backend.attend_chunk`: PyTorch's attention in bfloat16 over the history that a kernel has decoded."""
        from kvcompile.kernels import triton_history

        if not triton_history.supports(layer.fmt):
            return super().attend_chunk(q_HTD, k_KTD, v_KTD, layer, row, scaling)
        return triton_history.attend_chunk(q_HTD, k_KTD, v_KTD, layer, row, scaling)

    def _coding(self, layers: Sequence["Storage"], device: torch.device) -> "LayerCoding | None":
        """How these layers are written together, made once; None where they cannot be."""
        from kvcompile.kernels import triton_demote

        key = tuple(map(id, layers))
        owners, coding = self._codings.get(key, ([], None))
        if key != tuple(map(id, owners)):  # new, or copied along with a model
            coding = triton_demote.LayerCoding.of([(layer.fmt, layer.tables) for layer in layers], device)
            self._codings[key] = (list(layers), coding)
        return coding


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
