"""Kernels that start before the one they depend on has ended, and what they do until then.

From Hopper on, a kernel launched with `launch_pdl` starts as soon as every program of the kernel before it on the stream has
called `gdc_launch_dependents` or ended; `gdc_wait` returns when that kernel has ended and what it wrote can be read. What a
kernel reads before its `gdc_wait` must not be written by the kernel before it, nor by one that this one did not wait for.
"""
# mypy: allow-untyped-defs

import functools

import torch
import triton
import triton.language as tl

from kvcompile.kernels.triton_operands import INTERPRETED


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on the device can start before the one they depend on has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(ptrs, live):
    """Bring the live addresses' lines into L2. Nothing waits for them."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r", [ptrs.to(tl.int64), live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
