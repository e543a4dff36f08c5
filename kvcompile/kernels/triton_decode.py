"""Split-KV decode attention over packed pages and the BF16 windows: the Triton kernel that means `codec.attend_layer`.

Shapes: B batch rows, K KV heads, G query heads per KV head (padded to a power of two, PG, in a kernel), H = K G, D head_dim,
P pages, N page-table columns, X page bytes, Z splits.

Grid (B K, Z): the tiles of the windows and the pages of a row are divided among the splits, by what they cost and by the row's
own length, read on the device. Few splits of a row are merged by the program that ends last; many by a second launch, which
is started early and waits on the device. Shapes alone fix the grids, so a CUDA graph may hold them, and shapes and lengths the
division: the bits of a result never depend on timing. What a split does is in `triton_windows` and `triton_pages`.
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvcompile.codec.layer import LayerCache
from kvcompile.codec.page import PageFormat
from kvcompile.kernels.decode_config import DecodeConfig, choose_config, layer_of, padded_heads
from kvcompile.kernels.triton_launch import starts_early
from kvcompile.kernels.triton_merge import merge_here, merge_kernel
from kvcompile.kernels.triton_pages import attend_pages
from kvcompile.kernels.triton_windows import attend_windows

_LOG2_E = 1.4426950408889634
_MERGED_HERE = 64  # most splits of a row, times padded query heads, that its last program merges: it is alone


def default_config(batch: int, layer: LayerCache, groups: int) -> DecodeConfig:
    """The configuration that `attend` takes by itself, from shapes alone."""
    rows = batch * layer.pages_PKX.shape[1]
    return choose_config(layer.fmt, rows, layer.table_BN.shape[1], groups, layer.pages_PKX.device)


@triton.jit
def _share_of(split, num_splits, work, tilt, layer):
    """Where the split's share of the work begins.

    Programs start in the order of splits, and a scheduler serves first what came first. So `layer` splits, in 256ths, which fill
    all schedulers once, have equal shares, and every further layer smaller ones: linearly, the first to the last layer's as
    1 + tilt to 1 - tilt.
    In integers, and `tilt` in 256ths: what ends one share must be what begins the next, in another program too.
    """
    layers = (256 * num_splits + layer - 1) // layer
    part = _weight_until(split, layers, tilt, layer)
    return (work.to(tl.int64) * part // _weight_until(num_splits, layers, tilt, layer)).to(tl.int32)


@triton.jit
def _weight_until(split, layers, tilt, layer):
    """Sum of the weights of the splits before this one, whose unit is 1 / 256 of a split and of a layer's step of `tilt`."""
    full = 256 * split // layer
    rest = 256 * split - full * layer
    mean = 256 * tl.maximum(layers - 1, 1)
    before = layer.to(tl.int64) * full * (mean + tilt * (layers - full))
    return before + rest.to(tl.int64) * (mean + tilt * (layers - 1 - 2 * full))


