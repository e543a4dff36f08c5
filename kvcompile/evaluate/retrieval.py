"""Retrieval of a planted number from a long context, in the wording of RULER's needle-in-a-haystack task."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = " One of the special magic numbers for {key} is: {number}."
QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
DIGITS = 7


@dataclass(frozen=True)
class Trial:
    """One prompt, the number to be found, and the depth (0 start, 1 end) at which it is planted."""

    prompt: str
    number: str
    depth: float


def make_trials(haystack: str, words: Sequence[str], characters: int, count: int, seed: int = 0) -> list[Trial]:
    """`count` prompts with about `characters` of haystack, the needle at evenly spaced depths after a sentence's end."""
    draw = random.Random(seed)
    trials = []
    for i in range(count):
        start = draw.randrange(max(1, len(haystack) - characters))
        text = haystack[start : start + characters]
        depth = (i + 0.5) / count
        position = text.find(". ", int(depth * len(text))) + 1 or text.rfind(". ") + 1
        key = f"{draw.choice(words)}-{draw.choice(words)}"
        number = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        planted = text[:position] + NEEDLE.format(key=key, number=number) + text[position:]
        trials.append(Trial(HEAD + planted + QUESTION.format(key=key), number, depth))
    return trials


def retrieves(model: PreTrainedModel, tokenizer: Any, cache: Cache, trial: Trial) -> bool:
    """Whether the model, generating greedily with `cache`, continues the prompt with the planted number."""
    ids = tokenizer(trial.prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
    with torch.inference_mode():
        generate: Any = model.generate
        output: Tensor = generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=DIGITS + 3, do_sample=False
        )
    answer = tokenizer.decode(output[0, ids.shape[1] :])
    return trial.number in answer.replace(" ", "")


def retrieval(
    model: PreTrainedModel,
    tokenizer: Any,
    make_cache: Callable[[], Cache],
    trials: Sequence[Trial],
    on_trial: Callable[[Trial, bool], None] = lambda *_: None,
) -> float:
    """Share of the trials that succeed, each with a fresh cache."""
    found = []
    for trial in trials:
        found.append(retrieves(model, tokenizer, make_cache(), trial))
        on_trial(trial, found[-1])
    return sum(found) / len(found)
