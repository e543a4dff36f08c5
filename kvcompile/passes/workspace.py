"""The hidden directory beside the output in which a conversion works, so that the output appears whole or not at all.

``.{out}.kvcompile/`` holds ``inputs.json`` (what the stages were computed from), ``stages/`` (results that `--resume`
continues from), ``artifact/`` (the staging directory, renamed to the output at the end), ``replaced/`` (between two
renames, the artifact that `--force` replaces) and ``lock``.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcompile.artifact import MANIFEST_NAME, CalibrationRecord
from kvcompile.checkpoint import save_tensors, tensor_bytes
from kvcompile.errors import OutputError
from kvcompile.passes.base import Instrument, Pass, PassResult
from kvcompile.passes.ir import IR
from kvcompile.passes.lock import DirectoryLock


class Workspace:
    """Working directory of the conversion to `out`. Raises OutputError for an output that cannot be used."""

    def __init__(self, out: Path, force: bool = False):
        self.out, self.force = out.absolute(), force
        self.root = self.out.parent / f".{self.out.name}.kvcompile"
        self.staging = self.root / "artifact"
        self.stages = self.root / "stages"
        self.replaced = self.root / "replaced"
        self._lock = DirectoryLock(self.root)
        self._made: list[Path] = []

    def check_output(self) -> None:
        """Refuse an output that exists (unless forced, and then only an artifact) or whose parent cannot be written.

        One that another conversion is writing is refused too.
        """
        if self.replaced.exists() and not self._lock.held:
            self._take_lock()
            self._put_back()
            self._lock.release()
        if self.out.exists() or self.out.is_symlink():
            empty = self.out.is_dir() and not any(self.out.iterdir())
            if not self.force and not empty:
                raise OutputError(f"output {self.out} already exists; choose another path or replace it with --force")
            if not empty and not (self.out / MANIFEST_NAME).exists():
                raise OutputError(
                    f"output {self.out} exists and is no converted checkpoint, so --force does not replace it; "
                    "choose another path"
                )
        parent = next(p for p in self.out.parents if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise OutputError(f"output {self.out} cannot be written: {parent} is not a writable directory")

    def check_source(self, source: Path) -> None:
        """Refuse an output that is the source or holds it: replacing it would destroy the source."""
        out, source = self.out.resolve(), source.resolve()
        if out == source or out in source.parents:
            raise OutputError(
                f"output {self.out} holds the source {source}, which is never replaced; choose another path"
            )

    def open(self, inputs: Mapping[str, str], resume: bool) -> None:
        """Make the directory, or continue one whose inputs are the same.

        Raises OutputError when they have changed, or when another conversion works there: one at a time writes an output.
        """
        self._made = [parent for parent in self.root.parents if not parent.exists()]
        try:
            self._take_lock()
            stored = self._stored_inputs()
            if resume and stored is not None:
                self._check_inputs(stored, inputs)
                shutil.rmtree(self.staging, ignore_errors=True)
            else:
                self._clear()
            self.stages.mkdir(exist_ok=True)
            self.staging.mkdir()
            _write_atomically(self.root / "inputs.json", json.dumps(dict(inputs), indent=1))
        except OutputError:
            self._lock.release()
            raise
        except OSError as error:
            self.abandon()
            raise OutputError(f"cannot write beside {self.out}: {error.strerror or error}") from error

    def publish(self) -> None:
        """Rename the staging directory to the output, replacing a previous artifact when forced."""
        self.check_output()  # somebody may have put something there in the meantime
        for path in sorted(self.staging.rglob("*")):
            _sync(path)
        _sync(self.staging)
        if self.out.exists():
            shutil.rmtree(self.replaced, ignore_errors=True)
            self.out.rename(self.replaced)
        try:
            self.staging.rename(self.out)
        except OSError as error:
            raise OutputError(f"cannot move the result to {self.out}: {error.strerror}") from error
        finally:
            self._put_back()
        _sync(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the working directory, and parents that were made for it and hold nothing else."""
        if self._lock.held:
            self._clear()
            self._lock.release()
        for path in (self.root, *self._made):
            with suppress(OSError):
                path.rmdir()

    def abandon(self) -> bool:
        """After a failure: drop what is half-written, keep finished stages. Whether there is something to resume."""
        if self._lock.held and any(self.stages.glob("*.safetensors")):
            shutil.rmtree(self.staging, ignore_errors=True)
            self._lock.release()
            return True
        self.discard()
        return False

    def restore(self, steps: list[Pass], ir: IR) -> tuple[list[Pass], IR]:
        """The passes that still have to run and the IR of the last stored stage; every pass where nothing is stored."""
        for position in reversed(range(len(steps))):
            path = self._stage(steps[position])
            if steps[position].stored and path.exists():
                try:
                    restored = _load_stage(path, ir)
                except (SafetensorError, OSError, ValueError, KeyError, TypeError):
                    continue  # a damaged stage is computed again
                kept = [step for step in steps[:position] if not step.stored]
                return [*kept, *steps[position + 1 :]], restored
        return steps, ir

    def store(self, step: Pass, ir: IR) -> None:
        """Keep the IR after `step` for a later `--resume`."""
        meta = {
            "metrics": {str(i): dict(m) for i, m in ir.metrics.items()},
            "summary": dict(ir.summary),
            "calibration": ir.calibration.model_dump() if ir.calibration else None,
        }
        tensors = {f"statistics/{n}": t.contiguous() for n, t in ir.statistics.items()}
        tensors |= {f"tensors/{n}": t.contiguous() for n, t in ir.tensors.items()}
        temporary = self.stages / f".{step.name}.tmp"
        text = json.dumps(meta)
        try:
            save_tensors(tensors, temporary, {"ir": text, "sha256": _digest(text, tensors)})
            os.replace(temporary, self._stage(step))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _take_lock(self) -> None:
        if not self._lock.take():
            raise OutputError(
                f"another conversion is writing {self.out} (it works in {self.root}); wait for it, or choose another path"
            )

    def _check_inputs(self, stored: Mapping[str, str], inputs: Mapping[str, str]) -> None:
        changed = sorted(k for k in {*stored, *inputs} if stored.get(k) != inputs.get(k))
        if changed:
            raise OutputError(
                f"cannot resume: {', '.join(changed)} changed since the interrupted run; "
                "run again without --resume to start over"
            )

    def _clear(self) -> None:
        """Remove what earlier runs have left, but not an artifact that waits to be put back."""
        for path in (self.staging, self.stages):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.root / "inputs.json", self.root / "inputs.tmp"):
            with suppress(OSError):
                path.unlink()
        if self.out.exists():
            shutil.rmtree(self.replaced, ignore_errors=True)

    def _put_back(self) -> None:
        """Return a previous artifact whose replacement did not come to pass."""
        if self.replaced.exists() and not self.out.exists():
            self.replaced.rename(self.out)

    def _stage(self, step: Pass) -> Path:
        return self.stages / f"{step.name}.safetensors"

    def _stored_inputs(self) -> dict[str, str] | None:
        try:
            inputs = json.loads((self.root / "inputs.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return inputs if isinstance(inputs, dict) else None


class StageStore(Instrument):
    """Stores the result of every pass that says it is worth storing."""

    def __init__(self, workspace: Workspace):
        self.workspace = workspace

    def after(self, step: Pass, result: PassResult, seconds: float) -> None:
        """Write the stage."""
        if step.stored and result.modified:
            self.workspace.store(step, result.ir)


def _load_stage(path: Path, ir: IR) -> IR:
    statistics: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        text, digest = file.metadata()["ir"], file.metadata()["sha256"]
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    if _digest(text, stored) != digest:
        raise ValueError(f"{path} is damaged")
    meta = json.loads(text)
    for name, tensor in stored.items():
        kind, _, key = name.partition("/")
        (statistics if kind == "statistics" else tensors)[key] = tensor
    calibration = CalibrationRecord.model_validate(meta["calibration"]) if meta["calibration"] else None
    metrics = {int(i): m for i, m in meta["metrics"].items()}
    return replace(
        ir, statistics=statistics, tensors=tensors, calibration=calibration, metrics=metrics, summary=meta["summary"]
    )


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """sha256 of all that a stage holds."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
