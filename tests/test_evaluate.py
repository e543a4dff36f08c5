"""Evaluation through the packed cache: chunked is stepwise, what is measured, which text, and the `eval` command."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvcompile
from kvcompile.artifact import CalibrationRecord
from kvcompile.calibration import read_corpus, tokenize_corpus
from kvcompile.errors import KvCompileError
from kvcompile.evaluate import chunk_ends, divergence, evaluate, reference_logits, retrieval, teacher_forced
from kvcompile.evaluate.divergence import losses, scores
from kvcompile.evaluate.evaluation import parse_lengths
from kvcompile.evaluate.retrieval import HEAD, Finding, Retrieval, Trial, default_words, make_trials, trials_of_length
from kvcompile.evaluate.teacher_forcing import first_page
from kvcompile.evaluate.text import cut_windows, held_back_text, read_text
from kvcompile.models import load_tokenizer
from tests.commands import quick_conversions, refuse, run, succeed
from tests.conftest import EXAMPLE

Capsys = pytest.CaptureFixture[str]
HELDOUT = EXAMPLE.parent / "heldout.txt"
CODEC = ("--backend", "codec")


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EXAMPLE)


@pytest.fixture(scope="module")
def compiled(converted):
    """The bundled example as oscar-int2, on the codec."""
    return kvcompile.load(converted, backend="codec")[0]


def ids_of(tokenizer, length: int, rows: int = 1) -> torch.Tensor:
    ids = tokenizer(HELDOUT.read_text("utf-8"), return_tensors="pt", verbose=False).input_ids
    return ids[0, : rows * length].view(rows, -1)


def convert(tmp_path: Path, scheme: str, *overrides: str):
    """The bundled example under a scheme without calibration, loaded on the codec."""
    kvcompile.convert(EXAMPLE, tmp_path / "out", scheme, overrides=overrides)
    return kvcompile.load(tmp_path / "out", backend="codec")[0]


# Chunks


def test_chunks_end_where_pages_are_made(compiled):
    assert chunk_ends(kvcompile.new_cache(compiled), 500) == [320, 384, 448, 500]
    assert chunk_ends(kvcompile.new_cache(compiled, sink=4, recent=16), 100) == [20, 84, 100]
    assert chunk_ends(kvcompile.new_cache(compiled, sink=0, recent=0), 130) == [1, 64, 128, 130]
    assert chunk_ends(kvcompile.new_cache(compiled), 100) == [100]
    assert chunk_ends(kvcompile.new_cache(compiled), 500, prefill=300)[:2] == [300, 320]
    assert chunk_ends(kvcompile.new_cache(compiled), 500, prefill=400)[0] == 320, "no further than the smallest window"
    assert chunk_ends(kvcompile.new_cache(compiled), 323, stepwise=True) == [320, 321, 322, 323]
    assert chunk_ends(DynamicCache(), 500) == [500]
    assert first_page(kvcompile.new_cache(compiled)) == 384
    assert first_page(DynamicCache()) is None


def test_every_token_of_a_chunk_sees_the_pages_it_would_see_alone(compiled):
    cache = kvcompile.new_cache(compiled)
    pages = [cache.stores[0].geometry.full_pages(t + 1) for t in range(1000)]
    ends = chunk_ends(cache, 1000)
    for begin, end in zip([0, *ends], ends, strict=False):
        assert len(set(pages[begin:end])) == 1


@pytest.mark.parametrize(
    "scheme",
    [
        ("naive-int2", "window.sink=4", "window.recent=16"),
        ("quarot-int2", "window.sink=0", "window.recent=0"),
        ("quarot-int2", "window.sink=8", "window.recent=30", 'layers."1".window.recent=64', 'layers."2".window.sink=0'),
        ("kivi-int2",),
    ],
    ids=["windows", "no windows", "by layer", "channel-wise"],
)
def test_chunked_is_stepwise(scheme, tmp_path, tokenizer):
    """The same pages are read: what is left is rounding, which a trained model carries on, far below what quantizing does."""
    model = convert(tmp_path, *scheme).float()
    ids = ids_of(tokenizer, 200, rows=2)
    reference = reference_logits(model, ids)
    chunked, stepwise = (
        scores(model, kvcompile.new_cache(model), ids, reference, start=50, stepwise=stepwise)
        for stepwise in (False, True)
    )
    effect = float((chunked.loss_N - chunked.reference_loss_N).abs().mean())
    assert effect > 0.1, "nothing was quantized"
    assert float((chunked.loss_N - stepwise.loss_N).abs().mean()) < 0.03 * effect
    assert float(chunked.kl_N.mean()) == pytest.approx(float(stepwise.kl_N.mean()), rel=0.01)


def test_chunks_of_other_lengths_differ(tmp_path, tokenizer):
    """What the cuts are for: a chunk over a page's place reads rows exactly that decoding would read quantized."""
    model = convert(tmp_path, "naive-int2", "window.sink=0", "window.recent=0")
    ids = ids_of(tokenizer, 256)
    reference = reference_logits(model, ids)
    cache = kvcompile.new_cache(model)
    whole = torch.cat([model(part, past_key_values=cache).logits for part in ids.split(128, dim=1)], dim=1)
    wrong = (whole[:, 130:].float().log_softmax(-1) - reference[:, 130:].float().log_softmax(-1)).abs().mean()
    right = torch.cat([x for _, x in teacher_forced(model, kvcompile.new_cache(model), ids)], dim=1)
    assert (right[:, 130:].float().log_softmax(-1) - reference[:, 130:].float().log_softmax(-1)).abs().mean() > wrong


