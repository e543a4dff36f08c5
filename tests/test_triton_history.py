"""A chunk on a quantized prefix: decoded rows against the codec's, and attention over them."""

import re

import pytest
import torch

from kvcompile.codec import PageFormat, RowFormat, attend_chunk
from kvcompile.kernels import triton_history
from tests.compiled import compile_for_hopper, opcode
from tests.layers import on_device, random_layer

FORMATS = {
    "tokens": PageFormat(RowFormat(128, 2, 128), RowFormat(128, 2, 128)),
    "groups": PageFormat(RowFormat(96, 2, 32), RowFormat(96, 4, 48)),
    "four bits": PageFormat(RowFormat(64, 4, 64), RowFormat(64, 4, 32)),
    "channels": PageFormat(RowFormat(64, 2, 32, axis="channel"), RowFormat(64, 2, 32), 128),
    "norms": PageFormat(RowFormat(64, 1, 64, axis="channel", token_scale="l2"), RowFormat(64, 1, 64), 128),
    "large": PageFormat(RowFormat(256, 2, 64), RowFormat(256, 2, 256)),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("lengths", "sink", "ring"), [([0, 3, 700], 4, 256), ([128, 384, 1], 0, 128)])
def test_history_is_what_the_codec_decodes(name, lengths, sink, ring):
    layer = on_device(random_layer(FORMATS[name], 2, lengths, sink, ring))
    for row, num_tokens in enumerate(lengths):
        found = triton_history.history_rows(layer, row, room=5)
        for x_KTD, expected_KTD in zip(found, layer.dense_row(row), strict=True):
            assert x_KTD.shape[1] == num_tokens + 5
            assert torch.equal(x_KTD[:, :num_tokens], expected_KTD.bfloat16())


@pytest.mark.parametrize("num_queries", [2, 8])
def test_a_chunk_sees_all_history_and_its_own_past(num_queries):
    layer = on_device(random_layer(FORMATS["tokens"], 2, [0, 600, 333], 4, 256))
    generator = torch.Generator().manual_seed(1)
    q_HTD, k_KTD, v_KTD = (
        torch.randn(n, 40, 128, generator=generator).bfloat16().to(layer.pages_PKX.device) for n in (num_queries, 2, 2)
    )
    for row in range(3):
        found_HTD = triton_history.attend_chunk(q_HTD, k_KTD, v_KTD, layer, row, 0.1)
        k, v = (
            torch.cat([history, x.float()], dim=1).double().repeat_interleave(num_queries // 2, dim=0)
            for history, x in zip(layer.dense_row(row), (k_KTD, v_KTD), strict=True)
        )
        logits_HTN = q_HTD.double() @ k.mT * 0.1
        hidden_TN = torch.ones(40, k.shape[1], dtype=torch.bool, device=k.device).triu(k.shape[1] - 39)
        expected_HTD = logits_HTN.masked_fill(hidden_TN, -torch.inf).softmax(-1) @ v
        exact_HTD = attend_chunk(q_HTD, k_KTD, v_KTD, layer, row, 0.1)
        assert (exact_HTD - expected_HTD).norm() < 1e-5 * expected_HTD.norm()
        assert (found_HTD - expected_HTD).norm() < 1e-2 * expected_HTD.norm()


def test_formats_without_a_kernel_are_refused():
    layer = random_layer(PageFormat(RowFormat(64, 2, 64, zero_point="none"), RowFormat(64, 2, 64)), 1, [100], 4, 256)
    with pytest.raises(ValueError, match="no kernel reads"):
        triton_history.history_rows(layer, 0)


@pytest.mark.parametrize("channel", [False, True])
def test_compiles_for_hopper(channel, tmp_path):
    types = {"pages_ptr": "*u8", "table_ptr": "*i32", "k_ptr": "*bf16", "v_ptr": "*bf16"}
    types |= dict.fromkeys(("page_stride_p", "page_stride_k", "out_stride_k"), "i64")
    constants = {
        "D": 128, "PAGE": 64, "WIDTH": 128, "K_BITS": 2, "K_GROUP": 32, "K_CHANNEL": channel, "K_META": 4096, "K_NORM": 0,
        "V_BITS": 2, "V_GROUP": 128, "V_CODES": 2048, "V_META": 4352,
    }  # fmt: skip
    built = compile_for_hopper(
        "kvcompile.kernels.triton_history:_decode_kernel", types, constants, tmp_path, num_warps=4
    )
    assert not {"LDL", "STL"} & {opcode(line) for line in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", built["sass"])}
