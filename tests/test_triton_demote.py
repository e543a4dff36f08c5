"""Pages of all layers in one launch equal those that the codec writes layer by layer."""
# ruff: noqa: E402 - the interpreter must be chosen before the kernels are imported

import os
from dataclasses import replace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from kvcompile.codec import PageFormat, RowFormat
from kvcompile.kernels.triton_demote import LayerCoding, demote_pages
from kvcompile.runtime.backend import CodecBackend, TritonBackend
from kvcompile.runtime.plan import Storage
from tests.compiled import compile_for_hopper
from tests.layers import random_tables
from tests.test_triton_encode import tables_on_device

UNTOUCHED = 173


def layers_of(key: RowFormat, value: RowFormat, count: int, tokens: int = 64) -> list[Storage]:
    """Layers that differ in clip ratios and factors."""
    clips = [1.0, 0.9, 0.96, 0.5][:count]
    formats = [
        PageFormat(replace(key, clip_ratio=clip), replace(value, clip_ratio=other), tokens)
        for clip, other in zip(clips, reversed(clips), strict=True)
    ]
    return [Storage(fmt, tables_on_device(random_tables(fmt, 2, seed))) for seed, fmt in enumerate(formats)]


def demote(backend: CodecBackend, layers: list[Storage], batch: int = 3, rings: int = 3) -> torch.Tensor:
    """Pages ``[L, P, K, X]`` after two rows have written a block each, into a pool that was full of something."""
    fmt = layers[0].fmt
    generator = torch.Generator().manual_seed(0)
    shape = (len(layers), batch, 2, rings * fmt.tokens, fmt.head_dim)
    k, v = (torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for _ in "kv")
    pages = torch.full((len(layers), 5, 2, fmt.page_bytes), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    row, place, ids = (torch.tensor(x, device=DEVICE) for x in ([2, 0], [1, rings - 1], [3, 1]))
    backend.demote(layers, k, v, row, place, pages, ids)
    return pages


FORMATS = {
    "plain": (RowFormat(32, 2, 32), RowFormat(32, 2, 16), 64),
    "integer, 4 bits, long pages": (RowFormat(32, 4, 32, zero_point="integer"), RowFormat(32, 2, 32), 128),
    "odd head": (RowFormat(80, 2, 80), RowFormat(80, 4, 40), 64),
    "feedback of keys": (RowFormat(32, 2, 32, rounding="error_feedback"), RowFormat(32, 2, 32), 64),
    "feedback of both": (
        RowFormat(32, 2, 32, rounding="error_feedback"),
        RowFormat(32, 4, 16, rounding="error_feedback"),
        64,
    ),
}


@pytest.mark.parametrize(("key", "value", "tokens"), FORMATS.values(), ids=FORMATS.keys())
def test_all_layers_equal_the_codec(key, value, tokens, monkeypatch):
    layers = layers_of(key, value, 3, tokens)
    monkeypatch.setattr(TritonBackend, "write_pages", None)  # layer by layer would need it
    found = demote(TritonBackend(), layers)
    assert torch.equal(found, demote(CodecBackend(), layers))
    assert (found[:, [0, 2, 4]] == UNTOUCHED).all()


def test_layers_of_several_formats_are_written_one_by_one():
    row = RowFormat(32, 2, 32)
    mixed = layers_of(row, row, 2) + layers_of(replace(row, zero_point="integer"), row, 1)
    assert torch.equal(demote(TritonBackend(), mixed), demote(CodecBackend(), mixed))
    symmetric = [Storage(PageFormat(row, replace(row, zero_point="none")))] * 2
    assert torch.equal(demote(TritonBackend(), symmetric), demote(CodecBackend(), symmetric))


def test_wrong_shapes_are_refused():
    row = RowFormat(16, 2, 16)
    fmt = PageFormat(row, row)
    coding = LayerCoding.of([(fmt, Storage(fmt).tables)] * 2, torch.device(DEVICE))
    ring = torch.zeros(2, 1, 1, 128, 16, dtype=torch.bfloat16, device=DEVICE)
    pages = torch.zeros(2, 1, 1, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    index = torch.zeros(1, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="whole pages"):
        demote_pages(coding, ring[:, :, :, :100], ring[:, :, :, :100], index, index, pages, index)
    with pytest.raises(ValueError, match="do not fit rings"):
        demote_pages(coding, ring, ring, index, index, pages[:1], index)
    with pytest.raises(ValueError, match="do not fit 2 layers"):
        demote_pages(coding, ring[:1], ring[:1], index, index, pages[:1], index)


RING = {"row_ptr": "*i64", "place_ptr": "*i64", "ids_ptr": "*i64", "tau_ptr": "*fp32", "pages_ptr": "*u8"}


@pytest.mark.parametrize("feedback", [False, True])
def test_writing_compiles_for_hopper(feedback, tmp_path):
    side = {"BITS": 2, "GROUP": 128, "INTEGER": False, "FEEDBACK": feedback, "CHUNK": 32, "TILE": 32}
    built = compile_for_hopper(
        "kvcompile.kernels.triton_demote:_demote_kernel",
        RING | {"k_ptr": "*bf16", "v_ptr": "*bf16", "clip_ptr": "*i32"},
        {"D": 128, "PAGE": 64, "STEP": 16} | {f"{s}_{name}": value for s in "KV" for name, value in side.items()},
        tmp_path,
        num_warps=4,
    )
    assert "div.rn.f32" in built["ptx"]
    assert ".ftz" not in built["ptx"]
    assert "fma.rn.f32" not in built["ptx"]  # nothing was fused
    assert "STL" not in built["sass"]


def test_feedback_compiles_for_hopper(tmp_path):
    built = compile_for_hopper(
        "kvcompile.kernels.triton_demote:_feed_kernel",
        RING | {"x_ptr": "*bf16", "factor_ptr": "*fp32"},
        {"D": 128, "PAGE": 64, "BITS": 2, "GROUP": 128, "CODES": 0, "META": 4096, "TRANSPOSED": False, "TILE": 32}
        | {"CHUNK": 32},
        tmp_path,
        num_warps=1,
        enable_fp_fusion=False,
    )
    assert "div.rn.f32" in built["ptx"]
    assert "mul.f32" not in built["ptx"]  # ptxas fuses no product whose rounding is spelled out
    assert built["sass"].count("STL") <= 32
