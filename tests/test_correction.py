"""Linear correction (KVLinC): its states in a cache, its mathematics against float64, and the training of its adapters."""

import math
from types import SimpleNamespace

import pytest
import torch

import kvcompile
from benchmarks.quality import calibration_file, measure
from kvcompile.calibration import AttentionSample
from kvcompile.codec import PageFormat, RowFormat, decode_pages
from kvcompile.codec.correction import Correction
from kvcompile.errors import CacheError, KvCompileError
from kvcompile.passes.adapters import AttentionRows, train
from kvcompile.passes.convert import convert
from kvcompile.passes.correction import attention_rows, masks, split
from kvcompile.runtime.backend import CodecBackend
from kvcompile.runtime.cache import LayerPlan, NewRows, PackedLayer
from kvcompile.runtime.store import Geometry, PackedStore, Storage
from kvcompile.scheme import load_scheme
from kvcompile.scheme.model import LinearCorrection, Window
from tests.conftest import SHARED

K, G, D, F, BLOCK = 2, 3, 32, 32, 64
H = K * G
FORMS = ("paper", "relative")
SMALL = [
    "correction.features=32", "correction.steps=60", "calibration.tokens=4096", "calibration.sequence_length=512",
    "calibration.sample_sequences=8", "calibration.sample_length=512", "calibration.sample_queries=64",
]  # fmt: skip


def random_correction(form: str, seed: int = 0) -> Correction:
    generator = torch.Generator().manual_seed(seed)

    def maps(heads: int) -> torch.Tensor:
        return torch.randn(heads, D, F, generator=generator) * 0.3

    scale_H = torch.rand(H, generator=generator) + 0.5
    return Correction(maps(H), maps(K), scale_H, maps(K) if form == "relative" else None)


def packed_layer(correction: Correction, sink: int = 0, recent: int = 0) -> PackedLayer:
    """A layer of its own store: 2-bit keys along tokens, 2-bit values along channels."""
    key = RowFormat(D, 2, BLOCK, 1.0, "channel", "float", "nearest", "none", "head", 0)
    value = RowFormat(D, 2, D, 1.0, "token", "float", "nearest", "none", "head", 0)
    fmt = PageFormat(key, value, BLOCK)
    plan = LayerPlan(Storage(fmt, correction=correction))
    geometry = Geometry(K, D, sink, recent, fmt.page_bytes, BLOCK)
    store = PackedStore(geometry, [plan.storage], CodecBackend(), torch.device("cpu"))
    return PackedLayer(plan, store, 0, store.backend)


def random_rows(tokens: int, batch: int = 1, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries ``[B, H, T, D]``, keys and values ``[B, K, T, D]``, bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, tokens, D, generator=generator).bfloat16() for heads in (H, K, K))
    return q, k * 2, v


def run(
    layer: PackedLayer, rows: tuple[torch.Tensor, ...], chunks: list[int], scaling: float = D**-0.5
) -> torch.Tensor:
    """Attention outputs ``[B, T, H, D]`` of rows that arrive in chunks; a first chunk is attended to exactly."""
    module, position, out = SimpleNamespace(num_key_value_groups=G, is_causal=True), 0, []
    for length in chunks:
        q, k, v = (x[:, :, position : position + length] for x in rows)
        out.append(layer.attend(q, NewRows(layer, k, v), None, scaling, module))
        position += length
    layer.store.commit()
    return torch.cat(out, dim=1)


