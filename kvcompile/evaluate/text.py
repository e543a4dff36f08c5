"""Text to evaluate on: a user's file, or the documents of the bundled text that calibration has not read."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.artifact import CalibrationRecord
from kvcompile.calibration import read_corpus
from kvcompile.calibration.text import DOCUMENT_MARK
from kvcompile.errors import KvCompileError

BUNDLED = "bundled text, documents that calibration has not read"


@dataclass(frozen=True)
class EvaluationText:
    """Text and what to call it in a report."""

    name: str
    text: str


def read_text(path: str | Path) -> EvaluationText:
    """A UTF-8 text file; lines that mark documents are dropped. Raises KvCompileError when there is no text in it."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise KvCompileError(f"evaluation text {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise KvCompileError(f"evaluation text {path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise KvCompileError(f"evaluation text {path} holds no text")
    return EvaluationText(path.name, text.replace(DOCUMENT_MARK, "\n"))


def held_back_text(calibrations: Iterable[CalibrationRecord | None], tokenizer: Any) -> EvaluationText:
    """The documents of the bundled text that none of these calibrations has read.

    A calibration on other text has read none of them. Raises KvCompileError when nothing is left, or when what was read
    cannot be told because the bundled text has changed since.
    """
    corpus = read_corpus(None)
    unread = dict.fromkeys(corpus.documents)
    for record in calibrations:
        if record is None or record.text != corpus.name:
            continue
        drawn = read_corpus(None, seed=record.seed)
        if drawn.sha256 != record.text_sha256:
            raise KvCompileError(
                "the model was calibrated on a bundled text of another version, so it cannot be told which part of ours it "
                "has not seen; give evaluation text with --text FILE"
            )
        for document in _documents_read(drawn.documents, tokenizer, record.tokens):
            unread.pop(document, None)
    if not unread:
        raise KvCompileError("calibration has read all of the bundled text; give evaluation text with --text FILE")
    return EvaluationText(BUNDLED, "\n".join(unread))


def cut_windows(text: EvaluationText, tokenizer: Any, count: int, length: int, needed: int) -> Tensor:
    """Windows ``[N, T]`` of token ids, evenly spaced in the text: at most `count`, at most `length` long.

    A short text gives fewer windows rather than shorter ones. Raises KvCompileError where a window would not have more
    than `needed` tokens: so many are exact under the scheme, and nothing would be measured.
    """
    ids_T = torch.tensor(tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"])
    if min(length, len(ids_T)) <= needed + 1:
        raise KvCompileError(
            f"a window of {min(length, len(ids_T))} tokens is too short to measure anything: the first {needed} are not "
            f"quantized; {text.name} has {len(ids_T)} tokens: give longer text with --text or a larger --length, or use a "
            "scheme with smaller windows"
        )
    length = min(length, len(ids_T))
    count = max(1, min(count, len(ids_T) // length))
    return torch.stack([ids_T[i * len(ids_T) // count :][:length] for i in range(count)])


def _documents_read(documents: Iterable[str], tokenizer: Any, tokens: int) -> list[str]:
    """The documents of which `tokenize_corpus` takes its first `tokens` tokens."""
    read, seen = [], 0
    for document in documents:
        if seen >= tokens:
            break
        read.append(document)
        seen += len(tokenizer(document + "\n", add_special_tokens=False, verbose=False)["input_ids"])
    return read
