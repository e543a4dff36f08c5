"""Trains `examples/checkpoint/`: a 3.8M-parameter Qwen3 that reads prose and retrieves from its context.

Two stages, so that the machine with the GPU needs neither the texts nor a network:

    python examples/train_example.py prepare --text train.txt.xz --heldout heldout.txt --work WORK
    python examples/train_example.py train --work WORK --out examples/checkpoint --seconds 330

`prepare` trains the tokenizer and tokenizes the texts (public-domain books; a line that begins with `<|doc|>`
begins a document). `train` mixes plain text, copy documents and synthetic retrieval documents in the wording
of RULER's NIAH task. Its learning rate and its curriculum follow the elapsed fraction of `--seconds`, so the
result is always saved in time.

Spaces before digits: every digit is a token, and the space before a number is always the single token `Ġ`,
because `Digits` splits the text before `ByteLevel` does: " is 1234567." is [Ġis, Ġ, 1, 2, 3, 4, 5, 6, 7, .].
After a prompt that ends in " is", the model therefore generates 8 tokens: `Ġ`, then the 7 digits.

Shape suffixes: B batch rows, L tokens of a row, V vocabulary.
"""

import argparse
import contextlib
import json
import lzma
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

Ids = np.ndarray  # one-dimensional int64 token ids

EOS, PAD = 0, 1
END_OF_TEXT, PAD_TOKEN = "<|endoftext|>", "<|pad|>"
VOCAB_SIZE, MAX_POSITIONS = 4096, 4096
NUMBER_DIGITS = 7

INTRO = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = (" One of the special magic numbers for", " is: ", ".")
QUESTION = (
    "\nWhat is the special magic number for",
    " mentioned in the provided text? The special magic number for",
    " mentioned in the provided text is",
)

# Loss weights. Needle keys and digits cannot be predicted, so they cost nothing; answers can, and cost most.
UNPREDICTABLE, TEMPLATE, PLAIN, ANSWER = 0.0, 0.3, 1.0, 5.0


# ---- prepare: tokenizer, words, token arrays ---------------------------------------------------------------


def read_documents(path: Path) -> list[str]:
    """Reads a text file (plain or .xz) and splits it at the `<|doc|>` lines."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    documents = re.split(r"^<\|doc\|>", data.decode("utf-8"), flags=re.MULTILINE)
    return [text for text in (document.strip() for document in documents) if text]


def train_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """Trains a byte-level BPE whose digits are always tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json (compact) and a tokenizer_config.json that AutoTokenizer reads."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD_TOKEN,
        "padding_side": "left",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", config)


def frequent_words(documents: Sequence[str], count: int) -> list[str]:
    """The most frequent lower-case words of 4 to 10 letters, from which keys are built."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(re.findall(r"(?<![\w’'-])[a-z]{4,10}(?![\w’'-])", document))
    return [word for word, _ in counts.most_common(count)]


def tokenize_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """All documents as one uint16 array, an end-of-text token before each."""
    encodings = tokenizer.encode_batch(documents)
    return np.concatenate([np.array([EOS, *encoding.ids], dtype=np.uint16) for encoding in encodings])


def check_assembly(tokenizer: Tokenizer, builder: "DocumentBuilder", count: int = 300) -> None:
    """Concatenated ids must equal what the tokenizer gives on the concatenated text."""
    rng = np.random.default_rng(1)
    for index in range(count):
        ids, _ = builder.retrieval(rng, int(rng.integers(160, 2048)))
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        again = tokenizer.encode(text).ids
        if again != ids.tolist():
            at = next(i for i, pair in enumerate(zip(again, ids, strict=False)) if pair[0] != pair[1])
            near = tokenizer.decode(ids[max(0, at - 8) : at + 8].tolist())
            raise SystemExit(f"document {index} re-encodes differently at token {at}: ...{near!r}...")


def prepare(args: argparse.Namespace) -> None:
    """Fills the work folder: tokenizer files, tokens.npz, words.json."""
    args.work.mkdir(parents=True, exist_ok=True)
    documents, heldout_documents = read_documents(args.text), read_documents(args.heldout)
    tokenizer = train_tokenizer(documents)
    save_tokenizer(tokenizer, args.work)
    words = frequent_words(documents, args.words)
    np.random.default_rng(0).shuffle(words)
    cut = len(words) * 4 // 5
    write_json(args.work / "words.json", {"train": words[:cut], "evaluation": words[cut:]})
    tokens = tokenize_documents(tokenizer, documents)
    heldout = tokenize_documents(tokenizer, heldout_documents)
    heldout_bytes = sum(len(document.encode()) for document in heldout_documents)
    np.savez_compressed(args.work / "tokens.npz", train=tokens, heldout=heldout, heldout_bytes=np.array(heldout_bytes))
    work = Work.load(args.work)
    check_assembly(tokenizer, DocumentBuilder(work.tokenizer, work.train, work.words["train"]))
    size = sum(file.stat().st_size for file in args.work.iterdir())
    print(f"{len(tokens)} training and {len(heldout)} held-out tokens, {len(words)} words, {size / 1e6:.1f} MB")


def write_json(path: Path, value: Any) -> None:
    """Writes readable JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass
