"""`kvcompile compare`: one model converted with several schemes, each measured the same way, in one table and one report."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvcompile.errors import CacheError, KvCompileError, OutputError, SchemeError
from kvcompile.evaluate.cost import Cost, measure_cost
from kvcompile.evaluate.divergence import reference_logits
from kvcompile.evaluate.evaluation import Quality, Track, Workload, make_workload, measure_quality, untracked
from kvcompile.evaluate.stages import LayerErrors, TokenNorms, layer_errors, observe, token_norm_picture
from kvcompile.evaluate.text import held_back_text, read_text
from kvcompile.evaluate.uncalibrated import page_format
from kvcompile.models import EXACT, load_model, load_tokenizer, resolve_device, take_inventory
from kvcompile.passes.convert import collect_statistics, convert
from kvcompile.passes.emit import CONTEXTS
from kvcompile.passes.inventory import check_fit, open_source
from kvcompile.runtime import load, new_cache
from kvcompile.runtime.backend import choose_backend
from kvcompile.scheme import Scheme, load_scheme

BF16 = "bf16"
OBSERVED_WINDOWS = 2
REFERENCE_BYTES = 2**30
"""Logits of the source that are kept between schemes; those of more windows are computed again for each."""


@dataclass(frozen=True)
class Row:
    """One scheme: what it is, what it costs, what it is worth. The row of BF16 has no layers and no norms."""

    label: str
    summary: str
    bits_per_element: dict[str, float]
    backend: str
    quality: Quality
    cost: Cost
    convert_seconds: float
    layers: tuple[LayerErrors, ...] = ()
    norms: TokenNorms | None = None


@dataclass(frozen=True)
class Comparison:
    """All rows, BF16 first, and what they were measured on."""

    model: str
    text: str
    calibration: str
    windows: int
    window_tokens: int
    counted_from: int
    machine: str
    rows: tuple[Row, ...]
    spectra: Mapping[int, Mapping[str, tuple[float, ...]]]

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the share of every retrieval length."""
        document = asdict(self)
        for entry, row in zip(document["rows"], self.rows, strict=True):
            for retrieved, found in zip(entry["quality"]["retrieval"], row.quality.retrieval, strict=True):
                retrieved["share"] = found.share
        return document