# Divergence


def test_divergence_of_a_dense_cache_is_nothing(compiled, tokenizer):
    ids = ids_of(tokenizer, 300)
    found = divergence(compiled, DynamicCache(), ids, reference_logits(compiled, ids), start=100)
    assert found.kl < 1e-5
    assert found.agreement == 1
    assert found.positions == 199
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=1e-4)


def test_divergence_is_the_summary_of_its_positions(compiled, tokenizer):
    ids = ids_of(tokenizer, 600)
    reference = reference_logits(compiled, ids)
    done = []
    found = divergence(compiled, kvcompile.new_cache(compiled), ids, reference, start=400, on_step=done.append)
    positions = scores(compiled, kvcompile.new_cache(compiled), ids, reference, start=400)
    assert done[-1] == 599
    assert found.positions == len(positions.kl_N) == 199
    assert found.kl == pytest.approx(float(positions.kl_N.mean()))
    assert 0 < found.kl < found.kl_p99 <= float(positions.kl_N.max())
    expected = torch.nn.functional.cross_entropy(reference[0, 400:-1].float(), ids[0, 401:])
    assert found.reference_perplexity == pytest.approx(float(expected.exp()), rel=1e-4)
    alone = losses(compiled, kvcompile.new_cache(compiled), ids, start=400)
    torch.testing.assert_close(alone, positions.loss_N)


def test_a_reference_of_another_shape_is_refused(compiled, tokenizer):
    ids = ids_of(tokenizer, 400)
    with pytest.raises(KvCompileError, match="one tokenizer"):
        divergence(compiled, kvcompile.new_cache(compiled), ids, torch.zeros(1, 400, 7))


# Text


def test_held_back_text_is_what_calibration_has_not_read(tokenizer):
    corpus = read_corpus(None, seed=3)
    record = CalibrationRecord(text=corpus.name, text_sha256=corpus.sha256, tokens=8192, sequence_length=2048, seed=3)
    read = tokenizer.decode(torch.cat(tokenize_corpus(corpus, tokenizer, 8192, 2048)))
    held = held_back_text([record], tokenizer).text
    for document in corpus.documents:
        assert (document[:60] in read) != (document in held)
    assert len(held) < len(held_back_text([None], tokenizer).text) == len("\n".join(corpus.documents))


def test_held_back_text_may_be_unknown_or_empty(tokenizer):
    corpus = read_corpus(None)
    record = CalibrationRecord(text=corpus.name, text_sha256=corpus.sha256, tokens=10**6, sequence_length=64, seed=0)
    with pytest.raises(KvCompileError, match=r"read all of the bundled text.*--text"):
        held_back_text([record], tokenizer)
    with pytest.raises(KvCompileError, match=r"another version.*--text"):
        held_back_text([record.model_copy(update={"text_sha256": "0"})], tokenizer)
    elsewhere = record.model_copy(update={"text": "books.txt", "text_sha256": "0"})
    assert held_back_text([elsewhere], tokenizer).text


