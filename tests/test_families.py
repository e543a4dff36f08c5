"""Every supported family, from a checkpoint as transformers saves it to generation through its packed cache."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile.calibration import AttentionSample
from kvcompile.checkpoint import Checkpoint, tensor_bytes
from kvcompile.errors import CacheError, SchemeError
from kvcompile.evaluate import inspect
from kvcompile.models import FAMILIES, load_model, take_inventory
from kvcompile.models.agreement import KL_TOLERANCE, LOGITS_TOLERANCE
from kvcompile.models.families import VISION_LANGUAGE
from kvcompile.runtime.graph import replayed_steps
from tests.commands import quick_conversions, refuse, succeed
from tests.conftest import edit_json
from tests.families import CASES, save_family
from tests.support_table import document

PROMPT, CHUNK, LENGTH = 40, 20, 120
"""A first chunk, one on its history, then token by token; with a sink of 4 and 8 recent tokens a page is written at 77."""
quick = pytest.fixture(scope="module", autouse=True)(quick_conversions)


def test_every_family_is_tested() -> None:
    language = {case.text or name for name, case in CASES.items()}
    assert {name for name, case in CASES.items() if case.text} == set(VISION_LANGUAGE)
    assert set(FAMILIES) <= language


def random_ids(length: int = LENGTH) -> Tensor:
    return torch.randint(2, 4000, (1, length), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def cached_logits(model, cache, ids: Tensor, chunks: tuple[int, ...] = (PROMPT, CHUNK)) -> Tensor:
    """Logits ``[T, V]`` of all positions, teacher-forced through a cache: in `chunks`, then token by token."""
    step = partial(model, past_key_values=cache, use_cache=True)
    parts = ids.split([*chunks, *[1] * (ids.shape[1] - sum(chunks))], dim=1)
    return torch.cat([step(part).logits[0].float() for part in parts])


@torch.inference_mode()
def eager_logits(source: Path, ids: Tensor) -> Tensor:
    """Logits ``[T, V]`` of the source with transformers' own eager attention, in one forward pass without a cache."""
    return load_model(source, "eager")(ids, use_cache=False).logits[0].float()


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def check_untouched(source: Path, out: Path) -> None:
    """Nothing but W_V, b_V and W_O of packed layers may differ; of a fused matrix only the rows of v."""
    before, after = Checkpoint(source), Checkpoint(out)
    assert set(before.entries) == set(after.entries)
    assert (source / "config.json").read_bytes() == (out / "config.json").read_bytes()
    packed = take_inventory(before).compiled
    edited = {name for layer in packed for name in layer.projections()}
    for name in set(before.entries) - edited:
        assert tensor_bytes(before.load(name)) == tensor_bytes(after.load(name)), name
    for layer in packed:
        ours, theirs = after.load(layer.v_weight), before.load(layer.v_weight)
        assert torch.equal(ours[: layer.v_first], theirs[: layer.v_first])
        assert not torch.equal(ours[layer.v_rows], theirs[layer.v_rows]) or layer.gated


@pytest.mark.parametrize("family", CASES)
def test_family(family: str, tmp_path: Path) -> None:
    case, source, out = CASES[family], tmp_path / "model", tmp_path / "out"
    sharded = list(CASES).index(family) % 2 == 1
    save_family(family, source, shards="500KB" if sharded else "10GB")
    assert (len(Checkpoint(source).shards) > 1) == sharded
    found = inspect(source)
    assert tuple(layer.index for layer in found.layers if not layer.reason) == case.packed

    # fold and calibrate
    conversion = kvcompile.convert(source, out, calibration_tokens=192)
    assert conversion.manifest is not None
    assert [x.index for x in conversion.manifest.compiled] == list(case.packed)
    assert all(metrics["value_residual_after"] < 0.5 for metrics in conversion.ir.metrics.values() if metrics)
    if case.folds:
        assert conversion.ir.summary["fold_logit_error"] <= LOGITS_TOLERANCE
        assert kvcompile.verify(out, source).logits is not None
    else:
        assert not conversion.ir.folds
    check_untouched(source, out)

    # generate
    ids = random_ids()
    expected = eager_logits(source, ids)
    model, tokenizer = kvcompile.load(out, backend="cpu")
    exact = cached_logits(model, kvcompile.new_cache(model, sink=4, recent=512), ids)
    assert relative(exact[:PROMPT], expected[:PROMPT]) < LOGITS_TOLERANCE  # unquantized, not even rounded
    assert relative(exact, expected) < 0.005  # windows are bfloat16
    cache = kvcompile.new_cache(model, sink=4, recent=8)
    ours = cached_logits(model, cache, ids)
    assert all(store.num_pages == [1] for store in cache.stores)
    oracle, _ = kvcompile.load(out, backend="codec", check=False)
    assert relative(ours, cached_logits(oracle, kvcompile.new_cache(oracle, sink=4, recent=8), ids)) < 1e-4
    assert 1e-3 < relative(ours, expected) < 0.5
    assert kvcompile.generate(model, tokenizer, "Once upon a time", max_new_tokens=3).new_tokens > 0


