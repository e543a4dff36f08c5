"""Forward passes of a model, wherever its weights are: what calibration and verification run.

They name their forward passes and what is to happen between layers; whether the weights are all there, or come one layer at a
time (`kvcompile.models.streaming`), changes no number.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import nn
from transformers import PreTrainedModel

from kvcompile.models.loading import decoder_of

T = TypeVar("T")
Entering = Callable[[int, int, nn.Module], None]
"""Called with a forward pass, a layer and its module before this forward pass comes to this layer."""
Leaving = Callable[[int], None]
"""Called with a layer once every forward pass has passed it."""
Track = Callable[..., Iterable[Any]]
"""``track(items, description, unit, size)`` iterates and shows progress."""


@dataclass(frozen=True)
class Forward(Generic[T]):
    """A forward pass as a call that enters its own contexts (``inference_mode`` ...), and how many tokens it takes."""

    call: Callable[[], T]
    tokens: int


class Runnable(Protocol):
    """A model that forward passes can be run on."""

    model: PreTrainedModel

    def run(
        self,
        forwards: Sequence[Forward[T]],
        what: str,
        track: Track,
        entering: Entering = ...,
        leaving: Leaving = ...,
    ) -> list[T]:
        """The results of `forwards`, in order."""


class ResidentModel:
    """A model whose weights are all there: forward passes run one after another."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def run(
        self,
        forwards: Sequence[Forward[T]],
        what: str,
        track: Track,
        entering: Entering = lambda *_: None,
        leaving: Leaving = lambda *_: None,
    ) -> list[T]:
        """The results of `forwards`; every layer is entered before a forward pass begins."""
        layers: Any = decoder_of(self.model).layers
        results = []
        for index, forward in enumerate(track(forwards, what, "tok", lambda f: f.tokens)):
            for layer, module in enumerate(layers):
                entering(index, layer, module)
            results.append(forward.call())
        for layer in range(len(layers)):
            leaving(layer)
        return results
