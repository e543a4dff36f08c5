"""Calibration text: a text file, JSONL, a folder of either, or the text that comes with kvcompile."""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import CalibrationError

DOCUMENT_MARK = "<|doc|>"
"""A line that holds exactly this separates documents in a text file."""


@dataclass(frozen=True)
class Corpus:
    """Documents in the order in which they are drawn, and where they come from."""

    name: str
    documents: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Identity of the documents and their order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.encode())
            digest.update(b"\0")
        return digest.hexdigest()


def read_corpus(path: str | Path | None, field: str = "text", seed: int = 0) -> Corpus:
    """Documents of a `.txt`-like file, a `.jsonl` file (one object a line, the text in `field`) or a folder of both.

    `path` None is the bundled text. The documents are shuffled by `seed`. Raises CalibrationError naming file and line.
    """
    if path is None:
        name = "bundled"
        documents = _split(files("kvcompile.data").joinpath("calibration.txt").read_text("utf-8"))
    else:
        root = Path(path)
        if not root.exists():
            raise CalibrationError(f"calibration text {root} does not exist")
        sources = (
            sorted(f for f in root.rglob("*") if f.is_file() and not f.name.startswith("."))
            if root.is_dir()
            else [root]
        )
        name, documents = root.name, [document for source in sources for document in _read_file(source, field)]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise CalibrationError(f"calibration text {path} holds no text")
    random.Random(seed).shuffle(documents)
    return Corpus(name, tuple(documents))


def tokenize_corpus(corpus: Corpus, tokenizer: Any, tokens: int, sequence_length: int) -> list[Tensor]:
    """The first `tokens` token ids of the documents, joined, as int64 sequences ``[T]``, T at most `sequence_length`.

    Raises CalibrationError when the text is too short.
    """
    ids: list[int] = []
    for document in corpus.documents:
        if len(ids) >= tokens:
            break
        # A token is rarely longer than 16 characters: a very long document need not be tokenized to its end.
        ids += tokenizer(document[: 16 * (tokens - len(ids))] + "\n", add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
    if len(ids) < tokens:
        raise CalibrationError(
            f"calibration text '{corpus.name}' is too short: {len(ids)} tokens, but {tokens} are asked for; "
            "give more text with --calibration or ask for less with --calibration-tokens"
        )
    return list(torch.tensor(ids[:tokens]).split(sequence_length))


def _read_file(path: Path, field: str) -> Iterator[str]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"calibration text {path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix not in (".jsonl", ".ndjson"):
        yield from _split(text)
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split at U+2028, which JSON may contain
        if not line.strip():
            continue
        try:
            document = json.loads(line)[field]
            if not isinstance(document, str):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"{path}, line {number}: no JSON object with text in a field '{field}'; "
                "name the field with --calibration-field"
            ) from error
        yield document


def _split(text: str) -> list[str]:
    return [part.strip("\n") for part in f"\n{text}\n".split(f"\n{DOCUMENT_MARK}\n")]
