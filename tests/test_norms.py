"""Fused norms compute what the model's own do, and only plain ones are touched."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvcompile.runtime.norms import fuse_norms
from tests.conftest import family_config


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_stay(family, dtype, tolerance):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family), dtype=dtype)
    ids = torch.randint(2, 4000, (2, 40))
    with torch.no_grad():
        before = model(ids).logits
        assert fuse_norms(model) == (9 if family == "qwen3" else 5)  # 4 or 2 per layer, and the last one
        torch.testing.assert_close(model(ids).logits, before, rtol=tolerance, atol=tolerance)
    assert fuse_norms(model) == 0


class ShiftedRMSNorm(nn.Module):
    """As Gemma has it: the weight counts from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(8)), 1e-6

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class GatedRMSNorm(ShiftedRMSNorm):
    """Takes more than rows."""

    def forward(self, x, gate):
        return super().forward(x) * gate


def test_other_norms_are_left_alone():
    norms = nn.ModuleList([ShiftedRMSNorm(), GatedRMSNorm(), nn.LayerNorm(8)])
    assert fuse_norms(norms) == 0
    assert norms[0](torch.ones(1, 8)).allclose(torch.ones(1, 8), atol=1e-5)
