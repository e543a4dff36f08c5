"""Text in, text out, from a packed cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer
from transformers.cache_utils import Cache

from kvcompile.errors import CacheError
from kvcompile.runtime.cache import PackedCache, dense_bytes
from kvcompile.runtime.load import new_cache


@dataclass(frozen=True)
class Generation:
    """The text that followed the prompt, token counts, and the bytes that the cache took at the end."""

    text: str
    prompt_tokens: int
    new_tokens: int
    cache_bytes: int


class _CallbackStreamer(TextStreamer):
    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    cache: Cache | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continue `prompt` with a model from `kvcompile.load`; `on_text` receives text as it is produced.

    Temperature 0 is greedy. `cache` defaults to a new packed cache. Raises CacheError for an empty prompt.
    """
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    inputs.pop("token_type_ids", None)
    if inputs["input_ids"].numel() == 0:
        raise CacheError("the prompt is empty; give at least one character")
    cache = new_cache(model) if cache is None else cache
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
        torch.manual_seed(seed)
    streamer = _CallbackStreamer(tokenizer, on_text) if on_text else None
    compiled: Any = model
    with torch.inference_mode():
        output = compiled.generate(
            **inputs, past_key_values=cache, max_new_tokens=max_new_tokens, streamer=streamer, **sampling
        )
    prompt_tokens = inputs["input_ids"].shape[1]
    new_ids = output[0, prompt_tokens:]
    nbytes = cache.nbytes() if isinstance(cache, PackedCache) else dense_bytes(cache.layers)
    return Generation(tokenizer.decode(new_ids, skip_special_tokens=True), prompt_tokens, len(new_ids), nbytes)
