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


CHANNEL_128 = ("key.quantizer.group_size=128", "value.quantizer.group_size=128")
UNROTATED = ("key.rotation.kind=identity", "key.quantizer.zero_point=float", "value.quantizer.zero_point=float")
REFERENCE_ROWS = {
    "naive2": ("naive-int2",),
    "quarot2": ("quarot-int2",),
    "oscar2": ("oscar-int2",),
    "kivi2-g32": ("kivi-int2",),
    "kivi2-g128": ("kivi-int2", *CHANNEL_128),
    "omni2-g32": ("omni-int2",),
    "omni2-g32-head": ("omni-int2", "key.token_scale.scope=head"),
    "cr2-g32": ("omni-int2", "key.token_scale.kind=none"),
    "ots2-g32": ("omni-int2", *UNROTATED),
    "kvlinc2-noadapter": ("kvlinc-int2", "correction.kind=none"),
    "saw4": ("saw-int4",),
    "naive4": ("naive-int4",),
}
"""Rows of reference_quality.json and what they are here.

The reference's 4-bit schemes quantize every token at once; here the tokens of an unfinished block stay in BF16, so theirs
is an upper limit only.
"""
LAYER_SCOPE = ("key.rotation.scope=layer", "value.rotation.scope=layer")


@pytest.fixture(scope="module")
def kl_of(tmp_path_factory):
    """KL of a scheme with overrides on a reference model, at 2k windows unless said otherwise; measured once."""
    folder = tmp_path_factory.mktemp("schemes")
    text, known = calibration_file(SHARED, folder), {}

    def measured(model: str, scheme: str, *overrides: str, count: int = 4, length: int = 2048) -> float:
        key = (model, scheme, *overrides, length)
        if key not in known:
            out = folder / str(len(known))
            kvcompile.convert(SHARED / "models" / model, out, scheme, overrides=overrides, calibration=text)
            known[key] = measure(out, SHARED, count, length).kl
        return known[key]

    return measured


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("row", REFERENCE_ROWS)
def test_kl_is_that_of_the_reference_on_llama(row, kl_of):
    """Within 10 % of what an independent implementation measured with simulated quantization, four windows of 2048."""
    reference = json.loads((SHARED / "models" / "reference_quality.json").read_text())
    limit = reference["models"]["llama-32m"]["2k"][row]["kl"]
    found = kl_of("llama-32m", *REFERENCE_ROWS[row])
    assert found <= 1.1 * limit
    assert found >= (0.25 if row.endswith("4") else 0.75) * limit, "a KL this small means that less was quantized"


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("row", ["quarot2", "oscar2", "kivi2-g32", "omni2-g32"])
def test_kl_is_that_of_the_reference_on_qwen3(row, kl_of):
    reference = json.loads((SHARED / "models" / "reference_quality.json").read_text())
    limit = reference["models"]["qwen3-32m"]["2k"][row]["kl"]
    assert 0.75 * limit <= kl_of("qwen3-32m", *REFERENCE_ROWS[row]) <= 1.1 * limit


@pytest.mark.shared
@pytest.mark.slow
def test_schemes_rank_as_their_papers_say(kl_of):
    """OSCAR: naive > quarot > oscar at 2 bits. OScaR: rotation before channel-wise keys helps; max norms collapse."""

    def kl(*what: str) -> float:
        return kl_of("llama-32m", *what)

    assert kl("naive-int2") > kl("quarot-int2") > kl("oscar-int2")
    unrotated = kl("omni-int2", "key.token_scale.kind=none", "key.rotation.kind=identity")
    assert unrotated > kl("omni-int2", "key.token_scale.kind=none")
    assert kl("omni-int2", "key.token_scale.kind=max") > kl("omni-int2")


@pytest.mark.shared
@pytest.mark.slow
def test_the_default_scheme_beats_oscar_at_the_same_bits(kl_of):
    """kvc-int2 against oscar-int2 with one rotation per layer: geometric mean over two models at most 0.42 at 2k.

    At 8k, where the limit is 0.60, one window of one model has to do here; `benchmarks/ablation.py` has both.
    """
    ratios = [kl_of(m, "kvc-int2") / kl_of(m, "oscar-int2", *LAYER_SCOPE) for m in ("qwen3-32m", "llama-32m")]
    assert (ratios[0] * ratios[1]) ** 0.5 <= 0.42
    long = {"count": 1, "length": 8192}
    assert kl_of("llama-32m", "kvc-int2", **long) <= 0.6 * kl_of("llama-32m", "oscar-int2", *LAYER_SCOPE, **long)


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "trials"), [(4096, 12), (8192, 24)])
def test_retrieval_on_qwen3(tokens, trials, tmp_path):
    """The default scheme may miss one number of 24."""
    text = calibration_file(SHARED, tmp_path)
    kvcompile.convert(SHARED / "models" / "qwen3-32m", tmp_path / "out", calibration=text)
    assert measure_retrieval(tmp_path / "out", SHARED, tokens, trials) >= 0.95


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
    """On the bundled example: kvc-int2 < oscar-int2 < quarot-int2 < naive-int2 in KL, all with the same bits and windows."""
    from kvcompile.evaluate import divergence, reference_logits

    text = (Path(__file__).parents[1] / "examples" / "heldout.txt").read_text("utf-8")
    kl = {}
    for scheme in ("naive-int2", "quarot-int2", "oscar-int2", "kvc-int2"):
        kvcompile.convert(example, tmp_path / scheme, scheme)
        model, tokenizer = kvcompile.load(tmp_path / scheme)
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :2400].view(3, 800)
        kl[scheme] = divergence(model, kvcompile.new_cache(model), ids, reference_logits(model, ids), start=500).kl
    assert kl["kvc-int2"] < kl["oscar-int2"] < kl["quarot-int2"] < kl["naive-int2"]
