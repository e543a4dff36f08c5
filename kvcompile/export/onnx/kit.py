"""The kit in a folder: models, cases with their answers, the script that runs them, and an index.

    layer-00/*.onnx                the models of the first layer of every geometry
    operations/*.onnx              packing, which needs no layer
    conformance/*/*.npz            inputs (``in.name``) and outputs (``out.name``) of every model
    index.json                     which layers every folder stands for, and the sidecar tensors behind its initializers
    run_conformance.py             numpy and onnxruntime only

Equal artifacts give equal bytes.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, checker

from kvcompile.artifact import Artifact
from kvcompile.checkpoint import Checkpoint
from kvcompile.export.onnx.cases import layer_cases, packing_cases, with_answers
from kvcompile.export.onnx.layer import Layer
from kvcompile.export.onnx.models import layer_models, packing_models
from kvcompile.export.onnx.oracle import Arrays, answer_packing
from kvcompile.export.onnx.softmax import softmax_tensors

RUNNER = "run_conformance.py"
OPERATIONS = "operations"


def write_kit(artifact: Artifact, folder: Path) -> dict[str, list[int]]:
    """Write the kit of an artifact; the layers that every folder of models stands for."""
    softmax = softmax_tensors(Checkpoint(artifact.weights_path))
    layers = {record.index: Layer.of(artifact, record, softmax[record.index]) for record in artifact.manifest.compiled}
    first: dict[tuple[object, ...], int] = {}
    stands_for: dict[str, list[int]] = {}
    for index, layer in layers.items():
        leader = first.setdefault(layer.geometry(), index)
        stands_for.setdefault(_name(leader), []).append(index)
    for leader in first.values():
        layer = layers[leader]
        _write(folder, _name(leader), layer_models(layer), with_answers(layer, layer_cases(layer, seed=leader)))
    for bits in sorted({row.bits for layer in layers.values() for row in (layer.fmt.key, layer.fmt.value)}):
        cases = {name: (given, answer_packing(name, given)) for name, given in packing_cases(bits).items()}
        _write(folder, OPERATIONS, packing_models(bits), cases)
    shutil.copyfile(Path(__file__).with_name(RUNNER), folder / RUNNER)
    contents = {
        name: {
            "layers": indices,
            "sidecar": {
                n: f"layers.{{i}}.{n}"
                for n in sorted(layers[indices[0]].defaults())
                if f"layers.{indices[0]}.{n}" in artifact.tensors
            },
        }
        for name, indices in stands_for.items()
    }
    (folder / "index.json").write_text(json.dumps(contents, indent=1) + "\n", "utf-8")
    return stands_for


def _name(layer: int) -> str:
    return f"layer-{layer:02d}"


def _write(
    folder: Path, name: str, models: Mapping[str, ModelProto], cases: Mapping[str, tuple[Arrays, Arrays]]
) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / "conformance" / name).mkdir(parents=True, exist_ok=True)
    for model, proto in models.items():
        checker.check_model(proto)
        (folder / name / f"{model}.onnx").write_bytes(proto.SerializeToString(deterministic=True))
        given, expected = cases[model]
        arrays = {f"in.{n}": a for n, a in given.items()} | {f"out.{n}": a for n, a in expected.items()}
        with (folder / "conformance" / name / f"{model}.npz").open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
