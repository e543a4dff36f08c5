"""The model `kvcompile` for lm-evaluation-harness: its tasks, answered through the packed cache.

    python -m kvcompile.evaluate.lm_eval --model kvcompile --model_args pretrained=out/ --tasks hellaswag

is the harness's own command after this module has registered the model, which lm_eval up to 0.4.13 needs. Later versions
find it by the entry point ``lm_eval.models``, and ``lm_eval --model kvcompile ...`` is enough.
"""

from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import KvCompileError
from kvcompile.evaluate.teacher_forcing import teacher_forced
from kvcompile.models import resolve_device
from kvcompile.runtime import load, new_cache

try:
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    message = f"lm-evaluation-harness cannot be imported ({error}); install it with: pip install 'kvcompile[lm-eval]'"
    if __name__ == "__main__":
        raise SystemExit(f"error: {message}") from None
    raise KvCompileError(message) from error

NAME = "kvcompile"


class KvCompileLM(HFLM):
    """An artifact as the harness sees it: HFLM, except that every forward pass goes through a packed cache.

    1. Loglikelihoods are teacher-forced in chunks, so every token sees the pages that it would see when decoded; one
       ordinary forward pass would be exact and measure nothing.
    2. Generation is the model's own, with a fresh packed cache for each batch.
    3. A context that fits the BF16 windows is exact, as it is in use: short tasks cannot tell schemes apart.
    """

    def __init__(
        self,
        pretrained: str,
        device: str = "cpu",
        cache_backend: str | None = None,
        source: str | None = None,
        dtype: str | torch.dtype = "auto",
        **kwargs: Any,
    ) -> None:
        """Load the artifact `pretrained`; `source` says where an overlay's weights are, other arguments are HFLM's."""
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "cpu"  # the harness asks for cuda:0 unless it is told otherwise, and its own models do the same
        model, tokenizer = load(
            pretrained, device=resolve_device(device), dtype=dtype, backend=cache_backend, source=source
        )
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", **kwargs)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits ``[B, T, V]``; right padding comes after all real tokens of a row and touches none of them."""
        return torch.cat([logits for _, logits in teacher_forced(self.model, new_cache(self.model), inps)], dim=1)


if NAME not in model_registry:
    register_model(NAME)(KvCompileLM)


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