def written_out(
    layer: PackedLayer, rows: tuple[torch.Tensor, ...], position: int, sink: int, scaling: float
) -> torch.Tensor:
    """Equation 5 for one query of row 0, token by token in float64: ``[H, D]``."""
    correction = layer.plan.storage.correction
    q_HD, (k_KTD, v_KTD) = rows[0][0, :, position].double(), (x[0, :, : position + 1].double() for x in rows[1:])
    decoded_k, decoded_v = k_KTD.clone(), v_KTD.clone()
    for number, page in enumerate(layer.store.tables[0]):
        place = slice(sink + number * BLOCK, sink + (number + 1) * BLOCK)
        fmt = layer.plan.storage.fmt
        for into, decoded in zip(
            (decoded_k, decoded_v), decode_pages(layer.store.pages_LPKX[0, page], fmt), strict=True
        ):
            into[:, place] = decoded.double()
    quantized = torch.zeros(position + 1, dtype=torch.bool)
    quantized[sink : sink + len(layer.store.tables[0]) * BLOCK] = True

    def phi(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., : F // 2].softmax(-1), x[..., F // 2 :].softmax(-1)], dim=-1)

    out = []
    for head in range(H):
        kv = head // G
        logits_T = decoded_k[kv] @ q_HD[head] * scaling
        top = logits_T.max()
        key_logits_TF = (k_KTD[kv] - decoded_k[kv]) @ correction.key_KDF[kv].double()
        if correction.decoded_KDF is not None:
            key_logits_TF += decoded_k[kv] @ correction.decoded_KDF[kv].double()
        added_T = phi(key_logits_TF) @ phi(q_HD[head] @ correction.query_HDF[head].double())
        weight_T = (logits_T - top).exp()
        relative = correction.decoded_KDF is not None
        added_T = added_T * (weight_T.sum() / (position + 1) if relative else (-top).exp())
        weight_T += correction.scale_H[head].double() * added_T * quantized
        out.append(weight_T @ decoded_v[kv] / weight_T.sum())
    return torch.stack(out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (16, 40)])
@pytest.mark.parametrize("scaling", [D**-0.5, 2.0, 0.0])
def test_corrected_attention_is_the_formula_in_float64(form: str, sink: int, recent: int, scaling: float) -> None:
    """Decoded one by one and in a chunk; with windows, whose tokens enter the softmax but not the correction."""
    rows = random_rows(300)
    layer = packed_layer(random_correction(form), sink, recent)
    step = run(layer, rows, [200, *[1] * 60], scaling)[0, 259]
    torch.testing.assert_close(step.double(), written_out(layer, rows, 259, sink, scaling), atol=6e-3, rtol=1e-2)
    pages = layer.store.num_pages[0]
    layer = packed_layer(random_correction(form), sink, recent)
    chunk = run(layer, tuple(x[:, :, :265] for x in rows), [258, 7], scaling)[0, 258:]
    assert layer.store.num_pages[0] == pages >= 2
    for place in (0, 6):
        expected = written_out(layer, rows, 258 + place, sink, scaling)
        torch.testing.assert_close(chunk[place].double(), expected, atol=6e-3, rtol=1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_states_do_not_depend_on_how_tokens_arrive(form: str) -> None:
    rows = random_rows(280, batch=2)
    states = []
    for chunks in ([280], [1] * 280, [100, 70, *[1] * 10, 100]):
        layer = packed_layer(random_correction(form), sink=8, recent=20)
        run(layer, rows, chunks)
        assert layer.store.num_pages == [3, 3]
        states.append(layer.store.states[0])
    for other in states[1:]:
        torch.testing.assert_close(other.s_BKFD, states[0].s_BKFD, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(other.p_BKF, states[0].p_BKF, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        states[0].p_BKF.sum(-1), torch.full((2, K), 2.0 * 3 * BLOCK)
    )  # each half of phi sums to 1


def test_tokens_in_windows_do_not_enter_the_states() -> None:
    layer = packed_layer(random_correction("relative"), sink=16, recent=40)
    run(layer, random_rows(16 + 40 + BLOCK), [16 + 40 + BLOCK])
    assert not layer.store.states[0].s_BKFD.any()
    assert not layer.store.states[0].p_BKF.any()


@pytest.mark.parametrize("form", FORMS)
def test_no_denominator_overflows(form: str) -> None:
    """exp(-lse) of paper form alone is infinite below -88; a padding row has an infinite lse and count."""
    correction = random_correction(form)
    lse_T = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4, math.inf])
    kept_HT, added_HT = correction.weights(lse_T.expand(H, -1), torch.tensor([9.0, 9, 9, 9, 9, math.inf]))
    assert kept_HT.isfinite().all()
    assert added_HT.isfinite().all()
    assert ((kept_HT + added_HT) > 0).all()
    assert kept_HT[0, -1] == 1
    assert added_HT[0, -1] == 0