class Work:
    """What `prepare` left in the work folder."""

    tokenizer: Tokenizer
    train: Ids
    heldout: Ids
    heldout_bytes: int
    words: dict[str, list[str]]

    @classmethod
    def load(cls, folder: Path) -> "Work":
        """Reads the work folder."""
        arrays = np.load(folder / "tokens.npz")
        return cls(
            tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
            train=arrays["train"].astype(np.int64),
            heldout=arrays["heldout"].astype(np.int64),
            heldout_bytes=int(arrays["heldout_bytes"]),
            words=json.loads((folder / "words.json").read_text(encoding="utf-8")),
        )


# ---- documents ---------------------------------------------------------------------------------------------


class DocumentBuilder:
    """Builds training rows by concatenating token ids; the tokenizer runs only here in the constructor.

    1. Haystacks begin where a paragraph begins and are cut only where a sentence ends and a space follows,
       so that no pre-tokenizer chunk spans a seam.
    2. A key is two words, `{word}-{word}`; a word has one id sequence after a space, one after the hyphen.
    3. A document is (ids, weights): weights[i] is the loss weight of predicting ids[i].
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Ids, words: Sequence[str]) -> None:
        def encode(text: str) -> Ids:
            return np.array(tokenizer.encode(text).ids, dtype=np.int64)

        self.tokens = tokens
        self.intro = encode(INTRO)
        self.needle = [encode(part) for part in NEEDLE]
        self.question = [encode(part) for part in QUESTION]
        self.space, self.full_stop, self.hyphen = encode(" "), encode("."), encode("-")
        self.digits = np.concatenate([encode(str(digit)) for digit in range(10)])
        self.first_words = [np.array(e.ids) for e in tokenizer.encode_batch([f" {word}" for word in words])]
        self.second_words = [np.array(e.ids) for e in tokenizer.encode_batch(list(words))]
        self._find_seams(tokenizer)

    def _find_seams(self, tokenizer: Tokenizer) -> None:
        vocabulary = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
        texts = [tokenizer.decode([token]) for token in range(len(vocabulary))]
        ends_sentence = np.array([text.rstrip("\"'”’)").endswith((".", "?", "!")) for text in texts])
        is_space = np.array([piece.startswith(("Ġ", "Ċ")) for piece in vocabulary])
        is_letter = np.array([text[:1].isalpha() and text[:1].isascii() for text in texts])
        before, after = self.tokens[:-1], self.tokens[1:]
        newline = tokenizer.token_to_id("Ċ")
        self.sentence_ends = 1 + np.flatnonzero(ends_sentence[before] & is_space[after])
        self.paragraph_starts = 1 + np.flatnonzero((before == newline) & is_letter[after])
        self.document_starts = np.flatnonzero(self.tokens == EOS)

    def text(self, rng: np.random.Generator, length: int) -> Ids:
        """A random stretch of the training text."""
        start = int(rng.integers(0, len(self.tokens) - length))
        return self.tokens[start : start + length]

    def haystack(self, rng: np.random.Generator, length: int) -> tuple[Ids, Ids]:
        """Whole sentences of at most `length` tokens, and the sorted offsets of all sentence ends in them."""
        for _ in range(50):
            start = int(self.paragraph_starts[rng.integers(len(self.paragraph_starts))])
            low, high = np.searchsorted(self.sentence_ends, [start + 1, start + length + 1])
            one_document = np.diff(np.searchsorted(self.document_starts, [start, start + length]))[0] == 0
            if high > low and one_document:
                ends = self.sentence_ends[low:high] - start
                return self.tokens[start : start + ends[-1]], ends
        return self.tokens[:0], np.zeros(1, dtype=np.int64)

    def keys(self, rng: np.random.Generator, count: int) -> list[tuple[Ids, Ids, Ids]]:
        """Distinct keys as id pieces; now and then one shares a word with the key before it."""
        pairs: list[tuple[int, int]] = []
        while len(pairs) < count:
            first, second = (int(word) for word in rng.integers(len(self.first_words), size=2))
            if pairs and rng.random() < 0.15:
                first, second = (pairs[-1][0], second) if rng.random() < 0.5 else (first, pairs[-1][1])
            if (first, second) not in pairs:
                pairs.append((first, second))
        return [(self.first_words[first], self.hyphen, self.second_words[second]) for first, second in pairs]

    def numbers(self, rng: np.random.Generator, count: int) -> list[Ids]:
        """Random numbers of 7 digits as ids; the first digit is not 0."""
        digits = rng.integers(0, 10, size=(count, NUMBER_DIGITS))
        digits[:, 0] = rng.integers(1, 10, size=count)
        return list(self.digits[digits])

    def context(
        self,
        rng: np.random.Generator,
        keys: Sequence[tuple[Ids, Ids, Ids]],
        numbers: Sequence[Ids],
        length: int,
    ) -> list[tuple[Ids, float]]:
        """Introduction and a haystack of at most `length` tokens with the needles at random sentence ends."""
        hay, ends = self.haystack(rng, length)
        places = np.sort(rng.choice(ends, size=len(keys), replace=True))
        pieces, position = [(self.intro, TEMPLATE)], 0
        for key, number, place in zip(keys, numbers, places, strict=True):
            pieces.append((hay[position:place], PLAIN))
            pieces += [(self.needle[0], TEMPLATE), *((part, UNPREDICTABLE) for part in key)]
            pieces += [(self.needle[1], TEMPLATE), (number, UNPREDICTABLE), (self.needle[2], TEMPLATE)]
            position = place
        pieces.append((hay[position:], PLAIN))
        return pieces

    def ask(self, key: tuple[Ids, Ids, Ids]) -> list[tuple[Ids, float]]:
        """The question for one key, up to the word before the answer."""
        pieces = [(self.question[0], TEMPLATE), *((part, UNPREDICTABLE) for part in key)]
        pieces += [
            (self.question[1], TEMPLATE),
            *((part, PLAIN) for part in key),
            (self.question[2], TEMPLATE),
        ]
        return pieces

    def retrieval(self, rng: np.random.Generator, length: int) -> tuple[Ids, np.ndarray]:
        """A retrieval document of about `length` tokens: several needles, several answered questions."""
        most = max(1, min(14, int(length * 0.45) // 60))
        asked = int(rng.integers(1, most + 1))
        extra = int(rng.integers(0, 1 + min(6, length // 200)))
        keys, numbers = self.keys(rng, asked + extra), self.numbers(rng, asked + extra)
        hay_length = max(24, length - len(self.intro) - 28 * (asked + extra) - 48 * asked)
        pieces = self.context(rng, keys, numbers, hay_length)
        for index in rng.permutation(asked + extra)[:asked]:
            pieces += self.ask(keys[index])
            pieces += [(self.space, PLAIN), (numbers[index], ANSWER), (self.full_stop, TEMPLATE)]
        return join([*pieces, (np.array([EOS]), TEMPLATE)])

    def copying(self, rng: np.random.Generator, length: int) -> tuple[Ids, np.ndarray]:
        """A segment (text or random tokens) repeated with gaps of text: teaches the induction heads."""
        size = int(rng.integers(8, max(9, min(160, length // 3))))
        is_text = rng.random() < 0.5
        segment = self.text(rng, size) if is_text else rng.integers(2, VOCAB_SIZE, size=size)
        pieces, total = [(segment, PLAIN if is_text else UNPREDICTABLE)], size
        while total < length:
            gap = self.text(rng, int(rng.integers(0, max(1, length // 4))))
            pieces += [(gap, PLAIN), (segment, PLAIN)]
            total += len(gap) + size
        return join(pieces)

    def row(self, rng: np.random.Generator, length: int, mix: tuple[float, float]) -> tuple[Ids, np.ndarray]:
        """One row of exactly `length` + 1 ids; `mix` is the share of retrieval and of copy documents."""
        draw = rng.random()
        pieces = [join([(np.full(int(rng.integers(2)), EOS), UNPREDICTABLE)])]  # half the rows begin with EOS
        if draw < mix[0]:
            pieces.append(self.retrieval(rng, int(rng.integers(max(120, length // 3), length - 24))))
        elif draw < sum(mix):
            pieces.append(self.copying(rng, length + 1))
        missing = length + 1 - sum(len(ids) for ids, _ in pieces)
        if missing > 0:
            pieces.append(join([(self.text(rng, missing), PLAIN)]))
        ids, weights = (np.concatenate(column)[: length + 1] for column in zip(*pieces, strict=True))
        return ids, weights


def join(pieces: Sequence[tuple[Ids, float]]) -> tuple[Ids, np.ndarray]:
    """Concatenates (ids, weight) pieces into ids and per-token weights."""
    ids = np.concatenate([piece for piece, _ in pieces])
    weights = np.repeat(
        np.array([weight for _, weight in pieces], dtype=np.float32), [len(piece) for piece, _ in pieces]
    )
    return ids, weights


# ---- curriculum --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Until `until` (fraction of the time): row lengths with their probabilities, and the document mix."""

    until: float
    lengths: dict[int, float]
    mix: tuple[float, float]


