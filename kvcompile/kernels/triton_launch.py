"""Kernels that start before the one they depend on has ended.

From Hopper on, a kernel launched with `launch_pdl` starts as soon as every program of the kernel before it on the stream has
called `gdc_launch_dependents` or ended; `gdc_wait` returns when that kernel has ended and what it wrote can be read. What a
kernel reads before its `gdc_wait` must not be written by the kernel before it, nor by one that this one did not wait for.
"""

import functools

import torch


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on the device can start before the one they depend on has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
