"""A language model of which one decoder layer is in memory at a time, so that it may be larger than memory.

The modules are those that transformers builds, and weights go into them the way that it loads them, experts fused and names
converted; only when, and how many at once, is decided here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from kvcompile.checkpoint import DTYPES, Checkpoint, decodes, dequantized, edited_dtype, quant_method, scale_names
from kvcompile.errors import CheckpointError
from kvcompile.models.forwards import Entering, Forward, Leaving, Track
from kvcompile.models.inventory import Inventory
from kvcompile.models.loading import auto_class, check_loaded, decoder_of, first_line, quiet
from kvcompile.models.lockstep import run_abreast
from kvcompile.models.spill import spill

T = TypeVar("T")


class StreamedModel:
    """The model at `checkpoint`; embeddings, head and vision tower stay, decoder layers come and go.

    What stays between two layers is a forward pass's hidden states, in `spill_folder` where one is given. Raises
    CheckpointError where `load_model` would, before a weight is read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        inventory: Inventory,
        attention: str,
        device: torch.device,
        spill_folder: Path | None = None,
    ):
        check_streaming(checkpoint)
        self._checkpoint, self._device, self._spill_folder = checkpoint, device, spill_folder
        names = checkpoint.entries.keys() - {scale for n in checkpoint.entries for scale in scale_names(checkpoint, n)}
        self._names = [sorted(n for n in names if n.startswith(f"{x.prefix}.")) for x in inventory.layers]
        self.model = self._build(attention)
        layered = {name for names in self._names for name in names}
        with torch.device("meta"):
            absent = {n: torch.empty(checkpoint.shape(n), dtype=edited_dtype(checkpoint, n)) for n in sorted(names)}
        check_loaded(self._load(absent, torch.device("meta")), checkpoint.path)
        self._load({n: _Stored(checkpoint, n) for n in sorted(names - layered)}, device)
        self.model.tie_weights()
        self.model.eval()

    def run(
        self,
        forwards: Sequence[Forward[T]],
        what: str,
        track: Track,
        entering: Entering = lambda *_: None,
        leaving: Leaving = lambda *_: None,
    ) -> list[T]:
        """The results of `forwards`, all of which pass a layer while it is there."""
        layers: Any = decoder_of(self.model).layers

        @contextmanager
        def holding(layer: int) -> Iterator[None]:
            with self._resident(layer):
                yield
            leaving(layer)

        with self._spilling(layers):
            order: Iterable[int] = track(range(len(layers)), what, "layer", lambda _: 1)
            calls: list[Callable[[], T]] = [forward.call for forward in forwards]
            return run_abreast(layers, order, calls, holding, lambda call, i: entering(call, i, layers[i]))

    def _build(self, attention: str) -> PreTrainedModel:
        """The modules, with buffers but without parameters."""
        path = self._checkpoint.path
        with quiet():
            try:
                config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                for part in (config, config.get_text_config(decoder=True)):
                    vars(part).pop("quantization_config", None)  # weights are floats by the time they arrive
                dtype = config.dtype or _first_dtype(self._checkpoint)
                with _without_parameters(), self._device:
                    return auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
            except Exception as error:  # as in load_model
                raise CheckpointError(f"transformers cannot build the model in {path}: {first_line(error)}") from error

    def _load(self, tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Put these tensors of the checkpoint into the model, as transformers does; what it says of missing ones."""
        model: Any = self.model
        config = LoadStateDictConfig(
            ignore_mismatched_sizes=True,
            device_map={"": device},
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]
        )
        with quiet():
            info, _ = convert_and_load_state_dict_in_model(model, tensors, config)
            info.missing_keys -= set(model.all_tied_weights_keys)
            model._adjust_missing_and_unexpected_keys(info)
        return info.to_dict()

    @contextmanager
    def _resident(self, layer: int) -> Iterator[None]:
        """The weights of a layer are there."""
        layers: Any = decoder_of(self.model).layers
        module: nn.Module = layers[layer]
        held: Any
        absent = [
            (held, name, tensor)
            for owner in module.modules()
            for held in (owner._parameters, owner._buffers)
            for name, tensor in held.items()
            if tensor is not None and tensor.is_meta
        ]
        self._load({name: _Stored(self._checkpoint, name) for name in self._names[layer]}, self._device)
        try:
            yield
        finally:
            for held, name, tensor in absent:
                held[name] = tensor

    @contextmanager
    def _spilling(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Hidden states between layers lie in a file, if that is wanted: what enters the first layer, and what leaves each."""
        if self._spill_folder is None:
            yield
            return
        folder, embeddings = self._spill_folder, self.model.get_input_embeddings()

        def hook(_module: nn.Module, _arguments: Any, output: Any) -> Any:
            return spill(output, folder).to(output.device) if isinstance(output, Tensor) else output

        handles = [module.register_forward_hook(hook) for module in [embeddings, *layers]]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Stored:
    """A tensor, as the model means it, that is read when it is sliced: as transformers does with those of a safetensors file."""

    def __init__(self, checkpoint: Checkpoint, name: str):
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, _: Any) -> Tensor:
        return dequantized(self._checkpoint, self._name).to(edited_dtype(self._checkpoint, self._name))


def check_streaming(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for weights of which only their own library can make floats."""
    if not decodes(checkpoint):
        raise CheckpointError(
            f"weights in {checkpoint.path} are packed ({quant_method(checkpoint)}) and cannot be read layer by layer; leave "
            "--low-memory and --spill out"
        )


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Parameters of modules made within are on the meta device; buffers, which a checkpoint may not have, are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _first_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What transformers takes where config.json names no dtype: that of the first floating-point tensor."""
    dtypes = (DTYPES[entry.dtype] for entry in checkpoint.entries.values())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