@pytest.mark.parametrize("family", CASES)
def test_overlay(family: str, tmp_path: Path) -> None:
    """Without folded weights the values' rotation is applied online, with the same attention."""
    source, out = save_family(family, tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, "quarot-int4", weights="overlay")
    model, _ = kvcompile.load(out, backend="cpu")
    ids = random_ids(64)
    assert relative(cached_logits(model, kvcompile.new_cache(model), ids), eager_logits(source, ids)) < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "qwen2_5_vl"])
def test_16_bit_weights(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source, out = save_family(family, tmp_path / "model", dtype), tmp_path / "out"
    conversion = kvcompile.convert(source, out, calibration_tokens=192)
    assert conversion.ir.summary["fold_kl"] <= KL_TOLERANCE
    check_untouched(source, out)
    model, _ = kvcompile.load(out)
    assert model.dtype == dtype
    ids = random_ids(64)
    assert relative(cached_logits(model, kvcompile.new_cache(model), ids), eager_logits(source, ids)) < 0.05


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_next"])
def test_padded_batches(family: str, tmp_path: Path) -> None:
    """A row that is padded on the left gives what it gives alone: packed, sliding and linear layers see the mask."""
    source, out = save_family(family, tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, calibration_tokens=192)
    model, _ = kvcompile.load(out)
    ids_BT, padding = random_ids(120).view(2, 60), 17
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :padding] = 0
    cache, logits = kvcompile.new_cache(model), []
    with torch.inference_mode():
        for first, last in ((0, 50), (50, 57), (57, 58), (58, 59), (59, 60)):
            positions_BT = (mask_BT[:, :last].cumsum(1) - 1).clamp_min(0)[:, first:]
            part, seen = ids_BT[:, first:last], mask_BT[:, :last]
            step = model(part, past_key_values=cache, attention_mask=seen, position_ids=positions_BT, use_cache=True)
            logits.append(step.logits.float())
    together = torch.cat(logits, dim=1)
    assert relative(together[0], eager_logits(source, ids_BT[:1])) < 0.005
    assert relative(together[1, padding:], eager_logits(source, ids_BT[1:, padding:])) < 0.005
    assert cache.nbytes() > sum(store.nbytes() for store in cache.stores)  # the layers that are not packed count too


def test_rows_of_a_hybrid_cache_are_selected_and_repeated(tmp_path: Path) -> None:
    """States of linear attention follow their rows, as pages do."""
    source, out = save_family("qwen3_next", tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, "naive-int4")
    model, _ = kvcompile.load(out)
    ids_BT = random_ids(60).view(2, 30)
    cache = kvcompile.new_cache(model)
    with torch.inference_mode():
        model(ids_BT[:, :29], past_key_values=cache, use_cache=True)
        cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 3, 2]))
        ours = model(ids_BT[[1, 0, 0], 29:], past_key_values=cache, use_cache=True).logits[:, 0]
        theirs = torch.cat([eager_logits(source, ids_BT[row : row + 1])[-1:] for row in (1, 0, 0)])
    assert relative(ours, theirs) < 0.005


