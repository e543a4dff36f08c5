"""The append kernel against plain torch: what it rotates, where it writes, and that it touches nothing else."""
# ruff: noqa: E402 - the interpreter must be chosen before the kernels are imported

import os
from types import SimpleNamespace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from kvcompile.codec import LayerCache, PageFormat, RowFormat
from kvcompile.kernels.triton_append import TokenMaps, append_token
from kvcompile.kernels.triton_rows import RowMap, map_rows
from kvcompile.runtime.backend import CodecBackend
from tests.compiled import compile_for_hopper

UNTOUCHED = 7.0


def rotation(num_heads: int, head_dim: int, seed: int) -> torch.Tensor:
    """Orthogonal float32 matrices ``[K, D, D]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(
        torch.randn(num_heads, head_dim, head_dim, generator=generator, dtype=torch.float64)
    ).Q.float()


def windows(num_tokens: list[int], num_heads: int, head_dim: int, sink: int, ring: int) -> LayerCache:
    """Two layers' windows as a store has them, the second one as a layer; only lengths and windows matter here."""
    row = RowFormat(head_dim, 2, head_dim)

    def window(slots: int) -> torch.Tensor:
        shape = (2, len(num_tokens), num_heads, slots, head_dim)
        return torch.full(shape, UNTOUCHED, dtype=torch.bfloat16, device=DEVICE)[1]

    return LayerCache(
        PageFormat(row, row),
        torch.zeros(0, num_heads, 1, dtype=torch.uint8, device=DEVICE),
        torch.zeros(len(num_tokens), 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(len(num_tokens), dtype=torch.int32, device=DEVICE),
        torch.tensor(num_tokens, dtype=torch.int32, device=DEVICE),
        *(window(slots) for slots in (sink, sink, ring, ring)),
    )


def new_rows(batch: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows ``[B, heads, D]`` cut out of a fused projection, as attention gets them."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(batch, 1, heads + 2, head_dim, generator=generator).to(dtype).to(DEVICE)
    return fused[:, :, 1:-1].transpose(1, 2)[:, :, 0]


def expected_rows(x_BHD, r_KDD, mean_KD, num_heads):
    """In float64."""
    x_BKGD = x_BHD.double().cpu().unflatten(1, (num_heads, -1))
    if r_KDD is not None:
        x_BKGD = x_BKGD @ r_KDD.double()
    if mean_KD is not None:
        x_BKGD = x_BKGD - mean_KD.double()[:, None]
    return x_BKGD.flatten(1, 2)


def slot(index: int, sink: int, ring: int) -> tuple[str, int]:
    return ("sink", index) if index < sink else ("recent", (index - sink) % ring)


def check(num_tokens, num_heads, groups, head_dim, dtype, sink, ring, rotate="qkv", center="kv") -> None:
    batch = len(num_tokens)
    layer = windows(num_tokens, num_heads, head_dim, sink, ring)
    q, k, v = (
        new_rows(batch, heads, head_dim, dtype, seed)
        for seed, heads in enumerate((num_heads * groups, num_heads, num_heads))
    )
    rq, rk, rv = (rotation(num_heads, head_dim, seed) if name in rotate else None for seed, name in enumerate("qkv"))
    mk, mv = (
        torch.randn(num_heads, head_dim, generator=torch.Generator().manual_seed(seed)) if name in center else None
        for seed, name in enumerate("kv")
    )
    maps = TokenMaps.of(*(None if x is None else x.to(DEVICE) for x in (rq, rk, rv, mk, mv)))
    out = append_token(q, k, v, maps, layer)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu().double(), expected_rows(q, rq, None, num_heads), rtol=1e-5, atol=1e-4)
    for half, x, r, mean in (("k", k, rk, mk), ("v", v, rv, mv)):
        expected = expected_rows(x, r, mean, num_heads)
        found = {name: getattr(layer, f"{name}_{half}_{axes}").cpu() for name, axes in _WINDOWS.items()}
        for row, count in enumerate(num_tokens):
            for name, window in found.items():
                written = [slot(count - 1, sink, ring)[1]] if count and slot(count - 1, sink, ring)[0] == name else []
                for place in written:
                    torch.testing.assert_close(
                        window[row, :, place].double(), expected[row], rtol=2**-8, atol=2e-5, msg=f"{half} {row} {name}"
                    )
                others = [place for place in range(window.shape[2]) if place not in written]
                assert (window[row][:, others] == UNTOUCHED).all(), (half, row, name)


_WINDOWS = {"sink": "BKSD", "recent": "BKWD"}


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_rotated_and_stored(head_dim, dtype):
    check([1, 9, 40], 2, 3, head_dim, dtype, sink=4, ring=64)


@pytest.mark.parametrize(("batch", "num_heads", "groups"), [(1, 8, 4), (1, 1, 16), (17, 1, 1), (5, 2, 7), (33, 1, 2)])
def test_batches_and_groups(batch, num_heads, groups):
    check([1 + 13 * row for row in range(batch)], num_heads, groups, 32, torch.bfloat16, sink=16, ring=128)


@pytest.mark.parametrize("rotate", ["", "q", "k", "v", "qk", "qkv"])
@pytest.mark.parametrize("center", ["", "k", "v", "kv"])
def test_identities_and_missing_means(rotate, center):
    check([3, 70], 2, 2, 16, torch.bfloat16, sink=4, ring=64, rotate=rotate, center=center)
    check([3, 70], 2, 2, 16, torch.float16, sink=4, ring=64, rotate=rotate, center=center)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 67, 68, 69, 4 + 128, 5 + 128, 1000])
