"""RMS norms in one launch each: transformers writes them as eight small kernels, and a decoding step has four per layer."""

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_TOLERANCE = 2.0**-7
"""Of values in bfloat16: two roundings instead of one."""


def fuse_norms(model: nn.Module) -> int:
    """Let every plain RMS norm of `model` run as `torch.nn.functional.rms_norm`; how many do.

    A norm is plain if its outputs say so: ``weight * x / sqrt(mean(x^2) + variance_epsilon)``. Others stay as they are. In
    float32 nothing changes but the last bit; in bfloat16 one of two roundings is saved.
    """
    norms: list[Any] = [module for module in model.modules() if _is_plain(module)]
    for module in norms:
        module.forward = types.MethodType(_forward, module)
    return len(norms)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "variance_epsilon", None), float)
    if not named or not isinstance(weight, Tensor) or weight.ndim != 1 or "forward" in vars(module):
        return False
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    x_ND = torch.linspace(-2, 3, 4 * len(weight), device=weight.device).view(4, -1).to(weight.dtype)
    expected_ND, found_ND = module(x_ND), _forward(module, x_ND)
    return found_ND.dtype == expected_ND.dtype and torch.allclose(found_ND, expected_ND, rtol=_TOLERANCE, atol=1e-6)
