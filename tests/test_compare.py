"""Comparison: calibration shared without changing anything, the errors of stages, the page, and the `compare` command."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import kvcompile
from kvcompile.calibration import Recorder
from kvcompile.checkpoint import open_checkpoint
from kvcompile.errors import KvCompileError, OutputError, SchemeError
from kvcompile.evaluate.comparison import BF16, Comparison, compare, resolve_schemes
from kvcompile.evaluate.cost import measure_cost
from kvcompile.evaluate.page import comparison_page
from kvcompile.evaluate.pictures import pareto_front
from kvcompile.evaluate.stages import layer_errors, observe
from kvcompile.evaluate.table import cells, header
from kvcompile.models import load_tokenizer, take_inventory
from kvcompile.passes.collection import Collection
from kvcompile.passes.convert import collect_statistics
from kvcompile.scheme import load_scheme, scheme_text
from tests.commands import contents, quick_conversions, refuse, succeed
from tests.conftest import EXAMPLE

Capsys = pytest.CaptureFixture[str]
HELDOUT = EXAMPLE.parent / "heldout.txt"
SMALL = ("window.sink=4", "window.recent=16", "calibration.tokens=1024", "calibration.sequence_length=512")
OSCAR = "+".join(("oscar-int2", *SMALL))
OMNI = "omni-int2"


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """Two schemes on the bundled example, with retrieval, report and artifacts."""
    out = tmp_path_factory.mktemp("compare") / "report"
    found = compare(
        EXAMPLE, [OSCAR, OMNI], out, keep=True, text=HELDOUT, windows=2, length=320, retrieval=(512,), trials=2, backend="codec"
    )  # fmt: skip
    return found, out


# Shared calibration


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("window.sink=0",),
        ("calibration.sample_length=100", "calibration.sample_queries=8", "calibration.sample_sequences=1"),
        ("calibration.sequence_length=256",),
        ("value.rotation.target=value", "key.rotation.target=key"),
        ("key.center=true",),
    ],
    ids=" ".join,
)
def test_shared_statistics_change_nothing(overrides, tmp_path):
    """Every file of an artifact is the same byte for byte, whoever else shared the calibration pass."""
    ours = load_scheme("oscar-int2", [*SMALL, *overrides])
    others = [load_scheme("oscar-int2", SMALL), load_scheme("oscar-int2", [*SMALL, "calibration.sample_queries=64"])]
    shared = collect_statistics(EXAMPLE, [*others, ours])
    kvcompile.convert(EXAMPLE, tmp_path / "alone", ours)
    kvcompile.convert(EXAMPLE, tmp_path / "shared", ours, statistics=shared)
    assert contents(tmp_path / "alone") == contents(tmp_path / "shared")


def test_sharing_runs_the_model_once(tmp_path, monkeypatch):
    seen = []
    original = Recorder.observe
    monkeypatch.setattr(Recorder, "observe", lambda self, index, *a: (seen.append(index), original(self, index, *a))[1])
    schemes = [load_scheme("oscar-int2", [*SMALL, f"window.sink={sink}"]) for sink in (0, 4, 8)]
    shared = collect_statistics(EXAMPLE, schemes)
    assert len(seen) == 2 * 4, "two sequences, four layers"
    for scheme in schemes:
        kvcompile.convert(EXAMPLE, tmp_path / str(scheme.window.sink), scheme, statistics=shared)
    assert len(seen) == 2 * 4
    assert len(shared.records()) == 1


def test_statistics_that_do_not_cover_a_scheme_are_left_alone(tmp_path):
    """Other text, another seed, or more than was collected: the conversion calibrates by itself."""
    scheme = load_scheme("oscar-int2", SMALL)
    shared = collect_statistics(EXAMPLE, [load_scheme("oscar-int2", [*SMALL, "calibration.sample_queries=4"])])
    kvcompile.convert(EXAMPLE, tmp_path / "alone", scheme, seed=1)
    kvcompile.convert(EXAMPLE, tmp_path / "shared", scheme, seed=1, statistics=shared)
    assert contents(tmp_path / "alone") == contents(tmp_path / "shared")


def test_union_of_collections():
    small = Collection(frozenset({"query"}), 2, 100, 10, 4)
    large = Collection(frozenset({"key"}), 1, 80, 40, 8)
    both = small | large
    assert both == Collection(frozenset({"query", "key"}), 2, 130, 40, 8), "40 first tokens and 90 last ones"
    assert both.covers(small) and both.covers(large)
    assert not small.covers(large)


# Parts


def test_schemes_may_carry_overrides(tmp_path):
    (tmp_path / "mine.toml").write_text(scheme_text("naive-int2").replace("naive-int2", "mine"))
    found = resolve_schemes(["naive-int2", "naive-int2+window.recent=64+window.sink=0", str(tmp_path / "mine.toml")])
    assert list(found) == ["naive-int2", "naive-int2+window.recent=64+window.sink=0", "mine"]
    assert found["naive-int2+window.recent=64+window.sink=0"].window.recent == 64
    for wrong, message in ((["naive-int2"] * 2, "twice"), ([], "at least one"), (["nothing"], "unknown scheme")):
        with pytest.raises(SchemeError, match=message):
            resolve_schemes(wrong)


def test_pareto_front():
    assert pareto_front([(2, 3), (1, 5), (2, 2), (3, 2), (4, 1)]) == [1, 2, 4]


def test_stage_errors_shrink_with_bits_and_with_a_rotation(tmp_path):
    checkpoint = open_checkpoint(EXAMPLE)
    ids = load_tokenizer(EXAMPLE)(HELDOUT.read_text("utf-8"), return_tensors="pt", verbose=False).input_ids[:, :512]
    observation = observe(checkpoint.path, take_inventory(checkpoint).compiled, ids, torch.device("cpu"))
    errors = {}
    for scheme in ("naive-int2", "quarot-int2", "naive-int4"):
        overrides = ("window.sink=0", "window.recent=0")
        result = kvcompile.convert(EXAMPLE, tmp_path / scheme, scheme, overrides=overrides, stop_after="clip")
        errors[scheme] = layer_errors(result.ir, observation)
    for naive2, quarot2, naive4 in zip(*errors.values(), strict=True):
        assert naive2.before == naive2.after == quarot2.before, "a scheme that does nothing is its own baseline"
        for stage in ("key", "value", "logits", "weighted", "output"):
            assert 0 < getattr(naive4.after, stage) < getattr(naive2.after, stage)
    total = {name: sum(entry.after.output for entry in found) for name, found in errors.items()}
    assert total["quarot-int2"] < total["naive-int2"]
    for spectrum in observation.spectra.values():
        for values in spectrum.values():
            assert sum(values) == pytest.approx(1)
            assert list(values) == sorted(values, reverse=True)


def test_cost_is_measured_on_a_real_cache(converted):
    model, tokenizer = kvcompile.load(converted, backend="codec")
    ids = tokenizer(HELDOUT.read_text("utf-8"), return_tensors="pt", verbose=False).input_ids[0, :300]
    cost = measure_cost(model, kvcompile.new_cache(model), ids)
    assert cost.tokens == 4096 - 7
    elements = 2 * 4 * 2 * 64  # halves, layers, KV heads, head_dim
    expected = model.kvcompile.manifest.bits_per_element["4k"] * elements / 8
    assert cost.bytes_per_token == pytest.approx(expected, rel=0.1)
    assert cost.decode_ms > 0 and cost.encode_ms is not None and cost.encode_ms > 0


# The whole


def test_comparison_has_every_number(compared):
    found, out = compared
    assert [row.label for row in found.rows] == [BF16, OSCAR, OMNI]
    document = json.loads((out / "compare.json").read_text())
    assert document == json.loads(json.dumps(found.as_json()))
    bf16, oscar, omni = found.rows
    assert bf16.quality.divergence is not None and bf16.quality.divergence.kl < 1e-4
    assert bf16.cost.bytes_per_token == 2 * 2 * 4 * 2 * 64
    for row in (oscar, omni):
        assert row.quality.divergence is not None and row.quality.divergence.kl > 1e-3
        assert row.quality.divergence.positions == 2 * 191
        assert row.cost.bytes_per_token < bf16.cost.bytes_per_token / 3
        assert [entry.layer for entry in row.layers] == [0, 1, 2, 3]
        assert [len(entry.findings) for entry in row.quality.retrieval] == [2]
    assert oscar.norms is None
    assert omni.norms is not None
    before, after = (torch.tensor(x) for x in (omni.norms.before, omni.norms.after))
    assert after.std() < before.std()
    assert sorted(found.spectra) == [0, 1, 2, 3]


def test_kept_artifacts_are_whole(compared):
    _, out = compared
    kept = sorted(path for path in out.iterdir() if path.is_dir())
    assert [path.name for path in kept] == [OMNI, OSCAR]
    for path in kept:
        kvcompile.verify(path, EXAMPLE)


class Page(HTMLParser):
    """Tags of a page, its ids, its addresses and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href"):
                self.addresses.append(value)

    def handle_data(self, data):
        self.text += data