@pytest.mark.parametrize("sink", [0, 4])
def test_slots(count, sink):
    """The last sink slot, the first ring slot, the ring's wrap; a row of no tokens stores nothing."""
    check([count, 1], 1, 1, 16, torch.bfloat16, sink=sink, ring=64)


def test_rows_without_rotation_are_stored_exactly():
    """Identity rotations round only what has more bits than bfloat16, to nearest even."""
    layer = windows([6], 1, 16, sink=4, ring=64)
    q, k, v = (new_rows(1, 1, 16, torch.float32, seed) for seed in range(3))
    out = append_token(q, k, v, TokenMaps(RowMap(), RowMap(), RowMap()), layer)
    assert torch.equal(out, q)
    assert torch.equal(layer.recent_k_BKWD[0, :, 1], k[0].bfloat16())
    assert torch.equal(layer.recent_v_BKWD[0, :, 1], v[0].bfloat16())


def test_stored_rows_are_those_of_float32_up_to_a_tie():
    """The split rotation: at most one bfloat16 step from the float32 product, and that seldom."""
    layer = windows([200] * 16, 2, 128, sink=4, ring=256)
    q, k, v = (new_rows(16, 2, 128, torch.bfloat16, seed) for seed in range(3))
    r = rotation(2, 128, 3)
    append_token(q, k, v, TokenMaps.of(None, r.to(DEVICE), None, None, None), layer)
    expected = expected_rows(k, r, None, 2).float().bfloat16()
    found = layer.recent_k_BKWD[:, :, 195].cpu()
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    large = expected.abs() > 2**-8  # a tiny sum of large terms has no relative precision
    assert steps[large].max() <= 1
    assert (steps == 0).float().mean() > 0.99


def test_queries_and_keys_share_a_matrix():
    r = rotation(1, 16, 0)
    maps = TokenMaps.of(r, r, None, torch.zeros(1, 16), None)
    assert maps.query.halves_2KDD is maps.key.halves_2KDD
    assert maps.query.mean_KD is None


