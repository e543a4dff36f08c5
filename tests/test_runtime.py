"""The packed cache through transformers: what it stores, that backends agree, and that generation treats it as any cache."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache

import kvcompile
from kvcompile.errors import CacheError
from kvcompile.runtime.pool import PagePool
from tests.conftest import family_config, save_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

LENGTH = 640  # sink 64, recent 256: five pages


@pytest.fixture(scope="module")
def model(converted):
    return kvcompile.load(converted, device=DEVICE)[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A float32 model with random weights and small windows: pages appear after a hundred tokens."""
    folder = tmp_path_factory.mktemp("small")
    save_model(family_config("qwen3"), folder / "model")
    windows = ["window.sink=16", "window.recent=64"]
    kvcompile.convert(folder / "model", folder / "out", calibration_tokens=256, overrides=windows)
    return folder / "out"


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 4000, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def feed(model, cache, ids, chunks, mask=None):
    """Run `ids` through the model in chunks of the given lengths; the last logits of every chunk, ``[chunks, B, V]``."""
    position, out = 0, []
    with torch.inference_mode():
        for length in chunks:
            part = None if mask is None else mask[:, : position + length]
            positions = None if mask is None else (part.cumsum(1) - 1).clamp_min(0)[:, position:]
            logits = model(
                ids[:, position : position + length],
                past_key_values=cache,
                attention_mask=part,
                position_ids=positions,
                use_cache=True,
            ).logits
            out.append(logits[:, -1].float())
            position += length
    for store in cache.stores:
        store.commit()
    return torch.stack(out)


def rows(cache, layer: int, row: int):
    """All stored keys and values of one row, decoded."""
    return cache.stores[0].layer(layer).dense_row(row)


@pytest.mark.parametrize(
    "chunks", [[500, *[1] * 140], [1] * 3 + [637], [100, 300, 1, 1, 238], [64, 256, 320], [320, *[1] * 320]]
)
def test_the_first_layer_stores_the_same_bytes_however_tokens_arrive(model, chunks):
    """Keys and values of layer 0 do not depend on attention, so prefill and decoding must store identical pages."""
    ids = random_ids(1, LENGTH)
    whole, parts = kvcompile.new_cache(model), kvcompile.new_cache(model)
    feed(model, whole, ids, [LENGTH])
    feed(model, parts, ids, chunks)
    assert whole.stores[0].num_pages == parts.stores[0].num_pages == [4]
    assert whole.get_seq_length() == parts.get_seq_length() == LENGTH
    for ours, theirs in zip(rows(whole, 0, 0), rows(parts, 0, 0), strict=True):
        # torch multiplies matrices of different heights in different orders, so a projection may differ in its last bit
        assert (ours == theirs).float().mean() > 0.99
        assert torch.allclose(ours, theirs, atol=0.3 * float(theirs.std()))


def test_windows_hold_the_sink_and_the_recent_tokens(model):
    cache = kvcompile.new_cache(model)
    ids = random_ids(1, 700)
    feed(model, cache, ids, [700])
    store = cache.stores[0]
    in_ring = 700 - 64 - 64 * store.num_pages[0]
    assert 256 < in_ring <= 256 + 64
    k_exact = model.model.layers[0].self_attn  # layer 0 keys of the sink, recomputed and rotated
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    v = k_exact.v_proj(hidden).view(1, 700, 2, 64).transpose(1, 2)
    stored = rows(cache, 0, 0)[1]
    assert torch.allclose(stored[:, :64], v[0, :, :64].float(), atol=1e-2)
    assert torch.allclose(stored[:, -in_ring:], v[0, :, -in_ring:].float(), atol=1e-2)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_backends_agree_with_the_codec(small, backend):
    """Same pages bit for bit where the rows are the same; logits within float32 rounding of attention."""
    if backend == "cpu" and DEVICE == "cuda":
        pytest.skip("the cpu backend needs a model on the CPU")
    oracle, other = (kvcompile.load(small, backend=name, device=DEVICE)[0] for name in ("codec", backend))
    ids = random_ids(2, 260)
    mask = torch.ones_like(ids)
    mask[1, :90] = 0
    chunks = [250, *[1] * 10]
    caches = [kvcompile.new_cache(m) for m in (oracle, other)]
    logits = [feed(m, c, ids, chunks, mask) for m, c in zip((oracle, other), caches, strict=True)]
    assert caches[0].stores[0].num_pages == [2, 1]
    assert torch.allclose(logits[0], logits[1], atol=5e-3, rtol=5e-3)
    ours, theirs = (rows(cache, 0, 1) for cache in caches)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(ours, theirs, strict=True))