def compare(
    model: str | Path,
    schemes: Sequence[str | Scheme],
    out: str | Path | None = None,
    *,
    keep: bool = False,
    text: str | Path | None = None,
    calibration: str | Path | None = None,
    calibration_field: str = "text",
    calibration_tokens: int | None = None,
    seed: int = 0,
    windows: int = 4,
    length: int = 2048,
    retrieval: Sequence[int] = (),
    haystack: str | Path | None = None,
    words: Sequence[str] | None = None,
    trials: int = 12,
    device: str = "cpu",
    backend: str | None = None,
    track: Track = untracked,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Convert `model` with each scheme and measure it through its packed cache, next to the model as it is.

    A scheme is a built-in name or TOML file, with overrides as in ``"oscar-int2+key.clip.ratio=0.95"``, or a Scheme. All
    share one calibration pass. The reference of every divergence is the source. Into `out` go `report.html` and
    `compare.json`, and with `keep` the artifacts. Raises a KvCompileError before work starts for what can be refused; when a
    scheme fails later, the report has the schemes before it.
    """
    planned = resolve_schemes(schemes)
    torch_device = resolve_device(device)
    checkpoint = open_source(model)
    layers = take_inventory(checkpoint).compiled
    for label, scheme in planned.items():
        for layer in layers:
            check_fit(scheme, layer)
        try:
            choose_backend(backend, torch_device, [page_format(scheme, layers[0].head_dim)])
        except CacheError as error:
            raise CacheError(f"scheme {label}: {error}") from error
    folder = _prepare(out, keep)
    settings: dict[str, Any] = {
        "calibration": calibration,
        "calibration_field": calibration_field,
        "calibration_tokens": calibration_tokens,
        "seed": seed,
        "device": device,
    }
    say(f"calibrating once for {len(planned)} schemes")
    statistics = collect_statistics(checkpoint.path, planned.values(), **settings, track=track)
    tokenizer = load_tokenizer(checkpoint.path)
    evaluated = read_text(text) if text else held_back_text(statistics.records(), tokenizer)
    source = load_model(checkpoint.path, EXACT, torch_device)
    exact = max(min(v.window.sink + v.window.recent + v.window.block for v in s.variants()) for s in planned.values())
    work = make_workload(source, tokenizer, evaluated, windows, length, retrieval, haystack, words, trials, exact)
    reference = _RememberedLogits(source)
    say(f"measuring {BF16}")
    rows = [_measure_source(source, tokenizer, work, reference, track)]
    observation = observe(checkpoint.path, layers, work.windows_NT[:OBSERVED_WINDOWS], torch_device)

    def comparison() -> Comparison:
        return Comparison(
            checkpoint.path.name,
            work.text,
            ", ".join(sorted({f"{r.text}, {r.tokens} tokens" for r in statistics.records()})) or "none needed",
            work.windows_NT.shape[0],
            work.windows_NT.shape[1],
            work.start,
            f"{torch_device.type}, {torch.get_num_threads()} threads",
            tuple(rows),
            observation.spectra,
        )

    with tempfile.TemporaryDirectory(prefix="kvcompile-") as temporary:
        for label, scheme in planned.items():
            say(f"converting and measuring {label}")
            place = (folder if keep and folder else Path(temporary)) / _directory_name(label)
            try:
                result = convert(checkpoint.path, place, scheme, **settings, statistics=statistics)
                converted, _ = load(place, device=torch_device, backend=backend)
                compiled: Any = converted
                make_cache = partial(new_cache, converted)
                quality = measure_quality(converted, tokenizer, make_cache, work, reference, track)
                cost = measure_cost(converted, make_cache(), work.windows_NT[0])
            except KvCompileError as error:
                _forget_conversion(error, place)
                error.add_note(f"in scheme {label}")
                if folder is not None and len(rows) > 1:
                    write_comparison(comparison(), folder)
                    error.add_note(f"what was measured before it is in {folder}")
                raise
            assert result.manifest is not None
            row = Row(
                label,
                scheme.summary,
                dict(result.manifest.bits_per_element),
                compiled.kvcompile.backend.name,
                quality,
                cost,
                sum(result.seconds.values()),
                layer_errors(result.ir, observation),
                token_norm_picture(result.ir, observation),
            )
            rows.append(row)
            del converted, compiled, make_cache
    found = comparison()
    if folder is not None:
        write_comparison(found, folder)
    return found


def write_comparison(found: Comparison, folder: Path) -> None:
    """Write `compare.json` and `report.html`."""
    from kvcompile.evaluate.page import comparison_page  # matplotlib is slow to import

    (folder / "compare.json").write_text(json.dumps(found.as_json(), indent=1) + "\n", "utf-8")
    (folder / "report.html").write_text(comparison_page(found), "utf-8")


def resolve_schemes(schemes: Iterable[str | Scheme]) -> dict[str, Scheme]:
    """Schemes by the label they get in tables. Raises SchemeError for an unknown one, for none, or for one given twice."""
    found: dict[str, Scheme] = {}
    for entry in schemes:
        overrides: list[str] = []
        file = Path(entry) if isinstance(entry, str) and Path(entry).is_file() else None
        if isinstance(entry, str):
            if not Path(entry).is_file():
                entry, *overrides = entry.split("+")
            entry = load_scheme(entry.strip(), overrides)
        label = "+".join([entry.name, *overrides])
        if file is not None and (label == BF16 or found.get(label, entry) != entry):
            label = file.stem  # a scheme of one's own that still has the name of the one it was made from
        if label == BF16:
            raise SchemeError(f"{BF16} is always compared; give the scheme another name")
        if label in found:
            raise SchemeError(f"scheme '{label}' is named twice; change `name` in one of the files, or leave one out")
        found[label] = entry
    if not found:
        raise SchemeError("name at least one scheme to compare, for example --schemes oscar-int2,naive-int2")
    return found


class _RememberedLogits:
    """Logits of a model by window, kept as long as they fit `REFERENCE_BYTES`."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.kept, self.free = model, dict[tuple[int, ...], Tensor](), REFERENCE_BYTES

    def __call__(self, ids_BT: Tensor) -> Tensor:
        key = tuple(ids_BT.flatten().tolist())
        if key in self.kept:
            return self.kept[key]
        logits_BTV = reference_logits(self.model, ids_BT)
        if logits_BTV.nbytes <= self.free:
            self.kept[key] = logits_BTV
            self.free -= logits_BTV.nbytes
        return logits_BTV


def _measure_source(
    source: PreTrainedModel, tokenizer: Any, work: Workload, reference: _RememberedLogits, track: Track
) -> Row:
    make_cache = partial(DynamicCache, config=source.config)
    quality = measure_quality(source, tokenizer, make_cache, work, reference, track)
    cost = measure_cost(source, make_cache(), work.windows_NT[0])
    bits = {label: 16.0 for label in CONTEXTS}
    return Row(BF16, "the model as it is, with transformers' cache", bits, "transformers", quality, cost, 0.0)


def _forget_conversion(error: KvCompileError, place: Path) -> None:
    """Remove what a failed conversion left to resume from, and the advice to do so: a comparison begins anew."""
    shutil.rmtree(place.parent / f".{place.name}.kvcompile", ignore_errors=True)
    error.__notes__ = [note for note in getattr(error, "__notes__", []) if "--resume" not in note]


def _prepare(out: str | Path | None, keep: bool) -> Path | None:
    """The output folder, made; raises OutputError for one that holds something or cannot be made."""
    if out is None:
        if keep:
            raise OutputError("there is no folder to keep the artifacts in; name one with -o DIR")
        return None
    folder = Path(out)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"output {folder} already exists; choose another path or delete it")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"output {folder} cannot be written: {error.strerror or error}") from error
    return folder


def _directory_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "._-+=" else "_" for c in label)
