"""The ONNX specification against the codec and the runtime, on onnxruntime and on onnx's reference evaluator."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("onnx", reason="the ONNX export needs onnx, which is not installed")
pytest.importorskip("onnxscript", reason="the ONNX export needs onnxscript, which is not installed")
pytest.importorskip("onnxruntime", reason="the models are run on onnxruntime, which is not installed")

import onnx
from onnx import checker, numpy_helper

from kvcompile.artifact import open_artifact
from kvcompile.checkpoint import Checkpoint
from kvcompile.codec import LayerCache, PageFormat, RowFormat, attend_layer, decode_pages, encode_pages
from kvcompile.errors import ExportError
from kvcompile.export import export
from kvcompile.export.onnx.cases import Draw, layer_cases, packing_cases, settled, with_answers
from kvcompile.export.onnx.compose import Function, make_model, tensor_info
from kvcompile.export.onnx.layer import Layer
from kvcompile.export.onnx.models import layer_models, packing_models
from kvcompile.export.onnx.oracle import answer, answer_packing, from_bits, to_bits
from kvcompile.passes.convert import convert
from kvcompile.runtime.backend import CodecBackend
from kvcompile.runtime.cache import LayerPlan, NewRows, PackedLayer
from kvcompile.runtime.plan import Geometry, Storage
from kvcompile.runtime.store import PackedStore
from tests.commands import quick_conversions
from tests.families import save_family, small_config
from tests.layers import random_layer
from tests.onnx_layers import RUNTIMES, Session, assert_agrees, random_onnx_layer


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


def rows(dim: int, bits: int, group: int, clip: float = 1.0, **fields: object) -> RowFormat:
    return RowFormat(dim, bits, group, clip, **fields)  # type: ignore[arg-type]


FEEDBACK = {"rounding": "error_feedback"}
KVC = PageFormat(rows(64, 2, 64, 0.94, **FEEDBACK), rows(64, 2, 64, 0.96, **FEEDBACK))
LAYERS = {
    "kvc": lambda: random_onnx_layer(KVC, 6, 2, balanced="key", centered="key value"),
    "oscar-128": lambda: random_onnx_layer(
        PageFormat(rows(128, 2, 128, 0.96), rows(128, 2, 128, 0.92)), 8, 1, rotated="key value"
    ),
    "head-80": lambda: random_onnx_layer(
        PageFormat(rows(80, 2, 20, 0.9), rows(80, 4, 40)), 3, 3, rotated="value", centered="value"
    ),
    "integer-zero": lambda: random_onnx_layer(
        PageFormat(rows(64, 4, 32, zero_point="integer"), rows(64, 1, 64, 0.98, zero_point="integer")), 4, 2
    ),
    "one-bit": lambda: random_onnx_layer(PageFormat(rows(128, 1, 64), rows(128, 1, 128, 0.9), 128), 2, 2, rotated="key"),
    "lloyd-max": lambda: random_onnx_layer(
        PageFormat(rows(128, 2, 128, zero_point="none"), rows(128, 4, 64, zero_point="none")), 4, 1, rotated="key value"
    ),
    "lloyd-max-1": lambda: random_onnx_layer(
        PageFormat(rows(64, 1, 64, zero_point="none"), rows(64, 2, 32, zero_point="none")), 2, 2
    ),
    "kivi": lambda: random_onnx_layer(PageFormat(rows(128, 2, 32, axis="channel"), rows(128, 2, 32), 128), 4, 2),
    "channel-feedback": lambda: random_onnx_layer(
        PageFormat(rows(64, 2, 32, 0.97, axis="channel", zero_point="integer", **FEEDBACK), rows(64, 2, 16, **FEEDBACK)), 2, 1
    ),
    "omni": lambda: random_onnx_layer(
        PageFormat(rows(64, 2, 64, axis="channel", token_scale="l2", norm_scope="token"), rows(64, 2, 32)), 4, 2,
        balanced="key value",
    ),
    "rsqrt": lambda: random_onnx_layer(
        PageFormat(rows(64, 2, 64, 0.95, token_scale="rsqrt"), rows(64, 2, 64)), 2, 2, rotated="key", centered="key"
    ),
    "max": lambda: random_onnx_layer(PageFormat(rows(80, 4, 80, token_scale="max"), rows(80, 2, 80)), 2, 2),
    "mean-abs": lambda: random_onnx_layer(
        PageFormat(rows(64, 2, 32, token_scale="mean_abs", norm_scope="token"), rows(64, 2, 64)), 4, 2, rotated="value"
    ),
    "centroids": lambda: random_onnx_layer(
        PageFormat(rows(64, 4, 64, centroids=16, token_scale="l2"), rows(64, 4, 64, centroids=5)), 4, 2, rotated="key"
    ),
    "kvlinc": lambda: random_onnx_layer(
        PageFormat(rows(64, 2, 64, axis="channel"), rows(64, 2, 64)), 6, 2, rotated="value", correction="relative"
    ),
    "kvlinc-paper": lambda: random_onnx_layer(
        PageFormat(rows(64, 1, 64, axis="channel"), rows(64, 1, 32)), 4, 4, rotated="key", centered="value",
        correction="paper",
    ),
    "softcap": lambda: random_onnx_layer(
        PageFormat(rows(64, 2, 64, 0.94), rows(64, 2, 64)), 4, 2, rotated="key", centered="key", softmax="softcap"
    ),
    "sinks": lambda: random_onnx_layer(
        PageFormat(rows(64, 4, 32), rows(64, 4, 32)), 6, 2, balanced="key value", centered="key value", softmax="sinks"
    ),
    "softcap-sinks": lambda: random_onnx_layer(
        PageFormat(rows(64, 2, 64), rows(64, 2, 64)), 2, 2, centered="key", softmax="softcap sinks"
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=LAYERS)
def layer(request) -> Layer:
    return LAYERS[request.param]()


def test_every_model_answers_as_the_codec_does(layer):
    models, cases = layer_models(layer), with_answers(layer, layer_cases(layer))
    assert models.keys() == cases.keys()
    for name, model in models.items():
        checker.check_model(model)
        given, expected = cases[name]
        for runtime in RUNTIMES:
            assert_agrees(Session(model, runtime)(**given), expected, exact=name == "decode_page")


def dense_bits(layer: Layer, blocks: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """BF16 bits of dense stored rows of keys and of values, of many sizes, some of them constant."""
    tables, fmt, found = layer.tables(), layer.fmt, []
    generator = torch.Generator().manual_seed(seed)
    for row, table in ((fmt.key, tables.key), (fmt.value, tables.value)):
        x, clear = torch.zeros(blocks, layer.num_kv_heads, fmt.tokens, fmt.head_dim), torch.tensor([False])
        while not clear.all():
            sizes = 10 ** (torch.rand(*x.shape[:3], 1, generator=generator) * 8 - 6)
            new = (torch.randn(x.shape, generator=generator) * sizes).bfloat16().float()
            new[:, :, ::9] = new[:, :, ::9, :1]
            x = torch.where(clear[..., None], x, new)
            clear = settled(x, row, table)
        found.append(to_bits(x))
    return found[0], found[1]


def test_dense_rows_give_the_bytes_of_the_codec(layer):
    models = layer_models(layer)
    k, v = dense_bits(layer, 3, seed=1)
    expected = encode_pages(from_bits(k), from_bits(v), layer.fmt, layer.tables())
    decoded = decode_pages(expected, layer.fmt, layer.tables())
    for runtime in RUNTIMES:
        pages = Session(models["encode_page"], runtime)(k=k, v=v)["pages"]
        np.testing.assert_array_equal(pages, expected.numpy())
        back = Session(models["decode_page"], runtime)(pages=pages)
        for name, x in zip("kv", decoded, strict=True):
            np.testing.assert_array_equal(back[name], x.numpy())


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("size", [1e-37, 1e-31, 1e-20, 1e30])
def test_rows_of_any_size(runtime, size):
    """Constant groups, scales below 1e-30, and steps of error feedback that are subnormal."""
    layer = random_onnx_layer(KVC, 2, 2)
    k = (torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(3)) * size).bfloat16()
    k[:, :, 3] = size
    bits = to_bits(k)
    expected = encode_pages(k, k, layer.fmt, layer.tables()).numpy()
    found = Session(layer_models(layer)["encode_page"], runtime)(k=bits, v=bits)["pages"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_errors_that_are_fed_back_are_bounded(runtime):
    """The largest factor there is: errors add up until they are cut at 511 steps."""
    layer = random_onnx_layer(KVC, 2, 2)
    largest = torch.full((2, 64, 64), 127 / 64).triu(1)
    layer = replace(layer, tensors={"key.feedback": largest, "value.feedback": -largest})
    k, v = (torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    expected = encode_pages(k, v, layer.fmt, layer.tables()).numpy()
    found = Session(layer_models(layer)["encode_page"], runtime)(k=to_bits(k), v=to_bits(v))["pages"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_bf16_is_rounded_to_nearest_even(runtime):
    body = Function("Bits", ["x"])
    function = body.returns(("bits", body.call("ToBits", "x")), ("rounded", body.call("RoundBf16", "x")))
    infos = {n: tensor_info(n, t, ["N"]) for n, t in (("x", np.float32), ("bits", np.uint16), ("rounded", np.float32))}
    high = np.arange(2**16, dtype=np.uint32) << 16
    x = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)
    x = x[~np.isnan(x)]
    found = Session(make_model(function, infos, {}, ""), runtime)(x=x)
    rounded = torch.from_numpy(x).bfloat16()
    np.testing.assert_array_equal(found["bits"], to_bits(rounded))
    np.testing.assert_array_equal(found["rounded"].view(np.uint32), rounded.float().numpy().view(np.uint32))


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_packing(bits, runtime):
    for name, model in packing_models(bits).items():
        given = packing_cases(bits)[name]
        assert_agrees(Session(model, runtime)(**given), answer_packing(name, given))


def cache_arrays(cache: LayerCache) -> dict[str, np.ndarray]:
    windows = {"sink_k": cache.sink_k_BKSD, "sink_v": cache.sink_v_BKSD}
    windows |= {"ring_k": cache.recent_k_BKWD, "ring_v": cache.recent_v_BKWD}
    return {
        "pages": cache.pages_PKX.numpy(),
        "table": cache.table_BN.numpy(),
        "num_pages": cache.num_pages_B.numpy(),
        "num_tokens": cache.num_tokens_B.numpy(),
        **{name: to_bits(window) for name, window in windows.items()},
    }


@pytest.mark.parametrize("groups", [1, 4, 7])
@pytest.mark.parametrize(
    ("tokens", "sink", "ring"),
    [
        ([1, 63, 64, 65, 200], 0, 64),
        ([0, 1, 3, 4, 333], 4, 128),
        ([0, 2], 4, 64),
        ([129], 1, 64),
        ([5, 5 + 128], 5, 64),
    ],
)
def test_attention_over_ragged_batches(groups, tokens, sink, ring):
    """Empty windows, no pages, odd lengths; what lies in slots that hold no token does not matter."""
    fmt = PageFormat(rows(64, 2, 32, 0.9), rows(64, 2, 64))
    cache = random_layer(fmt, 2, tokens, sink, ring, seed=sum(tokens))
    if not int(cache.num_pages_B.max()):
        cache = replace(cache, table_BN=cache.table_BN[:, :0])
    layer = random_onnx_layer(fmt, 2 * groups, 2)
    q = torch.randn(len(tokens), 2 * groups, 64, generator=torch.Generator().manual_seed(5))
    out, lse = attend_layer(q, cache, 0.2)
    given = cache_arrays(cache)
    for row, n in enumerate(tokens):
        first = cache.fmt.tokens * int(cache.num_pages_B[row])
        used = {slot % ring for slot in range(first, max(n - sink, first))}
        unused = [slot for slot in range(ring) if slot not in used]
        for name in ("ring_k", "ring_v"):
            given[name][row][:, unused] = 0x7FC0  # NaN
    model = layer_models(layer)["attend"]
    for runtime in RUNTIMES:
        found = Session(model, runtime)(q=q.numpy(), scaling=np.array(0.2, np.float32), **given)
        assert_agrees(found, {"out": out.numpy(), "lse": lse.numpy()})


def packed_layer(layer: Layer, sink: int, recent: int) -> PackedLayer:
    """The runtime's cache of one layer."""
    maps = layer.tensors
    inverse, rotation, value = maps.get("key.inverse"), maps.get("key.rotation"), maps.get("value.rotation")
    plan = LayerPlan(
        Storage(layer.fmt, layer.tables(), layer.correction()),
        rotation, rotation if inverse is None else inverse.mT, value,
        maps.get("value.inverse", None if value is None else value.mT), maps.get("key.mean"), maps.get("value.mean"),
    )  # fmt: skip
    geometry = Geometry(layer.num_kv_heads, layer.fmt.head_dim, sink, recent, layer.fmt.page_bytes, layer.fmt.tokens)
    store = PackedStore(geometry, [plan.storage], CodecBackend(), torch.device("cpu"))
    return PackedLayer(plan, store, 0, store.backend)


