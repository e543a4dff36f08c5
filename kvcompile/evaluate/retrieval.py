"""Retrieval of a planted number from a long context, in the wording of RULER's needle-in-a-haystack task."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
NEAR = 0.02
"""Share of the text within which a needle waits for the end of a sentence, else of a line, else of a word."""
SHORTEST = 0.88
"""Share of the tokens asked for that a prompt must have."""
ATTEMPTS = 6


@dataclass(frozen=True)
class Trial:
    """One prompt, the number to be found, and the depth (share of the text before it) at which it is planted."""

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
    """`count` prompts with about `characters` of haystack, the needle at nearly evenly spaced depths after a sentence's end.

    A haystack that is too short is repeated.
    """
    draws = _draws(haystack, words, characters, count, seed)
    return [_plant(haystack, start, characters, depth, key, number) for start, depth, key, number in draws]


def _draws(
    haystack: str, words: Sequence[str], characters: int, count: int, seed: int
) -> Iterator[tuple[int, float, str, str]]:
    """What chance decides about each trial: where its text starts, and its key and number; and the depth it aims at."""
    draw = random.Random(seed)
    for i in range(count):
        start = draw.randrange(max(1, max(len(haystack), characters) - characters))
        key = f"{draw.choice(words)}-{draw.choice(words)}"
        yield start, (i + 0.5) / count, key, str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def _plant(haystack: str, start: int, characters: int, depth: float, key: str, number: str) -> Trial:
    """One prompt; the needle stands at the first sentence end, line end or space past `depth` that is near it."""
    if len(haystack) < start + characters:
        haystack = f"{haystack}\n" * -(-(start + characters) // max(1, len(haystack)))
    text = haystack[start : start + characters]
    aim = depth * len(text)
    position = int(aim)
    for end in (r"\.\s", r"\n", r"\s"):
        found = min((x.start() + 1 for x in re.finditer(end, text)), key=lambda place: abs(place - aim), default=None)
        later = next((x.start() + 1 for x in re.finditer(end, text) if x.start() + 1 > aim), found)
        if later is not None and abs(later - aim) <= NEAR * len(text):
            position = later
            break
    planted = text[:position] + NEEDLE.format(key=key, number=number) + text[position:]
    return Trial(HEAD + planted + QUESTION.format(key=key), number, position / max(1, len(text)))


def trials_of_length(
    haystack: str, words: Sequence[str], tokenizer: Any, tokens: int, count: int, seed: int = 0
) -> list[Trial]:
    """`make_trials` with prompts of `tokens` tokens at most, and, where the haystack allows, not many fewer.

    Each is cut anew until it fits: languages and tables take more tokens a character than the haystack does on average.
    """

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    sample = haystack[:200_000]
    characters = max(1, int((0.98 * tokens - OVERHEAD_TOKENS) * len(sample) / max(1, length(sample))))
    trials = []
    for start, depth, key, number in _draws(haystack, words, characters, count, seed):
        wanted = characters
        trial = _plant(haystack, start, wanted, depth, key, number)
        for _ in range(ATTEMPTS):
            found = length(trial.prompt)
            if SHORTEST * tokens <= found <= tokens:
                break
            kept = max(1, found - OVERHEAD_TOKENS)
            wanted = max(1, int(wanted * (0.97 * tokens - OVERHEAD_TOKENS) / kept))
            trial = _plant(haystack, start, wanted, depth, key, number)
        while length(trial.prompt) > tokens and wanted > 1:
            wanted = int(wanted * 0.9)
            trial = _plant(haystack, start, wanted, depth, key, number)
        trials.append(trial)
    return trials


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