def test_decode_matches_attention_over_the_decoded_cache(small):
    """One decode step equals plain attention over what the cache says it stores: the codec as oracle, end to end."""
    model = kvcompile.load(small, backend="codec", device=DEVICE)[0]
    cache = kvcompile.new_cache(model)
    ids = random_ids(1, 300)
    feed(model, cache, ids, [299])
    seen = {}
    layer = cache.layers[1]
    plain = layer.backend.attend

    def spy(q_BHD, stored, scaling):
        out = plain(q_BHD, stored, scaling)
        k, v = stored.dense_row(0)
        weights = (q_BHD[0].unflatten(0, (k.shape[0], -1)) @ k.mT * scaling).softmax(-1)
        seen[len(seen)] = ((weights @ v).flatten(0, 1) - out[0]).abs().max()
        return out

    layer.backend.attend = spy
    with torch.inference_mode():
        model(ids[:, -1:], past_key_values=cache)
    assert len(seen) == 2
    assert max(seen.values()) < 1e-5


def test_padding_changes_no_result(small):
    """Each row of a left-padded batch stores and answers what it does alone."""
    model = kvcompile.load(small, device=DEVICE)[0]
    lengths, total = [250, 131, 17], 250
    ids = random_ids(3, total + 8)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : total - length] = 0
    batch_cache = kvcompile.new_cache(model)
    together = feed(model, batch_cache, ids, [total, *[1] * 8], mask)
    assert batch_cache.stores[0].num_tokens == [length + 8 for length in lengths]
    for row, length in enumerate(lengths):
        cache = kvcompile.new_cache(model)
        alone = feed(model, cache, ids[row : row + 1, total - length :], [length, *[1] * 8])
        assert torch.allclose(alone[:, 0], together[:, row], atol=2e-3, rtol=2e-3)
        assert cache.stores[0].num_pages[0] == batch_cache.stores[0].num_pages[row]


def test_padding_inside_a_later_chunk(small):
    """A second turn whose rows have different lengths: padding takes no slot there either."""
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(2, 200)
    mask = torch.ones_like(ids)
    mask[1, 150:180] = 0
    cache, alone = kvcompile.new_cache(model), kvcompile.new_cache(model)
    together = feed(model, cache, ids, [150, 50], mask)
    keep = torch.cat([ids[1:, :150], ids[1:, 180:]], dim=1)
    single = feed(model, alone, keep, [150, 20])
    assert cache.stores[0].num_tokens == [200, 170]
    assert torch.allclose(single[-1, 0], together[-1, 1], atol=2e-3, rtol=2e-3)


def test_generate_uses_a_packed_cache_by_itself(model, converted):
    ids = random_ids(1, 400)
    output = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert isinstance(output.past_key_values, kvcompile.PackedCache)
    assert output.past_key_values.stores[0].num_pages == [1]


def test_generation_modes(model):
    """Greedy in a padded batch, seeded sampling, streaming."""
    ids = random_ids(2, 380)
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    alone = model.generate(ids[1:, 100:], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert greedy.shape == (2, 386)
    assert torch.equal(greedy[1, 380:], alone[0, 280:])
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        samples.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=True, temperature=1.5))
    assert torch.equal(*samples)


def test_streaming_yields_the_generated_text(converted):
    model, tokenizer = kvcompile.load(converted, device=DEVICE)
    pieces = []
    result = kvcompile.generate(model, tokenizer, "It was a dark night, and", max_new_tokens=12, on_text=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces).strip() == result.text.strip()
    assert result.new_tokens == 12


def test_beam_search_inside_the_windows_equals_the_dense_cache(model):
    """Nothing is quantized yet, so beams must be those of transformers' cache: rows were reordered rightly."""
    ids = random_ids(2, 90)
    settings = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "min_new_tokens": 12}
    packed = model.generate(ids, **settings)
    dense = model.generate(ids, past_key_values=DynamicCache(config=model.config), **settings)
    assert (packed == dense).float().mean() > 0.95  # windows are bfloat16 and rotated: a near tie may fall otherwise


