"""How the decode kernel divides its work: measured choices, stored as data per GPU and class of shapes, and a rule for others.

`decode_configs.json` holds what was measured best, by `benchmarks/tune.py` or `kernels.py`: for each GPU a list of classes with
the shape they were measured at. The nearest class of the GPU is taken, or of another GPU where nobody has measured. It says how
many programs an SM gets, so that it carries over to other batch sizes and other numbers of SMs.
"""

import functools
import json
import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from kvcompile.codec.page import PageFormat

_WINDOW_TILES = 20
"""About as many tiles as windows of usual size have: more programs than tiles and pages would have nothing to do."""
_SCHEDULERS = 4
"""Warp schedulers of an SM, on every GPU of today."""


@dataclass(frozen=True)
class DecodeConfig:
    """What tuning may change. `splits` programs share the pages and the tiles of the windows of a row and KV head."""

    splits: int
    page_tile: int = 64  # tokens of a page per step
    table_block: int = 64  # page ids loaded at once; between blocks nothing is in flight
    window_tile: int = 16  # tokens of a window per step; its buffers must not outgrow those of the pages
    num_stages: int = 3
    max_registers: int | None = None
    window_cost: int = 4  # of 16 tokens of a window, in what 16 tokens of pages take
    tilt: float = 0.0  # shares of programs that start first to shares of the last: 1 + tilt to 1 - tilt

    def __post_init__(self) -> None:
        """Raises ValueError for what the kernel cannot do."""
        if not 0 <= self.tilt <= 1 or self.window_cost < 1 or self.window_tile % 16 or self.page_tile > 256:
            raise ValueError(f"no configuration of the decode kernel: {self}")


def choose_config(fmt: PageFormat, rows: int, columns: int, groups: int, device: torch.device) -> DecodeConfig:
    """A configuration for `rows` pairs of batch row and KV head, page tables of `columns`, and `groups` query heads each.

    Depends on shapes alone: what a CUDA graph may hold.
    """
    name, sms = _gpu(device)
    known = _measured()
    classes = known.get(name) or next(iter(known.values()))
    best = min(classes, key=lambda found: _distance(found, fmt, rows, columns, groups))
    splits = max(1, round(best["programs_per_sm"] * sms / max(rows, 1)))
    return DecodeConfig(
        splits=min(splits, columns + _WINDOW_TILES),
        page_tile=best.get("page_tile", DecodeConfig.page_tile),
        num_stages=best.get("num_stages", DecodeConfig.num_stages),
        max_registers=best["max_registers"],
        window_cost=best.get("window_cost", DecodeConfig.window_cost),
        tilt=best.get("tilt", DecodeConfig.tilt),
    )


def layer_of(rows: int, device: torch.device) -> int:
    """Splits of which each of the GPU's warp schedulers gets one program, in 256ths."""
    _, sms = _gpu(device)
    return max(1, 256 * _SCHEDULERS * sms // max(rows, 1))


def padded_heads(groups: int) -> int:
    """Query heads of a KV head as the kernel has them: a power of two, at least 4."""
    return int(max(4, 2 ** math.ceil(math.log2(groups))))


def _distance(found: dict[str, Any], fmt: PageFormat, rows: int, columns: int, groups: int) -> float:
    """How far a measured class is from a shape: what changes the code first, then the amount of work."""
    group = fmt.key.group_size if fmt.key.axis == "token" else 0
    code = (
        4 * (found["channel_group"] != (0 if group else min(fmt.key.group_size, 64)))
        + 2 * abs(math.log2(padded_heads(found["groups"]) / padded_heads(groups)))
        + 2 * abs(math.log2(found["head_dim"] / fmt.head_dim))
        + abs(math.log2(found["bits"] / fmt.key.bits))
        + (found["groups_per_row"] != (fmt.key.num_groups if group else 1))
        + (found.get("norms", False) != (fmt.key.token_scale != "none"))
    )
    work = abs(math.log2(found["rows"] / max(rows, 1))) + abs(math.log2(found["columns"] / max(columns, 1)))
    return 8 * code + work


@functools.cache
def _measured() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(
        files("kvcompile.kernels").joinpath("decode_configs.json").read_text("utf-8")
    )
    return found


@functools.cache
def _gpu(device: torch.device) -> tuple[str, int]:
    """Name and number of SMs; one for the interpreter."""
    if device.type != "cuda":
        return "", 1
    return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).multi_processor_count
