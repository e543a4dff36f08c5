"""Where the weights of a model are while forward passes run: all there, one layer at a time, or on several devices."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.distributed import DistributedConfig

from kvcompile.checkpoint import Checkpoint, decodes, dense_bytes
from kvcompile.errors import KvCompileError
from kvcompile.models.forwards import ResidentModel, Runnable
from kvcompile.models.inventory import Inventory
from kvcompile.models.loading import load_model
from kvcompile.models.spill import spill
from kvcompile.models.streaming import StreamedModel

_HEADROOM = 1.25
"""A model whose weights take more than 1/1.25 of what is free is streamed: activations and statistics need room too."""
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
)
"""Where the second and the first version keep a limit, what is used, and the part of that which is only cached files."""


@dataclass(frozen=True)
class Placement:
    """How `open_model` opens a model.

    `streamed` means one decoder layer at a time. `scratch` is where statistics, and with `spill` hidden states, lie then
    instead of in memory. `device_map` is transformers' ("auto"), for one process with several devices. `tensor_parallel` is
    for one of several processes, each with its part of every layer.
    """

    device: torch.device
    streamed: bool = False
    spill: bool = False
    scratch: Path | None = None
    device_map: str | None = None
    tensor_parallel: bool = False

    def open_model(self, checkpoint: Checkpoint, inventory: Inventory, attention: str) -> Runnable:
        """The model with pre-quantized weights as floats, ready for forward passes.

        Raises CheckpointError where transformers cannot load it, or where packed weights would have to be read here.
        """
        if self.streamed:
            return StreamedModel(checkpoint, inventory, attention, self.device, self.scratch if self.spill else None)
        spread: dict[str, Any] = {}
        if self.device_map is not None:
            spread["device_map"] = self.device_map
        if self.tensor_parallel:
            spread["distributed_config"] = DistributedConfig(tp_plan="auto")
        model = load_model(checkpoint.path, attention, self.device, dequantize=True, **spread)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise KvCompileError(
                f"the model in {checkpoint.path} does not fit into the memory of these devices; convert it with --low-memory "
                "in place of --device-map"
            )
        return ResidentModel(model)

    def keep(self, tensor: Tensor) -> Tensor:
        """What a streamed model has been asked for, out of memory until it is used; otherwise the tensor itself."""
        return spill(tensor, self.scratch) if self.streamed and self.scratch else tensor


def must_stream(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether the weights do not fit comfortably into the memory that is free on `device`, and can be streamed."""
    return not fits(dense_bytes(checkpoint), device) and decodes(checkpoint)


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether a model of so many bytes fits comfortably into the memory that is free on `device`."""
    return nbytes * _HEADROOM <= available_memory(device)


def available_memory(device: torch.device) -> int:
    """Bytes that are free on a device; on a CPU within the limits of the process and of its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [psutil.virtual_memory().available]
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        soft, _ = resource.getrlimit(limit)
        free += [soft] if soft != resource.RLIM_INFINITY else []
    for folder, *names, cached in _CGROUPS:
        try:
            limit, used = (int(Path(folder, name).read_text()) for name in names)
            statistics = Path(folder, "memory.stat").read_text().splitlines()
            reclaimable = next((int(line.split()[1]) for line in statistics if line.startswith(cached)), 0)
        except (OSError, ValueError):  # no such control group, or no limit ("max")
            continue
        free.append(limit - used + reclaimable)
    return max(0, min(free))
