"""The decoding step of a model as one CUDA graph: captured once, replayed for every new token.

Shapes: B batch rows, V vocabulary.

A packed cache keeps what changes from step to step (lengths, page tables) on the device at fixed addresses, and the kernels
read it there; so one graph serves all lengths. Around a replay the host does what it does around an eager step: it takes pages,
encodes those that are due, sends lengths and tables, and counts. The graph is captured again when an address has changed.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvcompile.errors import CacheError
from kvcompile.runtime.cache import PackedCache

SWITCH = "KVCOMPILE_CUDA_GRAPH"
"""Environment variable; 0 keeps generation eager."""


class StepGraph:
    """Steps of one real token per row through `model` and a filled `cache`; the result is that of the model's forward.

    With ``capture=False`` a replay calls the forward instead, between the same bookkeeping and through the same static
    inputs: what can be tested without CUDA. `captures` counts how often the step was captured.
    """

    def __init__(self, model: PreTrainedModel, cache: PackedCache, *, capture: bool = True):
        self.model, self.cache, self.capture = model, cache, capture
        self.captures = 0
        self._forward: Callable[..., Any] = model.forward  # as it is now: generation may replace it by this graph
        self._replay: Callable[[], None] = self._run
        self._address: tuple[int, ...] | None = None

    @torch.no_grad()
    def __call__(self, ids_B1: Tensor, positions_B1: Tensor | None = None) -> CausalLMOutputWithPast:
        """Decode one token per row; positions (``[B, 1]`` or ``[1, 1]``) default to the cache's column count.

        Vision-language models have several positions per token: ``[S, B, 1]``.

        Raises CacheError where the cache cannot take the tokens, or the forward cannot be captured.
        """
        batch, columns = ids_B1.shape[0], self.cache.get_seq_length()
        self.cache.begin_token(batch)
        sections = () if positions_B1 is None else tuple(positions_B1.shape[:-2])
        address = (*self.cache.address, *sections)
        if address != self._address:
            self._allocate(batch, sections)
        self._ids_B1.copy_(ids_B1)
        if positions_B1 is None:
            self._positions_B1.fill_(columns)
        else:
            self._positions_B1.copy_(positions_B1)
        if address != self._address:
            self._record()
            self._address = address
        self._replay()
        self.cache.count_token()
        return CausalLMOutputWithPast(logits=self._logits_B1V.clone(), past_key_values=self.cache)  # type: ignore[arg-type]

    def _allocate(self, batch: int, sections: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # so that later steps may run outside of it
            self._ids_B1 = torch.zeros(batch, 1, dtype=torch.long, device=self.model.device)
            self._positions_B1 = self._ids_B1.new_zeros(*sections, batch, 1)

    def _record(self) -> None:
        """Make a replayable step. The token's slots are written early, and again by the replay; nothing is counted."""
        if self.capture:
            torch.cuda.synchronize(self.model.device)  # an earlier graph may be running still
        self._address, self._replay = None, self._run  # lets go of it and its memory
        self.captures += 1
        if not self.capture:
            self._run()
            return
        with torch.cuda.device(self.model.device):
            warm_up = torch.cuda.Stream()
            warm_up.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm_up):
                self._run()  # compiles kernels, makes workspaces
            torch.cuda.current_stream().wait_stream(warm_up)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._run()
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise CacheError(
                    f"a decoding step of this model cannot be captured as a CUDA graph: {reason}; set {SWITCH}=0"
                ) from error
        self._replay = graph.replay

    def _run(self) -> None:
        """The step by the model's own forward, as often as one likes: its counts are taken back."""
        output = self._forward(
            input_ids=self._ids_B1, position_ids=self._positions_B1, past_key_values=self.cache, use_cache=True
        )
        self.cache.count_token(-1)
        self._logits_B1V = output.logits


def can_capture(cache: object, model: PreTrainedModel) -> TypeGuard[PackedCache]:
    """Whether steps of `model` with `cache` can be graphs: on one CUDA device, every layer packed and read by kernels."""
    return (
        os.environ.get(SWITCH, "1") != "0"
        and model.device.type == "cuda"
        and isinstance(cache, PackedCache)
        and cache.captures
        and not any(_changes_with_length(module) or _caps_logits(module) for module in model.modules())
    )


@contextmanager
def replayed_steps(
    model: PreTrainedModel, cache: PackedCache, prompt: int, *, capture: bool = True
) -> Iterator[StepGraph]:
    """While this lasts, `model` replays steps of one token that follow `prompt` columns; its forward does all others."""
    graph = StepGraph(model, cache, capture=capture)
    forward, own = model.forward, vars(model).get("forward")

    @functools.wraps(forward)  # transformers looks at the signature
    def forward_or_replay(*args: Any, **kwargs: Any) -> Any:
        step = None if args else _step(cache, prompt, **kwargs)
        return forward(*args, **kwargs) if step is None else graph(*step)

    patched: Any = model
    patched.forward = forward_or_replay
    try:
        yield graph
    finally:
        del patched.forward
        if own is not None:
            patched.forward = own


def _step(
    cache: PackedCache,
    prompt: int,
    input_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: object = None,
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """Ids and positions of a plain step of one real token per row, or None for any other call.

    A mask is not looked at: what generation appends to a prompt is real, and the prompt's padding was settled with it.
    """
    columns = cache.get_seq_length()
    ours = past_key_values is cache and input_ids is not None and input_ids.shape[1] == 1
    padded = attention_mask is not None and getattr(attention_mask, "shape", ())[1:] != (columns + 1,)
    if not ours or padded or columns < max(prompt, 1) or not all(_is_plain(*setting) for setting in settings.items()):
        return None
    assert input_ids is not None
    return input_ids, position_ids


def _is_plain(name: str, value: object) -> bool:
    """Whether a setting of the forward is that of a plain step, which gives logits and nothing else."""
    if name in ("use_cache", "return_dict"):
        return value is not False
    return value is None or value is False or name in ("logits_to_keep", "cache_position")


def _caps_logits(module: nn.Module) -> bool:
    """Whether the host attends in a step: no kernel caps logits."""
    return getattr(module, "attn_logit_softcapping", None) is not None


def _changes_with_length(module: nn.Module) -> bool:
    """Whether the host looks at positions in a step: rotary embeddings that are computed anew for long texts."""
    kinds = getattr(module, "rope_type", "")
    return any(
        "dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )
