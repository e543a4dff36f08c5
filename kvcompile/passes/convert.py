"""From a checkpoint to an artifact: build the passes that a scheme names, run them, publish the result."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from kvcompile.artifact import Manifest, read_manifest
from kvcompile.calibration import read_corpus
from kvcompile.checkpoint import Checkpoint, decodes, dense_bytes, is_pickled, quant_method
from kvcompile.errors import (
    ArtifactError,
    CalibrationError,
    CheckpointError,
    KvCompileError,
    OutputError,
    PassError,
    SchemeError,
    VerificationError,
)
from kvcompile.models import resolve_device, take_inventory
from kvcompile.models.placement import Placement, available_memory, must_stream
from kvcompile.models.streaming import check_streaming
from kvcompile.passes.base import Context, Instrument, Pass, PassResult, run_passes
from kvcompile.passes.calibrate import CalibratePass
from kvcompile.passes.collection import CalibrationText, Collection, SharedStatistics, collect
from kvcompile.passes.imported import read_rotations
from kvcompile.passes.inventory import check_scheme, check_unconverted, open_source
from kvcompile.passes.ir import IR
from kvcompile.passes.memory import PeakMemory
from kvcompile.passes.ranks import Ranks
from kvcompile.passes.registry import CalibrationInput, build_passes, pass_class
from kvcompile.passes.unpickling import safetensors_copy
from kvcompile.passes.workspace import StageStore, Workspace
from kvcompile.scheme import DEFAULT_SCHEME, Scheme, load_scheme
from kvcompile.scheme.model import PASSES, LinearCorrection


@dataclass(frozen=True)
class Conversion:
    """What a conversion did: the artifact, its cost, and the manifest; a dry or stopped run has no artifact.

    `seconds` is by pass; `costs` holds the parts ``load``, ``forward`` (without statistics) and ``save`` that any tool
    would pay; `peak_bytes` is resident memory above what the process had at the start.
    """

    out: Path | None
    manifest: Manifest | None
    ir: IR
    seconds: dict[str, float]
    costs: dict[str, float]
    peak_bytes: int
    checkpoint_bytes: int


def convert(
    model: str | Path,
    out: str | Path,
    scheme: str | Scheme = DEFAULT_SCHEME,
    *,
    overrides: Sequence[str] = (),
    calibration: str | Path | None = None,
    calibration_field: str = "text",
    calibration_tokens: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    weights: Literal["fold", "overlay"] = "fold",
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    stop_after: str | None = None,
    instruments: Sequence[Instrument] = (),
    track: Callable[..., Iterable[Any]] | None = None,
    statistics: SharedStatistics | None = None,
    import_rotations: tuple[str | Path, str | Path] | None = None,
    allow_pickle: bool = False,
    low_memory: bool | None = None,
    spill: bool = False,
    device_map: str | None = None,
    ranks: Ranks | None = None,
) -> Conversion:
    """Convert the checkpoint `model` (a directory or a Hub id) with `scheme` into the new directory `out`.

    Everything that can be refused is refused before work starts: architecture, scheme, calibration text, output. The
    output appears whole, by a rename, or not at all; an interrupted run keeps its finished stages for `resume`.
    `dry_run` stops after the inventory. `statistics` (from `collect_statistics`) spare the forward pass and change nothing
    else. `import_rotations` are files of the OSCAR research fork (keys, values) whose matrices replace those that the scheme
    would solve. With `allow_pickle` weights in `.bin`, `.pt` or `.pth` files are read too, without running what they hold; they
    are written as safetensors. Raises a KvCompileError whose message says what is wrong, where, and what to do.

    Where weights are while the model runs changes no number: `low_memory` keeps one decoder layer in memory at a time (by
    itself where the checkpoint would not fit), with `spill` hidden states in files beside the output; `device_map` ("auto")
    spreads the model over several devices. `ranks` are processes that `assist`, each with its share of every layer.
    """
    if isinstance(scheme, Scheme) and overrides:
        raise SchemeError("overrides apply to a scheme given by name or file; change the Scheme object itself instead")
    if allow_pickle and is_pickled(Path(model)):
        if weights == "overlay":
            raise OutputError(f"{model} holds pickles, over which no overlay can lie; convert with weights 'fold'")
        check_unconverted(Path(model))
        Workspace(Path(out), force).check_source(Path(model))
        with safetensors_copy(Path(model), Path(out)) as copy:
            return convert(
                copy, out, scheme, overrides=overrides, calibration=calibration, calibration_field=calibration_field,
                calibration_tokens=calibration_tokens, seed=seed, device=device, weights=weights, dry_run=dry_run,
                resume=resume, force=force, stop_after=stop_after, instruments=instruments, track=track,
                statistics=statistics, import_rotations=import_rotations,
            )  # fmt: skip
    if weights not in ("fold", "overlay"):
        raise OutputError(f"weights is 'fold' or 'overlay', not '{weights}'")
    if calibration_tokens is not None and calibration_tokens < 1:
        raise CalibrationError(f"calibration_tokens must be at least 1, not {calibration_tokens}")
    if not isinstance(scheme, Scheme):
        scheme = load_scheme(scheme, tuple(overrides))
    if stop_after is not None:
        pass_class(stop_after)
    workspace = Workspace(Path(out), force)
    workspace.check_output()
    checkpoint = open_source(model)
    workspace.check_source(checkpoint.path)
    text = Path(calibration) if calibration else None
    given = CalibrationInput(text, calibration_field, calibration_tokens, seed, statistics)
    steps = build_passes(scheme, given)
    _check_order(scheme, stop_after)
    ir = IR(checkpoint, scheme, weights, read_rotations(*import_rotations) if import_rotations else None)
    placement = _placement(checkpoint, device, low_memory, spill, device_map, instruments)
    context = Context(replace(placement, scratch=workspace.root), workspace.staging, ranks=ranks)
    if track is not None:
        context.track = track
    timing, peak = Timing(), PeakMemory()

    def result(final: IR, manifest: Manifest | None) -> Conversion:
        path = workspace.out if manifest else None
        return Conversion(path, manifest, final, timing.seconds, timing.costs(context), peak.bytes, checkpoint.nbytes)

    ir = run_passes(steps[:1], ir, context, instruments)
    steps = steps[1:]
    if ir.imported is not None:
        ir.imported.check(checkpoint, scheme, ir.layers())
    if ranks is not None:
        ranks.check(checkpoint, ir.layers())
    if dry_run or stop_after == "inventory":
        return result(ir, None)
    corpus = read_corpus(given.text, given.field, given.seed)
    inputs = {
        "source": checkpoint.fingerprint(),
        "scheme": scheme.model_dump_json(),
        "calibration": f"{corpus.sha256} {given.tokens}",
        "weights": ir.weights,
        "passes": json.dumps({step.name: step.version for step in steps}),
    }
    if ir.imported is not None:
        inputs["rotations"] = " ".join(record.sha256 for record in ir.imported.records.values())
    workspace.open(inputs, resume)
    try:
        with peak:
            steps, ir = workspace.restore(steps, ir)
            wanted = scheme.passes[: scheme.passes.index(stop_after or "emit") + 1]
            steps = [step for step in steps if step.name in wanted]
            ir = run_passes(steps, ir, context, [timing, StageStore(workspace), *instruments])
            context.models.clear()
            if wanted[-1] != "emit":
                workspace.abandon()
                return result(ir, None)
            manifest = read_manifest(workspace.staging)  # what cannot be read back is not published
            if checkpoint.fingerprint() != inputs["source"]:
                raise CheckpointError(f"{checkpoint.path} changed while it was converted; run the conversion again")
            workspace.publish()
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        failure = OutputError(f"cannot write {workspace.out}: {reason}; nothing was left there")
        _resume_hint(failure, workspace)
        raise failure from error
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):  # a read error may pass
            _resume_hint(error, workspace)
        else:
            workspace.discard()  # a repaired source is another source
        raise
    except (ArtifactError, PassError, VerificationError) as error:
        if culprit := next(checkpoint.non_finite(), None):
            workspace.discard()
            raise CheckpointError(
                f"tensor {culprit} in {checkpoint.path} holds NaN or infinity; repair the checkpoint"
            ) from error
        _resume_hint(error, workspace)
        raise
    except BaseException as error:
        _resume_hint(error, workspace)
        raise
    return result(ir, manifest)


def collect_statistics(
    model: str | Path,
    schemes: Iterable[Scheme],
    *,
    calibration: str | Path | None = None,
    calibration_field: str = "text",
    calibration_tokens: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    track: Callable[..., Iterable[Any]] | None = None,
) -> SharedStatistics:
    """What conversions of `model` with all of these schemes need, in one forward pass for each length of text they ask for.

    Hand it to `convert` as `statistics`, with the same calibration. Raises what `convert` would raise for the model, a
    scheme that does not fit it, or the text.
    """
    checkpoint = open_source(model)
    given = CalibrationInput(Path(calibration) if calibration else None, calibration_field, calibration_tokens, seed)
    needs: dict[CalibrationText, Collection] = {}
    inventory = take_inventory(checkpoint)
    for scheme in schemes:
        check_scheme(scheme, inventory)
        ir = IR(checkpoint, scheme, "fold", inventory=inventory)
        for step in build_passes(scheme, given):
            if isinstance(step, CalibratePass) and scheme.calibrates():
                text, wanted = step.text_for(ir), step.collection(ir)
                needs[text] = needs[text] | wanted if text in needs else wanted
    shared = SharedStatistics(checkpoint)
    for text, wanted in needs.items():
        context = Context(Placement(resolve_device(device)), Path())
        if track is not None:
            context.track = track
        shared.add(text, wanted, collect(checkpoint, inventory, text, wanted, context))
    return shared


def _placement(
    checkpoint: Checkpoint,
    device: str,
    low_memory: bool | None,
    spill: bool,
    device_map: str | None,
    instruments: Sequence[Instrument],
) -> Placement:
    """Where the model's weights are to be; decides, and says so, where the user has not. Raises KvCompileError."""
    if device_map is not None:
        if low_memory or spill:
            raise KvCompileError(
                "--device-map spreads all weights over devices, --low-memory and --spill keep one layer; choose one"
            )
        if device_map not in ("auto", "balanced", "balanced_low_0", "sequential"):
            raise KvCompileError(
                f"device_map is 'auto', 'balanced', 'balanced_low_0' or 'sequential', not '{device_map}'"
            )
        if not decodes(checkpoint):
            raise CheckpointError(
                f"weights in {checkpoint.path} are packed ({quant_method(checkpoint)}) and loaded onto one device; leave "
                "--device-map out"
            )
        return Placement(resolve_device(device), device_map=device_map)
    target = resolve_device(device)
    streamed = low_memory or spill
    if streamed:
        check_streaming(checkpoint)
    elif low_memory is None and must_stream(checkpoint, target):
        streamed = True
        text = (
            f"low memory: {dense_bytes(checkpoint) / 1e9:.1f} GB of weights do not fit comfortably into "
            f"{available_memory(target) / 1e9:.1f} GB, so one decoder layer is loaded at a time"
        )
        for instrument in instruments:
            instrument.note(text)
    return Placement(target, bool(streamed), spill)


def _check_order(scheme: Scheme, stop_after: str | None) -> None:
    """Raise SchemeError unless passes run from inventory to emit, each once, and `stop_after` is one of them."""
    names = scheme.passes
    if names[:1] != ("inventory",) or names[-1:] != ("emit",) or len(set(names)) != len(names):
        raise SchemeError(
            f"scheme {scheme.name}: passes must begin with inventory, end with emit and name no pass twice, "
            f"but they are: {', '.join(names) or 'none'}"
        )
    ours = [name for name in names if name in PASSES]
    if ours != sorted(ours, key=PASSES.index):
        raise SchemeError(
            f"scheme {scheme.name}: passes build on one another and must keep this order: "
            f"{', '.join(sorted(ours, key=PASSES.index))}; they are given as: {', '.join(ours)}"
        )
    if missing := [name for name in _needed(scheme) if name not in names]:
        raise SchemeError(f"scheme {scheme.name}: pass '{missing[0]}' must be among its passes: {', '.join(names)}")
    if stop_after is not None and stop_after not in names:
        raise SchemeError(f"cannot stop after '{stop_after}': scheme {scheme.name} runs only {', '.join(names)}")


def _needed(scheme: Scheme) -> Iterator[str]:
    """The passes that the scheme's fields ask for, so that a list without one is refused before any work."""
    rows = [row for variant in scheme.variants() for _, row in variant.rows()]
    asked = {
        "calibrate": scheme.calibrates(),
        "rotations": True,
        "center": any(row.center for row in rows),
        "centroids": any(row.centroids for row in rows),
        "feedback": any(row.quantizer.rounding == "error_feedback" for row in rows),
        "clip": True,
        "correction": isinstance(scheme.correction, LinearCorrection),
        "fold": scheme.folds_values(),
    }
    yield from (name for name, wanted in asked.items() if wanted)


def _resume_hint(error: BaseException, workspace: Workspace) -> None:
    if workspace.abandon():
        error.add_note(f"finished stages are kept in {workspace.root}; run the same command with --resume to continue")


class Timing(Instrument):
    """Seconds by pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def after(self, step: Pass, result: PassResult, seconds: float) -> None:
        """Note how long a pass took."""
        self.seconds[step.name] = seconds

    def costs(self, context: Context) -> dict[str, float]:
        """The parts of a conversion that any tool would pay: load, a plain forward pass, save."""
        return {**context.costs, "save": self.seconds.get("emit", 0.0)}