def test_report_is_one_file_that_needs_no_network(compared):
    found, out = compared
    text = (out / "report.html").read_text("utf-8")
    page = Page(text)
    assert page.tags.count("svg") == 5
    assert page.tags.count("figcaption") == 5
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert all(address.startswith("#") for address in page.addresses)
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{i}" for i in page.ids}
    assert len(page.ids) == len(set(page.ids))
    for row in found.rows:
        assert row.label in page.text


def test_report_escapes_what_users_wrote(compared):
    found, _ = compared
    evil = "<script>alert('$x$')</script>&"
    rows = tuple(replace(row, label=evil + row.label, summary=evil) for row in found.rows)
    page = Page(comparison_page(replace(found, model=evil, text=evil, calibration=evil, rows=rows)))
    assert "script" not in page.tags
    assert page.text.count(evil) > len(rows)


def test_report_without_retrieval_and_norms_leaves_those_pictures_out(compared):
    found, _ = compared
    rows = tuple(replace(row, norms=None, quality=replace(row.quality, retrieval=())) for row in found.rows)
    assert Page(comparison_page(replace(found, rows=rows))).tags.count("svg") == 3


def test_report_of_a_conversion_escapes_too(converted):
    from kvcompile.artifact import read_manifest
    from kvcompile.artifact.report import report_html

    manifest = read_manifest(converted)
    evil = manifest.model_copy(update={"source": manifest.source.model_copy(update={"name": "<b>&"})})
    page = Page(report_html(evil))
    assert "b" not in page.tags
    assert "<b>&" in page.text
    assert page.tags.count("tr") == 1 + len(manifest.layers)