def test_rows_take_their_states_along() -> None:
    layer = packed_layer(random_correction("relative"))
    run(layer, random_rows(200, batch=2), [200])
    before = layer.store.states[0]
    size = layer.store.nbytes()
    layer.store.select([1, 1, 0])
    assert torch.equal(layer.store.states[0].s_BKFD, before.s_BKFD[[1, 1, 0]])
    assert torch.equal(layer.store.states[0].p_BKF, before.p_BKF[[1, 1, 0]])
    assert layer.store.nbytes() - size >= (before.s_BKFD.nbytes + before.p_BKF.nbytes) // 2


def test_cropping_into_pages_is_refused() -> None:
    layer = packed_layer(random_correction("relative"), recent=20)
    run(layer, random_rows(2 * BLOCK + 20), [2 * BLOCK + 20])
    layer.store.crop(20)
    with pytest.raises(CacheError, match="cannot forget"):
        layer.store.crop(2 * BLOCK)
    assert layer.store.num_tokens == [2 * BLOCK]


@pytest.mark.parametrize("window", [Window(sink=0, recent=0, block=128), Window(sink=64, recent=100, block=64)])
def test_training_sees_the_pages_of_the_runtime(window: Window) -> None:
    quantized_nT, visible_nT = masks(window, 200, 512)
    geometry = Geometry(1, D, window.sink, window.recent, 0, window.block)
    for row, seen in enumerate(range(313, 513)):
        assert int(visible_nT[row].sum()) == seen
        assert int(quantized_nT[row].sum()) == geometry.full_pages(seen) * window.block
        assert not quantized_nT[row, : window.sink].any()


