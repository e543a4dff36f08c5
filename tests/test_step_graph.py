"""Steps that are replayed are the steps of the model: their logits, and what the host counts around them.

Without CUDA a replay is a call of the forward between the same bookkeeping; with it the same tests capture.
"""

import os
from types import SimpleNamespace

import pytest
import torch

import kvcompile
from kvcompile.errors import CacheError
from kvcompile.runtime import StepGraph
from kvcompile.runtime.graph import SWITCH, can_capture, replayed_steps
from tests.conftest import family_config, save_model

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A float32 model with random weights, small windows, and means of keys and values."""
    folder = tmp_path_factory.mktemp("step")
    save_model(family_config("qwen3"), folder / "model")
    changes = ["window.sink=16", "window.recent=64", "key.center=true", "value.center=true"]
    kvcompile.convert(folder / "model", folder / "out", "oscar-int2", calibration_tokens=256, overrides=changes)
    return folder / "out"


@pytest.fixture(scope="module")
def model(folder):
    return kvcompile.load(folder, device=DEVICE)[0]


def prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, 4000, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def left_padded(batch: int, length: int) -> torch.Tensor:
    """A mask whose rows have 0, 70, 140, ... columns of padding."""
    return (torch.arange(length) >= torch.arange(batch)[:, None] * 70).long().to(DEVICE)


def bookkeeping(cache) -> dict[str, object]:
    """Everything that the host knows of a cache."""
    return {
        "layers": [(layer.columns, layer.steps) for layer in cache.layers],
        "stores": [
            (s.num_tokens, s.num_pages, s.tables, s.references, s.runs, s.steps, s.pending, s.grown)
            for s in cache.stores
        ],
    }


def prefilled(model, ids, mask=None, reserve=0, **options):
    cache = kvcompile.new_cache(model, **options)
    cache.reserve(reserve)
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    with torch.inference_mode():
        model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions)
    return cache


def decode(step, cache, ids, lengths) -> torch.Tensor:
    """Logits ``[steps, B, V]`` of tokens fed one by one; row b stands at position ``lengths[b]``."""
    out = []
    for t in range(ids.shape[1]):
        positions = torch.tensor(lengths, device=DEVICE)[:, None] + t
        out.append(step(ids[:, t : t + 1], positions).logits[:, -1].clone())
    return torch.stack(out)


def eager(model, cache):
    def step(ids, positions):
        with torch.inference_mode():
            return model(ids, position_ids=positions, past_key_values=cache)

    return step


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 360}, {"reserve": 360}, {"reserve": 200}])
def test_replayed_steps_are_eager_steps(model, batch, options):
    """Across several pages in every row, ragged, whether or not the pool grows."""
    ids, mask = prompt(batch, 330), left_padded(batch, 180)
    ours, theirs = (prefilled(model, ids[:, :180], mask, **options) for _ in range(2))
    lengths = mask.sum(1).tolist()
    graph = StepGraph(model, ours, capture=CUDA)
    found = decode(graph, ours, ids[:, 180:], lengths)
    expected = decode(eager(model, theirs), theirs, ids[:, 180:], lengths)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert bookkeeping(ours) == bookkeeping(theirs)
    assert max(ours.stores[0].num_pages) >= 3
    assert (graph.captures == 1) == (360 in options.values())


@pytest.mark.slow
def test_kernels_and_codec_agree(folder):
    """The one launch for a new token, in replays across a page, against plain torch step by step."""
    ids, mask = prompt(2, 210), left_padded(2, 207)
    models = [kvcompile.load(folder, device=DEVICE, backend=name)[0] for name in ("triton", "codec")]
    caches = [prefilled(each, ids[:, :207], mask, max_tokens=300) for each in models]
    lengths = mask.sum(1).tolist()
    found = decode(StepGraph(models[0], caches[0], capture=CUDA), caches[0], ids[:, 207:], lengths)
    expected = decode(eager(models[1], caches[1]), caches[1], ids[:, 207:], lengths)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)
    assert bookkeeping(caches[0]) == bookkeeping(caches[1])
    assert caches[0].stores[0].num_pages == [2, 0]


def test_positions_default_to_columns(model):
    ids = prompt(2, 60)
    ours, theirs = (prefilled(model, ids[:, :50]) for _ in range(2))
    graph = StepGraph(model, ours, capture=CUDA)
    with torch.inference_mode():
        for t in range(50, 60):
            expected = model(ids[:, t : t + 1], past_key_values=theirs).logits
            torch.testing.assert_close(graph(ids[:, t : t + 1]).logits, expected, atol=1e-4, rtol=1e-4)


def test_results_outlive_the_next_step(model):
    ids = prompt(1, 42)
    graph = StepGraph(model, prefilled(model, ids[:, :40]), capture=CUDA)
    first = graph(ids[:, 40:41]).logits
    copy = first.clone()
    graph(ids[:, 41:42])
    assert torch.equal(first, copy)


def test_replayed_and_other_steps_mix(model):
    """Chunks, crops and selected rows between replays; only what moves memory makes a new graph."""
    ids = prompt(2, 400)
    ours, theirs = (prefilled(model, ids[:, :200], max_tokens=500) for _ in range(2))
    graph = StepGraph(model, ours, capture=CUDA)
    step = eager(model, theirs)

    def both(columns: slice) -> None:
        positions = torch.full((1, 1), ours.get_seq_length(), device=DEVICE)
        found, expected = graph(ids[:, columns], positions).logits, step(ids[:, columns], positions).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    for t in range(200, 204):
        both(slice(t, t + 1))
    for cache in (ours, theirs):
        with torch.inference_mode():
            model(ids[:, 204:300], past_key_values=cache)
    both(slice(300, 301))
    for cache in (ours, theirs):
        cache.crop(-150)
    both(slice(151, 152))
    assert graph.captures == 1
    for cache in (ours, theirs):
        cache.reorder_cache(torch.tensor([1, 1], device=DEVICE))
    both(slice(152, 153))
    assert graph.captures == 2
    for cache in (ours, theirs):
        cache.batch_select_indices(torch.tensor([0], device=DEVICE))
    ids = ids[:1]
    both(slice(153, 154))
    assert graph.captures == 3
    assert bookkeeping(ours) == bookkeeping(theirs)


def test_a_reset_cache_is_captured_anew(model):
    ids = prompt(1, 30)
    cache = prefilled(model, ids[:, :20])
    graph = StepGraph(model, cache, capture=CUDA)
    first = decode(graph, cache, ids[:, 20:], [20])
    cache.reset()
    with torch.inference_mode():
        model(ids[:, :20], past_key_values=cache)
    assert torch.equal(decode(graph, cache, ids[:, 20:], [20]), first)


def test_a_full_pool_is_named_and_the_cache_goes_on_after_a_crop(model):
    ids = prompt(1, 300)
    cache = prefilled(model, ids[:, :200], max_tokens=210)  # two pages; the next one is written at 16 + 64 + 192 + 1
    graph = StepGraph(model, cache, capture=CUDA)
    assert cache.stores[0].pages_LPKX.shape[1] == 2
    decode(graph, cache, ids[:, 200:272], [200])
    with pytest.raises(CacheError, match="page pool is full: 0 of 2 pages"):
        graph(ids[:, 272:273])
    assert (cache.stores[0].num_tokens, cache.stores[0].num_pages, cache.get_seq_length()) == ([272], [2], 272)
    cache.crop(-10)
    decode(graph, cache, ids[:, 262:272], [262])
    assert graph.captures == 1


def generate(model, batch, **settings):
    ids, mask = prompt(batch, 180), left_padded(batch, 180)
    common = {
        "attention_mask": mask,
        "max_new_tokens": 150,
        "min_new_tokens": 150,
        "do_sample": False,
        "pad_token_id": 1,
    }
    return model.generate(ids, **{**common, **settings})


@pytest.mark.parametrize("batch", [1, 3])
def test_generation_replays_its_steps(model, batch, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    expected = generate(model, batch)
    cache = kvcompile.new_cache(model, max_tokens=330)
    with replayed_steps(model, cache, 180, capture=CUDA) as graph:
        found = generate(model, batch, past_key_values=cache)
    assert torch.equal(found, expected)
    assert graph.captures == 1
    assert cache.stores[0].steps == cache.layers[0].steps == 150
    assert "forward" not in vars(model)


def test_calls_that_are_no_plain_step_take_the_forward(model):
    ids = prompt(1, 40)
    cache, other = kvcompile.new_cache(model), kvcompile.new_cache(model)
    mask = torch.ones(1, 45, dtype=torch.long, device=DEVICE)
    with torch.inference_mode(), replayed_steps(model, cache, 30, capture=CUDA) as graph:
        model(input_ids=ids[:, :28], past_key_values=cache)
        model(input_ids=ids[:, 28:29], past_key_values=cache)  # of the prompt
        model(input_ids=ids[:, 29:30], past_key_values=cache, attention_mask=mask[:, :30])
        model(input_ids=ids[:, 30:32], past_key_values=cache)
        model(input_ids=ids[:, :1], past_key_values=other)
        model(ids[:, 32:33], past_key_values=cache)  # positional
        hidden = model(input_ids=ids[:, 33:34], past_key_values=cache, output_hidden_states=True).hidden_states
        assert hidden
        model(input_ids=ids[:, 34:35], past_key_values=cache, attention_mask=mask)  # columns of the future
        assert isinstance(model(input_ids=ids[:, 35:36], past_key_values=cache, return_dict=False), tuple)
        assert graph.captures == 0
        model(
            input_ids=ids[:, 36:37],
            past_key_values=cache,
            attention_mask=mask[:, :37],
            use_cache=True,
            logits_to_keep=1,
        )
        assert graph.captures == 1
    assert cache.get_seq_length() == 37
    with pytest.raises(RuntimeError), replayed_steps(model, cache, 30, capture=CUDA):
        raise RuntimeError
    assert "forward" not in vars(model)


def test_what_is_not_captured(model, folder, monkeypatch):
    """Asked of a model that claims to be on CUDA: everything else decides."""
    triton = kvcompile.load(folder, device=DEVICE, backend="triton")[0]
    codec = kvcompile.load(folder, device=DEVICE, backend="codec")[0]

    def on_cuda(*modules):
        return SimpleNamespace(device=torch.device("cuda"), modules=lambda: modules)

    cache = kvcompile.new_cache(triton)
    assert can_capture(cache, on_cuda())
    assert can_capture(cache, on_cuda(*triton.modules()))
    assert not can_capture(cache, SimpleNamespace(device=torch.device("cpu"), modules=list))
    assert not can_capture(kvcompile.new_cache(codec), on_cuda())
    assert not can_capture(None, on_cuda())
    for kinds in ("dynamic", "longrope", {"full_attention": "default", "other": "dynamic"}):
        assert not can_capture(cache, on_cuda(SimpleNamespace(rope_type=kinds)))
    assert can_capture(cache, on_cuda(SimpleNamespace(rope_type={"full_attention": "yarn"})))
    monkeypatch.setenv(SWITCH, "0")
    assert not can_capture(cache, on_cuda())
    monkeypatch.delenv(SWITCH)
    cache.layers.append(SimpleNamespace())
    assert not can_capture(cache, on_cuda())


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """bfloat16, head_dim 128, the windows of the scheme."""
    folder = tmp_path_factory.mktemp("large")
    config = family_config(
        "qwen3", hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=128, num_hidden_layers=3
    )
    save_model(config, folder / "model", torch.bfloat16)
    kvcompile.convert(folder / "model", folder / "out", calibration_tokens=1024)
    return kvcompile.load(folder / "out", device=DEVICE)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [None, {}, {"max_tokens": 700}])
def test_graph_generation_gives_the_tokens_of_eager_generation(large, batch, options, monkeypatch):
    """Prompt 300, 400 new tokens, four pages written on the way; by itself, and with caches of all kinds."""
    settings = {"max_new_tokens": 400, "min_new_tokens": 400, "do_sample": False, "pad_token_id": 1}
    ids, mask = prompt(batch, 300), left_padded(batch, 300)
    outputs = []
    for switch in ("0", "1"):
        monkeypatch.setenv(SWITCH, switch)
        if options is not None:
            settings["past_key_values"] = kvcompile.new_cache(large, **options)
        outputs.append(large.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    eager_store, store = (output.past_key_values.stores[0] for output in outputs)
    assert store.num_tokens == eager_store.num_tokens
    assert store.steps == eager_store.steps == 400
    assert store.num_pages == [store.geometry.full_pages(699 - 70 * row) for row in range(batch)]


@pytest.mark.gpu
def test_a_replayed_step_waits_for_nothing(large):
    """Not even one that writes a page."""
    ids = prompt(3, 600)
    cache = prefilled(large, ids[:, :300], max_tokens=700)
    graph = StepGraph(large, cache)
    decode(graph, cache, ids[:, 300:450], [300] * 3)  # kernels of page writing are compiled here
    positions = torch.full((1, 1), 450, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(450, 600):
            graph(ids[:, t : t + 1], positions)
            positions += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graph.captures == 1


@pytest.mark.gpu
def test_an_eager_step_waits_for_nothing(large):
    ids = prompt(2, 600)
    cache = prefilled(large, ids[:, :300], max_tokens=700)
    positions = torch.full((1, 1), 300, device=DEVICE)
    with torch.inference_mode():
        for t in range(300, 600):
            if t == 450:
                torch.cuda.set_sync_debug_mode("error")
            try:
                large(ids[:, t : t + 1], position_ids=positions, past_key_values=cache)
                positions += 1
            except BaseException:
                torch.cuda.set_sync_debug_mode("default")
                raise
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_generation_modes_on_a_gpu(large):
    """Beams stay eager; prompt lookup, sampling, and a second turn on the same cache replay."""
    ids = prompt(2, 330)
    assert large.generate(ids, max_new_tokens=8, min_new_tokens=8, num_beams=3, do_sample=False).shape == (2, 338)
    assert large.generate(ids[:1], max_new_tokens=70, do_sample=False, prompt_lookup_num_tokens=3).shape[0] == 1
    cache = kvcompile.new_cache(large)
    first = large.generate(ids, max_new_tokens=80, min_new_tokens=80, past_key_values=cache, do_sample=False)
    second = large.generate(first, max_new_tokens=80, min_new_tokens=80, past_key_values=cache, do_sample=True)
    assert second.shape == (2, 490)
    assert cache.get_seq_length() == 489


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_says_so(large, monkeypatch):
    ids = prompt(1, 20)
    graph = StepGraph(large, prefilled(large, ids[:, :19]))
    forward = graph._forward

    def reads_back(**inputs):
        inputs["input_ids"].sum().item()
        return forward(**inputs)

    monkeypatch.setattr(graph, "_forward", reads_back)
    with pytest.raises(CacheError, match=SWITCH):
        graph(ids[:, 19:])
