"""What calibration collects in its forward pass, alone for one scheme or shared by several.

Statistics depend on the model, the text, the tokens, and on what is collected; nothing of a scheme changes a number. So one
forward pass can collect the union of what several schemes need, and each takes out what it would have collected alone.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompile.artifact import CalibrationRecord
from kvcompile.calibration import OBSERVER, Corpus, Recorder, recording, tokenize_corpus
from kvcompile.checkpoint import Checkpoint
from kvcompile.errors import CheckpointError
from kvcompile.models import (
    AttentionLayer,
    Inventory,
    decoder_of,
    head_grams,
    load_tokenizer,
    output_weight,
    take_inventory,
)
from kvcompile.models.forwards import Forward
from kvcompile.passes.base import Context
from kvcompile.passes.memory import release_memory
from kvcompile.passes.ranks import Ranks


@dataclass(frozen=True)
class Collection:
    """Second moments to collect, and the attention sample: sequences, tokens (`head` of them the first), last queries."""

    targets: frozenset[str]
    sequences: int
    length: int
    head: int
    queries: int

    def __or__(self, other: "Collection") -> "Collection":
        """The least that holds both: as many first tokens, and as many last ones, as either wants."""
        head = max(self.head, other.head)
        tail = max(self.length - self.head, other.length - other.head)
        return Collection(
            self.targets | other.targets,
            max(self.sequences, other.sequences),
            head + tail,
            head,
            max(self.queries, other.queries),
        )

    def covers(self, other: "Collection") -> bool:
        """Whether everything that `other` holds can be taken out of this."""
        return self | other == self

    def take(
        self, statistics: Mapping[str, Tensor], layers: Iterable[AttentionLayer], sequence_length: int
    ) -> dict[str, Tensor]:
        """Of statistics that cover it, what this collection would have been by itself, tensor for tensor."""
        found = {}
        for layer in layers:
            prefix = f"layers.{layer.index}."
            queries = min(self.queries, max(sequence_length // 4, 1))
            q_SKXD = statistics[f"{prefix}sample_q"][: self.sequences]
            q_SKGnD = q_SKXD.unflatten(2, (layer.queries_per_kv, -1))[:, :, :, -queries:]
            for name in (*sorted(self.targets), "key_mean", "value_mean", "sample_scaling"):
                found[prefix + name] = statistics[prefix + name]
            for name in ("sample_softcap", "sample_sinks", "output_gram"):
                if prefix + name in statistics:
                    found[prefix + name] = statistics[prefix + name]
            found[f"{prefix}sample_q"] = q_SKGnD.flatten(2, 3).clone()
            for half in "kv":
                found[f"{prefix}sample_{half}"] = self._ends(statistics[f"{prefix}sample_{half}"][: self.sequences])
        return found

    def _ends(self, x_SKTD: Tensor) -> Tensor:
        if x_SKTD.shape[2] <= self.length:
            return x_SKTD.clone()
        return torch.cat([x_SKTD[:, :, : self.head], x_SKTD[:, :, self.head - self.length :]], dim=2)


@dataclass(frozen=True)
class CalibrationText:
    """What the model is run over: the first `tokens` tokens of a corpus, in sequences of `sequence_length`, `batch` at once.

    Up to `last_position` the sequences' first positions are spread; 0 lets all of them start at position 0.
    """

    corpus: Corpus
    tokens: int
    sequence_length: int
    batch: int
    seed: int
    last_position: int = 0

    def start(self, index: int) -> int:
        """First position of a sequence: on a logarithmic scale, the first one at 0 and the early ones close to it.

        Most contexts are short, and every context has early positions; the later ones only have to be represented.
        """
        room, count = self.last_position / self.sequence_length, -(-self.tokens // self.sequence_length)
        return int(self.sequence_length * (max(room, 1) ** ((index / count) ** 2) - 1))

    def record(self) -> CalibrationRecord:
        """Its provenance, as the manifest has it."""
        return CalibrationRecord(
            text=self.corpus.name, text_sha256=self.corpus.sha256, tokens=self.tokens,
            sequence_length=self.sequence_length, seed=self.seed, last_position=self.last_position,
        )  # fmt: skip


class SharedStatistics:
    """Statistics of one checkpoint that several conversions take theirs from; made by `passes.convert.collect_statistics`."""

    def __init__(self, checkpoint: Checkpoint):
        self._source = checkpoint.fingerprint()
        self._entries: list[tuple[CalibrationText, Collection, Mapping[str, Tensor]]] = []

    def add(self, text: CalibrationText, wanted: Collection, statistics: Mapping[str, Tensor]) -> None:
        """Keep what one forward pass has collected."""
        self._entries.append((text, wanted, statistics))

    def records(self) -> list[CalibrationRecord]:
        """What was read, once for each forward pass."""
        return [text.record() for text, _, _ in self._entries]

    def find(
        self, checkpoint: Checkpoint, inventory: Inventory, text: CalibrationText, wanted: Collection
    ) -> dict[str, Tensor] | None:
        """What a forward pass for this alone would collect, or None where nothing here covers it."""
        for known, held, statistics in self._entries:
            if known == text and held.covers(wanted) and checkpoint.fingerprint() == self._source:
                return wanted.take(statistics, inventory.compiled, min(text.sequence_length, text.tokens))
        return None


def collect(
    checkpoint: Checkpoint, inventory: Inventory, text: CalibrationText, wanted: Collection, context: Context
) -> dict[str, Tensor]:
    """Run the model over the text once: ``layers.{i}.{target}``, means and attention samples of every compiled layer.

    The language-model head is not run. The loaded model stays in `context.models`, unless several processes have parts of
    it. Raises CalibrationError or CheckpointError for text or a tokenizer that cannot be used.
    """
    sequences = tokenize_corpus(text.corpus, load_tokenizer(checkpoint.path), text.tokens, text.sequence_length)
    if context.ranks is None:
        return _observe(checkpoint, inventory, text, sequences, wanted, context)
    ranks = context.ranks
    ranks.call((checkpoint.path, text, sequences, wanted))
    ours = replace(context, placement=ranks.placement(), models={})
    return ranks.gather(_observe(checkpoint, inventory, text, sequences, wanted, ours), inventory)


def assist(ranks: Ranks) -> None:
    """What a process other than rank 0 does: observe its heads whenever rank 0 collects, until rank 0 is done."""
    while (task := ranks.call(None)) is not None:
        path, text, sequences, wanted = task
        checkpoint = Checkpoint(path)
        inventory = take_inventory(checkpoint)
        context = Context(ranks.placement(), Path())
        ranks.gather(_observe(checkpoint, inventory, text, sequences, wanted, context), inventory)


def _observe(
    checkpoint: Checkpoint,
    inventory: Inventory,
    text: CalibrationText,
    sequences: list[Tensor],
    wanted: Collection,
    context: Context,
) -> dict[str, Tensor]:
    """Load the model and collect; where it is split over processes, of the heads that this one holds."""
    release_memory()
    started = time.perf_counter()
    source = context.placement.open_model(checkpoint, inventory, OBSERVER)
    context.costs["load"] = time.perf_counter() - started
    embeddings: Any = source.model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    if int(max(s.max() for s in sequences)) >= vocabulary:
        raise CheckpointError(f"the tokenizer in {checkpoint.path} has ids beyond the model's {vocabulary} embeddings")
    context.models["source"] = source
    layers = {layer.index for layer in inventory.compiled}
    recorder = Recorder(layers, wanted.targets, wanted.sequences, wanted.length, wanted.head, wanted.queries)
    batches = _batches(sequences, text.batch)
    starts = torch.tensor([text.start(i) for i in range(len(sequences))]).split([len(batch) for batch in batches])
    statistics: dict[str, Tensor] = {}

    def leaving(layer: int) -> None:
        statistics.update((name, context.placement.keep(tensor)) for name, tensor in recorder.take(layer).items())

    forwards = [
        Forward(partial(_forward, source.model, ids_BT, start_B), ids_BT.numel())
        for ids_BT, start_B in zip(batches, starts, strict=True)
    ]
    started = time.perf_counter()
    with recording(recorder):
        source.run(forwards, "calibrate", context.track, leaving=leaving)
    context.costs["forward"] = time.perf_counter() - started - recorder.seconds
    return statistics | _packed_grams(source.model, inventory)


def _packed_grams(model: PreTrainedModel, inventory: Inventory) -> dict[str, Tensor]:
    """``layers.{i}.output_gram`` of the packed W_O, which only the loaded model can multiply with; nothing for others."""
    layers = [layer for layer in inventory.compiled if layer.storage == "packed"]
    return {f"layers.{x.index}.output_gram": head_grams(output_weight(model, x), x) for x in layers}


@torch.inference_mode()
def _forward(model: PreTrainedModel, ids_BT: Tensor, start_B: Tensor) -> None:
    """A forward pass without the head, over sequences whose first positions are `start_B`."""
    positions_BT = start_B[:, None] + torch.arange(ids_BT.shape[1])
    decoder_of(model)(ids_BT.to(model.device), position_ids=positions_BT.to(model.device), use_cache=False)


def _batches(sequences: list[Tensor], size: int) -> list[Tensor]:
    """Equally long sequences stacked ``[B, T]``, at most `size` together; a shorter last one by itself."""
    full = [s for s in sequences if len(s) == len(sequences[0])]
    rest = [s[None] for s in sequences[len(full) :]]
    return [torch.stack(full[i : i + size]) for i in range(0, len(full), size)] + rest