def random_attention(seed: int) -> AttentionRows:
    """Few directions that queries and keys share, and rounding to whole numbers for a codec."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(8, D, generator=torch.Generator().manual_seed(99))
    q_HnD, k_KTD = (torch.randn(h, t, 8, generator=generator) @ basis for h, t in ((H, 64), (K, 256)))
    quantized_nT, visible_nT = masks(Window(sink=0, recent=0, block=64), 64, 256)
    return AttentionRows(q_HnD, k_KTD, (k_KTD / 4).round() * 4, quantized_nT, visible_nT, 0.05)


@pytest.mark.parametrize("form", FORMS)
def test_training_helps_a_sequence_it_has_not_seen(form: str) -> None:
    samples, held_out = split([random_attention(i) for i in range(6)])
    assert (len(samples), len(held_out)) == (5, 1)
    trained = train(samples, held_out, LinearCorrection(form=form, features=64, steps=60), seed=0)
    assert trained.after < trained.before
    after = held_out[0].losses(trained.correction)
    assert float(after.mean()) == pytest.approx(trained.after, rel=1e-5)
    assert (after <= held_out[0].losses(None) + 1e-6).all()


def test_training_stops_early_and_never_harms() -> None:
    """With an absurd learning rate nothing improves: training stops after `patience` evaluations, and nothing gets worse."""
    samples, held_out = split([random_attention(i) for i in range(3)])
    trained = train(samples, held_out, LinearCorrection(features=32, steps=1000, learning_rate=50, patience=2), seed=0)
    assert trained.steps < 1000
    assert trained.after <= trained.before


def test_a_head_that_gains_nothing_is_switched_off() -> None:
    """Keys that quantization leaves as they are need no correction, and get none."""
    samples, held_out = split([random_attention(i) for i in range(3)])
    exact = [AttentionRows(**{**vars(x), "decoded_KTD": x.k_KTD}) for x in (*samples, *held_out)]
    trained = train(exact[:-1], exact[-1:], LinearCorrection(features=32, steps=20), seed=0)
    assert not trained.correction.scale_H.any()
    assert trained.after == trained.before


def test_one_sequence_holds_out_its_last_queries() -> None:
    samples, held_out = split([random_attention(0)])
    assert samples[0].q_HnD.shape[1] == 48
    assert held_out[0].q_HnD.shape[1] == 16


@pytest.fixture(scope="module", params=FORMS)
def converted_twice(request, example, tmp_path_factory):
    """The example with adapters, converted twice with the same seed."""
    folder, sets = tmp_path_factory.mktemp("kvlinc"), [*SMALL, f"correction.form={request.param}"]
    return [convert(example, folder / name, "kvlinc-int2", overrides=sets) for name in ("a", "b")]


def test_conversion_lowers_held_out_cross_entropy(converted_twice) -> None:
    """In 60 steps with 32 features one layer of the smallest model may gain nothing, and is then left as it was."""
    losses = [
        (x.metrics["correction_loss_before"], x.metrics["correction_loss_after"])
        for x in converted_twice[0].manifest.compiled
    ]
    assert all(after <= before for before, after in losses)
    assert sum(after < before for before, after in losses) >= len(losses) - 1
    assert all(0 < x.metrics["correction_steps"] <= 60 for x in converted_twice[0].manifest.compiled)


@pytest.mark.shared
@pytest.mark.slow
def test_adapters_help_a_reference_model_in_every_layer(tmp_path) -> None:
    """The built-in scheme on llama-32m: held-out cross-entropy falls in all layers, KL falls (by little: docs/schemes.md)."""
    text = calibration_file(SHARED, tmp_path)
    results = []
    for name, overrides in (("with", []), ("without", ["correction.kind=none"])):
        source = SHARED / "models" / "llama-32m"
        made = convert(source, tmp_path / name, "kvlinc-int2", overrides=overrides, calibration=text)
        results.append(measure(tmp_path / name, SHARED, 4, 2048).kl)
        for layer in made.manifest.compiled if name == "with" else ():
            assert layer.metrics["correction_loss_after"] < layer.metrics["correction_loss_before"]
    assert results[0] < results[1]


def test_two_conversions_give_the_same_bytes(converted_twice) -> None:
    first, second = ((x.out / "kvcompile.safetensors").read_bytes() for x in converted_twice)
    assert first == second


def test_a_corrected_model_generates_and_crops(converted_twice) -> None:
    model, _ = kvcompile.load(converted_twice[0].out, backend="codec")
    ids = torch.randint(2, 4000, (2, 300), generator=torch.Generator().manual_seed(0))
    cache = kvcompile.new_cache(model)
    out = model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2, past_key_values=cache)
    assert out.shape[1] <= 306
    assert cache.stores[0].states
    with pytest.raises(CacheError, match="cannot forget"):
        cache.crop(100)


def test_training_sees_the_logits_of_the_source(example, tmp_path) -> None:
    """Queries go by the transposed inverse, which differs from the rotation where the basis is balanced."""
    sets = [*SMALL, "key.rotation.kind=spectral", "key.rotation.target=key", "key.rotation.balance=1.5"]
    ir = convert(example, tmp_path / "out", "kvlinc-int2", overrides=sets, stop_after="clip").ir
    layer = ir.layers().compiled[0]
    sample = AttentionSample.restore(ir.statistics, layer.index)
    rows = attention_rows(ir, layer, torch.device("cpu"))[0]
    q_KXD, k_KTD = rows.q_HnD.unflatten(0, (len(rows.k_KTD), -1)).flatten(1, 2), rows.k_KTD
    found = q_KXD @ k_KTD.mT
    source_q = sample.q_SKXD[0].float().unflatten(1, (-1, rows.q_HnD.shape[1])).flatten(1, 2)
    expected = source_q @ sample.k_SKTD[0].float().mT
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_training_needs_a_sample_and_a_codec(example, tmp_path) -> None:
    passes = load_scheme("kvlinc-int2").passes
    without = load_scheme("kvlinc-int2").model_copy(update={"passes": tuple(p for p in passes if p != "calibrate")})
    with pytest.raises(KvCompileError, match="pass 'calibrate' must be among its passes"):
        convert(example, tmp_path / "out", without)


@pytest.mark.parametrize(("name", "bits"), [("kvlinc-int2", 2), ("kvlinc-int1", 1)])
def test_builtin_schemes(name: str, bits: int) -> None:
    scheme = load_scheme(name)
    assert scheme.key.quantizer.bits == scheme.value.quantizer.bits == bits
    assert (scheme.key.quantizer.axis, scheme.value.quantizer.axis) == ("channel", "token")
    assert (scheme.window.sink, scheme.window.recent, scheme.window.block) == (0, 0, 128)
    assert isinstance(scheme.correction, LinearCorrection)
