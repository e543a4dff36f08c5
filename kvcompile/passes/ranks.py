"""Several processes, started by torchrun, that run one model: rank 0 converts, the others lend it their share of calibration.

Every process holds a part of each layer (transformers' tensor parallelism) and observes the heads that it holds. Rank 0 alone
decides, refuses, solves and writes; the others do what it tells them.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvcompile.checkpoint import Checkpoint, quant_method
from kvcompile.errors import KvCompileError
from kvcompile.models import Inventory, resolve_device
from kvcompile.models.placement import Placement

_PATIENCE = timedelta(days=7)
"""How long the others wait while rank 0 solves and writes; torchrun ends them when it dies."""


class Ranks:
    """The processes of this run. Made by every process, once; `dismiss` ends it."""

    def __init__(self) -> None:
        accelerated = torch.cuda.is_available()
        if accelerated:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if accelerated else "gloo", timeout=_PATIENCE)
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = resolve_device("cuda" if accelerated else "cpu")
        if (
            accelerated and self.rank == 0 and torch.get_num_threads() == 1
        ):  # as torchrun sets it, but only this one computes
            torch.set_num_threads(len(os.sched_getaffinity(0)))

    @staticmethod
    def expected() -> bool:
        """Whether torchrun has started more than this process."""
        return int(os.environ.get("WORLD_SIZE", "1")) > 1

    def check(self, checkpoint: Checkpoint, inventory: Inventory) -> None:
        """Raise KvCompileError unless weights are plain and every layer's KV heads can be shared out evenly."""
        if method := quant_method(checkpoint):
            raise KvCompileError(
                f"weights in {checkpoint.path} are quantized ({method}) and not shared out to processes; convert in one process"
            )
        for layer in inventory.compiled:
            if layer.num_key_value_heads % self.size:
                raise KvCompileError(
                    f"the {layer.num_key_value_heads} KV heads of layer {layer.index} in {checkpoint.path} cannot be shared "
                    f"out to {self.size} processes; choose --nproc-per-node so that it divides them"
                )

    def placement(self) -> Placement:
        """This process's part of a model."""
        return Placement(self._device, tensor_parallel=True)

    def call(self, task: Any) -> Any:
        """On rank 0: tell the others what to do. On others: what rank 0 says; they end when it has gone."""
        box = [task]
        try:
            dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as error:
            if self.rank == 0:
                raise
            raise SystemExit(1) from error  # rank 0 has said why
        return box[0]

    def gather(self, statistics: dict[str, Tensor], inventory: Inventory) -> dict[str, Tensor]:
        """On rank 0 the statistics of all heads; on others nothing."""
        parts: list[Any] = [None] * self.size
        dist.gather_object(statistics, parts if self.rank == 0 else None, dst=0, group=self._group)
        return join_heads(parts, inventory) if self.rank == 0 else {}

    def dismiss(self) -> None:
        """End the run; on rank 0 this lets the others go."""
        if self.rank == 0:
            self.call(None)
        dist.destroy_process_group()


def join_heads(parts: list[Mapping[str, Tensor]], inventory: Inventory) -> dict[str, Tensor]:
    """Statistics of all heads out of those of each process's heads, in the order of processes.

    A layer that is not split, because its model's plan gathers its heads, has been seen whole by every process.
    """
    heads = {layer.index: layer.num_key_value_heads for layer in inventory.compiled}
    joined = {}
    for name, first in parts[0].items():
        _, index, what = name.split(".", 2)
        whole = parts[0][f"layers.{index}.key_mean"].shape[0] == heads[int(index)]
        axis = 1 if what in ("sample_q", "sample_k", "sample_v") else 0  # S sequences stand before K heads
        joined[name] = first if whole or first.ndim == 0 else torch.cat([part[name] for part in parts], dim=axis)
    return joined