def test_windows_are_spaced_evenly_and_short_text_gives_fewer(tokenizer):
    text = read_text(HELDOUT)
    ids = ids_of(tokenizer, 10**6)[0]
    windows = cut_windows(text, tokenizer, 3, 500, needed=100)
    assert windows.shape == (3, 500)
    assert torch.equal(windows[1], ids[len(ids) // 3 :][:500])
    assert cut_windows(text, tokenizer, 4, len(ids) // 2, needed=100).shape == (2, len(ids) // 2)
    assert cut_windows(text, tokenizer, 4, 10**6, needed=100).shape == (1, len(ids))
    with pytest.raises(KvCompileError, match="first 384 are not quantized"):
        cut_windows(text, tokenizer, 4, 385, needed=384)


# Retrieval


@pytest.mark.parametrize(
    "strange", ["漢字かな交じり文。" * 3000, "x = f(a, b)\n" * 4000, "no sentence ends here " * 3000]
)
def test_trials_have_the_length_asked_for_and_the_depth_they_report(tokenizer, strange):
    """In texts of any language, mixed with others, and without sentences."""
    haystack = HELDOUT.read_text("utf-8")[:20000] + strange
    for trial in trials_of_length(haystack, default_words(), tokenizer, 600, 6):
        tokens = len(tokenizer(trial.prompt, add_special_tokens=False)["input_ids"])
        assert 0.8 * 600 <= tokens <= 600
        body = trial.prompt[len(HEAD) : trial.prompt.rindex("\nWhat is the special")]
        before, after = re.split(r" One of the special magic numbers for [a-z]+-[a-z]+ is: \d{7}\.", body)
        assert len(before) / len(before + after) == pytest.approx(trial.depth)


def test_trials_say_where_the_number_is(tokenizer):
    trials = trials_of_length(HELDOUT.read_text("utf-8"), default_words(), tokenizer, 1024, 5)
    assert [trial.depth for trial in trials] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.03)
    for trial in trials:
        assert trial.prompt.count(trial.number) == 1
        assert trial.prompt.index(trial.number) / len(trial.prompt) == pytest.approx(trial.depth, abs=0.15)
        assert 900 < len(tokenizer(trial.prompt).input_ids) <= 1024


def test_a_short_haystack_is_repeated():
    (trial,) = make_trials("One sentence. ", ["red"], characters=1000, count=1)
    assert len(trial.prompt) > 1000


def test_words_are_plain():
    words = default_words()
    assert len(words) == len(set(words)) > 300
    assert all(word.isalpha() and word.islower() for word in words)


def test_retrieval_tells_every_trial(compiled, tokenizer):
    prompt = make_trials(HELDOUT.read_text("utf-8"), default_words(), 1500, 2)
    hopeless = Trial(prompt[0].prompt, "not a number", 0.9)
    found = retrieval(compiled, tokenizer, lambda: kvcompile.new_cache(compiled), [*prompt, hopeless])
    assert found[2] == Finding(0.9, False)
    assert Retrieval(512, found).share == sum(f.found for f in found) / 3


def test_lengths():
    assert parse_lengths("4k, 8192,4096") == (4096, 8192)
    assert parse_lengths("") == ()
    for wrong in ("4m", "k", "-1", "0", "1.5k"):
        with pytest.raises(KvCompileError, match="no context length"):
            parse_lengths(wrong)


# The command


def test_eval_prints_a_table(converted, capsys: Capsys):
    out = succeed(capsys, "eval", converted, "--windows", 1, "--length", 600, *CODEC).out
    assert "perplexity" in out
    assert "bundled text" in out
    assert "KL" not in out


def test_eval_json_has_everything(converted, capsys: Capsys):
    outcome = succeed(
        capsys, "eval", converted, "--text", HELDOUT, "--windows", 2, "--length", 600, "--against", EXAMPLE, *CODEC,
        "--retrieval", "512", "--trials", 2, "--json",
    )  # fmt: skip
    found = json.loads(outcome.out)
    assert (found["windows"], found["window_tokens"], found["counted_from"]) == (2, 600, 384)
    assert (found["text"], found["backend"], found["reference"]) == ("heldout.txt", "codec", str(EXAMPLE))
    quality = found["quality"]
    assert quality["divergence"]["positions"] == 2 * 215
    assert quality["divergence"]["perplexity"] == pytest.approx(quality["perplexity"])
    assert 0 < quality["divergence"]["kl"] < quality["divergence"]["kl_p99"]
    assert [len(entry["findings"]) for entry in quality["retrieval"]] == [2]
    assert quality["cache_bytes"] > 0


def test_evaluate_against_itself_and_against_the_source_agree(converted):
    """The fold leaves logits as they were."""
    settings = {"text": HELDOUT, "windows": 1, "length": 700, "backend": "codec"}
    itself, source = (evaluate(converted, **settings, **x).quality for x in ({"kl": True}, {"against": EXAMPLE}))
    assert itself.divergence is not None and source.divergence is not None
    assert itself.perplexity == source.perplexity
    assert itself.divergence.kl == pytest.approx(source.divergence.kl, rel=0.05, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "nowhere.txt"), "evaluation text nowhere.txt does not exist"),
        (("--length", 200), "the first 384 are not quantized"),
        (("--retrieval", "8k"), "the model has 4096 positions"),
        (("--retrieval", "100"), "takes at least 256"),
        (("--retrieval", "many"), "'many' is no context length"),
        (("--haystack", "nowhere.txt"), "evaluation text nowhere.txt does not exist"),
        (("--against", "nowhere"), "nowhere"),
        (("--device", "cuda:99"), "device 'cuda:99'"),
    ],
)
def test_eval_refuses(arguments, message, converted, capsys: Capsys):
    arguments = arguments if "--haystack" not in arguments else (*arguments, "--retrieval", "512")
    assert message in refuse(capsys, "eval", converted, *CODEC, *arguments)