@triton.jit(do_not_specialize=["tilt", "layer", "window_cost", "num_heads", "sink", "ring", "table_stride_b"])
def _split_kernel(
    q_ptr, pages_ptr, table_ptr, num_pages_ptr, num_tokens_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr,
    partial_ptr, stats_ptr, arrived_ptr, out_ptr, lse_ptr, scaling, tilt, layer, window_cost, num_heads, sink, ring,
    q_stride_b, q_stride_h, page_stride_p, page_stride_k, table_stride_b,
    sink_k_stride_b, sink_k_stride_k, sink_k_stride_t, sink_v_stride_b, sink_v_stride_k, sink_v_stride_t,
    recent_k_stride_b, recent_k_stride_k, recent_k_stride_t, recent_v_stride_b, recent_v_stride_k, recent_v_stride_t,
    G: tl.constexpr, PG: tl.constexpr, D: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHANNEL: tl.constexpr, K_NORM: tl.constexpr, K_CHUNK: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_CHUNK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, TABLE: tl.constexpr,
    WINDOW_TILE: tl.constexpr, PAGE_COST: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, MERGE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program per (batch row and KV head, split): writes acc, m and l of its tokens, m = -inf where it has none.

    The cost of a tile of a window, `window_cost`, is in what 16 tokens of a page take. With MERGE (at least the splits) the
    last of a row and KV head merges them all. With WAIT the kernel may start before the one before it has ended: until then it
    reads numbers of pages and tokens, and tables.
    """
    if EARLY:
        gdc_launch_dependents()
    row = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    place = (tl.program_id(0).to(tl.int64) * num_splits + split) * G
    part_ptr = partial_ptr + place * D
    part_stats_ptr = stats_ptr + place * 2
    q_ptr += row * q_stride_b + head * G * q_stride_h
    num_pages = tl.load(num_pages_ptr + row)
    num_tokens = tl.load(num_tokens_ptr + row)
    num_sink = tl.minimum(num_tokens, sink)
    num_recent = tl.maximum(num_tokens - num_sink - num_pages * PAGE, 0)
    tiles = (num_sink + WINDOW_TILE - 1) // WINDOW_TILE + (num_recent + WINDOW_TILE - 1) // WINDOW_TILE
    tiles_cost = tiles * window_cost
    first = _share_of(split, num_splits, tiles_cost + num_pages * PAGE_COST, tilt, layer)
    end = _share_of(split + 1, num_splits, tiles_cost + num_pages * PAGE_COST, tilt, layer)
    first_tile = tl.minimum((first + window_cost - 1) // window_cost, tiles)
    end_tile = tl.minimum((end + window_cost - 1) // window_cost, tiles)
    first_page = (tl.maximum(first - tiles_cost, 0) + PAGE_COST - 1) // PAGE_COST
    end_page = (tl.maximum(end - tiles_cost, 0) + PAGE_COST - 1) // PAGE_COST
    if first_tile < end_tile:
        if WAIT:
            gdc_wait()
        attend_windows(
            q_ptr, q_stride_h,
            sink_k_ptr + row * sink_k_stride_b + head * sink_k_stride_k,
            sink_v_ptr + row * sink_v_stride_b + head * sink_v_stride_k,
            recent_k_ptr + row * recent_k_stride_b + head * recent_k_stride_k,
            recent_v_ptr + row * recent_v_stride_b + head * recent_v_stride_k,
            part_ptr, part_stats_ptr, sink_k_stride_t, sink_v_stride_t, recent_k_stride_t, recent_v_stride_t,
            num_sink, num_recent, (num_pages * PAGE) % tl.maximum(ring, 1), tl.maximum(ring, 1),
            first_tile, end_tile, scaling, G, PG, D, WIDTH, WINDOW_TILE,
        )  # fmt: skip
        tl.debug_barrier()  # every thread's part is written before others go on from it
    if (first_page < end_page) | (first_tile >= end_tile):
        attend_pages(
            q_ptr, q_stride_h, pages_ptr + head * page_stride_k, table_ptr + row * table_stride_b, part_ptr, part_stats_ptr,
            first_page, end_page, tl.where(first_tile < end_tile, G, 0), page_stride_p, scaling,
            G, PG, D, K_BITS, K_GROUP, K_CHANNEL, K_NORM, K_CHUNK, V_BITS, V_GROUP, V_CHUNK, PAGE, TILE, TABLE, STAGES,
            WAIT,
        )  # fmt: skip
    if MERGE:
        tl.debug_barrier()  # every thread's part is written before the arrival is announced
        arrived = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            place = tl.program_id(0).to(tl.int64) * num_splits * G
            merge_here(
                partial_ptr + place * D, stats_ptr + place * 2, out_ptr + tl.program_id(0).to(tl.int64) * G * D,
                lse_ptr + tl.program_id(0).to(tl.int64) * G, num_splits, G, PG, D, WIDTH, MERGE,
            )  # fmt: skip


def merges_here(splits: int, groups: int) -> bool:
    """Whether a row's last program merges its splits, rather than a launch of its own."""
    return splits <= _MERGED_HERE // padded_heads(groups)


def supports(fmt: PageFormat) -> bool:
    """Whether this kernel reads the format; if not, the codec does."""
    rows = (fmt.key, fmt.value)
    grids = all(row.zero_point != "none" and not row.centroids for row in rows)
    steps = fmt.key.axis == "token" or fmt.key.group_size >= 32  # at least 32 tokens share a scale
    return grids and steps and fmt.value.axis == "token" and fmt.value.token_scale == "none"


def attend(
    q_BHD: Tensor,
    layer: LayerCache,
    scaling: float,
    config: DecodeConfig | None = None,
    arrived: Tensor | None = None,
    lengths_at_rest: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of one new rotated query per row and head, means `codec.attend_layer`: float32 ``[B, H, D]``, ``[B, H]``.

    Lengths and page tables are read on the device only, so the call may be captured into a CUDA graph. Calls that may run at
    the same time on several streams of a device need `new_arrivals` of their own. `lengths_at_rest` says that the kernel before
    this one on the stream writes neither tables nor numbers of pages or tokens: reading these need not wait for it.
    """
    batch, num_queries, head_dim = q_BHD.shape
    num_heads = layer.pages_PKX.shape[1]
    if num_queries % num_heads or head_dim != layer.fmt.head_dim or batch != layer.table_BN.shape[0]:
        raise ValueError(f"queries {[*q_BHD.shape]} do not fit pages {[*layer.pages_PKX.shape]} in {layer.fmt}")
    if not supports(layer.fmt):
        raise ValueError(f"no kernel reads {layer.fmt}")
    windows = (layer.sink_k_BKSD, layer.sink_v_BKSD, layer.recent_k_BKWD, layer.recent_v_BKWD)
    for x in (q_BHD, layer.pages_PKX, layer.table_BN, *windows):
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides are {x.stride()}")
    groups = num_queries // num_heads
    config = config or default_config(batch, layer, groups)
    splits = config.splits
    key, value = layer.fmt.key, layer.fmt.value
    partial = torch.empty((batch * num_heads, splits, groups, head_dim), dtype=torch.float32, device=q_BHD.device)
    stats = torch.empty((batch * num_heads, splits, groups, 2), dtype=torch.float32, device=q_BHD.device)
    out_BHD = torch.empty(q_BHD.shape, dtype=torch.float32, device=q_BHD.device)
    lse_BH = torch.empty(q_BHD.shape[:2], dtype=torch.float32, device=q_BHD.device)
    if not batch:
        return out_BHD, lse_BH
    merge = _MERGED_HERE // padded_heads(groups) if merges_here(splits, groups) else 0
    early = not merge and starts_early(q_BHD.device)
    wait = lengths_at_rest and starts_early(q_BHD.device)
    if arrived is None:
        arrived = _shared_arrivals(batch, num_heads, q_BHD.device)
    _split_kernel[(batch * num_heads, splits)](
        q_BHD, layer.pages_PKX, layer.table_BN, layer.num_pages_B, layer.num_tokens_B, *windows, partial, stats,
        arrived, out_BHD, lse_BH, scaling * _LOG2_E, round(256 * config.tilt), layer_of(batch * num_heads, q_BHD.device),
        config.window_tile // 16 * config.window_cost, num_heads,
        layer.sink_k_BKSD.shape[2], layer.recent_k_BKWD.shape[2],
        *q_BHD.stride()[:2], *layer.pages_PKX.stride()[:2], layer.table_BN.stride(0),
        *(stride for x in windows for stride in x.stride()[:3]),
        G=groups, PG=padded_heads(groups), D=head_dim,
        K_BITS=key.bits, K_GROUP=key.group_size, K_CHANNEL=key.axis == "channel",
        K_NORM=layer.fmt.sections["key_norm"][0] if key.token_scale != "none" else 0,
        K_CHUNK=max(32, triton.next_power_of_2(key.row_bytes)),
        V_BITS=value.bits, V_GROUP=value.group_size, V_CHUNK=max(16, triton.next_power_of_2(value.row_bytes)),
        PAGE=layer.fmt.tokens, TILE=config.page_tile, WIDTH=max(16, triton.next_power_of_2(head_dim)),
        TABLE=config.table_block, WINDOW_TILE=config.window_tile,
        PAGE_COST=layer.fmt.tokens // 16, STAGES=config.num_stages, EARLY=early, MERGE=merge, WAIT=wait, num_warps=1,
        maxnreg=config.max_registers, launch_pdl=wait,
    )  # fmt: skip
    if not merge:
        merge_kernel[(batch * num_queries, triton.cdiv(head_dim, 32))](
            partial, stats, out_BHD, lse_BH, splits,
            G=groups, D=head_dim, WIDTH=32, BLOCK=min(256, triton.next_power_of_2(splits)), EARLY=early, num_warps=4,
            launch_pdl=early,
        )  # fmt: skip
    return out_BHD, lse_BH


def new_arrivals(batch: int, num_heads: int, device: torch.device) -> Tensor:
    """Counters of programs that have ended, for `attend`: int32, at least ``B K``, all 0 between calls."""
    return torch.zeros(triton.next_power_of_2(batch * num_heads), dtype=torch.int32, device=device)


_arrivals: dict[torch.device, list[Tensor]] = {}
"""Counters by device, the largest last: earlier ones stay, because a CUDA graph may hold them."""


def _shared_arrivals(batch: int, num_heads: int, device: torch.device) -> Tensor:
    """Counters of the device, kept for later calls; a graph's own while one is captured, if there are none yet."""
    kept = _arrivals.setdefault(device, [])
    if not kept or len(kept[-1]) < batch * num_heads:
        made = new_arrivals(max(batch, 1024), num_heads, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return made
        kept.append(made)
    return kept[-1]