CURRICULUM = (
    Phase(0.15, {256: 1.0}, (0.45, 0.25)),
    Phase(0.35, {256: 0.25, 1024: 0.75}, (0.45, 0.10)),
    Phase(0.80, {1024: 0.25, 2304: 0.65, 4096: 0.10}, (0.40, 0.04)),
    Phase(1.01, {1024: 0.20, 2304: 0.60, 4096: 0.20}, (0.30, 0.02)),
)


@dataclass(frozen=True)
class Clock:
    """Elapsed fraction of a time span, the same in every process."""

    start: float
    end: float

    def fraction(self) -> float:
        """0 at the start, 1 at the end and after it."""
        return min(1.0, max(0.0, (time.monotonic() - self.start) / (self.end - self.start)))


class Rows(IterableDataset):
    """An endless stream of batches (ids [B, L + 1], weights [B, L]) that follows the curriculum."""

    def __init__(self, builder: DocumentBuilder, clock: Clock, batch_tokens: int, seed: int) -> None:
        self.builder, self.clock, self.batch_tokens, self.seed = builder, clock, batch_tokens, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([self.seed, worker.id if worker else 0])
        while True:
            fraction = self.clock.fraction()
            phase = next(phase for phase in CURRICULUM if fraction < phase.until)
            length = int(rng.choice(list(phase.lengths), p=list(phase.lengths.values())))
            count = batch_rows(self.batch_tokens, length)
            rows = [self.builder.row(rng, length, phase.mix) for _ in range(count)]
            ids_BL, weights_BL = (np.stack(column) for column in zip(*rows, strict=True))
            yield torch.from_numpy(ids_BL.astype(np.int32)), torch.from_numpy(weights_BL[:, 1:].copy())


