"""The pass protocol, the context passes run in, and the manager that runs them. `docs/passes.md` is the contract."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from kvcompile.artifact import inverse_error
from kvcompile.errors import KvCompileError, PassError
from kvcompile.models.placement import Placement
from kvcompile.passes.ir import IR
from kvcompile.passes.memory import release_memory
from kvcompile.passes.ranks import Ranks

T = TypeVar("T")


def _untracked(items: Sequence[T], _description: str, _unit: str, _size: Callable[[T], int]) -> Iterable[T]:
    return items


@dataclass
class Context:
    """What a pass may use besides the IR.

    `track(items, description, unit, size)` iterates and shows progress; `staging` is where emit writes; `models` lets
    calibrate and verify share one loaded model, which the pipeline drops at the end; `costs` takes the seconds of work that
    is not kvcompile's own (loading, the plain forward pass). `placement` says where the weights of a model are while it
    runs; `ranks` are the processes that calibrate together, where there are several.
    """

    placement: Placement
    staging: Path
    track: Callable[..., Iterable[Any]] = _untracked
    models: dict[str, Any] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    ranks: Ranks | None = None

    @property
    def device(self) -> torch.device:
        """Where heavy computation goes."""
        return self.placement.device


@dataclass(frozen=True)
class PassResult:
    """The IR after a pass and whether it differs from the one before."""

    ir: IR
    modified: bool


class Pass(Protocol):
    """One step of a conversion. A pass is a frozen dataclass: its fields are its typed configuration.

    `version` changes when a pass computes something else from the same input: stored stages of the old one are not
    reused. `stored` says whether the result is kept for `--resume`.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    stored: ClassVar[bool]

    def requires(self, ir: IR) -> str | None:
        """A sentence that says what is missing, or None when the pass can run."""

    def run(self, ir: IR, context: Context) -> PassResult:
        """Do the work; raises a KvCompileError that names layer and tensor."""

    def ensures(self, ir: IR) -> str | None:
        """A sentence that says what the pass failed to establish, or None."""


class Instrument:
    """Watches a pipeline from outside: timing, printing, dumping, storing. Passes know nothing of it."""

    def note(self, text: str) -> None:
        """Called with a sentence about what was decided for the user."""

    def before(self, step: Pass, ir: IR) -> None:
        """Called before a pass runs."""

    def after(self, step: Pass, result: PassResult, seconds: float) -> None:
        """Called after a pass has run and its result was verified."""


def run_passes(steps: Sequence[Pass], ir: IR, context: Context, instruments: Sequence[Instrument] = ()) -> IR:
    """Run passes in order, checking conditions and the IR's health around each.

    Raises PassError naming the pass when a condition does not hold; errors of a pass itself go through unchanged.
    """
    for step in steps:
        if problem := step.requires(ir):
            raise PassError(f"pass '{step.name}' cannot run: {problem}")
        for instrument in instruments:
            instrument.before(step, ir)
        started = time.perf_counter()
        try:
            result = step.run(ir, context)
        except KvCompileError as error:
            error.add_note(f"in pass '{step.name}'")
            raise
        if problem := step.ensures(result.ir) or find_fault(result.ir):
            raise PassError(f"pass '{step.name}' left a faulty result: {problem}")
        seconds = time.perf_counter() - started
        ir = result.ir
        release_memory()
        for instrument in instruments:
            instrument.after(step, result, seconds)
    return ir


def find_fault(ir: IR) -> str | None:
    """The cheap verifier behind every pass: what is wrong with an IR, naming the tensor, or None.

    Checks that tensors belong to compiled layers, have the shape that the inventory implies, are finite, and that
    rotations are orthogonal.
    """
    if ir.inventory is None:
        return None
    layers = {layer.index: layer for layer in ir.inventory.compiled}
    for name, tensor in {**ir.statistics, **ir.tensors}.items():
        index = int(name.split(".")[1])
        if index not in layers:
            return f"{name} belongs to layer {index}, which is not compiled"
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
        layer = layers[index]
        square = (layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        if ".correction." not in name and _is_square(tensor) and tuple(tensor.shape) != square:
            return f"{name} has shape {list(tensor.shape)}, expected {list(square)}"
        if name.endswith(".rotation"):
            inverse = ir.tensors.get(name.removesuffix("rotation") + "inverse")
            if (error := inverse_error(tensor, inverse)) > 1e-5:
                return (
                    f"{name} is not {'orthogonal' if inverse is None else 'undone by its inverse'} (error {error:.1e})"
                )
    return None


def _is_square(tensor: Tensor) -> bool:
    return tensor.ndim == 3 and tensor.shape[-1] == tensor.shape[-2]