# The command


def test_compare_prints_a_table_and_writes_the_report(tmp_path, capsys: Capsys):
    out = tmp_path / "report"
    outcome = succeed(
        capsys, "compare", EXAMPLE, "--schemes", "naive-int2+window.sink=0+window.recent=0", "-o", out,
        "--windows", 1, "--length", 128, "--backend", "codec",
    )  # fmt: skip
    assert BF16 in outcome.out
    assert "naive-int2+window.sink=0+window.recent=0" in outcome.out
    assert "converting and measuring naive-int2" in outcome.err
    assert sorted(path.name for path in out.iterdir()) == ["compare.json", "report.html"]


def test_compare_prints_json(capsys: Capsys):
    outcome = succeed(
        capsys, "compare", EXAMPLE, "--schemes", "naive-int2+window.sink=0+window.recent=0", "--json",
        "--text", HELDOUT, "--windows", 1, "--length", 128, "--backend", "codec",
    )  # fmt: skip
    assert json.loads(outcome.out)["rows"][0]["label"] == BF16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schemes", "nothing"), "unknown scheme 'nothing'"),
        (("--schemes", ","), "name at least one scheme"),
        (("--schemes", "naive-int2,naive-int2"), "named twice"),
        (("--schemes", "naive-int2+key.bits=2"), "key.bits"),
        (("--schemes", "naive-int2+key.quantizer.group_size=128+layers.9.window.sink=1"), "layer 9"),
        (("--schemes", "naive-int2", "--keep"), "no folder to keep the artifacts in"),
        (("--schemes", "naive-int2", "--length", 200), "the first 384 are not quantized"),
        (("--schemes", "naive-int2", "--text", "nowhere.txt"), "evaluation text nowhere.txt does not exist"),
        (("--schemes", "oscar-int2", "--calibration", "nowhere.txt"), "calibration text nowhere.txt does not exist"),
    ],
)
def test_compare_refuses(arguments, message, capsys: Capsys):
    assert message in refuse(capsys, "compare", EXAMPLE, "--backend", "codec", *arguments)


