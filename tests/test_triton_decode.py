"""The decode kernel means `attend_layer`: on the GPU where there is one, else in Triton's interpreter."""
# ruff: noqa: E402 - the interpreter must be chosen before the kernels are imported

import itertools
import os
import re
from dataclasses import replace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvcompile.codec import LayerCache, PageFormat, RowFormat, attend_layer, encode_pages
from kvcompile.kernels import triton_operands, triton_pages
from kvcompile.kernels.decode_config import DecodeConfig, choose_config, padded_heads
from kvcompile.kernels.triton_decode import _share_of, attend, supports
from tests.compiled import compile_for_hopper, loops, opcode
from tests.layers import on_device, random_layer

TOLERANCE = 3e-4  # relative error of a head's output against float64 on the same codes
HALF_TOLERANCE = 1e-3  # the same with more than 8 query heads a KV head, whose weights of values are float16
LSE_TOLERANCE = 3e-4  # error of the log of the softmax denominator, relative to its size where that is above 1


def attend_exactly(q: torch.Tensor, layer: LayerCache, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_layer` in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row in range(q.shape[0]):
        k, v = (x.double() for x in layer.dense_row(row))
        if k.shape[1]:
            logits = q[row].double().unflatten(0, (k.shape[0], -1)) @ k.transpose(1, 2) * scaling
            out[row] = (logits.softmax(dim=-1) @ v).flatten(0, 1)
            lse[row] = logits.logsumexp(dim=-1).flatten()
    return out, lse


def check(
    q: torch.Tensor,
    layer: LayerCache,
    scaling: float,
    config: DecodeConfig | None = None,
    tolerance: float | None = None,
) -> torch.Tensor:
    out, lse = attend(q.to(DEVICE), on_device(layer), scaling, config)
    assert out.dtype == lse.dtype == torch.float32
    exact, exact_lse = attend_exactly(q, layer, scaling)
    if tolerance is None:
        tolerance = TOLERANCE if q.shape[1] <= 8 * layer.pages_PKX.shape[1] else HALF_TOLERANCE
    error = (out.cpu().double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
    assert error.max() < tolerance, error
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
    return out.cpu()


CASES = [  # head_dim, (bits, group) of the keys, of the values, KV heads, G, tokens, sink, ring
    (128, (2, 128), (2, 128), 2, 4, [450, 0, 63, 1], 64, 128),
    (128, (2, 32), (2, 64), 1, 5, [321], 3, 64),
    (128, (4, 128), (2, 128), 1, 8, [257, 200], 64, 128),
    (64, (2, 64), (2, 64), 2, 1, [190, 65], 0, 64),
    (64, (2, 16), (4, 32), 1, 7, [300, 130], 70, 192),
    (16, (2, 16), (2, 16), 3, 3, [290, 90, 64], 64, 128),
    (16, (4, 16), (4, 16), 1, 2, [130], 1, 64),
    (80, (4, 40), (2, 16), 1, 16, [203], 4, 64),
    (80, (2, 80), (4, 80), 1, 1, [150], 4, 64),
    (96, (2, 96), (2, 32), 1, 6, [200], 65, 64),
    (96, (4, 48), (4, 96), 1, 3, [170], 8, 128),
    (256, (2, 256), (2, 64), 1, 2, [260], 64, 64),
    (256, (4, 128), (4, 256), 1, 4, [140], 64, 64),
    (32, (2, 32), (2, 32), 1, 4, [128, 0], 0, 0),
    (128, (2, 128), (4, 32), 1, 8, [140], 4, 64),
    (32, (2, 32), (4, 16), 1, 12, [300], 4, 64),
    (32, (4, 32), (1, 32), 1, 16, [200], 4, 64),
    (32, (2, 16), (2, 32), 1, 20, [150], 4, 64),
]


@pytest.mark.parametrize(("head_dim", "key", "value", "num_heads", "groups", "num_tokens", "sink", "ring"), CASES)
def test_attend_means_the_codec(head_dim, key, value, num_heads, groups, num_tokens, sink, ring):
    fmt = PageFormat(RowFormat(head_dim, *key, 0.96), RowFormat(head_dim, *value, 0.92))
    layer = random_layer(fmt, num_heads, num_tokens, sink, ring)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(num_tokens), num_heads * groups, head_dim, generator=generator).bfloat16()
    out = check(q, layer, head_dim**-0.5, DecodeConfig(4))
    torch.testing.assert_close(out, attend_layer(q, layer, head_dim**-0.5)[0], rtol=1e-2, atol=1e-3)
    assert not out[layer.num_tokens_B == 0].any()


@pytest.mark.parametrize("head_dim", [32, 80])
def test_pages_of_128_tokens(head_dim):
    """With integer zero points, and codes of error feedback: a decoder does not see how codes were chosen."""
    key = RowFormat(head_dim, 2, 16, zero_point="integer", rounding="error_feedback")
    layer = random_layer(PageFormat(key, RowFormat(head_dim, 4, head_dim), 128), 2, [450, 0, 299], 30, 256)
    q = torch.randn(3, 4, head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    check(q, layer, head_dim**-0.5, DecodeConfig(4, table_block=2))


@pytest.mark.parametrize(
    ("head_dim", "bits", "group", "page", "token_scale", "groups"),
    [
        (128, 2, 32, 128, "none", 4),
        (128, 2, 128, 128, "none", 1),
        (64, 1, 64, 128, "none", 8),
        (80, 4, 32, 64, "l2", 3),
        (32, 2, 64, 64, "mean_abs", 2),
        (32, 2, 32, 128, "l2", 8),
        (32, 2, 64, 128, "l2", 16),
    ],
)
def test_keys_quantized_along_tokens(head_dim, bits, group, page, token_scale, groups):
    """KIVI, KVLinC and OScaR: a scale and zero point per channel and group of tokens; norms per token."""
    key = RowFormat(head_dim, bits, group, axis="channel", token_scale=token_scale)
    layer = random_layer(PageFormat(key, RowFormat(head_dim, bits, head_dim), page), 2, [450, 0, 299], 30, 2 * page)
    q = torch.randn(3, 2 * groups, head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    tolerance = 1e-3 if bits == 1 else None  # the query's chunks for 1 bit have three bits less than others
    check(q, layer, head_dim**-0.5, DecodeConfig(3), tolerance)


def test_token_norms_of_keys_quantized_by_token():
    key = RowFormat(32, 2, 32, token_scale="rsqrt")
    layer = random_layer(PageFormat(key, RowFormat(32, 1, 32)), 1, [333, 70], 3, 64)
    q = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    check(q, layer, 0.2, DecodeConfig(2))


def test_formats_that_are_left_to_the_codec():
    row = RowFormat(64, 2, 64)
    assert supports(PageFormat(row, row, 128))
    assert supports(PageFormat(RowFormat(64, 1, 32, axis="channel", token_scale="l2"), row))
    for other in (RowFormat(64, 2, 64, zero_point="none"), RowFormat(64, 2, 64, centroids=4)):
        assert not supports(PageFormat(other, row))
        assert not supports(PageFormat(row, other))
    assert not supports(PageFormat(row, RowFormat(64, 2, 64, axis="channel")))
    assert not supports(PageFormat(RowFormat(64, 2, 16, axis="channel"), row))
    unread = RowFormat(32, 2, 32, zero_point="none")
    layer = on_device(random_layer(PageFormat(unread, unread), 1, [70], 0, 64))
    with pytest.raises(ValueError, match="no kernel"):
        attend(torch.zeros(1, 1, 32, device=DEVICE), layer, 1.0)


SMALL = PageFormat(RowFormat(32, 2, 32, 0.96), RowFormat(32, 2, 32, 0.92))


@pytest.mark.parametrize(
    "config",
    [
        None,
        DecodeConfig(2),
        DecodeConfig(10, table_block=2),
        DecodeConfig(8, table_block=1, window_tile=32, num_stages=1),
        DecodeConfig(22, window_tile=64, tilt=0.2),
        DecodeConfig(41, page_tile=32),
        DecodeConfig(5, page_tile=128, tilt=0.9),
        DecodeConfig(3, page_tile=256, table_block=4),
        DecodeConfig(3, page_tile=128, table_block=1, window_cost=3),
        DecodeConfig(9, page_tile=32, window_cost=5),
    ],
)
def test_any_division_of_the_work(config):
    layer = random_layer(SMALL, 1, [900, 70, 5], 40, 192)
    for heads in (2, 6, 12) if config and config.page_tile == 128 else (2, 6):
        q = torch.randn(3, heads, 32, generator=torch.Generator().manual_seed(1))
        check(q, layer, 0.2, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [1e-6, 1.0, 10.0])
def test_queries_of_any_kind(dtype, sharpness):
    layer = random_layer(SMALL, 2, [333, 129], 64, 128)
    q = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    check((sharpness * q).to(dtype), layer, 0.2, DecodeConfig(3), 1e-3 if sharpness > 1 else None)


@pytest.mark.skipif(DEVICE != "cpu", reason="runs of operands are the compiler's; the interpreter takes any")
@pytest.mark.parametrize("run", [4, 8])
@pytest.mark.parametrize("groups", [4, 8, 16])
def test_runs_of_operands_of_other_compilers(groups, run, monkeypatch):
    """In what order tokens and channels go through tensor cores depends on the version of Triton, what comes out does not."""
    for module in (triton_operands, triton_pages):
        monkeypatch.setattr(module, "OPERAND_RUN", tl.constexpr(run))
    layer = random_layer(SMALL, 1, [300], 4, 64)
    check(torch.randn(1, groups, 32, generator=torch.Generator().manual_seed(1)), layer, 0.2, DecodeConfig(3))


@pytest.mark.parametrize("tilt", [0, 40, 255])
@pytest.mark.parametrize("layer", [1, 341, 528, 4096, 135168])
def test_shares_of_the_work(layer, tilt):
    """They cover it once, without a gap, and where programs fill schedulers twice, the first ones get more."""
    places = shares(17, 1234, tilt, layer)
    assert places[0] == 0 and places[-1] == 1234
    sizes = [after - before for before, after in itertools.pairwise(places)]
    assert min(sizes) >= 0
    if tilt == 40 and layer == 528:
        assert sizes[0] > sizes[-1] + 10


def shares(splits: int, work: int, tilt: int, layer: int) -> list[int]:
    out = torch.zeros(splits + 1, dtype=torch.int32, device=DEVICE)
    share_kernel[(splits + 1,)](out, splits, work, tilt, layer)
    return out.tolist()


@triton.jit(do_not_specialize=["splits", "work", "tilt", "layer"])
def share_kernel(out_ptr, splits, work, tilt, layer):
    place = _share_of(tl.program_id(0), splits, work, tilt, layer)
    tl.store(out_ptr + tl.program_id(0), place)


def test_configurations_that_cannot_be():
    for wrong in ({"tilt": 1.1}, {"tilt": -0.1}, {"window_cost": 0}, {"window_tile": 24}, {"page_tile": 512}):
        with pytest.raises(ValueError, match="no configuration"):
            DecodeConfig(2, **wrong)


def test_zero_query():
    layer = random_layer(SMALL, 1, [333], 64, 128)
    check(torch.zeros(1, 1, 32), layer, 0.2, DecodeConfig(3))


@pytest.mark.gpu
def test_many_tokens_in_one_program():
    """Tensor cores truncate what they add up: sums over many tiles must not be theirs."""
    layer = random_layer(SMALL, 1, [60_000], 64, 128)
    q = 0.3 * torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1))
    check(q, layer, 0.2, DecodeConfig(1))


@pytest.mark.parametrize("groups", [4, 8, 16])
def test_weights_of_very_different_size(groups):
    """Fixed point, and float16, must not lose light tokens beside heavy ones: neither in another tile nor with a larger scale."""
    generator = torch.Generator().manual_seed(0)
    layer = random_layer(SMALL, 1, [64 * 12 + 1], 0, 64)
    k, v = (torch.randn(12, 1, 64, 32, generator=generator) for _ in range(2))
    direction = torch.ones(32)
    k[3, 0, 5] += 8 * direction / 32**0.5 * 3  # one heavy key, whose value is tiny
    v[3, 0, 5] *= 1e-3
    v[7] *= 100.0  # light keys with large values
    pages = layer.pages_PKX.clone()
    pages[layer.table_BN[0, :12].long()] = encode_pages(k.bfloat16(), v.bfloat16(), SMALL)
    q = 2 * direction[None, None] + torch.randn(1, groups, 32, generator=generator) * 0.3
    check(q, replace(layer, pages_PKX=pages), 0.25, DecodeConfig(3))


def test_any_strides():
    """Pages of one layer inside a pool of several, windows [B, slots, K, D] in memory, queries in a wider tensor."""
    layer = random_layer(SMALL, 2, [400, 90], 30, 128)
    q = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected, expected_lse = attend(q.to(DEVICE), on_device(layer), 0.2)
    pool = torch.zeros(3, *layer.pages_PKX.shape, dtype=torch.uint8).transpose(0, 1)
    pool[:, 1] = layer.pages_PKX
    wide_q = torch.zeros(2, 6, 48, dtype=torch.bfloat16)
    wide_q[:, 1:5, 8:40] = q
    moved = on_device(layer)
    windows = ("sink_k_BKSD", "sink_v_BKSD", "recent_k_BKWD", "recent_v_BKWD")
    moved = replace(moved, **{x: getattr(moved, x).transpose(1, 2).contiguous().transpose(1, 2) for x in windows})
    moved = replace(moved, pages_PKX=pool.to(DEVICE)[:, 1])
    out, lse = attend(wide_q.to(DEVICE)[:, 1:5, 8:40], moved, 0.2)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_wrong_shapes_are_refused():
    layer = on_device(random_layer(SMALL, 2, [70], 0, 64))
    with pytest.raises(ValueError, match="do not fit"):
        attend(torch.zeros(1, 3, 32, device=DEVICE), layer, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        attend(torch.zeros(2, 2, 32, device=DEVICE), layer, 1.0)


@pytest.mark.gpu
def test_graph_replays_with_other_lengths():
    """Lengths and tables are read on the device: a captured call serves a cache that has grown."""
    layer = random_layer(SMALL, 2, [700, 300], 64, 128)
    q = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    device_q, device_layer = q.to(DEVICE), on_device(layer)
    device_layer.num_tokens_B.fill_(10)
    device_layer.num_pages_B.fill_(0)
    attend(device_q, device_layer, 0.2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(device_q, device_layer, 0.2)
    device_layer.num_tokens_B.copy_(layer.num_tokens_B)
    device_layer.num_pages_B.copy_(layer.num_pages_B)
    graph.replay()
    exact, exact_lse = attend_exactly(q, layer, 0.2)
    assert (out.cpu().double() - exact).norm() < TOLERANCE * exact.norm()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


BF16_POINTERS = ("sink_k_ptr", "sink_v_ptr", "recent_k_ptr", "recent_v_ptr")
TYPES = (
    dict.fromkeys(BF16_POINTERS, "*bf16")
    | dict.fromkeys(("table_ptr", "num_pages_ptr", "num_tokens_ptr"), "*i32")
    | dict.fromkeys(("q_ptr", "partial_ptr", "stats_ptr", "out_ptr", "lse_ptr"), "*fp32")
    | {"arrived_ptr": "*i32"}
    | {"pages_ptr": "*u8", "scaling": "fp32"}
)


# head_dim, G, bits, group, page, channel, compute capability, registers: instructions of a step over 64 tokens at most
CODE = {
    (128, 4, 2, 128, 64, False, 90, 128): 550,
    (128, 8, 2, 128, 64, False, 90, 208): 770,
    (128, 5, 2, 128, 64, False, 90, 208): 770,
    (128, 16, 2, 128, 64, False, 90, 255): 1085,
    (64, 4, 2, 64, 64, False, 90, 112): 480,
    (128, 4, 4, 128, 64, False, 90, 128): 640,
    (128, 4, 2, 32, 64, False, 90, 168): 980,
    (128, 4, 2, 128, 128, True, 90, 255): 880,
    (128, 4, 2, 32, 128, True, 90, 128): 2 * 790,
    (128, 4, 2, 128, 64, False, 80, 168): 620,
    (128, 4, 2, 128, 64, False, 100, 168): 620,
}


@pytest.mark.parametrize("case", CODE)
def test_what_the_compiler_makes_of_the_kernel(case, tmp_path):
    """Codes go to tensor cores, copies are in flight ahead of them, nothing spills in a loop, and it stays this short."""
    head_dim, groups, bits, group, page, channel, capability, registers = case
    chunk = max(32, head_dim * bits // 8)
    sides = {f"{s}_{name}": x for s in "KV" for name, x in (("BITS", bits), ("GROUP", group), ("CHUNK", chunk))}
    padded = padded_heads(groups)
    constants = {"G": groups, "PG": padded, "D": head_dim, "PAGE": page, "WIDTH": head_dim, "TABLE": 64, "TILE": 64}
    constants |= {
        "K_CHANNEL": channel,
        "K_NORM": 0,
        "WINDOW_TILE": 16,
        "STAGES": 3,
        "EARLY": False,
        "MERGE": 64 // padded,
    }
    constants |= {"WAIT": capability >= 90, "PAGE_COST": page // 16}
    kernel = "kvcompile.kernels.triton_decode:_split_kernel"
    sides["V_CHUNK"] = head_dim * bits // 8
    built = compile_for_hopper(
        kernel, TYPES, constants | sides, tmp_path, capability, num_warps=1, num_stages=3, maxnreg=registers
    )
    bodies = [x for x in loops(built["sass"]) if "IMMA" in map(opcode, x)]
    steps = 2 if channel and group == 32 else 1
    opcodes = [opcode(x) for x in bodies[0]]  # the innermost loop that multiplies codes: one step
    assert steps * len(opcodes) <= CODE[case], f"{len(opcodes)} instructions"
    products = 64 * head_dim * 2 * padded // (16 * 32 * 8)  # of keys, and of values where those are int8
    assert opcodes.count("IMMA") * steps >= products * (1 if groups > 8 else 2)
    assert groups <= 8 or opcodes.count("HMMA") >= 64 * head_dim * 16 // (16 * 16 * 8)
    assert "LDGSTS" in opcodes
    assert groups <= 4 or opcodes.count("SHFL") <= 20  # what is multiplied stays in its threads
    assert not {"LDL", "STL"} & set(opcodes)
    assert int(re.search(r"REG:(\d+)", built["use"])[1]) <= registers


def test_merge_compiles_for_hopper(tmp_path):
    kernel = "kvcompile.kernels.triton_merge:merge_kernel"
    constants = {"G": 4, "D": 128, "WIDTH": 128, "BLOCK": 16, "EARLY": True}
    assert compile_for_hopper(kernel, TYPES, constants, tmp_path, num_warps=4)["ptx"]


@pytest.mark.parametrize("fmt", [SMALL, PageFormat(RowFormat(64, 2, 32, axis="channel"), RowFormat(64, 2, 64), 128)])
@pytest.mark.parametrize(("rows", "columns", "groups"), [(1, 0, 1), (8, 2000, 4), (256, 100, 8), (5000, 10, 16)])
def test_every_shape_has_a_configuration(fmt, rows, columns, groups):
    """From stored measurements of the nearest shape; on a GPU that nobody has measured too."""
    config = choose_config(fmt, rows, columns, groups, torch.device(DEVICE))
    assert 1 <= config.splits <= columns + 20
    assert config == choose_config(fmt, rows, columns, groups, torch.device(DEVICE))