def batch_rows(batch_tokens: int, length: int) -> int:
    """Rows of a batch: about `batch_tokens` tokens."""
    return max(1, batch_tokens // length)


# ---- train -------------------------------------------------------------------------------------------------


def build_model() -> Qwen3ForCausalLM:
    """The untrained model: 4 layers, 4 query and 2 KV heads of 64, QK-norm, tied embeddings."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


class TrainingLoss(torch.nn.Module):
    """Weighted cross-entropy; calls the layers directly, without a mask: attention is one causal kernel."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids_BL: torch.Tensor, weights_BL: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss and the unweighted loss of every token."""
        hidden = self.model.model.embed_tokens(ids_BL[:, :-1])
        for layer in self.model.model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=(cos, sin))
        logits_BLV = self.model.lm_head(self.model.model.norm(hidden))
        targets = ids_BL[:, 1:].flatten().long()
        losses = F.cross_entropy(logits_BLV.float().flatten(0, 1), targets, reduction="none")
        losses = losses.view_as(weights_BL)
        return (losses * weights_BL).sum() / weights_BL.sum(), losses.detach()


class Trainer:
    """Model, optimizer and learning-rate schedule of one run."""

    def __init__(self, device: torch.device, learning_rate: float, compiled: bool) -> None:
        self.device, self.learning_rate = device, learning_rate
        self.model = build_model().to(device).train()
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        )
        self.loss = TrainingLoss(self.model)
        self.run_loss = torch.compile(self.loss, dynamic=False) if compiled else self.loss
        self.rope = {length: self._rope(length) for phase in CURRICULUM for length in phase.lengths}

    def _rope(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, device=self.device)[None]
        return self.model.model.rotary_emb(torch.zeros(1, device=self.device), positions)

    def losses(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward pass: bf16 autocast on a GPU."""
        cos, sin = self.rope[weights_BL.shape[1]]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.run_loss(ids_BL, weights_BL, cos, sin)

    def warm_up(self, batch_tokens: int) -> None:
        """Compiles every batch shape; falls back to eager execution if the compiler fails."""
        for length in self.rope:
            rows, begin = batch_rows(batch_tokens, length), time.monotonic()
            ids = torch.randint(2, VOCAB_SIZE, (rows, length + 1), dtype=torch.int32, device=self.device)
            weights = torch.ones(rows, length, device=self.device)
            try:
                self.losses(ids, weights)[0].backward()
            except Exception as error:
                if self.run_loss is self.loss:
                    raise
                print(f"compilation failed, running eagerly: {type(error).__name__}: {error}", flush=True)
                self.run_loss = self.loss
                self.losses(ids, weights)[0].backward()
            self.optimizer.zero_grad()
            print(f"warm-up {rows} x {length}: {time.monotonic() - begin:.1f} s", flush=True)

    def step(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor, fraction: float) -> tuple[torch.Tensor, ...]:
        """One optimizer step at the learning rate of this fraction of the run: warm-up, then cosine."""
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fraction))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, (fraction + 1e-3) / 0.02) * cosine
        loss, losses = self.losses(ids_BL, weights_BL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), losses


def optimize(args: argparse.Namespace, work: Work, device: torch.device, end: float) -> tuple[Trainer, dict[str, Any]]:
    """Trains until the clock reads `end`."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(device, args.learning_rate, compiled=device.type == "cuda" and not args.eager)
    trainer.warm_up(args.batch_tokens)
    clock = Clock(time.monotonic(), end)
    builder = DocumentBuilder(work.tokenizer, work.train, work.words["train"])
    rows = Rows(builder, clock, args.batch_tokens, args.seed)
    loader = DataLoader(rows, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None)
    steps, seen, logged = 0, 0, clock.start
    for ids_BL, weights_BL in loader:
        fraction = clock.fraction()
        if fraction >= 1:
            break
        ids_BL, weights_BL = ids_BL.to(device, non_blocking=True), weights_BL.to(device, non_blocking=True)
        _, losses = trainer.step(ids_BL, weights_BL, fraction)
        steps, seen = steps + 1, seen + weights_BL.numel()
        if steps % 10 == 0 or device.type == "cpu":  # reading a value waits for the device: honest clock
            plain, answer = (losses[weights_BL == kind].mean().item() for kind in (PLAIN, ANSWER))
            if time.monotonic() - logged > args.log_seconds:
                logged = time.monotonic()
                print(
                    f"{logged - clock.start:5.0f} s  {fraction:4.0%}  step {steps}  {seen / 1e6:.0f}M tokens "
                    f"length {weights_BL.shape[1]}  plain {plain:.3f}  answer digits {answer:.3f}",
                    flush=True,
                )
    return trainer, {
        "steps": steps,
        "tokens": seen,
        "optimize_seconds": round(time.monotonic() - clock.start, 1),
    }


# ---- evaluate and save -------------------------------------------------------------------------------------


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, tokens: Ids, text_bytes: int, window: int = 2048) -> dict[str, float]:
    """Token perplexity and bits per byte of a text in windows that do not overlap."""
    count = (len(tokens) - 1) // window
    total, predicted = 0.0, 0
    for index in range(count):
        ids = torch.from_numpy(tokens[index * window : (index + 1) * window + 1])[None].to(model.device)
        logits = model(ids[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        predicted += window
    nats = total / predicted
    bits_per_byte = nats / math.log(2) * len(tokens) / text_bytes
    return {"token_perplexity": round(math.exp(nats), 3), "bits_per_byte": round(bits_per_byte, 4)}


@torch.no_grad()
def retrieval_accuracy(
    model: Qwen3ForCausalLM,
    builder: DocumentBuilder,
    length: int,
    needles: int,
    trials: int = 40,
    rows: int = 20,
) -> float:
    """Share of prompts of about `length` tokens whose asked number is generated exactly (greedy)."""
    rng = np.random.default_rng([length, needles])
    right = 0
    for _ in range(trials // rows):
        prompts, answers = [], []
        for _ in range(rows):
            keys, numbers = builder.keys(rng, needles), builder.numbers(rng, needles)
            room = length - len(builder.intro) - 28 * needles - 40
            asked = int(rng.integers(needles))
            prompts.append(join([*builder.context(rng, keys, numbers, room), *builder.ask(keys[asked])])[0])
            answers.append([*builder.space, *numbers[asked]])
        longest = max(len(prompt) for prompt in prompts)
        ids_BL = np.stack([np.pad(prompt, (longest - len(prompt), 0), constant_values=PAD) for prompt in prompts])
        prompt_BL = torch.from_numpy(ids_BL).to(model.device)
        out = model.generate(
            prompt_BL,
            attention_mask=(prompt_BL != PAD).long(),
            max_new_tokens=NUMBER_DIGITS + 1,
            min_new_tokens=NUMBER_DIGITS + 1,
            do_sample=False,
        )
        right += sum(out[:, longest:].cpu().numpy().tolist()[row] == answers[row] for row in range(rows))
    return right / (trials // rows * rows)


def evaluate(folder: Path, work: Work, device: torch.device, lengths: Sequence[int]) -> dict[str, Any]:
    """Reloads the checkpoint as a user would and measures it on held-out books with held-out words."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sample = "The text is 1234567.\n\nWhat is it?"
    if tokenizer(sample)["input_ids"] != work.tokenizer.encode(sample).ids:
        raise SystemExit("AutoTokenizer does not give the ids that the training tokenizer gave")
    builder = DocumentBuilder(work.tokenizer, work.heldout, work.words["evaluation"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    result: dict[str, Any] = {"heldout": perplexity(model, work.heldout, work.heldout_bytes)}
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    for dtype, name in names.items():
        model = model.to(dtype)
        for needles in (1, 4):
            result[f"retrieval_{needles}_needle{'s' * (needles > 1)}_{name}"] = {
                str(length): retrieval_accuracy(model, builder, length, needles) for length in lengths
            }
    return result


def save_checkpoint(trainer: Trainer, work_folder: Path, out: Path) -> None:
    """Writes the weights in bf16, the configuration and the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model = build_model()
    model.load_state_dict({name: value.float().cpu() for name, value in trainer.model.state_dict().items()})
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    model.save_pretrained(out)
    save_tokenizer(Tokenizer.from_file(str(work_folder / "tokenizer.json")), out)


def write_model_card(out: Path, training: dict[str, Any]) -> None:
    """Writes README.md from the measured numbers."""
    heldout = training["heldout"]
    single, multi = training["retrieval_1_needle_float32"], training["retrieval_4_needles_float32"]
    table = "\n".join(f"| {length} | {single[length]:.3f} | {multi[length]:.3f} |" for length in single)
    text = f"""---
license: apache-2.0
language: en
library_name: transformers
tags: [qwen3, kv-cache, example]
---

# kvcompile example checkpoint

A {training["parameters"] / 1e6:.1f}M-parameter Qwen3 (4 layers, 4 query and 2 KV heads of 64, QK-norm, tied
embeddings, bf16), trained from scratch by `examples/train_example.py` on public-domain books and synthetic
retrieval documents. It exists so that the damage that a compressed KV cache does can be seen in seconds on a
CPU; it is no use as a language model.

Held-out books: token perplexity {heldout["token_perplexity"]}, {heldout["bits_per_byte"]} bits per byte.
Retrieval of a planted 7-digit number (greedy, float32, exact match, keys of words never trained on):

| prompt tokens | 1 needle | 4 needles |
|---|---|---|
{table}

Every digit is a token, and the space before a number is a token of its own: a prompt ends in " is", the
model then generates a space token and the 7 digits. All numbers and the training settings: `training.json`.
"""
    (out / "README.md").write_text(text, encoding="utf-8")


def train(args: argparse.Namespace) -> None:
    """Trains within --seconds, saves the checkpoint, reloads and measures it."""
    end = time.monotonic() + args.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = Work.load(args.work)
    trainer, training = optimize(args, work, device, end)
    save_checkpoint(trainer, args.work, args.out)
    print("saved; measuring", flush=True)
    training["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
    training |= evaluate(args.out, work, device, args.lengths)
    training["settings"] = {
        "seconds": args.seconds,
        "learning_rate": args.learning_rate,
        "batch_tokens": args.batch_tokens,
        "seed": args.seed,
        "corpus_tokens": len(work.train),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    write_json(args.out / "training.json", training)
    write_model_card(args.out, training)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(json.dumps(training, indent=1), f"\n{size / 1e6:.2f} MB in {args.out}", flush=True)


def main() -> None:
    """Parses the command line and runs one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True)
    stage = stages.add_parser("prepare", help="train the tokenizer and tokenize the texts")
    stage.add_argument("--text", type=Path, required=True, help="training text, plain or .xz")
    stage.add_argument("--heldout", type=Path, required=True, help="other text, for evaluation")
    stage.add_argument("--work", type=Path, required=True, help="folder to fill")
    stage.add_argument("--words", type=int, default=6000, help="words that keys are built from")
    stage.set_defaults(run=prepare)
    stage = stages.add_parser("train", help="train and measure the checkpoint")
    stage.add_argument("--work", type=Path, required=True, help="folder that `prepare` filled")
    stage.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    stage.add_argument("--seconds", type=float, default=330, help="training time, compilation included")
    stage.add_argument("--batch-tokens", type=int, default=73728, help="tokens of a batch")
    stage.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    stage.add_argument("--workers", type=int, default=min(10, (os.cpu_count() or 1) - 1), help="data processes")
    stage.add_argument("--log-seconds", type=float, default=10, help="seconds between log lines")
    stage.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4000], help="measured prompts")
    stage.add_argument("--seed", type=int, default=0)
    stage.add_argument("--eager", action="store_true", help="do not use torch.compile")
    stage.set_defaults(run=train)
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        args.run(args)


if __name__ == "__main__":
    main()
