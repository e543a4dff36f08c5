"""Error-feedback rounding: codes chosen one channel after another, each error fed forward under the metric it is read with.

With a metric ``M = (I + U) D (I + U)^T`` (U strictly upper) the code of channel i quantizes ``x_i - sum_{j<i} e_j U_ji``, where
``e_j = x^_j - x_j`` is the error that channel j was left with. Scale and zero point are fixed beforehand. This is what LDLQ
and GPTQ do for weights (algorithms.md section 6); stored format and decoder do not change.

Every product is exact, so that a blocked evaluation, in any order, gives the codes of the sequential one: U is stored in
steps of 1/64 with ``|U| < 2``, and an error counts in whole steps of ``delta``, a power of two between 1/128 and 1/64 of the
row's largest scale, at most 511 of them. A sum of up to 256 products of these integers is below 2^24: float32 holds it.
"""

import torch
from torch import Tensor

FACTOR_STEP = 1 / 64
FACTOR_LIMIT = 127
ERROR_LIMIT = 511
BLOCK = 16
MAX_FEEDBACK_DIM = 256


def feedback_factor(metric_KDD: Tensor, damping: float) -> Tensor:
    """The factor U ``[K, D, D]`` float32 of symmetric float64 metrics, as it is stored: in steps of 1/64.

    The metric is brought to a mean diagonal of 1 and `damping` is added to its diagonal.
    """
    dim = metric_KDD.shape[-1]
    mean = metric_KDD.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-300)
    eye = torch.eye(dim, dtype=metric_KDD.dtype, device=metric_KDD.device)
    damped = metric_KDD / mean[:, None, None] + damping * eye
    # M = L L^T with the order of channels reversed is M = A A^T with A upper triangular; U is A with unit columns.
    upper = torch.linalg.cholesky(damped.flip(-1, -2)).flip(-1, -2)
    factor = upper / upper.diagonal(dim1=-2, dim2=-1)[:, None, :] - eye
    steps = (factor.triu(1) / FACTOR_STEP).round().clamp(-FACTOR_LIMIT, FACTOR_LIMIT)
    return (steps * FACTOR_STEP).float()


def feedback_codes(
    x: Tensor, scale: Tensor, zero: Tensor, factor_KDD: Tensor, bits: int, group_size: int, group_dim: int
) -> Tensor:
    """Codes uint8 ``[..., K, T, D]`` of float32 rows; scale and zero point are those of their groups along `group_dim`."""
    levels, head_dim = 2**bits - 1, x.shape[-1]
    scale, zero = (grid.repeat_interleave(group_size, group_dim) for grid in (scale, zero))
    delta = torch.ldexp(torch.ones_like(scale[..., :1]), torch.frexp(scale.amax(-1, keepdim=True)).exponent - 7)
    steps_KDD = factor_KDD / FACTOR_STEP
    unit = delta * FACTOR_STEP
    errors, codes = torch.zeros_like(x), torch.empty_like(x)
    for start in range(0, head_dim, BLOCK):
        block = slice(start, start + BLOCK)
        fed = errors[..., :start] @ steps_KDD[:, :start, block]
        within = steps_KDD[:, block, block]
        for i in range(fed.shape[-1]):
            c = slice(start + i, start + i + 1)
            exact, s, z = x[..., c], scale[..., c], zero[..., c]
            code = ((exact - fed[..., i : i + 1] * unit) / s + z).clamp_(0, levels).round_()
            error = (((code - z) * s - exact) / delta).round_().clamp_(-ERROR_LIMIT, ERROR_LIMIT)
            codes[..., c], errors[..., c] = code, error
            fed = fed + error * within[:, i : i + 1]
    return codes.to(torch.uint8)
