"""Every scheme from conversion to attention: what the packed cache answers is what a dense float64 simulation answers."""

import json
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvcompile
from kvcompile.artifact import open_artifact, read_manifest
from kvcompile.calibration import OBSERVER, Recorder, read_corpus, recording, tokenize_corpus
from kvcompile.codec.correction import Correction
from kvcompile.errors import ArtifactError, SchemeError, VerificationError
from kvcompile.linalg import hadamard
from kvcompile.models import AttentionLayer, load_model, load_tokenizer
from kvcompile.passes.coding import HalfCoding
from kvcompile.passes.convert import Conversion, collect_statistics
from kvcompile.passes.ir import IR
from kvcompile.passes.rotations import solve_rotation
from kvcompile.runtime.cache import PackedLayer
from kvcompile.scheme import builtin_names, load_scheme
from kvcompile.scheme.model import Spectral
from tests.commands import contents, quick_conversions, refuse, reseal, succeed
from tests.conftest import family_config, save_model

PROMPT, STEPS, CHUNK = 345, 3, 70
SMALL = (
    "calibration.sequence_length=256", "calibration.sample_length=256", "calibration.sample_sequences=2",
    "calibration.sample_queries=32", "calibration.tokens=512",
)  # fmt: skip
WINDOWS = ("window.sink=20", "window.recent=50")
COMPOSITIONS = {
    "OSCAR's values with channel-wise keys": (
        "oscar-int2",
        ("key.rotation.kind=identity", "key.clip.kind=none", "key.quantizer.axis=channel", "key.quantizer.group_size=32"),
    ),
    "token scale with a spectral rotation": (
        "omni-int2",
        ("key.rotation.kind=spectral", "key.rotation.target=query", "key.token_scale.scope=head"),
    ),
    "token scale with a random rotation": ("omni-int2", ("key.rotation.kind=random", "key.rotation.seed=5")),
    "other bits for keys than for values": ("oscar-int2", ("key.quantizer.bits=4", "value.quantizer.bits=1")),
    "bits by layer": (
        "kvc-int2",
        (
            'layers."0,3".key.quantizer.bits=4',
            'layers."1-2".value.quantizer.bits=1',
            'layers."1".key.rotation.kind=hadamard',
            'layers."2".window.sink=0',
        ),
    ),
    "centroids, channel-wise, centred": (
        "kmeans-int4",
        ("key.centroids=9", "key.center=true", "key.quantizer.axis=channel", "key.quantizer.group_size=16"),
    ),
    "the paper's correction in the values' own basis": (
        "kvlinc-int2", ("correction.form=paper", "value.rotation.kind=identity", "key.center=true", "value.center=true"),
    ),
    "public OSCAR code's value target": ("oscar-int2", ("value.rotation.target=score_weighted", "value.rotation.balance=1")),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def ids(example: Path) -> torch.Tensor:
    tokens = tokenize_corpus(read_corpus(None), load_tokenizer(example), 1024, 1024)[0]
    return tokens[None, : PROMPT + 2 * STEPS + CHUNK]


def overrides_for(name: str) -> list[str]:
    """Little text, short training, and windows that leave a history in a short context."""
    found = list(SMALL)
    if load_scheme(name).window.recent:
        found += WINDOWS
    if load_scheme(name).correction.kind == "linear":
        found += ["correction.steps=10", "correction.features=32"]
    if load_scheme(name).key.centroids:
        found += ["key.centroids=40", "value.centroids=40"]
    return found


# -- the oracle --------------------------------------------------------------------------------------------------------


class Watched:
    """Every attention call of packed layers: what went in, what came out, and how many pages there were by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: dict[int, list[tuple]] = {}
        attend = PackedLayer.attend

        def spy(layer, q_BHTD, rows, mask, scaling, module, *special):
            out_BTHD = attend(layer, q_BHTD, rows, mask, scaling, module, *special)
            stored = layer.store.num_pages[0]
            seen = (q_BHTD[0], rows.k_BKTD[0], rows.v_BKTD[0], out_BTHD[0].transpose(0, 1), stored, scaling)
            seen = tuple(x.double() if isinstance(x, torch.Tensor) else x for x in seen)
            self.calls.setdefault(module.layer_idx, []).append(seen)
            return out_BTHD

        monkeypatch.setattr(PackedLayer, "attend", spy)


def simulate(ir: IR, layer: AttentionLayer, calls: list[tuple], call: int, quantize: bool = True) -> torch.Tensor:
    """What attention call number `call` of a layer should return, ``[H, T, D]`` float64 in the source's basis.

    Everything that was stored is rounded to BF16 in the basis of the cache, whole blocks are coded by the schemes'
    `HalfCoding`, and all of it is turned back and attended to by the original queries.
    """
    scheme, folded = ir.scheme.layer(layer.index), layer.index in {fold.layer for fold in ir.folds}
    q_HTD, *_, pages, scaling = calls[call]
    k_KND, v_KND = (torch.cat([c[i] for c in calls[: call + 1]], dim=1) for i in (1, 2))
    codings = {
        half: HalfCoding.of(ir, layer, half, float(ir.tensors[f"layers.{layer.index}.{half}.clip_ratio"]))
        for half in ("key", "value")
    }
    if folded:
        v_KND = v_KND @ codings["value"].inverse.double()
    total, first = k_KND.shape[1], scheme.window.sink
    paged = slice(first, first + pages * scheme.window.block)
    decoded, errors = {}, None
    for half, rows in (("key", k_KND), ("value", v_KND)):
        coding = codings[half]
        stored = coding.store(rows.float())
        basis = stored.double()
        if quantize and pages:
            blocks = stored[:, paged].unflatten(1, (pages, -1)).transpose(0, 1)
            basis[:, paged] = coding.decode(blocks.contiguous()).transpose(0, 1).flatten(1, 2).double()
        if half == "key":
            errors = stored.double() - basis
        decoded[half] = basis
    k_KND, v_KND = decoded["key"], decoded["value"]
    queries = q_HTD
    if codings["key"].rotation is not None:
        queries = queries @ codings["key"].inverse.double().mT.repeat_interleave(layer.queries_per_kv, 0)
    logits = queries @ k_KND.repeat_interleave(layer.queries_per_kv, 0).mT * scaling
    seen = torch.ones(q_HTD.shape[1], total, dtype=torch.bool).tril(total - q_HTD.shape[1])
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    correction = correction_of(ir, layer.index)
    if correction is not None and quantize and pages:
        # a share of attention (relative), or the correction against exp(logits) themselves (paper)
        phi_q = features(queries, correction.query_HDF.double())
        keys = errors @ correction.key_KDF.double()
        if correction.decoded_KDF is not None:
            keys = keys + k_KND @ correction.decoded_KDF.double()
        phi_k = torch.cat([part.softmax(-1) for part in keys.chunk(2, -1)], -1).repeat_interleave(
            layer.queries_per_kv, 0
        )
        added = (phi_q @ phi_k.mT) * correction.scale_H.double()[:, None, None]
        added[..., : paged.start], added[..., paged.stop :] = 0, 0
        lse = logits.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
        added = added / (seen.sum(-1, keepdim=True) if correction.decoded_KDF is not None else lse.exp())
        weights = (weights + added) / (1 + added.sum(-1, keepdim=True))
    out = weights @ v_KND.repeat_interleave(layer.queries_per_kv, 0)
    mean, inverse = codings["value"].mean, codings["value"].inverse
    if mean is not None:
        out = out + mean.double().repeat_interleave(layer.queries_per_kv, 0)[:, None]
    if inverse is not None:
        out = out @ inverse.double().repeat_interleave(layer.queries_per_kv, 0)
    return out


def features(x: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.softmax(-1) for part in (x @ maps).chunk(2, -1)], -1)


def correction_of(ir: IR, index: int) -> Correction | None:
    found = {n: ir.tensors.get(f"layers.{index}.correction.{n}") for n in ("query", "key", "scale", "decoded")}
    if found["query"] is None:
        return None
    return Correction(found["query"], found["key"], found["scale"], found["decoded"])


def check_attention(done: Conversion, ids: torch.Tensor, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, single steps, a chunk and steps again; every call after the prompt against the simulation."""
    watched = Watched(monkeypatch)
    artifact = done.out
    model, _ = kvcompile.load(artifact, dtype=torch.float32, source=source)
    cache = kvcompile.new_cache(model)
    position = 0
    with torch.inference_mode():
        for length in (PROMPT, *[1] * STEPS, CHUNK, *[1] * STEPS):
            model(ids[:, position : position + length], past_key_values=cache, use_cache=True)
            position += length
    assert all(pages >= 1 for store in cache.stores for pages in store.num_pages)
    for layer in done.ir.layers().compiled:
        calls = watched.calls[layer.index]
        assert len(calls) == 2 + 2 * STEPS
        value = HalfCoding.of(done.ir, layer, "value", 1.0)
        for call in (1, STEPS, STEPS + 1, STEPS + 2, len(calls) - 1):
            ours = calls[call][3]
            if layer.index in {fold.layer for fold in done.ir.folds}:
                ours = ours @ value.inverse.double().repeat_interleave(layer.queries_per_kv, 0)
            expected = simulate(done.ir, layer, calls, call)
            exact = simulate(done.ir, layer, calls, call, quantize=False)
            scale = float(exact.square().mean().sqrt())
            error = float((ours - expected).square().mean().sqrt()) / scale
            loss = float((exact - expected).square().mean().sqrt()) / scale
            assert error < 2e-3, f"layer {layer.index}, call {call}: {error}"
            assert loss > 5 * error, (
                f"layer {layer.index}, call {call}: quantization changes {loss}, which shows nothing"
            )


@pytest.mark.parametrize("name", builtin_names())
def test_builtin_schemes_compute_what_they_say(
    name: str, example: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = kvcompile.convert(example, tmp_path / "out", name, overrides=overrides_for(name))
    kvcompile.verify(tmp_path / "out", example)
    check_attention(done, ids, example, monkeypatch)


@pytest.mark.parametrize(("name", "changes"), COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
def test_operators_compose(
    name: str,
    changes: tuple[str, ...],
    example: Path,
    ids: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = kvcompile.convert(example, tmp_path / "out", name, overrides=[*overrides_for(name), *changes])
    kvcompile.verify(tmp_path / "out", example)
    check_attention(done, ids, example, monkeypatch)


@pytest.mark.parametrize("name", ["kvc-int2", "omni-int2"])
def test_overlays_compute_the_same(
    name: str, example: Path, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = kvcompile.convert(example, tmp_path / "out", name, overrides=overrides_for(name), weights="overlay")
    assert not done.ir.folds
    kvcompile.verify(tmp_path / "out", example)
    check_attention(done, ids, example, monkeypatch)


# -- overrides for single layers ---------------------------------------------------------------------------------------


def test_overrides_arrive_in_manifest_pages_and_generation(
    example: Path, ids: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line, as the documentation writes it."""
    changes = [
        'layers."0-1".key.quantizer.bits=4',
        'layers."1,3".value.quantizer.group_size=16',
        'layers."2".window.block=128',
    ]
    arguments = [part for change in (*SMALL, *WINDOWS, *changes) for part in ("--set", change)]
    succeed(capsys, "convert", example, "-o", tmp_path / "out", "--scheme", "oscar-int2", *arguments)
    manifest = read_manifest(tmp_path / "out")
    assert [layer.key.bits for layer in manifest.layers] == [4, 4, 2, 2]
    assert [layer.value.bits for layer in manifest.layers] == [2, 2, 2, 2]
    assert [layer.value.group_size for layer in manifest.layers] == [64, 16, 64, 16]
    assert [layer.page_tokens for layer in manifest.layers] == [64, 64, 128, 64]
    codes, meta = 64 * 64 // 8, 64 * 4
    sizes = [layer.page_format().page_bytes for layer in manifest.layers]
    assert sizes == [6 * codes + 2 * meta, 6 * codes + 5 * meta, 2 * (4 * codes + 2 * meta), 4 * codes + 5 * meta]
    assert manifest.bits_per_element["128k"] < 5

    model, _ = kvcompile.load(tmp_path / "out")
    output = model.generate(ids[:, :PROMPT], max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = output.past_key_values
    assert output.sequences.shape == (1, PROMPT + 5)
    for index, layer in enumerate(cache.layers):
        storage = layer.store.layers[layer.position]
        assert storage.fmt == manifest.layers[index].page_format()
        pages = layer.store.pages_LPKX[layer.position]
        assert pages.shape[-1] == sizes[index]
        assert layer.store.num_pages == [layer.store.geometry.full_pages(PROMPT + 4)]
    capsys.readouterr()
    assert "0-3" in refuse(
        capsys,
        "convert",
        example,
        "-o",
        tmp_path / "no",
        "--scheme",
        "oscar-int2",
        "--set",
        'layers."4".key.quantizer.bits=4',
    )


def test_later_overrides_win_and_kinds_are_replaced_whole() -> None:
    scheme = load_scheme(
        "oscar-int2",
        [
            'layers."0-5".key.quantizer.bits=4',
            'layers."3".key.quantizer.bits=1',
            'layers."3".value.rotation.kind=random',
        ],
    )
    assert [scheme.layer(i).key.quantizer.bits for i in range(7)] == [4, 4, 4, 1, 4, 4, 2]
    assert scheme.layer(3).value.rotation.model_dump() == {"kind": "random", "seed": 0, "apply": "folded"}
    assert scheme.layer(2).value.rotation == scheme.value.rotation
    assert scheme.overridden_layers() == set(range(6))


# -- what is refused, and why ------------------------------------------------------------------------------------------

REFUSED = {
    "folded keys": ("oscar-int2", ["key.rotation.apply=folded"], "RoPE"),
    "clipped channels": (
        "oscar-int2",
        ["key.quantizer.axis=channel", "key.quantizer.group_size=32"],
        "order statistic",
    ),
    "scaled values": ("oscar-int2", ["value.token_scale.kind=l2"], "logits"),
    "scaled rows with centroids": ("kmeans-int4", ["key.token_scale.kind=l2"], "unscaled rows"),
    "levels without rms": ("turboquant-int2", ["key.quantizer.zero_point=float"], "belong together"),
    "uniform without zero point": ("oscar-int2", ["key.quantizer.zero_point=none"], "belong together"),
    "Lloyd-Max by channel": ("turboquant-int2", ["key.quantizer.axis=channel"], "axis 'token'"),
    "Lloyd-Max with feedback": ("turboquant-int2", ["key.quantizer.rounding=error_feedback"], "evenly spaced"),
    "groups longer than blocks": ("kvlinc-int2", ["window.block=64"], "window.block 64"),
    "balance without a basis": (
        "oscar-int2",
        ["key.rotation.balance=0.5", "key.rotation.eigenbasis=false"],
        "eigenbasis",
    ),
    "balance after Hadamard": ("hessian-int4", ["key.rotation.balance=0.5"], "eigenbasis_first"),
    "centroids with correction": ("kvlinc-int2", ["key.centroids=4"], "correction.kind 'linear'"),
    "three bits": ("oscar-int2", ["key.quantizer.bits=3"], "key.quantizer.bits"),
    "unknown norm": ("omni-int2", ["key.token_scale.kind=l3"], "key.token_scale"),
    "unknown field": ("oscar-int2", ["key.centre=true"], "key.centre"),
    "unknown section": ("oscar-int2", ["keys.center=true"], "keys"),
    "no layer number": ("oscar-int2", ['layers."first".key.quantizer.bits=4'], 'layers."0-1,11"'),
    "backward range": ("oscar-int2", ['layers."3-1".key.quantizer.bits=4'], 'layers."3-1"'),
    "no quotation marks": ("oscar-int2", ["layers.0-1.key.bits=4"], "key.bits"),
    "unknown field of a layer": ("oscar-int2", ['layers."0-1".key.quantizer.bit=4'], 'layers."0-1"'),
    "section of a layer that cannot differ": (
        "oscar-int2",
        ['layers."0".correction.kind=linear'],
        "only key, value and window",
    ),
    "layer that is no section": ("oscar-int2", ['layers."0"=4'], "layers.0"),
    "override that is impossible there": ("oscar-int2", ['layers."0".key.quantizer.axis=channel'], 'layers."0"'),
    "no path": ("oscar-int2", ["..=4"], "FIELD=VALUE"),
    "empty field": ("oscar-int2", ["key..quantizer.bits=4"], "FIELD=VALUE"),
    "unbalanced quotes": ("oscar-int2", ['layers."0.key.quantizer.bits=4'], "FIELD=VALUE"),
}


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_impossible_schemes_are_refused_in_one_sentence(name: str, changes: list[str], reason: str) -> None:
    with pytest.raises(SchemeError) as refused:
        load_scheme(name, changes)
    message = str(refused.value)
    assert reason in message
    assert "\n" not in message
    assert "pydantic" not in message


# -- what is exact -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def biased(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random float32 checkpoints with and without QK-norm and biases."""
    return save_model(family_config(request.param), tmp_path_factory.mktemp(request.param) / "model")


def logits(model: torch.nn.Module, ids: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    cache, out, position = kvcompile.new_cache(model), [], 0
    with torch.inference_mode():
        for length in chunks:
            part = ids[:, position : position + length]
            out.append(model(part, past_key_values=cache, use_cache=True).logits)
            position += length
    return torch.cat(out, 1)


def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in float32: what is left is exact arithmetic, so that a wrong mean or inverse cannot hide in BF16 rounding."""
    single = types.SimpleNamespace(**{**vars(torch), "bfloat16": torch.float32})
    monkeypatch.setattr("kvcompile.runtime.store.torch", single)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)


@pytest.mark.parametrize(
    "changes",
    [
        ("key.center=true", "value.center=true", "value.rotation.kind=identity", "key.rotation.kind=identity"),
        ("key.center=true", "value.center=true"),
        (
            "key.rotation.balance=1.0",
            "value.rotation.balance=1.0",
            "key.rotation.target=key",
            "value.rotation.target=value",
        ),
        ('layers."0".value.rotation.apply=online',),
        ('layers."1".value.rotation.kind=identity',),
    ],
    ids=["centred", "centred and rotated", "balanced", "partly online", "partly unrotated"],
)
@pytest.mark.parametrize("weights", ["fold", "overlay"])
def test_nothing_but_quantization_changes_the_model(
    changes: tuple[str, ...], weights: str, biased: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows longer than the text, in float32: the logits of the source, 1e-5 where centred, 1e-4 where balanced."""
    few = [
        "calibration.sequence_length=64",
        "calibration.sample_length=64",
        "calibration.tokens=128",
        "window.recent=512",
    ]
    kvcompile.convert(biased, tmp_path / "out", "oscar-int2", overrides=[*few, *changes], weights=weights)
    ids = torch.randint(2, 4000, (1, 60), generator=torch.Generator().manual_seed(0))
    source = load_model(biased, "sdpa")
    with torch.inference_mode():
        expected = source(ids).logits
    model, _ = kvcompile.load(tmp_path / "out", source=biased, backend="codec")
    unrounded(monkeypatch)
    found = logits(model, ids, (40, 1, 1, 1, 17))
    size = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= (1e-4 if "balance" in changes[0] else 1e-5) * size
    assert kvcompile.new_cache(model).layers[0].plan.key_rotation is not None or "identity" in changes[-1]


def test_balanced_keys_and_queries_have_the_same_products(biased: Path, tmp_path: Path) -> None:
    """q k = (q R^-T) (k R)^T, and the matrix is far from orthogonal: the inverse is needed."""
    few = ["calibration.sequence_length=64", "calibration.sample_length=64", "calibration.tokens=128"]
    balanced = ["key.rotation.target=key", "key.rotation.balance=1.0"]
    kvcompile.convert(biased, tmp_path / "out", "oscar-int2", overrides=[*few, *balanced])
    tensors = load_file(tmp_path / "out" / "kvcompile.safetensors")
    r, inverse = (tensors[f"layers.1.key.{name}"].double() for name in ("rotation", "inverse"))
    q, k = (torch.randn(2, 50, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    exact = q @ k.mT
    assert torch.allclose((q @ inverse.mT) @ (k @ r).mT, exact, atol=1e-5 * float(exact.abs().max()))
    assert not torch.allclose((q @ r) @ (k @ r).mT, exact, atol=0.1 * float(exact.abs().max()))
    assert "layers.1.value.inverse" not in tensors


def test_balance_evens_out_the_spectrum_of_keys() -> None:
    """Second moment of ``k R``: eigenvalue w becomes ``w (w + damping)^-a``; with a = 1 and no damping all are equal."""
    layer = AttentionLayer(0, "full_attention", 4, 2, 32, "q", "k", "v", "o", None)
    x = torch.randn(2, 500, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(0, -2, 32, dtype=torch.float64)
    c = x.mT @ x / 500
    for power, spread in ((0.0, None), (1.0, 1.0)):
        r = solve_rotation(Spectral(target="key", balance=power, balance_damping=1e-9), layer, c)
        values = torch.linalg.eigvalsh(r.mT @ c @ r)
        if spread is None:
            assert torch.allclose(values, torch.linalg.eigvalsh(c), atol=1e-9)
        else:
            assert torch.allclose(values, values[:, :1].expand_as(values), rtol=1e-4)
    flat = torch.eye(32, dtype=torch.float64).expand(2, -1, -1) * 7
    r = solve_rotation(Spectral(target="key", balance=2.0), layer, flat)
    assert torch.allclose(r.mT @ r, torch.eye(32, dtype=torch.float64).expand(2, -1, -1), atol=1e-12), (
        "scales of mean 1"
    )


def test_hessian_order_is_hadamard_then_eigenbasis() -> None:
    """Seed 003 equation 11: ``(k H) R``, R the eigenbasis of the queries that stand before H; blocks stay blocks."""
    layer = AttentionLayer(0, "full_attention", 4, 2, 32, "q", "k", "v", "o", None)
    x = torch.randn(2, 200, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    c = (x * torch.linspace(0.1, 2, 32, dtype=torch.float64)).mT @ x
    c = (c + c.mT) / 2
    plan = Spectral(target="query", order="hadamard_first", block_size=16, permutation="none")
    basis = torch.linalg.eigh(c).eigenvectors.flip(-1)
    blocks = torch.block_diag(hadamard(16), hadamard(16))
    first = torch.linalg.solve(blocks.expand(2, -1, -1), solve_rotation(plan, layer, c))
    assert torch.allclose(first.abs(), basis.abs(), atol=1e-9)
    other = solve_rotation(plan.model_copy(update={"order": "eigenbasis_first"}), layer, c)
    assert torch.allclose((other @ blocks).abs(), basis.abs(), atol=1e-9)
    whole = solve_rotation(Spectral(target="query", order="hadamard_first", permutation="none"), layer, c)
    assert torch.allclose((hadamard(32) @ whole).abs(), basis.abs(), atol=1e-9)


def test_score_weighted_target_is_that_of_the_public_code(biased: Path) -> None:
    """``V^T diag(w) V``, ``w_t = k_t (Q^T Q) k_t^T`` of mean 1, token by token; Q all query heads of the KV head."""
    model = load_model(biased, OBSERVER)
    ids = torch.randint(2, 4000, (1, 30), generator=torch.Generator().manual_seed(2))
    seen = {}

    class Keeper(Recorder):
        def observe(self, index, q, k, v, out, scaling):
            seen[index] = q[0].double(), k[0].double(), v[0].double()
            super().observe(index, q, k, v, out, scaling)

    recorder = Keeper({1: 2}, frozenset({"score_weighted"}), 1, 16, 4, 4)
    with torch.inference_mode(), recording(recorder):
        model.base_model(ids, use_cache=False)
    q, k, v = seen[1]
    for head in range(2):
        queries = q[3 * head : 3 * head + 3].reshape(-1, 32)
        weights = [float((queries @ key).square().sum()) for key in k[head]]
        mean = sum(weights) / 30
        expected = (
            sum(w / mean * value[:, None] * value[None, :] for w, value in zip(weights, v[head], strict=True)) / 30
        )
        ours = recorder.layers[1].moments["score_weighted"].mean()[head]
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


# -- what verify finds -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def balanced(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("balanced") / "out"
    kvcompile.convert(example, out, "kvc-int2", overrides=[*SMALL, *WINDOWS])
    return out


@pytest.mark.parametrize("half", ["key", "value"])
def test_verify_refuses_a_tampered_inverse(half: str, balanced: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(balanced, tmp_path / "out"))
    sidecar = artifact / "kvcompile.safetensors"
    tensors = load_file(sidecar)
    if f"layers.2.{half}.inverse" not in tensors:
        pytest.skip("kvc-int2 does not balance this half")
    tensors[f"layers.2.{half}.inverse"][1, 3, 5] += 1e-3
    save_file(tensors, sidecar)
    with pytest.raises(ArtifactError, match="sha256"):
        kvcompile.verify(artifact)
    reseal(artifact)
    with pytest.raises(VerificationError, match=rf"layers\.2\.{half}\.rotation is not undone by its inverse"):
        kvcompile.verify(artifact)


TAMPERED: dict[str, Callable[[dict], object]] = {
    "no inverse": lambda d: d["layers"][0]["key"].update(inverse=None),
    "no mean": lambda d: d["layers"][0]["key"].update(mean=None),
    "no factor": lambda d: d["layers"][0]["key"].update(feedback=None),
    "nearest rounding": lambda d: d["layers"][0]["value"].update(rounding="nearest"),
    "another axis": lambda d: d["layers"][0]["key"].update(axis="channel"),
    "integer zero points": lambda d: d["layers"][0]["key"].update(zero_point="integer"),
    "norms": lambda d: d["layers"][0]["key"].update(token_scale="l2"),
    "centroids": lambda d: d["layers"][0]["key"].update(num_centroids=4),
    "longer pages": lambda d: d["layers"][0].update(page_tokens=128),
    "a correction": lambda d: d["layers"][0].update(correction={"query": "a", "key": "b", "scale": "c"}),
    "an override that the table does not follow": lambda d: d["scheme"].update(
        layers={"0": {"key": {"quantizer": {"bits": 4}}}}
    ),
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_table_that_contradicts_its_scheme_is_refused(
    tamper: Callable[[dict], object], balanced: Path, tmp_path: Path
) -> None:
    artifact = Path(shutil.copytree(balanced, tmp_path / "out"))
    document = json.loads((artifact / "kvcompile.json").read_text("utf-8"))
    tamper(document)
    (artifact / "kvcompile.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="contradicts itself"):
        open_artifact(artifact)


def test_shared_statistics_change_nothing(example: Path, tmp_path: Path) -> None:
    """One forward pass for schemes that need different things; each artifact equals the one made alone, byte for byte."""
    names = ["oscar-int2", "kvc-int2", "hessian-int4"]
    schemes = [load_scheme(name, [*SMALL, "calibration.sample_queries=8"]) for name in names]
    shared = collect_statistics(example, schemes)
    for name, scheme in zip(names, schemes, strict=True):
        kvcompile.convert(example, tmp_path / name, scheme, statistics=shared)
        kvcompile.convert(example, tmp_path / f"{name}-alone", scheme)
        assert contents(tmp_path / name) == contents(tmp_path / f"{name}-alone")
