"""Checkpoints larger than memory, and several devices: where weights are while a model runs changes no number."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

import kvcompile
from kvcompile.artifact import open_artifact
from kvcompile.calibration import statistics
from kvcompile.checkpoint import Checkpoint, copying, save_tensors
from kvcompile.checkpoint.reader import read_header
from kvcompile.errors import CheckpointError, KvCompileError, VerificationError
from kvcompile.models import attention, decoder_of, load_model, take_inventory
from kvcompile.models.lockstep import run_abreast
from kvcompile.models.placement import Placement, available_memory, fits
from kvcompile.models.spill import spill
from tests.commands import contents, overwrite, quick_conversions, refuse, reseal, succeed
from tests.conftest import EXAMPLE, edit_json, family_config, save_model
from tests.families import save_family

ROOT = Path(__file__).parents[1]
quick = pytest.fixture(scope="module", autouse=True)(quick_conversions)


# one layer at a time


@pytest.mark.parametrize(
    ("family", "given"),
    [("example", {}), ("qwen3_moe", {"spill": True}), ("qwen3_vl", {}), ("gemma2", {"spill": True}), ("phi3", {})],
)
def test_streamed_artifacts_are_the_resident_ones(family: str, given: dict[str, bool], tmp_path: Path) -> None:
    """Several batches, sharded, of every kind: weights that transformers fuses, a vision tower, layers that are not packed."""
    source = EXAMPLE if family == "example" else save_family(family, tmp_path / "model", shards="300KB")
    for name, placement in (("resident", {"low_memory": False}), ("streamed", {"low_memory": True, **given})):
        kvcompile.convert(source, tmp_path / name, calibration_tokens=1100, **placement)
    assert contents(tmp_path / "streamed") == contents(tmp_path / "resident")
    assert not list(tmp_path.glob(".*"))


def test_verification_streams(tmp_path: Path) -> None:
    source, out = save_family("qwen3_moe", tmp_path / "model"), tmp_path / "out"
    kvcompile.convert(source, out, calibration_tokens=192)
    streamed, resident = (kvcompile.verify(out, source, low_memory=low_memory) for low_memory in (True, False))
    assert streamed == resident
    layer = open_artifact(out).manifest.compiled[-1].index
    name = f"model.layers.{layer}.mlp.gate.weight"  # logits notice it, projections do not
    overwrite(out, name, bytes(1000))
    reseal(out)
    with pytest.raises(VerificationError, match="differ"):
        kvcompile.verify(out, source, low_memory=True)


def test_a_streamed_fold_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited weights are really put into the layers that come and go."""
    source = save_model(family_config("llama"), tmp_path / "model")
    from kvcompile.passes import verify as verify_module

    monkeypatch.setattr(verify_module, "check_projections", lambda *_: 0.0)
    honest = verify_module.fold_edits
    broken: Callable[..., object] = lambda ir: {n: (lambda t, e=e: 1.01 * e(t)) for n, e in honest(ir).items()}  # noqa: E731
    monkeypatch.setattr(verify_module, "fold_edits", broken)
    with pytest.raises(VerificationError, match="logits differ"):
        kvcompile.convert(source, tmp_path / "out", calibration_tokens=192, low_memory=True)


