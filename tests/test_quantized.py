"""Pre-quantized weights: what can be folded is, and stays what it was; what cannot becomes an overlay, or is refused by name."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

import kvcompile
from kvcompile.checkpoint import DTYPES, Checkpoint, dequantized, tensor_bytes, write_patched
from kvcompile.checkpoint.reader import read_header
from kvcompile.errors import CheckpointError, ExportError, UnsupportedArchitectureError
from kvcompile.evaluate import inspect
from kvcompile.evaluate.difference import diff
from kvcompile.evaluate.stages import layer_errors, observe
from kvcompile.export import export
from kvcompile.models import head_grams, load_model, loading, output_weight, take_inventory
from kvcompile.models.agreement import KL_TOLERANCE, LOGITS_TOLERANCE, compare_logits
from kvcompile.passes.convert import collect_statistics
from kvcompile.scheme import load_scheme
from tests.commands import contents, overwrite, quick_conversions, refuse, succeed
from tests.conftest import edit_json
from tests.families import save_family
from tests.quantized import save_compressed, save_fp8, save_mxfp4, save_packed, save_twin
from tests.test_families import cached_logits, random_ids, relative

quick = pytest.fixture(scope="module", autouse=True)(quick_conversions)
Save = Callable[[Path], Path]
FOLDED: dict[str, tuple[Save, torch.dtype]] = {
    "fp8": (save_fp8, torch.bfloat16),
    "fp8 in float32, sharded": (partial(save_fp8, dtype=torch.float32, shards="500KB"), torch.float32),
    "fp8 in float16, list given": (
        partial(save_fp8, dtype=torch.float16, modules_to_not_convert=["lm_head"]),
        torch.float16,
    ),
    "fp8, q, k and v in one": (partial(save_fp8, family="phi3", dtype=torch.float32), torch.float32),
    "fp8, biases": (partial(save_fp8, family="llama"), torch.bfloat16),
    "fp8, vision tower": (partial(save_fp8, family="qwen3_vl", dtype=torch.float32), torch.float32),
    "channel in float32": (
        partial(save_compressed, scheme="channel", dtype=torch.float32, activations=True),
        torch.float32,
    ),
    "tensor, sharded": (partial(save_compressed, scheme="tensor", shards="500KB"), torch.bfloat16),
    "block": (partial(save_compressed, scheme="block"), torch.bfloat16),
    "int8": (partial(save_compressed, scheme="int8", activations=True), torch.bfloat16),
}


@torch.inference_mode()
def dense_logits(path: Path, ids: Tensor) -> Tensor:
    """Logits ``[T, V]`` in float32 of the model whose weights are floats, one forward pass with eager attention."""
    return load_model(path, "eager", dtype=torch.float32, dequantize=True)(ids, use_cache=False).logits[0]


@pytest.mark.parametrize(("save", "dtype"), FOLDED.values(), ids=FOLDED)
def test_codes_are_folded(save: Save, dtype: torch.dtype, tmp_path: Path) -> None:
    source, out = save(tmp_path / "model"), tmp_path / "out"
    method = json.loads((source / "config.json").read_text())["quantization_config"]["quant_method"]
    named = str(dtype).removeprefix("torch.")
    assert inspect(source).weights == f"{method}; W_V and W_O are folded and stored in {named}, all else stays as it is"
    before = contents(source)
    conversion = kvcompile.convert(source, out, calibration_tokens=192)
    assert contents(source) == before
    assert conversion.ir.weights == "fold"
    assert kvcompile.verify(out, source).logits is not None
    assert diff(out, source).same
    assert inspect(out).weights == f"{method}, with W_V and W_O in {named}; folded"

    # everything else is byte for byte the source's; scales of what became floats are gone, here and in the index
    ours, theirs = Checkpoint(out), Checkpoint(source)
    layers = take_inventory(theirs).compiled
    stored = {name for layer in layers for name in layer.stored}
    edited = {name for layer in layers for name in layer.projections()}
    assert set(ours.entries) == set(theirs.entries) - (stored - edited) < set(theirs.entries)
    for name in set(ours.entries) - edited:
        assert tensor_bytes(ours.load(name)) == tensor_bytes(theirs.load(name)), name
    assert {ours.load(name).dtype for name in edited} == {dtype}
    index = out / "model.safetensors.index.json"
    assert index.exists() == (len(theirs.shards) > 1)
    if index.exists():
        total = sum(entry.end - entry.begin for entry in ours.entries.values())
        assert json.loads(index.read_text())["metadata"]["total_size"] == total

    # the same model as the source's codes stand for
    ids = random_ids()
    agreement = compare_logits(dense_logits(save_twin(source, tmp_path / "twin"), ids), dense_logits(out, ids))
    if dtype == torch.float32:
        assert agreement.relative_error <= LOGITS_TOLERANCE
    else:
        assert agreement.kl <= KL_TOLERANCE
        assert agreement.relative_error < 0.1

    # transformers loads it by itself, and our runtime runs the same model from packed pages
    model, tokenizer = kvcompile.load(out, backend="cpu")
    plain, info = type(model).from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        expected = plain(ids, use_cache=False).logits[0].float()
    exact = cached_logits(model, kvcompile.new_cache(model, sink=4, recent=512), ids, chunks=(ids.shape[1],))
    assert relative(exact, expected) < (1e-5 if dtype == torch.float32 else 0.03)
    cache = kvcompile.new_cache(model, sink=4, recent=8)
    packed = cached_logits(model, cache, ids)
    assert all(store.num_pages == [1] for store in cache.stores)
    oracle, _ = kvcompile.load(out, backend="codec", check=False)
    same = relative(packed, cached_logits(oracle, kvcompile.new_cache(oracle, sink=4, recent=8), ids))
    assert same < (1e-4 if dtype == torch.float32 else 0.03)
    assert 1e-3 < relative(packed, expected) < 0.5
    assert kvcompile.generate(model, tokenizer, "Once upon a time", max_new_tokens=3).new_tokens > 0


@pytest.mark.parametrize("name", ["fp8 in float32, sharded", "fp8, biases", "int8"])
def test_codes_are_streamed(name: str, tmp_path: Path) -> None:
    """One layer at a time, decoded as it is read: the bytes of an artifact that was converted with all layers there."""
    source = FOLDED[name][0](tmp_path / "model")
    for out, low_memory in (("resident", False), ("streamed", True)):
        kvcompile.convert(source, tmp_path / out, calibration_tokens=192, low_memory=low_memory)
    assert contents(tmp_path / "resident") == contents(tmp_path / "streamed")
    assert kvcompile.verify(tmp_path / "streamed", source, low_memory=True).logits is not None


@pytest.mark.parametrize("how", ["--low-memory", "--spill", "--device-map=auto"])
def test_packed_weights_are_not_streamed(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_compressed(tmp_path / "model", scheme="int4")
    assert "leave --" in refuse(capsys, "convert", source, "-o", tmp_path / "out", how)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [None, ["lm_head"]])
def test_config_lists_what_is_no_longer_fp8(given: list[str] | None, tmp_path: Path) -> None:
    """Without a list transformers spares the head; with one it must be told of everything that is a float matrix."""
    settings = {} if given is None else {"modules_to_not_convert": given}
    source, out = save_fp8(tmp_path / "model", **settings), tmp_path / "out"
    kvcompile.convert(source, out, "quarot-int4")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, out))
    spared = after["quantization_config"].pop("modules_to_not_convert")
    before["quantization_config"].pop("modules_to_not_convert", None)
    assert before == after
    for name in Checkpoint(out).entries:
        if name.endswith("proj.weight") or name == "lm_head.weight":
            quantized = f"{name}_scale_inv" in Checkpoint(out)
            assert should_convert_module(name.removesuffix(".weight"), spared) == quantized, name


def test_activations_stay_quantized_where_weights_do(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kvcompile.convert(save_compressed(tmp_path / "model", "channel", activations=True), out, "quarot-int4")
    attention = AutoModelForCausalLM.from_pretrained(out).model.layers[1].self_attn
    assert [hasattr(m, "quantization_scheme") for m in (attention.q_proj, attention.v_proj, attention.o_proj)] == [
        True,
        False,
        False,
    ]


def test_a_scheme_that_folds_nothing_leaves_codes_alone(tmp_path: Path) -> None:
    source, out = save_fp8(tmp_path / "model", shards="500KB"), tmp_path / "out"
    assert inspect(source, "naive-int4").weights == "fp8; left as they are"
    kvcompile.convert(source, out, "naive-int4")
    assert inspect(out).weights == "fp8; left as they are"
    for name, content in contents(source).items():
        assert (out / name).read_bytes() == content
    assert kvcompile.verify(out, source).logits is not None


@pytest.mark.parametrize("weights", ["fold", "overlay"])
@pytest.mark.parametrize("module", ["v_proj", "o_proj"])
def test_nan_in_scales(module: str, weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, name = save_fp8(tmp_path / "model"), f"model.layers.1.self_attn.{module}.weight_scale_inv"
    overwrite(source, name, torch.full((1,), torch.nan).numpy().tobytes())
    error = refuse(capsys, "convert", source, "-o", tmp_path / "out", "--weights", weights)
    assert "holds NaN or infinity; repair the checkpoint" in error
    assert name.removesuffix("_scale_inv") in error


def test_int4_becomes_an_overlay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = save_compressed(tmp_path / "model", "int4"), tmp_path / "out"
    before, plan = contents(source), "an overlay, because these weights cannot be folded: values are rotated online"
    assert f"weights: compressed-tensors; {plan}" in succeed(capsys, "inspect", source).out
    said = succeed(capsys, "convert", source, "-o", out, "--calibration-tokens", 192).out
    assert said.count(f"weights: compressed-tensors; {plan}\n") == 1
    assert contents(source) == before
    assert not list(out.glob("model*"))
    assert inspect(out).weights == "compressed-tensors; an overlay"
    succeed(capsys, "verify", out, "--source", source)
    assert all(
        layer.value and layer.value.apply == "online" for layer in kvcompile.load(out)[0].kvcompile.manifest.compiled
    )

    ids = random_ids()
    model, tokenizer = kvcompile.load(out, backend="cpu")
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16  # not only after a first forward pass
    expected = AutoModelForCausalLM.from_pretrained(source, dtype="auto")(ids).logits[0].detach().float()
    exact = cached_logits(model, kvcompile.new_cache(model, sink=4, recent=512), ids, chunks=(ids.shape[1],))
    assert relative(exact, expected) < 0.03
    oracle, _ = kvcompile.load(out, backend="codec")
    found = [cached_logits(m, kvcompile.new_cache(m, sink=4, recent=8), ids) for m in (model, oracle)]
    assert relative(*found) < 0.03
    assert 1e-3 < relative(found[0], expected) < 0.5
    assert kvcompile.generate(model, tokenizer, "Once upon a time", max_new_tokens=3).new_tokens > 0


def test_packed_output_projections_are_read_from_the_model(tmp_path: Path) -> None:
    """Calibration weighs errors by W_O, which of packed weights only the model knows."""
    source = save_compressed(tmp_path / "model", "int4", torch.float32)
    layers = take_inventory(Checkpoint(source)).compiled
    dense, packed = load_model(source, "sdpa", dequantize=True), load_model(source, "sdpa")
    stopped = kvcompile.convert(source, tmp_path / "out", calibration_tokens=192, stop_after="calibrate")
    for layer in layers:
        with pytest.raises(CheckpointError, match=r"self_attn.o_proj in .* is packed \(compressed-tensors\)"):
            dequantized(Checkpoint(source), layer.o_weight)
        w_O = dense.model.layers[layer.index].self_attn.o_proj.weight.detach()
        assert torch.allclose(output_weight(packed, layer), w_O, atol=1e-6)
        gram_KDD = stopped.ir.statistics[f"layers.{layer.index}.output_gram"]
        assert torch.allclose(gram_KDD, head_grams(w_O, layer), rtol=1e-4, atol=1e-6)


def test_output_projections_with_a_bias(tmp_path: Path) -> None:
    source = save_family("llama", tmp_path / "model")
    model, (layer, _) = load_model(source, "sdpa"), take_inventory(Checkpoint(source)).compiled
    projection = model.model.layers[0].self_attn.o_proj
    assert projection.bias.abs().max() > 0.1
    assert torch.allclose(output_weight(model, layer), projection.weight.detach(), atol=1e-6)


def test_packed_weights_are_compared_like_others(tmp_path: Path) -> None:
    """Statistics that several schemes share hold W_O too, and so does what the report of a comparison is made from."""
    source = save_compressed(tmp_path / "model", "int4")
    shared = collect_statistics(source, [load_scheme("kvc-int2"), load_scheme("oscar-int2")], calibration_tokens=192)
    for name, statistics in (("alone", None), ("together", shared)):
        kvcompile.convert(source, tmp_path / name, "oscar-int2", calibration_tokens=192, statistics=statistics)
    assert contents(tmp_path / "alone") == contents(tmp_path / "together")
    ir = kvcompile.convert(source, tmp_path / "out", "oscar-int2", calibration_tokens=192, stop_after="clip").ir
    observation = observe(source, ir.layers().compiled, random_ids(256), torch.device("cpu"))
    for error in layer_errors(ir, observation):
        assert 0 < error.after.output < error.before.output


def test_experts_in_mxfp4_spare_attention(tmp_path: Path) -> None:
    """gpt-oss as it is published: what the fold edits is bfloat16, so nothing about the quantization changes."""
    source, out = save_mxfp4(tmp_path / "model"), tmp_path / "out"
    assert inspect(source).weights == "mxfp4, with W_V and W_O in bfloat16; W_V and W_O are folded as they are"
    conversion = kvcompile.convert(source, out, calibration_tokens=192)
    assert conversion.ir.summary["fold_kl"] <= KL_TOLERANCE
    assert (source / "config.json").read_bytes() == (out / "config.json").read_bytes()
    assert kvcompile.verify(out, source).logits is not None
    ids = random_ids()
    model, _ = kvcompile.load(out)
    exact = cached_logits(model, kvcompile.new_cache(model, sink=4, recent=512), ids)
    assert relative(exact, dense_logits(source, ids)) < 0.05


@pytest.mark.parametrize("kernels", [True, False])
def test_fp8_needs_kernels_to_run_as_fp8(kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def stop(config: Any) -> None:
        seen.append(config.quantization_config.get("dequantize", False))
        raise ValueError("far enough")

    source = save_fp8(tmp_path / "model")
    monkeypatch.setattr(loading, "auto_class", stop)
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: kernels or None)
    with pytest.raises(CheckpointError, match="far enough"):
        load_model(source, "sdpa")
    assert seen == [not kernels]


LIBRARIES = {"gptq": "optimum", "awq": "gptqmodel", "bitsandbytes": "bitsandbytes"}


@pytest.mark.parametrize(("method", "library"), LIBRARIES.items())
def test_methods_whose_library_is_missing(
    method: str, library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save_packed(tmp_path / "model", method), tmp_path / "out"
    assert f"weights: {method}; an overlay, because" in succeed(capsys, "inspect", source).out
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_: pytest.fail("a weight was read"))
        error = refuse(capsys, "convert", source, "-o", out)
    assert f"{source} are quantized ({method}), and transformers cannot run them on cpu here: " in error
    assert library in error
    assert "convert the unquantized checkpoint" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    # A scheme that needs no forward pass can be prepared here, to be run where the library is.
    kvcompile.convert(source, out, "quarot-int4")
    kvcompile.verify(out, source)
    with pytest.raises(CheckpointError, match=f"transformers cannot run them on cpu here: .*{library}"):
        kvcompile.load(out)


FAULTS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "method that transformers does not know": (
        {"quant_method": "modelopt"},
        CheckpointError,
        r"quantized \(modelopt\), and .* it does not know this method",
    ),
    "no method": ({"bits": 4}, CheckpointError, "names no quant_method"),
    "cache quantized too": (
        {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}},
        UnsupportedArchitectureError,
        "would quantize the cache a second time; set it to null",
    ),
}


@pytest.mark.parametrize(("quantization", "kind", "reason"), FAULTS.values(), ids=FAULTS)
def test_configs_that_are_refused(
    quantization: dict[str, object], kind: type[Exception], reason: str, tmp_path: Path
) -> None:
    source = save_fp8(tmp_path / "model")
    edit_json(source / "config.json", quantization_config=quantization)
    with pytest.raises(kind, match=reason):
        kvcompile.convert(source, tmp_path / "out", calibration_tokens=192)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_exports_of_quantized_weights(tmp_path: Path) -> None:
    """config.json has room for one method: what would replace it is refused, what copies it is not."""
    source, out = save_fp8(tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, "quarot-int4")
    for target in ("transformers", "compressed-tensors"):
        with pytest.raises(ExportError, match=r"quantized \(fp8\), and config.json has room for one"):
            export(out, target, tmp_path / target)
    export(out, "plain", tmp_path / "plain")
    ids = random_ids(40)
    assert relative(dense_logits(tmp_path / "plain", ids), dense_logits(source, ids)) < 0.1


def test_sglang_is_not_told_to_fold_into_codes(tmp_path: Path) -> None:
    source, out, view = save_fp8(tmp_path / "model"), tmp_path / "out", tmp_path / "view"
    kvcompile.convert(source, out, "oscar-int2", calibration_tokens=192, weights="overlay")
    export(out, "sglang", view)
    assert 'SGLANG_OSCAR_ABSORB_V_ROTATION="0"' in (view / "oscar.env").read_text()


SCALES: dict[str, tuple[Tensor, tuple[int, int] | None]] = {
    "tensor": (torch.tensor(0.5), None),
    "tensor of one element": (torch.tensor([0.5], dtype=torch.bfloat16), None),
    "channel": (torch.arange(1, 7).float(), None),
    "channel as a column": (torch.arange(1, 7).float()[:, None], (128, 128)),
    "groups": (torch.arange(1, 13).view(6, 2).float(), None),
    "blocks that are cut off": (torch.arange(1, 5).view(2, 2).float(), (4, 5)),
    "powers of two": (torch.tensor([[0.5, 4.0]]).to(torch.float8_e8m0fnu), None),
}


def save_layer(path: Path, codes_NM: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Checkpoint:
    """A checkpoint with one linear layer, ``v``."""
    tensors = {"v.weight": codes_NM, "v.weight_scale_inv": scale, "v.bias": torch.ones(len(codes_NM))}
    save_file(tensors, path / "model.safetensors")
    settings = {"quant_method": "fp8"} | ({} if block is None else {"weight_block_size": list(block)})
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return Checkpoint(path)


@pytest.mark.parametrize(("scale", "block"), SCALES.values(), ids=SCALES)
def test_codes_times_scales(scale: Tensor, block: tuple[int, int] | None, tmp_path: Path) -> None:
    """Each element times the scale of its block, exactly."""
    codes = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    checkpoint = save_layer(tmp_path, codes, scale, block)
    found = dequantized(checkpoint, "v.weight")
    grid = scale.double().reshape(-1, 1) if scale.ndim < 2 else scale.float().double()
    for row in range(6):
        for column in range(8):
            r = row // 4 if block == (4, 5) else row * len(grid) // 6
            c = column // 5 if block == (4, 5) else column * grid.shape[1] // 8
            assert found[row, column] == codes[row, column].double() * grid[r, c]
    assert torch.equal(dequantized(checkpoint, "v.bias"), torch.ones(6))


def test_shards_laid_out_anew_are_aligned(tmp_path: Path) -> None:
    """Codes of an odd size must not shift the floats behind them."""
    source, out = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    save_layer(source, torch.ones(3, 5).to(torch.float8_e4m3fn), torch.tensor(0.5))
    tensors = load_file(source / "model.safetensors") | {"a.codes": torch.ones(3, 5).to(torch.float8_e4m3fn)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(source)
    write_patched(checkpoint, out, {"v.weight": lambda w: w + 1}, checkpoint.shards)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == ["a.codes", "v.bias", "v.weight"]
        assert torch.equal(file.get_tensor("v.weight"), torch.full((3, 5), 1.5, dtype=torch.bfloat16))
        assert torch.equal(file.get_tensor("v.bias"), tensors["v.bias"])
        assert torch.equal(file.get_tensor("a.codes").float(), torch.ones(3, 5))
    for entry in read_header(out / "model.safetensors").values():
        assert entry.begin % DTYPES[entry.dtype].itemsize == 0


@pytest.mark.parametrize("shape", [(7,), (4, 1), (1, 16), (0, 1), (2, 2, 1)])
def test_scales_that_do_not_fit(shape: tuple[int, ...], tmp_path: Path) -> None:
    checkpoint = save_layer(tmp_path, torch.zeros(6, 8, dtype=torch.float8_e4m3fn), torch.ones(shape))
    with pytest.raises(CheckpointError, match=r"weight_scale_inv .* which does not fit v.weight with shape \[6, 8\]"):
        dequantized(checkpoint, "v.weight")