def test_wrong_shapes_are_refused():
    layer = windows([6, 6], 2, 16, sink=4, ring=64)
    maps = TokenMaps(RowMap(), RowMap(), RowMap())
    q, k = new_rows(2, 4, 16, torch.bfloat16, 0), new_rows(2, 2, 16, torch.bfloat16, 1)
    with pytest.raises(ValueError, match="do not fit"):
        append_token(q[:, :3], k, k, maps, layer)
    with pytest.raises(ValueError, match="do not fit"):
        append_token(q, k, k[:1], maps, layer)
    with pytest.raises(ValueError, match="does not fit keys"):
        append_token(q[:1], k[:1], k[:1], maps, layer)
    with pytest.raises(ValueError, match="must be contiguous"):
        append_token(q, k.transpose(0, 1).mT.contiguous().mT.transpose(0, 1), k, maps, layer)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bf16", 64), ("bf16", 80), ("bf16", 128), ("bf16", 256), ("fp16", 128)]
)
def test_compiles_for_hopper(dtype, head_dim, tmp_path):
    rows, matrix, halves = f"*{dtype}", "*bf16" if dtype == "bf16" else "*fp32", dtype == "bf16"
    pointers = {f"{x}_ptr": rows for x in "qkv"} | {f"r{x}_ptr": matrix for x in "qkv"}
    pointers |= {"mean_k_ptr": "*fp32", "mean_v_ptr": "*fp32", "out_ptr": "*fp32", "num_tokens_ptr": "*i32"}
    pointers |= {f"{window}_{half}_ptr": "*bf16" for window in ("sink", "recent") for half in "kv"}
    width = 1 << (head_dim - 1).bit_length()
    constants = {"G": 4, "D": head_dim, "ROWS": 16, "CHANNELS": 32, "STEP": width if halves else 16, "HALVES": halves}
    constants |= {name: True for name in ("ROTATE_Q", "ROTATE_K", "ROTATE_V", "CENTER_K", "CENTER_V")}
    built = compile_for_hopper(
        "kvcompile.kernels.triton_append:_append_kernel", pointers, constants, tmp_path, num_warps=4
    )
    assert ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in built["ptx"]) == halves
    assert "tf32" not in built["ptx"]
    assert "STL" not in built["sass"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "tokens", "rotate", "center"), [
    (128, 1, True, True), (64, 70, True, False), (80, 33, True, True), (96, 130, False, True), (32, 5, False, False),
])  # fmt: skip
def test_rows_of_a_prefill_are_stored_as_the_codec_stores_them(head_dim, tokens, rotate, center, dtype):
    """Rotated, centred and rounded: to the bit, but for ties that fall to the other side."""
    generator = torch.Generator().manual_seed(0)
    heads = 3
    x = torch.randn(2, tokens, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
    r = torch.linalg.qr(torch.randn(heads, head_dim, head_dim, generator=generator)).Q if rotate else None
    mean = torch.randn(heads, head_dim, generator=generator) if center else None
    plan = SimpleNamespace(key_rotation=r, key_mean=mean, value_rotation=None, value_mean=None)
    expected, _ = CodecBackend().stored_rows(x, x, plan)
    moved = (None if y is None else y.to(DEVICE) for y in (r, mean))
    found = map_rows(x.to(DEVICE), RowMap.of(*moved)).cpu()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-9)
    assert (found != expected).float().mean() < (0.02 if rotate else 1e-9)


def test_rows_that_do_not_fit_a_map_are_refused():
    with pytest.raises(ValueError, match="does not fit"):
        map_rows(torch.zeros(1, 2, 3, 32, device=DEVICE), RowMap.of(torch.eye(32, device=DEVICE).expand(3, 32, 32)))


def test_mapping_rows_compiles_for_hopper(tmp_path):
    """Tensor cores on both halves of the matrix, and no spills."""
    types = {"x_ptr": "*bf16", "r_ptr": "*bf16", "mean_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"D": 128, "ROWS": 64, "CHANNELS": 128, "STEP": 64, "ROTATE": True, "CENTER": True, "HALVES": True}
    built = compile_for_hopper("kvcompile.kernels.triton_rows:_map_kernel", types, constants, tmp_path, num_warps=4)
    assert "GMMA" in built["sass"] or "HMMA" in built["sass"]
    assert "STL" not in built["sass"]