def test_absent_and_misshapen_tensors_are_named_before_work(tmp_path: Path) -> None:
    source = save_model(family_config("llama"), tmp_path / "model")
    edit_json(source / "config.json", intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight in .* has shape"):
        kvcompile.convert(source, tmp_path / "out", calibration_tokens=192, low_memory=True)
    edit_json(source / "config.json", intermediate_size=128, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.self_attn\.k_proj\.bias .* is missing"):
        kvcompile.convert(source, tmp_path / "out", calibration_tokens=192, low_memory=True)


def test_streaming_is_chosen_and_said_where_weights_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_model(family_config("llama"), tmp_path / "model")
    run = ("convert", source, "--calibration-tokens", 192, "--stop-after", "calibrate", "-o", tmp_path / "out")
    assert "low memory" not in succeed(capsys, *run).err
    monkeypatch.setattr("kvcompile.models.placement.fits", lambda *_: False)
    assert "so one decoder layer is loaded at a time" in succeed(capsys, *run).err
    assert "low memory" not in succeed(capsys, *run, "--no-low-memory").err


def test_what_fits_is_decided_by_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    free = available_memory(device)
    assert fits(free // 2, device) and not fits(free, device)
    monkeypatch.setattr("resource.getrlimit", lambda _: (10_000, 10_000))
    assert available_memory(device) == 10_000


MEMORY = """
import sys, torch
torch.set_num_threads(1)
from kvcompile.passes.convert import convert
convert(sys.argv[1], sys.argv[2], "oscar-int2", calibration_tokens=128, low_memory=sys.argv[3] == "streamed")
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024)
"""


def peak_memory(source: Path, out: Path, how: str) -> int:
    """Peak resident memory of a conversion in a process of its own, bytes."""
    command = [sys.executable, "-c", MEMORY, source, out, how]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.split()[-1])


@pytest.mark.slow
def test_streamed_memory_is_bounded(tmp_path: Path) -> None:
    """300 MB of weights in 12 layers, verification included."""
    config = family_config(
        "llama", hidden_size=1024, intermediate_size=3328, num_hidden_layers=12, num_attention_heads=8, head_dim=64,
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in AutoModelForCausalLM.from_config(config).state_dict().items()}
    source = save_model(family_config("llama"), tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    rows = {shape: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in set(shapes.values())}
    weights = {name: rows[shape].bfloat16() for name, shape in shapes.items()}
    save_tensors(weights, source / "model.safetensors", {})
    config.dtype = torch.bfloat16
    config.save_pretrained(source)
    nbytes = Checkpoint(source).nbytes
    assert nbytes > 280e6
    peaks = {how: peak_memory(source, tmp_path / how, how) for how in ("streamed", "resident")}
    assert peaks["resident"] - peaks["streamed"] > 0.5 * nbytes
    assert contents(tmp_path / "streamed") == contents(tmp_path / "resident")


# forward passes abreast


class Stack(nn.Module):
    """Layers that note who passes them."""

    def __init__(self, seen: list[tuple[int, int]], layers: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(layers))
        self.seen = seen

    def walk(self, who: int, order: tuple[int, ...] = (0, 1, 2)) -> int:
        for layer in order:
            self.layers[layer](torch.zeros(1))
            self.seen.append((layer, who))
        return who


@contextmanager
def no_threads_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def abreast(stack: Stack, calls: list[Callable[[], int]], entering: Callable[[int, int], None] = lambda *_: None):
    held: list[int] = []

    @contextmanager
    def holding(layer: int) -> Iterator[None]:
        held.append(layer)
        yield

    return run_abreast(list(stack.layers), range(len(stack.layers)), calls, holding, entering), held


def test_a_layer_is_passed_by_all_before_the_next() -> None:
    stack = Stack(seen := [])
    with no_threads_left():
        results, held = abreast(stack, [lambda i=i: stack.walk(i) for i in range(4)])
    assert results == [0, 1, 2, 3]
    assert held == [0, 1, 2]
    assert seen == [(layer, who) for layer in range(3) for who in range(4)]
    stack.walk(7)  # no hook is left


def test_an_error_of_one_forward_pass_ends_all() -> None:
    stack, ended = Stack([]), []

    def walk(who: int) -> int:
        try:
            stack.layers[0](torch.zeros(1))
            if who == 1:
                raise KvCompileError("bad").with_traceback(None)
            return stack.walk(who, (1, 2))
        finally:
            ended.append(who)

    with no_threads_left(), pytest.raises(KvCompileError, match="bad"):
        abreast(stack, [lambda i=i: walk(i) for i in range(3)])
    assert sorted(ended) == [0, 1, 2]


def test_an_interrupt_ends_all_forward_passes() -> None:
    stack = Stack([])

    def walk() -> int:
        stack.layers[0](torch.zeros(1))
        os.kill(os.getpid(), signal.SIGINT)  # reaches the main thread, which waits
        threading.Event().wait(0.2)
        return stack.walk(0, (1, 2))

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores it for what runs in its background
    try:
        with no_threads_left(), pytest.raises(KeyboardInterrupt):
            abreast(stack, [walk, walk])
    finally:
        signal.signal(signal.SIGINT, before)


def test_layers_out_of_order_are_a_bug_that_is_named() -> None:
    stack = Stack([])
    with no_threads_left(), pytest.raises(RuntimeError, match="out of order"):
        abreast(stack, [lambda: stack.walk(0, (1, 0, 2))])


# files


def test_spilled_tensors_lie_in_no_file_that_stays(tmp_path: Path) -> None:
    for tensor in (torch.randn(3, 5).bfloat16(), torch.arange(7)[::2], torch.empty(0, 4), torch.tensor(2.5)):
        spilled = spill(tensor, tmp_path)
        assert torch.equal(spilled, tensor) and spilled.dtype == tensor.dtype and spilled.shape == tensor.shape
    assert not list(tmp_path.iterdir())


def test_saved_tensors_are_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {
        "b": torch.tensor(3, dtype=torch.uint8),
        "a": torch.randn(2, 3).double(),
        "c": torch.randn(5, 2).bfloat16().mT,
    }
    save_tensors(tensors, tmp_path / "x.safetensors", {"note": "é"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"note": "é"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
    assert set(read_header(tmp_path / "x.safetensors")) == {*"abc"}


@pytest.mark.parametrize("answer", [None, "ENOSYS", "EXDEV"])
def test_files_are_copied_whatever_the_kernel_can(
    answer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    (tmp_path / "a").write_bytes(bytes(range(256)) * 100)
    monkeypatch.setattr(copying, "_AT_ONCE", 1000)
    if answer:

        def cannot(*_: object) -> int:
            raise OSError(getattr(errno, answer), answer)

        monkeypatch.setattr(os, "copy_file_range", cannot)
    copying.copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_full_disk_is_no_reason_to_copy_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        copying.copy_file(tmp_path / "a", tmp_path / "b")


# long sequences and experts


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", "gemma2", "gpt_oss"])
def test_full_attention_gets_no_mask(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask would be quadratic in the length; only a window that is shorter than the text needs one."""
    masks: dict[int, set[bool]] = {}
    honest = statistics.dense_attention

    def spy(module: nn.Module, q: object, k: object, v: object, mask: object, **given: object) -> object:
        masks.setdefault(module.layer_idx, set()).add(mask is not None)  # type: ignore[arg-type]
        return honest(module, q, k, v, mask, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(statistics, "dense_attention", spy)
    model = load_model(save_family(family, tmp_path / "model"), statistics.OBSERVER)
    ids_BT, windowed = torch.arange(5, 133).view(2, 64), family in ("gemma2", "gpt_oss")
    for starts in ([0, 0], [0, 100], [40, 41]):
        positions_BT = torch.tensor(starts)[:, None] + torch.arange(64)
        with torch.inference_mode():
            decoder_of(model)(ids_BT, position_ids=positions_BT, use_cache=False)
    assert masks == {0: {windowed}, 1: {False}}


def test_bent_attention_is_the_same_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    q, k, v = (
        torch.randn(2, heads, 50, 8, generator=torch.Generator().manual_seed(i)) for i, heads in enumerate((4, 2, 2))
    )
    whole = attention.dense_attention(module, q, k, v, None, softcap=2.0)[0]
    mask_TT = torch.ones(50, 50, dtype=torch.bool).tril()[None, None]
    assert torch.equal(whole, attention.dense_attention(module, q, k, v, mask_TT, softcap=2.0)[0])
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", 2 * 4 * 50 * 7)
    assert torch.allclose(whole, attention.dense_attention(module, q, k, v, None, softcap=2.0)[0], atol=1e-6)


def test_experts_that_see_no_token_do_not_matter(tmp_path: Path) -> None:
    """64 experts, 2 of them for each of 24 tokens."""
    sizes = {"num_experts": 64, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "num_local_experts": 64}
    source = save_model(family_config("qwen3_moe", **sizes), tmp_path / "model")
    for name, low_memory in (("resident", False), ("streamed", True)):
        found = kvcompile.convert(source, tmp_path / name, calibration_tokens=24, low_memory=low_memory)
        assert all(math.isfinite(x) for metrics in found.ir.metrics.values() for x in metrics.values())
    assert contents(tmp_path / "streamed") == contents(tmp_path / "resident")


# several devices


def test_device_map_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_family("llama", tmp_path / "model")
    for name, more in (("one", ()), ("map", ("--device-map", "auto"))):
        succeed(capsys, "convert", source, "--calibration-tokens", 192, "-o", tmp_path / name, *more)
    assert contents(tmp_path / "map") == contents(tmp_path / "one")
    told = refuse(capsys, "convert", source, "-o", tmp_path / "x", "--device-map", "auto", "--low-memory")
    assert "choose one" in told
    assert "device_map is" in refuse(capsys, "convert", source, "-o", tmp_path / "x", "--device-map", "best")


def test_a_model_that_devices_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would offload it to where edited weights do not reach it, and verification would see no change."""
    source = Checkpoint(save_model(family_config("llama"), tmp_path / "model"))
    monkeypatch.setattr("kvcompile.models.placement.load_model", lambda *_, **__: nn.Linear(2, 2, device="meta"))
    with pytest.raises(KvCompileError, match="convert it with --low-memory"):
        Placement(torch.device("cpu"), device_map="auto").open_model(source, take_inventory(source), "sdpa")


RANKS = """
import json, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from kvcompile.errors import KvCompileError
from kvcompile.passes.collection import assist
from kvcompile.passes.convert import convert
from kvcompile.passes.ranks import Ranks

ranks, folder, said = Ranks(), Path(sys.argv[1]), {}
if ranks.rank:
    assist(ranks)
    sys.exit()
try:
    convert(folder / "gemma", folder / "none", ranks=ranks)
except KvCompileError as error:
    said["gemma"] = str(error)
for family in ("olmo2", "qwen3_moe"):
    one, two = (
        convert(folder / family, folder / "none", calibration_tokens=192, stop_after="calibrate", ranks=r).ir.statistics
        for r in (None, ranks)
    )
    assert list(one) == list(two) and all(one[name].dtype == two[name].dtype for name in one)
    said[family] = max(float((one[name] - two[name]).norm() / one[name].norm()) for name in one)
ranks.dismiss()
(folder / "said.json").write_text(json.dumps(said))
"""


def torchrun(*command: object) -> None:
    """Two processes on this CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launcher, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
def test_two_ranks_convert_what_one_does(tmp_path: Path) -> None:
    source = save_family("llama", tmp_path / "model")
    kvcompile.convert(source, tmp_path / "one", calibration_tokens=192)
    torchrun("-m", "kvcompile", "convert", source, "-o", tmp_path / "two", "--calibration-tokens", 192)
    one, two = open_artifact(tmp_path / "one"), open_artifact(tmp_path / "two")
    assert set(one.tensors) == set(two.tensors)
    for name, tensor in one.tensors.items():
        if name.endswith(".feedback"):  # in steps of 1/64
            assert float((tensor - two.tensors[name]).abs().max()) <= 1 / 64, name
        else:
            assert torch.allclose(tensor, two.tensors[name], rtol=1e-4, atol=1e-4), name
    assert kvcompile.verify(tmp_path / "two", source).logits is not None


@pytest.mark.slow
def test_statistics_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    """Heads split, heads gathered by the model's plan (OLMo 2), experts; and heads that cannot be split."""
    for family in ("gemma", "olmo2", "qwen3_moe"):
        save_family(family, tmp_path / family)
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun(tmp_path / "ranks.py", tmp_path)
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["gemma"] == (
        f"the 1 KV heads of layer 0 in {tmp_path / 'gemma'} cannot be shared out to 2 processes; "
        "choose --nproc-per-node so that it divides them"
    )
    assert said["olmo2"] < 1e-6 and said["qwen3_moe"] < 1e-6
