"""Running a model in float32 while its weights stay in their 16-bit dtype: exact, without a second copy of the model."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, torch.bmm, torch.addmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
)
_ELEMENTS_AT_ONCE = 1 << 21
"""Elements of a linear layer's weight upcast at a time: 8 MiB, however large the vocabulary."""


class Float32Compute(TorchFunctionMode):
    """Inside this mode embeddings come out in float32 and every matrix product is computed in float32.

    Element-wise operations follow by type promotion. A weight is upcast only while its product is computed.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _PRODUCTS:
            return func(*map(_upcast, args), **{name: _upcast(value) for name, value in kwargs.items()})
        result = func(*args, **kwargs)
        return _upcast(result) if func is F.embedding else result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias`` in float32, a few output channels at a time."""
    rows = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    parts = [torch.matmul(_upcast(input), _upcast(part).T) for part in weight.split(rows)]
    product = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return product if bias is None else product + _upcast(bias)


def _upcast(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