@pytest.mark.parametrize("name", ["kvc", "omni", "kvlinc", "kvlinc-paper", "softcap", "sinks", "softcap-sinks"])
def test_decoding_token_by_token_with_the_models_alone(name):
    """From nothing: steps, pages and states made by the models give what the runtime gives."""
    layer, sink, recent = LAYERS[name](), 3, 20
    reference = packed_layer(layer, sink, recent)
    geometry, block, dim, kv = reference.store.geometry, layer.fmt.tokens, layer.fmt.head_dim, layer.num_kv_heads
    models = {n: Session(m) for n, m in layer_models(layer).items() if n in ("step", "encode_page", "absorb")}
    draw = Draw(layer, seed=7)
    k, v = (draw.page_rows(half, 3).transpose(0, 1).flatten(1, 2)[None] for half in ("key", "value"))
    tokens = k.shape[2]
    q = draw.normal(1, layer.num_heads, tokens)
    slots = {"sink_k": sink, "sink_v": sink, "ring_k": geometry.ring, "ring_v": geometry.ring}
    windows = {window: np.zeros((1, kv, size, dim), np.uint16) for window, size in slots.items()}
    pages = np.zeros((0, kv, layer.fmt.page_bytes), np.uint8)
    correction = layer.correction()
    features = 0 if correction is None else correction.key_KDF.shape[-1]
    state_s, state_p = np.zeros((kv, features, dim), np.float32), np.zeros((kv, features), np.float32)
    softcap, sinks = (layer.tensors.get(f"softmax.{name}") for name in ("softcap", "sinks"))
    module, scaling = SimpleNamespace(num_key_value_groups=layer.num_heads // kv, is_causal=True), dim**-0.5
    for i in range(tokens):
        if geometry.full_pages(i + 1) > len(pages):
            place = len(pages) * block % geometry.ring
            block_k, block_v = (windows[f"ring_{x}"][:, :, place : place + block] for x in "kv")
            page = models["encode_page"](k=block_k, v=block_v)["pages"]
            pages = np.concatenate([pages, page])
            if features:
                states = models["absorb"](k=block_k, pages=page, state_s=state_s, state_p=state_p)
                state_s, state_p = states["new_state_s"], states["new_state_p"]
        states = {"state_s": state_s[None], "state_p": state_p[None]} if features else {}
        found = models["step"](
            q=q[:, :, i].numpy(), k=k[:, :, i].numpy(), v=v[:, :, i].numpy(), pages=pages,
            table=np.arange(len(pages), dtype=np.int32)[None], num_pages=np.array([len(pages)], np.int32),
            num_tokens=np.array([i], np.int32), **windows, **states,
        )  # fmt: skip
        windows = {n: found[f"new_{n}"] for n in windows}
        query, *new = (x[:, :, i : i + 1] for x in (q, k, v))
        out = reference.attend(query, NewRows(reference, *new), None, scaling, module, softcap, sinks)
        np.testing.assert_allclose(found["out"], out[:, 0].numpy(), rtol=1e-5, atol=1e-5)
    stored = reference.store.layer(0)
    assert len(pages) == int(stored.num_pages_B[0]) > 1
    np.testing.assert_array_equal(pages, stored.pages_PKX[stored.table_BN[0, : len(pages)].long()].numpy())


def test_tensors_of_another_layer_can_be_fed():
    first, second = (random_onnx_layer(KVC, 4, 2, rotated="key", centered="key value", seed=seed) for seed in (1, 2))
    second = replace(second, fmt=replace(KVC, key=replace(KVC.key, clip_ratio=0.8)))
    assert first.geometry() == second.geometry()
    models, cases = layer_models(first), with_answers(second, layer_cases(second))
    for name in ("encode_key", "encode_page", "step"):
        given, expected = cases[name]
        wanted = {x.name for x in models[name].graph.input}
        tensors = {n: a for n, a in second.defaults().items() if n in wanted}
        for runtime in RUNTIMES:
            assert_agrees(Session(models[name], runtime)(**given, **tensors), expected)
        changed = Session(models[name])(**given)
        assert any(not np.array_equal(changed[n], expected[n]) for n in expected)


# -- the kit -----------------------------------------------------------------------------------------------------------


def run_kit(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run_conformance.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_kit_of_the_example(converted, tmp_path):
    folder = tmp_path / "kit"
    export(converted, "onnx", folder)
    done = run_kit(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 of 11 cases agree" in done.stdout
    index = json.loads((folder / "index.json").read_text())
    assert index["layer-00"]["layers"] == [0, 1, 2, 3]
    assert "- `layer-00`: layers 0, 1, 2, 3" in (folder / "NOTES.md").read_text("utf-8")
    export(converted, "onnx", tmp_path / "again")
    for path in filter(Path.is_file, folder.rglob("*")):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(folder)).read_bytes(), path


def test_kit_finds_a_wrong_answer(converted, tmp_path):
    folder = tmp_path / "kit"
    export(converted, "onnx", folder)
    case = folder / "conformance" / "layer-00" / "encode_page.npz"
    arrays = dict(np.load(case))
    arrays["out.pages"][0, 0, 0] ^= 1
    np.savez(case, **arrays)
    done = run_kit(folder)
    assert done.returncode == 1
    assert "FAIL layer-00/encode_page pages" in done.stdout
    for path in (folder / "conformance").rglob("*.npz"):
        path.unlink()
    assert run_kit(folder).returncode == 1


def test_initializers_are_the_tensors_of_the_sidecar(converted, tmp_path):
    artifact = open_artifact(converted)
    export(converted, "onnx", tmp_path / "kit")
    index = json.loads((tmp_path / "kit" / "index.json").read_text())
    layer = Layer.of(artifact, artifact.manifest.layers[0], {})
    assert "key.rotation" in index["layer-00"]["sidecar"]
    assert layer.defaults().keys() == {*index["layer-00"]["sidecar"], "scaling"}
    for name, pattern in index["layer-00"]["sidecar"].items():
        np.testing.assert_array_equal(layer.defaults()[name], artifact.tensors[pattern.format(i=0)].numpy())


@pytest.mark.parametrize("scheme", ["kvc-int2", "omni-int2", "kvlinc-int2", "kmeans-int4"])
def test_kit_of_other_schemes(scheme, example, tmp_path):
    """Every operator, and whatever tensors its passes make."""
    overrides = ["calibration.tokens=256"]
    if scheme == "kvlinc-int2":
        overrides += ["correction.steps=4", "correction.features=32", "calibration.sample_sequences=1"]
    convert(example, tmp_path / "out", scheme, overrides=overrides)
    export(tmp_path / "out", "onnx", tmp_path / "kit")
    done = run_kit(tmp_path / "kit")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("family", "tensor"), [("gemma2", "softmax.softcap"), ("gpt_oss", "softmax.sinks")])
def test_kit_of_a_model_without_a_plain_softmax(family, tensor, tmp_path):
    source = save_family(family, tmp_path / "model")
    convert(source, tmp_path / "out", "kvc-int2", overrides=["calibration.tokens=192"])
    export(tmp_path / "out", "onnx", tmp_path / "kit")
    done = run_kit(tmp_path / "kit")
    assert done.returncode == 0, done.stdout + done.stderr
    step = onnx.load(tmp_path / "kit" / "layer-01" / "step.onnx")
    held = {x.name: numpy_helper.to_array(x) for x in step.graph.initializer}[tensor]
    if family == "gemma2":
        assert held == small_config(family).attn_logit_softcapping
    else:
        np.testing.assert_array_equal(held, Checkpoint(source).load("model.layers.1.self_attn.sinks").numpy())


@pytest.mark.shared
def test_kit_of_qwen3(shared, tmp_path):
    convert(shared / "models" / "qwen3-32m", tmp_path / "out", "kvc-int2", overrides=["calibration.tokens=512"])
    export(tmp_path / "out", "onnx", tmp_path / "kit")
    done = run_kit(tmp_path / "kit")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_its_libraries_the_export_says_what_to_install(converted, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvcompile.export.onnx.kit", None)
    with pytest.raises(ExportError, match=r"pip install 'kvcompile\[onnx\]'"):
        export(converted, "onnx", tmp_path / "kit")
    assert not list(tmp_path.iterdir())


def test_answers_do_not_alter_their_inputs():
    layer = LAYERS["kvlinc"]()
    for model, given in layer_cases(layer).items():
        before = {name: array.copy() for name, array in given.items()}
        answer(model, layer, given)
        for name, array in given.items():
            np.testing.assert_array_equal(array, before[name])
