"""`kvcompile eval`: what a converted model is worth, all of it through the real packed cache."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcompile.checkpoint import open_checkpoint
from kvcompile.errors import KvCompileError
from kvcompile.evaluate.divergence import Divergence, losses, reference_logits, scores
from kvcompile.evaluate.retrieval import (
    ANSWER_TOKENS,
    Retrieval,
    Trial,
    default_words,
    retrieval,
    trials_of_length,
)
from kvcompile.evaluate.teacher_forcing import first_page
from kvcompile.evaluate.text import EvaluationText, cut_windows, held_back_text, read_text
from kvcompile.models import EXACT, load_model, resolve_device
from kvcompile.runtime import load, new_cache
from kvcompile.runtime.cache import PackedCache, dense_bytes

Track = Callable[..., Iterable[Any]]
"""``track(items, description, unit, size)`` iterates and shows progress."""

SHORTEST_RETRIEVAL = 256


def untracked(items: Sequence[Any], *_: Any) -> Iterable[Any]:
    """Iterate without showing progress."""
    return items


@dataclass(frozen=True)
class Workload:
    """What a model is evaluated on: windows ``[N, T]`` of token ids, counted from position `start` on, and trials."""

    text: str
    windows_NT: Tensor
    start: int
    trials: Mapping[int, Sequence[Trial]]


@dataclass(frozen=True)
class Quality:
    """What a workload shows about one model and cache.

    Perplexity and divergence count the positions past a quarter of each window. `cache_bytes` are of one window's cache.
    """

    perplexity: float
    divergence: Divergence | None
    retrieval: tuple[Retrieval, ...]
    cache_bytes: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`: what was measured, and on what."""

    path: str
    scheme: str
    backend: str
    bits_per_element: dict[str, float]
    text: str
    windows: int
    window_tokens: int
    counted_from: int
    reference: str | None
    quality: Quality

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the share of every retrieval length."""
        document = asdict(self)
        for entry, found in zip(document["quality"]["retrieval"], self.quality.retrieval, strict=True):
            entry["share"] = found.share
        return document


def evaluate(
    directory: str | Path,
    *,
    text: str | Path | None = None,
    kl: bool = False,
    against: str | Path | None = None,
    windows: int = 4,
    length: int = 2048,
    retrieval: Sequence[int] = (),
    haystack: str | Path | None = None,
    words: Sequence[str] | None = None,
    trials: int = 12,
    device: str = "cpu",
    backend: str | None = None,
    source: str | Path | None = None,
    track: Track = untracked,
) -> Evaluation:
    """Measure the converted model in `directory`: perplexity, with `kl` (or `against`) divergence, and retrieval.

    `text` is a file; by default the documents of the bundled text that its calibration has not read. The reference of the
    divergence is the model itself without a packed cache, or the checkpoint `against`. `retrieval` are context lengths in
    tokens, `trials` the numbers planted at each, `haystack` a file to plant them in (default: the text). Raises
    KvCompileError for text that is too short, lengths that the model cannot take, or an artifact that cannot be used.
    """
    model, tokenizer = load(directory, device=resolve_device(device), backend=backend, source=source)
    compiled: Any = model
    manifest = compiled.kvcompile.manifest
    evaluated = read_text(text) if text else held_back_text([manifest.calibration], tokenizer)
    make_cache = partial(new_cache, model)
    work = make_workload(
        model, tokenizer, evaluated, windows, length, retrieval, haystack, words, trials, first_page(make_cache()) or 0
    )
    reference = model
    if against is not None:
        reference = load_model(open_checkpoint(against).path, EXACT, model.device)
    logits = partial(reference_logits, reference) if kl or against else None
    quality = measure_quality(model, tokenizer, make_cache, work, logits, track)
    return Evaluation(
        str(directory),
        manifest.scheme.name,
        compiled.kvcompile.backend.name,
        dict(manifest.bits_per_element),
        work.text,
        work.windows_NT.shape[0],
        work.windows_NT.shape[1],
        work.start,
        None if logits is None else str(against or "the model itself without a packed cache"),
        quality,
    )


def make_workload(
    model: PreTrainedModel,
    tokenizer: Any,
    text: EvaluationText,
    windows: int,
    length: int,
    retrieval: Sequence[int],
    haystack: str | Path | None,
    words: Sequence[str] | None,
    trials: int,
    needed: int,
) -> Workload:
    """Cut windows from `text` and plant numbers. The first `needed` tokens of a window are exact and not counted.

    Raises KvCompileError for a retrieval length that is too short to hold the task or too long for the model.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    limit = int(positions or max(length, *retrieval, 0) + ANSWER_TOKENS)
    for tokens in retrieval:
        if not SHORTEST_RETRIEVAL <= tokens <= limit - ANSWER_TOKENS:
            raise KvCompileError(
                f"cannot test retrieval at {tokens} tokens: the task takes at least {SHORTEST_RETRIEVAL}, and the model has "
                f"{limit} positions, {ANSWER_TOKENS} of them for the answer"
            )
    windows_NT = cut_windows(text, tokenizer, windows, min(length, limit), needed)
    hay = read_text(haystack).text if haystack else text.text
    planted = {n: trials_of_length(hay, words or default_words(), tokenizer, n, trials) for n in retrieval}
    return Workload(text.name, windows_NT, max(windows_NT.shape[1] // 4, needed), planted)


def measure_quality(
    model: PreTrainedModel,
    tokenizer: Any,
    make_cache: Callable[[], Cache],
    work: Workload,
    reference: Callable[[Tensor], Tensor] | None,
    track: Track,
) -> Quality:
    """Run a workload through fresh caches; `reference` gives the logits ``[1, T, V]`` to compare with, window by window."""
    started = time.perf_counter()
    found, loss, cache = [], [], make_cache()
    for ids_T in track(list(work.windows_NT), "windows", "tok", len):
        cache = make_cache()
        if reference is None:
            loss.append(losses(model, cache, ids_T[None], work.start))
        else:
            found.append(scores(model, cache, ids_T[None], reference(ids_T[None]), work.start))
            loss.append(found[-1].loss_N)
    retrieved = tuple(
        Retrieval(
            tokens,
            retrieval(model, tokenizer, make_cache, track(trials, f"retrieval {tokens}", "trial", lambda _: 1)),
        )
        for tokens, trials in work.trials.items()
    )
    return Quality(
        float(torch.cat(loss).mean().exp()),
        Divergence.of(found) if found else None,
        retrieved,
        cache.nbytes() if isinstance(cache, PackedCache) else dense_bytes(cache.layers),
        time.perf_counter() - started,
    )


def parse_lengths(text: str) -> tuple[int, ...]:
    """``"4k,8192"`` as (4096, 8192). Raises KvCompileError for anything else."""
    lengths = []
    for part in filter(None, (part.strip().lower() for part in text.split(","))):
        digits = part.removesuffix("k")
        if not digits.isdecimal() or int(digits) < 1:
            raise KvCompileError(f"'{part}' is no context length; write lengths such as 4k,8k or 4096")
        lengths.append(int(digits) * (1024 if part.endswith("k") else 1))
    return tuple(dict.fromkeys(lengths))
