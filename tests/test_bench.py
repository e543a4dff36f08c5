"""`kvcompile bench`, and what it and the scripts in `benchmarks/` measure on: caches with random calibration."""

import json
from pathlib import Path

import pytest
import torch

from kvcompile.errors import KvCompileError, SchemeError
from kvcompile.evaluate.bench import BF16, PACKED, bench, bench_shape, parse_shape
from kvcompile.evaluate.uncalibrated import Shape, fill, page_format, random_cache, random_plan
from kvcompile.runtime.cache import PackedLayer
from kvcompile.scheme import builtin_names, load_scheme
from tests.commands import refuse, run, succeed

CPU = torch.device("cpu")
SMALL = Shape(layers=2, heads=4, kv_heads=2, head_dim=32)


def test_a_model_is_timed_with_both_caches(converted: Path) -> None:
    found = bench(converted, contexts=[400, 700], batches=[1, 2], steps=2)
    assert [(x.context, x.batch, x.cache) for x in found.timings] == [
        (context, batch, cache) for context in (400, 700) for batch in (1, 2) for cache in (PACKED, BF16)
    ]
    assert found.scheme == "oscar-int2"
    for x in found.timings:
        assert 0 < x.median_ms <= x.p90_ms
        assert x.tokens_per_second > 0
        if x.cache == BF16:  # 4 layers, 2 heads of 64 channels, keys and values; steps have been appended
            assert x.cache_bytes == x.batch * (x.context + 2 + 3) * 4 * 2 * 64 * 2 * 2
    faster, smaller = found.ratios(found.timings[4])
    assert faster == found.timings[5].median_ms / found.timings[4].median_ms
    assert smaller == found.timings[5].cache_bytes / found.timings[4].cache_bytes


@pytest.mark.parametrize("scheme", ["kvc-int2", "kivi-int2", "kvlinc-int1", "kmeans-int4", "turboquant-int2"])
def test_a_shape_is_timed_without_a_model(scheme: str) -> None:
    overrides = ["correction.features=32"] if "kvlinc" in scheme else []
    overrides += ["key.centroids=4", "value.centroids=4"] if "kmeans" in scheme else []
    found = bench_shape(SMALL, scheme, overrides, contexts=[300], steps=2)
    packed, dense = found.timings
    assert (packed.cache, dense.cache) == (PACKED, BF16)
    assert found.measured == "attention of 2 layers alone"
    assert dense.cache_bytes == 305 * 2 * 2 * 32 * 2 * 2


@pytest.mark.parametrize("scheme", builtin_names())
def test_every_scheme_has_a_random_plan(scheme: str) -> None:
    loaded = load_scheme(scheme)
    plan = random_plan(loaded, Shape(1, 4, 2, 128), CPU)
    assert plan.storage.fmt == page_format(loaded, 128)
    assert (plan.storage.correction is not None) == (loaded.correction.kind == "linear")
    assert (plan.storage.tables.key.feedback is not None) == (loaded.key.quantizer.rounding == "error_feedback")


def test_a_filled_cache_decodes_like_one_that_was_prefilled() -> None:
    cache = random_cache(load_scheme("kvc-int2"), SMALL, CPU, "codec")
    fill(cache, batch=3, tokens=600, room=100)
    store = cache.stores[0]
    addresses, full = store.address, store.geometry.full_pages(600)
    assert cache.get_seq_length() == 600
    assert [len(set(table)) for table in store.tables] == [full] * 3
    assert len({page for table in store.tables for page in table}) == 3 * full  # nothing is shared
    assert store.tables[0] != sorted(store.tables[0])  # pages lie scattered
    q_BHTD, k_BKTD = torch.randn(3, 4, 1, 32), torch.randn(3, 2, 1, 32)
    for _ in range(80):  # more than a page
        for layer in cache.layers:
            assert isinstance(layer, PackedLayer)
            out = layer.attend(q_BHTD, layer.update(k_BKTD, k_BKTD)[0], None, 0.2, torch.nn.Module())
            assert out.isfinite().all()
    assert cache.get_seq_length() == 680
    assert store.num_pages == [full + 1] * 3
    assert store.address == addresses  # there was room


def test_cli_prints_a_table_and_json(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--contexts", "350", "--steps", "1"
    text = succeed(capsys, "bench", converted, *arguments).out
    assert "oscar-int2" in text
    assert "packed" in text
    assert "bf16" in text
    document = json.loads(succeed(capsys, "bench", converted, "--batch", "1,2", *arguments, "--json").out)
    assert [x["batch"] for x in document["timings"]] == [1, 1, 2, 2]
    shape = "--shape", "heads=4,kv_heads=2,head_dim=32", "-s", "naive-int2", "--set", "window.recent=64"
    assert json.loads(succeed(capsys, "bench", *shape, *arguments, "--json").out)["scheme"] == "naive-int2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads=4,kv_heads=2", "lacks head_dim"),
        ("heads=4,kv_heads=3,head_dim=32", "4 query heads cannot share 3 KV heads"),
        ("heads=4,kv_heads=0,head_dim=32", "at least one of everything"),
        ("heads=4,width=2", "'width=2' is no part of a shape"),
        ("heads=x", "'heads=x' is no part of a shape"),
    ],
)
def test_a_wrong_shape_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(KvCompileError, match=message):
        parse_shape(text)


def test_layers_of_a_shape_are_one_unless_given() -> None:
    assert parse_shape(" heads=4, kv_heads=2,head_dim=32 ") == Shape(1, 4, 2, 32)
    assert parse_shape("heads=4,kv_heads=2,layers=3,head_dim=32").layers == 3


def test_a_scheme_that_does_not_fit_a_shape_is_refused() -> None:
    with pytest.raises(SchemeError, match=r"group_size 64 does not divide head_dim 80 of the shape"):
        bench_shape(Shape(1, 4, 2, 80), "naive-int2", ["key.quantizer.group_size=64"], contexts=[100], steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--contexts", "4096"),
            "the model has 4096 positions, 35 of them for the steps; choose --contexts up to 4061",
        ),
        (("--contexts", "many"), "'many' is no context length"),
        (("--batch", "1,few"), "'few' is no batch size"),
        (("--batch", "0"), "contexts, batches and steps must be positive"),
        (("--contexts", ","), "contexts, batches and steps must be positive"),
        (("--device", "nonsense"), "device 'nonsense' is not available"),
    ],
)
def test_wrong_settings_are_one_sentence(
    converted: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refuse(capsys, "bench", converted, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either a converted directory or --shape"),
        (("out", "--shape", "heads=4"), "either a converted directory or --shape"),
        (("out", "--scheme", "naive-int2"), "an artifact has its scheme already"),
        (("--shape", "heads=4", "--source", "x"), "a shape has no weights"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "bench", *arguments)
    assert outcome.code == 2
    assert message in outcome.err


def test_what_does_not_fit_the_device_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("kvcompile.evaluate.bench.fill", full)
    with pytest.raises(KvCompileError, match=r"both caches of 2 x 300 tokens do not fit cpu; choose smaller"):
        bench_shape(SMALL, "naive-int2", contexts=[300], batches=[2], steps=1)
