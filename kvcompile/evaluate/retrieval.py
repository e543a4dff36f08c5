"""Retrieval of a planted number from a long context, in the wording of RULER's needle-in-a-haystack task."""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
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
ANSWER_TOKENS = DIGITS + 3
OVERHEAD_TOKENS = 120
"""Left for the task's own sentences when a haystack is cut to a number of tokens."""


@dataclass(frozen=True)
class Trial:
    """One prompt, the number to be found, and the depth (0 start, 1 end) at which it is planted."""

    prompt: str
    number: str
    depth: float


@dataclass(frozen=True)
class Finding:
    """How one trial ended."""

    depth: float
    found: bool


@dataclass(frozen=True)
class Retrieval:
    """The trials at one context length."""

    tokens: int
    findings: tuple[Finding, ...]

    @property
    def share(self) -> float:
        """Share of the numbers that were found."""
        return sum(finding.found for finding in self.findings) / len(self.findings)


def default_words() -> list[str]:
    """The words that keys are built from unless others are given."""
    return files("kvcompile.data").joinpath("words.txt").read_text("utf-8").split()


def make_trials(haystack: str, words: Sequence[str], characters: int, count: int, seed: int = 0) -> list[Trial]:
    """`count` prompts with about `characters` of haystack, the needle at evenly spaced depths after a sentence's end.

    A haystack that is too short is repeated.
    """
    draw = random.Random(seed)
    if len(haystack) < characters:
        haystack = f"{haystack}\n" * -(-characters // len(haystack))
    trials = []
    for i in range(count):
        start = draw.randrange(max(1, len(haystack) - characters))
        text = haystack[start : start + characters]
        depth = (i + 0.5) / count
        ends = [end.start() + 1 for end in re.finditer(r"\.\s", text)] or [len(text)]
        position = next((end for end in ends if end > depth * len(text)), ends[-1])
        key = f"{draw.choice(words)}-{draw.choice(words)}"
        number = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        planted = text[:position] + NEEDLE.format(key=key, number=number) + text[position:]
        trials.append(Trial(HEAD + planted + QUESTION.format(key=key), number, depth))
    return trials


def trials_of_length(
    haystack: str, words: Sequence[str], tokenizer: Any, tokens: int, count: int, seed: int = 0
) -> list[Trial]:
    """`make_trials` with prompts of about `tokens` tokens (a little less, so that they fit), at least 256."""
    sample = haystack[:200_000]
    characters_per_token = len(sample) / len(tokenizer(sample, verbose=False)["input_ids"])
    characters = int((0.98 * tokens - OVERHEAD_TOKENS) * characters_per_token)
    return make_trials(haystack, words, characters, count, seed)


def retrieves(model: PreTrainedModel, tokenizer: Any, cache: Cache, trial: Trial) -> bool:
    """Whether the model, generating greedily with `cache`, continues the prompt with the planted number."""
    ids = tokenizer(trial.prompt, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids.to(
        model.device
    )
    with torch.inference_mode():
        generate: Any = model.generate
        output: Tensor = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
        )
    answer = tokenizer.decode(output[0, ids.shape[1] :])
    return trial.number in answer.replace(" ", "")


def retrieval(
    model: PreTrainedModel,
    tokenizer: Any,
    make_cache: Callable[[], Cache],
    trials: Iterable[Trial],
    on_trial: Callable[[Trial, bool], None] = lambda *_: None,
) -> tuple[Finding, ...]:
    """How each trial ends, each with a fresh cache."""
    findings = []
    for trial in trials:
        findings.append(Finding(trial.depth, retrieves(model, tokenizer, make_cache(), trial)))
        on_trial(trial, findings[-1].found)
    return tuple(findings)
