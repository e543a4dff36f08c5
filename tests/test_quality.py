"""What a conversion must be worth on the reference models, through the real packed cache. Slow; skips without ../shared."""

import json
from pathlib import Path

import pytest
import torch

import kvcompile
from benchmarks.quality import calibration_file, measure, measure_retrieval
from kvcompile.checkpoint import Checkpoint
from tests.conftest import SHARED

MODELS = ["qwen3-32m", "llama-32m", "TinyStories-656K"]


@pytest.fixture(scope="module")
def converted_models(tmp_path_factory):
    """Every reference model converted as the reference measurement was calibrated."""
    folder = tmp_path_factory.mktemp("reference")
    text = calibration_file(SHARED, folder)
    results = {}
    for name in MODELS:
        results[name] = kvcompile.convert(SHARED / "models" / name, folder / name, "oscar-int2", calibration=text)
    return results


@pytest.mark.shared
@pytest.mark.parametrize("name", MODELS)
def test_fold_leaves_the_model_as_it_was(name, converted_models):
    found = kvcompile.verify(converted_models[name].out, SHARED / "models" / name).logits
    assert found.kl <= 2e-4
    assert found.agreement > 0.98


@pytest.mark.shared
@pytest.mark.parametrize("name", MODELS)
def test_fold_of_a_float32_copy_is_exact(name, tmp_path):
    """The same weights stored in float32: logits within 1e-4 relative."""
    from transformers import AutoModelForCausalLM

    source = SHARED / "models" / name
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(tmp_path / "model")
    for file in source.glob("tokenizer*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    assert {e.dtype for e in Checkpoint(tmp_path / "model").entries.values()} == {"F32"}
    kvcompile.convert(tmp_path / "model", tmp_path / "out", calibration_tokens=2048)
    assert kvcompile.verify(tmp_path / "out", tmp_path / "model").logits.relative_error <= 1e-4


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-32m", "llama-32m"])
def test_kl_is_at_most_that_of_the_reference(name, converted_models):
    """Four windows of 2048, decoded in chunks, positions past 512: at most 1.1 of the reference's oscar2 row."""
    reference = json.loads((SHARED / "models" / "reference_quality.json").read_text())
    limit = 1.1 * reference["models"][name]["2k"]["oscar2"]["kl"]
    found = measure(converted_models[name].out, SHARED)
    assert found.kl <= limit
    assert found.kl > 0.2 * limit, "a KL this small means that nothing was quantized"


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "trials"), [(4096, 12), (8192, 24)])
def test_retrieval_on_qwen3(tokens, trials, converted_models):
    assert measure_retrieval(converted_models["qwen3-32m"].out, SHARED, tokens, trials) >= 0.95


@pytest.mark.shared
def test_tinystories_generates_from_pages(converted_models):
    """head_dim 16, a third party's checkpoint: text comes out, from packed pages."""
    model, tokenizer = kvcompile.load(converted_models["TinyStories-656K"].out)
    ids = tokenizer("Once upon a time there was a little girl", return_tensors="pt").input_ids
    cache = kvcompile.new_cache(model, sink=4, recent=16)
    output = model.generate(ids, past_key_values=cache, max_new_tokens=150, min_new_tokens=150, do_sample=False)
    assert cache.stores[0].num_pages[0] >= 1
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    assert len(set(text.split())) > 15


@pytest.mark.slow
def test_rotations_beat_plain_quantization(tmp_path, example):
    """On the bundled example: oscar-int2 < quarot-int2 < naive-int2 in KL, all with the same bits and windows."""
    from kvcompile.evaluate import divergence, reference_logits

    text = (Path(__file__).parents[1] / "examples" / "heldout.txt").read_text("utf-8")
    kl = {}
    for scheme in ("naive-int2", "quarot-int2", "oscar-int2"):
        kvcompile.convert(example, tmp_path / scheme, scheme)
        model, tokenizer = kvcompile.load(tmp_path / scheme)
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :2400].view(3, 800)
        kl[scheme] = divergence(model, kvcompile.new_cache(model), ids, reference_logits(model, ids), start=500).kl
    assert kl["oscar-int2"] < kl["quarot-int2"] < kl["naive-int2"]