def test_sample_weights_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    q_SKXD, k_SKTD = torch.randn(1, 2, 6, 8, generator=generator), torch.randn(1, 2, 20, 8, generator=generator)
    sinks_H = torch.randn(4, generator=generator)  # 2 KV heads, 2 query heads each, 3 queries
    sample = AttentionSample(q_SKXD, k_SKTD, k_SKTD, 0.7, 1.5, sinks_H)
    restored = AttentionSample.restore(sample.tensors(3), 3)
    assert restored is not None
    for kv in range(2):
        for x in range(6):
            logits = [1.5 * float(torch.tanh(q_SKXD[0, kv, x] @ k * 0.7 / 1.5)) for k in k_SKTD[0, kv]]
            exp = torch.tensor([*logits, float(sinks_H[2 * kv + x // 3])]).exp()
            assert torch.allclose(restored.weights(k_SKTD)[0, kv, x], exp[:-1] / exp.sum(), atol=1e-6)


def test_unusual_layers_are_named_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_family("qwen3_next", tmp_path / "model")
    first, second = inspect(source).layers
    assert first.reason == "linear attention: it keeps a state of fixed size, no keys and values"
    assert first.bf16_bytes == first.packed_bytes == 0
    assert "rotated online" in second.note
    assert "1 of 2" in succeed(capsys, "inspect", source).out
    said = succeed(capsys, "convert", source, "-o", tmp_path / "out", "--calibration-tokens", 192).out
    assert "1 of 2 layers packed" in said
    assert "values rotated online, because a gate" in said
    assert kvcompile.verify(tmp_path / "out", source).logits is not None


@pytest.mark.parametrize(("family", "what"), [("gemma2", "soft-capped logits"), ("gpt_oss", "attention sinks")])
def test_linear_correction_is_for_a_plain_softmax(family: str, what: str, tmp_path: Path) -> None:
    source = save_family(family, tmp_path / "model")
    with pytest.raises(SchemeError, match=f"has {what}; use --set correction.kind=none"):
        kvcompile.convert(source, tmp_path / "out", "kvlinc-int2", dry_run=True)


@pytest.mark.parametrize(
    ("language", "reason"), [("deepseek_v3", "compressed latent"), ("opt", "no description of its attention")]
)
def test_a_language_model_inside_is_refused_by_name(
    language: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_family("llava", tmp_path / "model")
    edit_json(source / "config.json", text_config={"model_type": language})
    error = refuse(capsys, "convert", source, "-o", tmp_path / "out")
    assert f"LlavaForConditionalGeneration (language model '{language}')" in error
    assert reason in error


def test_images_in_a_prompt_that_see_each_other_are_refused(tmp_path: Path) -> None:
    """Gemma 3 attends in both directions within an image; packed pages know causal attention only."""
    source, out = save_family("gemma3", tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, "naive-int4")
    model, _ = kvcompile.load(out)
    ids = random_ids(32)
    images = torch.zeros_like(ids)
    images[:, 4:8] = 1
    with pytest.raises(CacheError, match="4-D mask cannot be applied"):
        model(ids, token_type_ids=images, past_key_values=kvcompile.new_cache(model), use_cache=True)


def test_a_prompt_with_an_image(tmp_path: Path) -> None:
    """Where an image's tokens are attended causally, they are cached like any others."""
    source, out = save_family("llava", tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, calibration_tokens=192)
    model, reference = kvcompile.load(out)[0], load_model(source, "eager")
    ids = random_ids(40)
    ids[:, 4:8] = 7  # (16 / 8)^2 patches
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    settings = {"pixel_values": image, "max_new_tokens": 5, "do_sample": False, "output_logits": True}
    settings |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    ours, theirs = (torch.cat(m.generate(ids, **settings).logits) for m in (model, reference))
    assert relative(ours, theirs) < 0.005
    settings["pixel_values"] = -image
    assert relative(torch.cat(reference.generate(ids, **settings).logits), theirs) > 0.005


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_triton_kernels_with_a_bent_softmax(family: str, tmp_path: Path) -> None:
    source, out = save_family(family, tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, calibration_tokens=192, overrides=["window.sink=4", "window.recent=0"])
    device, ids, found = "cuda" if torch.cuda.is_available() else "cpu", random_ids(80), []
    for backend in ("triton", "codec"):
        model, _ = kvcompile.load(out, backend=backend, device=device)
        cache = kvcompile.new_cache(model)
        found.append(cached_logits(model, cache, ids.to(device), chunks=(78,))[-2:])
        assert cache.stores[0].num_pages == [1]
    assert relative(*found) < 1e-4


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "glm4_moe"])
def test_replayed_steps(family: str, tmp_path: Path) -> None:
    """What a CUDA graph of a step rests on, without one; vision-language models have several positions per token."""
    source, out = save_family(family, tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, "naive-int4")
    model, _ = kvcompile.load(out)
    ids = random_ids(30)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    eager = model.generate(ids, **settings)
    cache = kvcompile.new_cache(model)
    with replayed_steps(model, cache, ids.shape[1], capture=False) as graph:
        assert torch.equal(model.generate(ids, past_key_values=cache, **settings), eager)
    assert graph.captures == 1


def test_the_table_of_supported_models_is_current() -> None:
    assert (Path(__file__).parents[1] / "docs" / "models.md").read_text("utf-8") == document()