def test_beam_search_with_pages_shares_them(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    out = model.generate(
        random_ids(1, 230),
        max_new_tokens=70,
        num_beams=4,
        do_sample=False,
        min_new_tokens=70,
        return_dict_in_generate=True,
    )
    store = out.past_key_values.stores[0]
    assert len(store.tables) == 4
    assert len({table[0] for table in store.tables}) == 1, "beams of one prompt share its pages"
    used = [page for page, count in enumerate(store.references) if count]
    assert sorted([*used, *store.free]) == list(range(store.pages_LPKX.shape[1]))
    assert sum(store.references) == sum(map(len, store.tables))


def test_selecting_rows_keeps_their_content(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(3, 200)
    cache = kvcompile.new_cache(model)
    feed(model, cache, ids, [200])
    before = [rows(cache, 1, row) for row in range(3)]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    for row, origin in enumerate([2, 0, 0]):
        assert all(torch.equal(a, b) for a, b in zip(rows(cache, 1, row), before[origin], strict=True))
    cache.batch_repeat_interleave(2)
    assert len(cache.stores[0].num_tokens) == 6
    cache.batch_select_indices(torch.tensor([1]))
    assert all(torch.equal(a, b) for a, b in zip(rows(cache, 1, 0), before[2], strict=True))


@pytest.mark.parametrize("removed", [1, 30, 64])
def test_cropping_inside_the_window_is_exact(small, removed):
    """Cropping by less than the recent window and going on equals never having seen the cropped tokens."""
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(1, 300)
    cropped, fresh = kvcompile.new_cache(model), kvcompile.new_cache(model)
    feed(model, cropped, ids, [230])
    kept = 230 - removed
    full = rows(cropped, 0, 0)
    cropped.crop(-removed)
    assert cropped.get_seq_length() == kept
    assert all(torch.equal(a, b[:, :kept]) for a, b in zip(rows(cropped, 0, 0), full, strict=True))
    feed(model, fresh, ids, [kept])
    following = ids[:, kept : kept + 5]
    ours = feed(model, cropped, following, [5])
    theirs = feed(model, fresh, following, [5])
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > 0.98


def test_cropping_into_pages_and_a_padded_batch(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(2, 300)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    cache = kvcompile.new_cache(model)
    feed(model, cache, ids, [300], mask)
    before = [rows(cache, 0, row) for row in range(2)]
    cache.crop(-200)
    assert cache.stores[0].num_tokens == [100, 50]
    for row, count in enumerate([100, 50]):
        for ours, full in zip(rows(cache, 0, row), before[row], strict=True):
            assert torch.allclose(ours, full[:, :count], atol=2e-2, rtol=1e-2)
    used = sum(map(len, cache.stores[0].tables))
    assert len(cache.stores[0].free) == cache.stores[0].pages_LPKX.shape[1] - used
    feed(model, cache, ids, [200])
    assert cache.stores[0].num_tokens == [300, 250]
    cache.crop(-10_000)
    assert cache.stores[0].num_tokens == [0, 0]
    assert cache.get_seq_length() == 0


def test_prompt_lookup_decoding_crops_and_agrees(model):
    ids = random_ids(1, 60).repeat(1, 3)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assisted = model.generate(ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert (plain == assisted).float().mean() > 0.95


def test_inference_mode_may_end_between_steps(small):
    """Storage is made of ordinary tensors, so later steps may run outside inference mode, and no graph is kept."""
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(1, 160)
    cache = kvcompile.new_cache(model)
    feed(model, cache, ids, [150])
    cache.reorder_cache(torch.tensor([0]))
    logits = model(ids[:, 150:151], past_key_values=cache).logits
    assert logits.requires_grad  # the model's own graph, outside the cache
    assert not any(window.requires_grad for window in cache.stores[0].windows.values())


def test_reset_and_reuse(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    cache = kvcompile.new_cache(model)
    ids = random_ids(1, 150)
    first = feed(model, cache, ids, [140, *[1] * 10])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes() == 0
    assert torch.equal(first, feed(model, cache, ids, [140, *[1] * 10]))


def test_windows_can_be_chosen_per_cache(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(1, 200)
    exact = kvcompile.new_cache(model, sink=0, recent=1000)
    feed(model, exact, ids, [200])
    assert exact.stores[0].num_pages == [0]
    tight = kvcompile.new_cache(model, sink=0, recent=0)
    feed(model, tight, ids, [200])
    assert tight.stores[0].num_pages == [3]


def test_storage_is_really_packed(model):
    """By the allocator: pages take 2.5 bits per element at head_dim 64, windows 16; no other tensor holds rows."""
    cache = kvcompile.new_cache(model)
    feed(model, cache, random_ids(1, 3200), [3200])
    pages = cache.stores[0].pages_LPKX
    elements = 4 * 2 * 2 * 64 * 64 * sum(cache.stores[0].num_pages)
    assert pages.nbytes * 8 / elements == pytest.approx(2.5)
    windows = sum(w.nbytes for w in cache.stores[0].windows.values())
    assert cache.nbytes() == pages.nbytes + windows
    assert cache.nbytes() < 0.3 * (4 * 2 * 2 * 64 * 3200 * 2)


def test_layers_with_a_sliding_window_keep_their_own_cache(tmp_path):
    config = family_config(
        "qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=32, max_window_layers=2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    save_model(config, tmp_path / "model")
    result = kvcompile.convert(
        tmp_path / "model", tmp_path / "out", calibration_tokens=256, overrides=["window.sink=0", "window.recent=0"]
    )
    assert [layer.index for layer in result.manifest.compiled] == [0, 2]
    model = kvcompile.load(tmp_path / "out", device=DEVICE)[0]
    ids = random_ids(2, 190)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    cache = kvcompile.new_cache(model)
    logits = feed(model, cache, ids, [180, *[1] * 10], mask)
    alone = feed(model, kvcompile.new_cache(model), ids[1:, 40:], [140, *[1] * 10])
    assert torch.allclose(alone[:, 0], logits[:, 1], atol=2e-3, rtol=2e-3)
    assert cache.layers[1].keys.shape[-2] < 32
    output = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert output.shape == (2, 194)


def test_misuse_is_named(small, tmp_path):
    model = kvcompile.load(small, device=DEVICE)[0]
    cache = kvcompile.new_cache(model)
    with pytest.raises(CacheError, match="2-D attention_mask"):
        model(random_ids(1, 4), past_key_values=cache, attention_mask=torch.ones(1, 1, 4, 4, device=DEVICE))
    with pytest.raises(CacheError, match=r"crop the PackedCache"):
        cache.layers[0].crop(-1)
    plain = AutoModelForCausalLM.from_config(family_config("qwen3"))
    with pytest.raises(CacheError, match=r"kvcompile\.load"):
        kvcompile.new_cache(plain)
    with pytest.raises(CacheError, match="unknown backend 'cuda'"):
        kvcompile.load(small, backend="cuda")


def test_a_dense_cache_still_works_with_the_loaded_model(small):
    """Nobody is forced to use packed pages: the folded model with transformers' cache is the source model."""
    model = kvcompile.load(small, device=DEVICE)[0]
    source = AutoModelForCausalLM.from_pretrained(small.parent / "model").to(DEVICE)
    ids = random_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    with torch.inference_mode():
        ours = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
        theirs = source(ids, attention_mask=mask).logits
    assert torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_a_dense_cache_takes_chunks_with_and_without_a_mask(small, masked):
    """A second chunk on transformers' own cache sees all of the first, whether or not a mask is given."""
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(1, 60)
    with torch.inference_mode():
        whole = model(ids, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        model(ids[:, :40], past_key_values=cache)
        mask = torch.ones_like(ids) if masked else None
        chunk = model(ids[:, 40:], past_key_values=cache, attention_mask=mask).logits
    assert torch.allclose(chunk, whole[:, 40:], atol=1e-4, rtol=1e-4)


def test_heads_that_the_cpu_kernel_cannot_read_go_to_the_codec(tmp_path):
    """head_dim 24 at 2 bits is no whole number of 32-bit words: chosen when the model is loaded, not at the first step."""
    save_model(family_config("qwen3", head_dim=24), tmp_path / "model")
    kvcompile.convert(tmp_path / "model", tmp_path / "out", "oscar-int2", calibration_tokens=256)
    model = kvcompile.load(tmp_path / "out")[0]
    assert model.kvcompile.backend.name == "codec"
    assert model.generate(random_ids(1, 20).cpu(), max_new_tokens=2).shape[1] <= 22
    with pytest.raises(CacheError, match="32-bit words"):
        kvcompile.load(tmp_path / "out", backend="cpu")


def test_masks_that_do_not_fit_the_cache_are_refused_before_anything_is_stored(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(2, 60)
    longer = torch.ones(2, 80, dtype=torch.long, device=DEVICE)
    cache, plain = kvcompile.new_cache(model), kvcompile.new_cache(model)
    with torch.inference_mode():
        padded = longer.clone()
        padded[:, 60:] = 0  # columns that are still to come do not count
        ours = model(ids, past_key_values=cache, attention_mask=padded).logits
        theirs = model(ids, past_key_values=plain).logits
        assert torch.allclose(ours, theirs, atol=1e-5)
        with pytest.raises(CacheError, match="one column per token"):
            model(ids[:, :2], past_key_values=cache, attention_mask=longer[:, :61])
        changed = longer[:, :62].clone()
        changed[0, :5] = 0
        with pytest.raises(CacheError, match="keep the mask of earlier steps"):
            model(ids[:, :2], past_key_values=cache, attention_mask=changed)
        with pytest.raises(CacheError, match="holds 2 rows"):
            model(ids[:1, :1], past_key_values=cache)
        assert cache.get_seq_length() == 60
        again = model(ids[:, :1], past_key_values=cache).logits
        assert torch.allclose(again, model(ids[:, :1], past_key_values=plain).logits, atol=1e-5)


def test_a_step_that_fails_half_way_is_not_counted(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    cache = kvcompile.new_cache(model)
    ids = random_ids(1, 30)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        rotate = cache.layers[1]._rotate
        cache.layers[1]._rotate = None
        with pytest.raises(TypeError):
            model(ids[:, :2], past_key_values=cache)
        cache.layers[1]._rotate = rotate
        with pytest.raises(CacheError, match="failed before every layer"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 30


def test_static_caches_and_generation_configs_are_respected(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(1, 40)
    with torch.inference_mode():
        whole = model(ids, use_cache=False).logits
        static = StaticCache(config=model.config, max_cache_len=64)
        assert torch.allclose(model(ids, past_key_values=static).logits, whole, atol=1e-4, rtol=1e-4)
    off = model.generate(ids, GenerationConfig(use_cache=False, max_new_tokens=2, return_dict_in_generate=True))
    assert off.past_key_values is None
    dense = model.generate(ids, cache_implementation="dynamic", max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(dense.past_key_values, DynamicCache)
    with pytest.raises(CacheError, match="negative"):
        kvcompile.new_cache(model, sink=-1)


def test_a_copied_model_generates_with_its_own_weights(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        twin.lm_head.weight[7] = 1.0
    ids = random_ids(1, 20)
    assert not torch.equal(twin.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))


def test_nan_is_not_hidden(small):
    """A model that overflows shows it with every backend."""
    model = kvcompile.load(small, device=DEVICE)[0]
    cache = kvcompile.new_cache(model)
    with torch.inference_mode():
        model(random_ids(1, 20), past_key_values=cache)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    with torch.inference_mode():
        logits = model(torch.tensor([[5]], device=DEVICE), past_key_values=cache).logits
    assert logits.isnan().all()


def test_triton_without_a_gpu_is_refused(small):
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    code = f"import kvcompile; kvcompile.load({str(small)!r}, backend='triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "needs a model on a CUDA device" in result.stderr


def assert_consistent(store) -> None:
    """Every page is free or held by as many rows as its count says."""
    held = [page for table in store.tables for page in table]
    assert [held.count(page) for page in range(store.pages_LPKX.shape[1])] == store.references
    assert sorted(store.free) == [page for page, count in enumerate(store.references) if not count]


def test_rows_with_one_prompt_share_its_pages(small):
    """Two rows with the same long prompt take the pages of one; whatever happens to one leaves the other as it was."""
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(2, 320)
    ids[1, :300] = ids[0, :300]
    ids = ids[[0, 1, 0]]
    ids[2, 200:] = random_ids(1, 120, seed=5)  # shares the first pages
    cache = kvcompile.new_cache(model)
    feed(model, cache, ids, [300])
    store = cache.stores[0]
    assert store.num_pages == [3, 3, 3]
    shared = [tuple(table) for table in store.tables]
    assert shared[0] == shared[1]
    assert shared[0][:2] == shared[2][:2], "tokens 16 to 144 are the same"
    assert shared[0][2] != shared[2][2]
    assert store.pages_LPKX.shape[1] - len(store.free) == 4
    assert_consistent(store)
    before = [rows(cache, 1, row) for row in range(3)]
    feed_more = ids[:, 300:]
    with torch.inference_mode():
        for t in range(20):  # the rows part: each one gets pages of its own
            model(feed_more[:, t : t + 1], past_key_values=cache)
        cache.stores[0].commit()
    assert_consistent(store)
    cache.crop(-20)
    assert store.tables[0][:3] == list(shared[0])
    cache.batch_select_indices(torch.tensor([2, 1]))
    assert_consistent(store)
    for row, origin in enumerate([2, 1]):
        for ours, theirs in zip(rows(cache, 1, row), before[origin], strict=True):
            assert torch.equal(ours[:, : theirs.shape[1] - 64], theirs[:, :-64])
    cache.batch_select_indices(torch.tensor([1]))
    for ours, theirs in zip(rows(cache, 1, 0), before[1], strict=True):
        assert torch.equal(ours[:, : theirs.shape[1] - 64], theirs[:, :-64])
    cache.crop(10)
    assert len(store.free) == store.pages_LPKX.shape[1]
    assert_consistent(store)


def test_sharing_goes_on_from_chunk_to_chunk_and_needs_a_common_beginning(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(1, 500).repeat(3, 1)
    ids[2, 30] = ids[2, 30] % 3000 + 5  # a token of the first page; what follows looks alike in no page
    cache = kvcompile.new_cache(model)
    feed(model, cache, ids, [230, 100, 170])
    tables = cache.stores[0].tables
    assert tables[0] == tables[1]
    assert len(tables[0]) == 6
    assert not set(tables[0]) & set(tables[2])
    assert_consistent(cache.stores[0])


def test_pages_that_differ_in_a_later_layer_are_not_shared():
    """Equal digests are not enough: all bytes of all layers are compared."""
    pool = PagePool(2, 1, 64, torch.device(DEVICE))
    pool.grow(6)
    pool.pages_LPKX.copy_(torch.arange(3, device=DEVICE).repeat(2)[:, None, None].expand(2, 6, 1, 64))
    tables = [pool.take(3), pool.take(3)]
    pool.pages_LPKX[1, tables[1][1]] += 1
    assert pool.share_prefixes(tables, [range(3), range(3)]) == [1]
    assert tables == [[0, 1, 2], [0, 4, 5]]
    assert pool.references == [2, 1, 1, 0, 1, 1]
    assert pool.free == [3]


def test_a_fixed_pool_is_allocated_once_and_says_when_it_is_full(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(2, 400)
    cache = kvcompile.new_cache(model, max_tokens=16 + 64 + 3 * 64)
    feed(model, cache, ids[:, :10], [10])
    store, size = cache.stores[0], cache.nbytes()
    assert store.pages_LPKX.shape[1] == 2 * 2
    address = store.address
    feed(model, cache, ids[:, 10:272], [150, *[1] * 112])
    assert store.num_pages == [2, 2]
    assert store.address == address
    assert cache.nbytes() == size
    with pytest.raises(CacheError, match=r"0 of 4 pages are free and this step needs 2; .*max_tokens"):
        feed(model, cache, ids[:, 272:], [1])
    assert cache.get_seq_length() == 272
    cache.batch_select_indices(torch.tensor([1]))  # the other row's pages are free now
    feed(model, cache, ids[:1, 272:], [100])
    assert store.num_pages == [4]


def test_reserved_pools_grow_beyond(small):
    model = kvcompile.load(small, device=DEVICE)[0]
    ids = random_ids(1, 1500)
    cache = kvcompile.new_cache(model)
    cache.reserve(300)
    feed(model, cache, ids, [20])
    store = cache.stores[0]
    assert store.pages_LPKX.shape[1] == 3
    feed(model, cache, ids[:, 20:], [480])
    assert store.pages_LPKX.shape[1] == store.num_pages[0] == 6
    cache.reserve(1500)
    address = store.address
    feed(model, cache, ids[:, 500:], [999, 1])
    assert store.num_pages[0] == 22
    assert store.address == address
