"""Partial results of the splits of a row, merged: by the program that ends last, or by a launch of its own.

Shapes in a kernel: Z splits, S of them at a time, G query heads per KV head (PG padded), D head_dim. A split leaves an
unnormalized output, a maximum (minus infinity where it had no token) and a sum of weights; logits are in base 2.
"""
# mypy: allow-untyped-defs, disable-error-code="assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvcompile.kernels.triton_operands import loop_end

_LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # a maximum before there is one; minus infinity would make NaN of differences


@triton.jit
def store_stats(stats_ptr, m_G, l_G, g, G: tl.constexpr):
    """Maximum and sum; the maximum is minus infinity where there was no token."""
    tl.store(stats_ptr + 2 * g, tl.where(l_G > 0.0, m_G, float("-inf")), mask=g < G)
    tl.store(stats_ptr + 2 * g + 1, l_G, mask=g < G)


@triton.jit
def merge_here(
    partial_ptr, stats_ptr, out_ptr, lse_ptr, num_splits,
    G: tl.constexpr, PG: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """All query heads of a row and KV head, whose parts other programs have just written (so L1 must not answer)."""
    z = tl.arange(0, Z)
    g = tl.arange(0, PG)
    d = tl.arange(0, WIDTH)
    place_ZG = z[:, None] * G + g[None, :]
    live_ZG = (z < num_splits)[:, None] & (g < G)[None, :]
    m_ZG = tl.load(stats_ptr + 2 * place_ZG, mask=live_ZG, other=float("-inf"), cache_modifier=".cg")
    l_ZG = tl.load(stats_ptr + 2 * place_ZG + 1, mask=live_ZG, other=0.0, cache_modifier=".cg")
    m_G = tl.maximum(tl.max(m_ZG, axis=0), LOWEST)
    l_G = tl.sum(l_ZG * tl.exp2(m_ZG - m_G[None, :]), axis=0)
    sum_G = tl.where(l_G > 0.0, l_G, 1.0)
    acc_GD = tl.zeros([PG, WIDTH], tl.float32)
    live_GD = (g < G)[:, None] & (d < D)[None, :]
    S: tl.constexpr = 16 // PG if PG <= 16 else 1  # splits at a time: their loads are under way together
    for first in tl.range(0, loop_end(num_splits), S, num_stages=1):
        s = first + tl.arange(0, S)
        place_SG = s[:, None] * G + g[None, :]
        live_SG = (s < num_splits)[:, None] & (g < G)[None, :]
        part_SGD = tl.load(
            partial_ptr + place_SG[:, :, None] * D + d[None, None, :],
            mask=live_SG[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        m_SG = tl.load(stats_ptr + 2 * place_SG, mask=live_SG, other=float("-inf"), cache_modifier=".cg")
        acc_GD += tl.sum(part_SGD * tl.exp2(m_SG - m_G[None, :])[:, :, None], axis=0)
    tl.store(out_ptr + g[:, None] * D + d[None, :], acc_GD / sum_G[:, None], mask=live_GD)
    lse_G = tl.where(l_G > 0.0, m_G * _LN_2 + tl.log(sum_G), float("-inf"))  # logits are in base 2
    tl.store(lse_ptr + g, lse_G, mask=g < G)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial_ptr, stats_ptr, out_ptr, lse_ptr, num_splits,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per (batch row and query head, WIDTH channels): the weighted mean over splits, and the log of the sum.

    Zeros and minus infinity where no split has tokens.
    """
    if EARLY:
        gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    m = tl.full([1], LOWEST, tl.float32)
    l_ = tl.zeros([1], tl.float32)
    acc_D = tl.zeros([WIDTH], tl.float32)
    for step in tl.range(0, loop_end((num_splits + BLOCK - 1) // BLOCK)):
        z = step * BLOCK + tl.arange(0, BLOCK)
        place_Z = ((index // G) * num_splits + z) * G + index % G
        m_Z = tl.load(stats_ptr + 2 * place_Z, mask=z < num_splits, other=float("-inf"))
        live_Z = m_Z > float("-inf")
        l_Z = tl.load(stats_ptr + 2 * place_Z + 1, mask=z < num_splits, other=0.0)
        live_ZD = (z < num_splits)[:, None] & (d < D)[None, :]
        part_ZD = tl.load(partial_ptr + place_Z[:, None] * D + d[None, :], mask=live_ZD, other=0.0)
        new_m = tl.maximum(m, tl.max(m_Z, axis=0))
        weight_Z = tl.where(live_Z, tl.exp2(m_Z - new_m), 0.0)
        old = tl.exp2(m - new_m)
        l_ = l_ * old + tl.sum(weight_Z * l_Z, axis=0)
        acc_D = acc_D * old + tl.sum(weight_Z[:, None] * part_ZD, axis=0)
        m = new_m
    sum_ = tl.where(l_ > 0.0, l_, 1.0)
    tl.store(out_ptr + index * D + d, acc_D / sum_, mask=d < D)
    if tl.program_id(1) == 0:
        lse = tl.where(l_ > 0.0, m * _LN_2 + tl.log(sum_), float("-inf"))  # logits are in base 2
        tl.store(lse_ptr + index + tl.arange(0, 1), lse)