def test_commas_inside_quotes_do_not_part_schemes(capsys: Capsys):
    """The second scheme is unknown, so both were read."""
    schemes = 'naive-int2+layers."0,1".window.sink=0,nothing'
    assert "unknown scheme 'nothing'" in refuse(capsys, "compare", EXAMPLE, "--schemes", schemes)


def test_every_row_says_its_backend(compared):
    found, _ = compared
    assert [row.backend for row in found.rows] == ["transformers", "codec", "codec"]
    assert [row["backend"] for row in found.as_json()["rows"]] == ["transformers", "codec", "codec"]
    assert header(found.rows).index("backend") == cells(found.rows[0]).index("transformers")


def test_a_failure_leaves_a_report_of_what_was_measured(tmp_path, monkeypatch):
    out, loads = tmp_path / "report", []

    def fails_the_second_time(*arguments: object, **settings: object) -> object:
        loads.append(arguments)
        if len(loads) == 2:
            raise KvCompileError("nothing left to load into")
        return kvcompile.load(*arguments, **settings)

    monkeypatch.setattr("kvcompile.evaluate.comparison.load", fails_the_second_time)
    schemes = ["naive-int2+window.sink=0+window.recent=0", "quarot-int2+window.sink=0+window.recent=0"]
    with pytest.raises(KvCompileError, match="nothing left") as caught:
        compare(EXAMPLE, schemes, out, text=HELDOUT, windows=1, length=128, backend="codec")
    assert any(schemes[1] in note for note in caught.value.__notes__)
    assert any(str(out) in note for note in caught.value.__notes__)
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [row["label"] for row in rows] == [BF16, schemes[0]]
    assert schemes[0] in (out / "report.html").read_text()


def test_a_file_that_kept_the_name_of_its_origin_goes_by_its_own(tmp_path):
    (tmp_path / "mine.toml").write_text(scheme_text("naive-int2").replace("sink = 64", "sink = 1"))
    (tmp_path / "same.toml").write_text(scheme_text("naive-int2"))
    assert list(resolve_schemes(["naive-int2", str(tmp_path / "mine.toml")])) == ["naive-int2", "mine"]
    with pytest.raises(SchemeError, match="named twice"):
        resolve_schemes(["naive-int2", str(tmp_path / "same.toml")])


def test_compare_does_not_write_over_anything(tmp_path, capsys: Capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert "already exists" in refuse(capsys, "compare", EXAMPLE, "--schemes", "naive-int2", "-o", tmp_path)
    assert "already exists" in refuse(
        capsys, "compare", EXAMPLE, "--schemes", "naive-int2", "-o", tmp_path / "notes.txt"
    )
    assert contents(tmp_path) == {"notes.txt": b"mine"}
    with pytest.raises(OutputError, match="cannot be written"):
        compare(EXAMPLE, ["naive-int2"], tmp_path / "notes.txt" / "below")