def test_eval_refuses_what_is_no_artifact(capsys: Capsys):
    assert "is no converted checkpoint" in refuse(capsys, "eval", EXAMPLE)
    assert run(capsys, "eval", EXAMPLE, "--windows", 0).code == 2


def test_eval_of_an_empty_text(converted, tmp_path, capsys: Capsys):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "holds no text" in refuse(capsys, "eval", converted, "--text", tmp_path / "empty.txt", *CODEC)
    assert "UTF-8" in refuse(capsys, "eval", converted, "--text", tmp_path / "binary.txt", *CODEC)


# lm-evaluation-harness


@pytest.fixture
def harness(tmp_path):
    """A task with local data, and the harness's `simple_evaluate` on it."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'kvcompile[lm-eval]'")
    from lm_eval.tasks import TaskManager

    import kvcompile.evaluate.lm_eval  # noqa: F401 - registers the model

    text = HELDOUT.read_text("utf-8")
    records = [{"text": text[i : i + 2200], "right": text[i + 2200 : i + 2230]} for i in (0, 3000)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    head = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'data.jsonl'}}}}}\ntest_split: test\n"
    )
    (tmp_path / "choice.yaml").write_text(
        "task: local_choice\noutput_type: multiple_choice\n" + head + 'doc_to_text: "{{text}}"\ndoc_to_target: 0\n'
        'doc_to_choice: ["{{right}}", " zebra zebra zebra"]\nmetric_list: [{metric: acc}]\n'
    )
    (tmp_path / "generate.yaml").write_text(
        "task: local_generate\noutput_type: generate_until\n"
        + head
        + 'doc_to_text: "{{text}}"\ndoc_to_target: "{{right}}"\n'
        "generation_kwargs: {max_gen_toks: 3, do_sample: false}\nmetric_list: [{metric: exact_match}]\n"
    )

    def evaluate_tasks(model: object, *tasks: str, **settings: object) -> dict:
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        return lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **settings
        )

    return evaluate_tasks


def test_harness_answers_through_the_packed_cache(harness, converted):
    settings = f"pretrained={converted},cache_backend=codec"
    found = harness("kvcompile", "local_choice", "local_generate", model_args=settings, batch_size=2, device="cpu")
    assert found["results"]["local_choice"]["acc,none"] == 1
    ours = [sample["filtered_resps"][0][0] for sample in found["samples"]["local_choice"]]
    exact = harness("hf", "local_choice", model_args=f"pretrained={converted}", batch_size=1, device="cpu")
    theirs = [sample["filtered_resps"][0][0] for sample in exact["samples"]["local_choice"]]
    assert ours == pytest.approx(theirs, rel=0.1), "the same model"
    assert ours != theirs, "but with a quantized cache"
