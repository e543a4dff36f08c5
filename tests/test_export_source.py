"""--source: only the checkpoint that was converted; and mixes of layers whose values are rotated by weights, engine or nobody."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvcompile
from kvcompile.artifact import read_manifest
from kvcompile.checkpoint import file_digest
from kvcompile.errors import ExportError
from kvcompile.export import Notes, export
from tests.commands import overwrite, quick_conversions
from tests.conftest import EXAMPLE, family_config, save_model
from tests.families import save_family

TARGETS = ("sglang", "gguf", "compressed-tensors")
NOT_IT = r"is not the checkpoint that .* was made from: "


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    yield from quick_conversions()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Values of layer 0 rotated online, of layer 1 not at all, of the others in the weights; the source, and the artifact."""
    folder = tmp_path_factory.mktemp("mixed")
    model = save_model(family_config("qwen3", num_hidden_layers=4), folder / "model")
    scheme = folder / "mixed.toml"
    scheme.write_text(
        'name = "mixed"\nsummary = "some values are folded"\n'
        '[key.rotation]\nkind = "hadamard"\n[key.quantizer]\nbits = 2\ngroup_size = 32\n'
        '[value.rotation]\nkind = "hadamard"\napply = "folded"\n[value.quantizer]\nbits = 2\ngroup_size = 32\n'
        '[layers."0".value.rotation]\napply = "online"\n[layers."1".value.rotation]\nkind = "identity"\n'
    )
    kvcompile.convert(model, folder / "out", scheme)
    assert [x.value.apply for x in read_manifest(folder / "out").compiled] == ["online", "online", "folded", "folded"]
    return model, folder / "out"


@pytest.mark.parametrize("target", TARGETS)
def test_weights_that_are_folded_already_are_no_source(target: str, quarot: Path, converted: Path, tmp_path: Path):
    """What W_O W_V computes is the same in all of these; an engine that rotates again would store garbage."""
    export(quarot, "plain", tmp_path / "own")
    export(converted, "plain", tmp_path / "other")
    for wrong, why in (
        (quarot, "is a converted checkpoint, whose values may be rotated already"),
        (converted, "is a converted checkpoint, whose values may be rotated already"),
        (
            tmp_path / "own",
            NOT_IT + r"its model\.layers\.0\.self_attn\.v_proj\.weight, folded by the artifact's rotation",
        ),
        (tmp_path / "other", NOT_IT),
    ):
        with pytest.raises(ExportError, match=why):
            export(quarot, target, tmp_path / "view", source=wrong)
    assert not (tmp_path / "view").exists()


def test_other_checkpoints_are_no_source(quarot: Path, tmp_path: Path):
    fewer = save_model(family_config("qwen3"), tmp_path / "fewer")
    with pytest.raises(ExportError, match=NOT_IT + "it has other attention layers"):
        export(quarot, "sglang", tmp_path / "view", source=fewer)
    model = Path(shutil.copytree(EXAMPLE, tmp_path / "altered"))
    overwrite(model, "model.layers.3.self_attn.o_proj.weight", b"\x40" * 4096)
    with pytest.raises(ExportError, match=NOT_IT + r"its model\.layers\.3\.self_attn\.o_proj\.weight"):
        export(quarot, "sglang", tmp_path / "view", source=model)


def test_a_source_of_layers_that_are_not_folded_must_be_equal(mixed: tuple[Path, Path], tmp_path: Path):
    source, out = mixed
    model = Path(shutil.copytree(source, tmp_path / "altered"))
    overwrite(model, "model.layers.1.self_attn.v_proj.weight", b"\x40" * 4)
    with pytest.raises(ExportError, match=NOT_IT + r"model\.layers\.1\.self_attn\.v_proj\.weight is another tensor"):
        export(out, "sglang", tmp_path / "view", source=model)


@pytest.mark.parametrize(("family", "dtype"), [("phi3", torch.float32), ("qwen2", torch.float16)])
def test_fused_matrices_biases_and_other_dtypes(family: str, dtype: torch.dtype, tmp_path: Path):
    model = save_family(family, tmp_path / "model", dtype)
    kvcompile.convert(model, tmp_path / "out", "quarot-int2")
    export(tmp_path / "out", "sglang", tmp_path / "view", source=model)
    export(tmp_path / "out", "plain", tmp_path / "plain")
    with pytest.raises(ExportError, match=NOT_IT):
        export(tmp_path / "out", "sglang", tmp_path / "again", source=tmp_path / "plain")


@pytest.mark.parametrize("target", TARGETS)
def test_notes_name_the_weights_that_were_handed_over(target: str, quarot: Path, tmp_path: Path):
    export(quarot, target, tmp_path / "own")
    export(quarot, target, tmp_path / "source", source=EXAMPLE)
    own, source = ((tmp_path / name / "NOTES.md").read_text("utf-8") for name in ("own", "source"))
    digests = [file_digest(path / "model.safetensors") for path in (quarot, EXAMPLE)]
    assert [digests[0] in own, digests[1] in own] == [True, False]
    assert [digests[0] in source, digests[1] in source] == [False, True]
    assert "an engine must not rotate values again" in own
    assert "an engine must not rotate values again" not in source
    assert "value rotations online (the weights know nothing of them)" in source


def carried(notes: Notes) -> str:
    return next(entry for entry in notes.carried if entry.startswith("value rotation"))


def test_a_mix_of_layers_says_which_is_which(mixed: tuple[Path, Path], tmp_path: Path):
    """Never that all are folded, nor that all are online."""
    _, out = mixed
    for target in ("plain", *TARGETS):
        notes = export(out, target, tmp_path / target)
        head = (tmp_path / target / "NOTES.md").read_text("utf-8").partition("## Carried")[0]
        assert "(an engine must not rotate values again) in layers 2, 3" in head, target
        assert "(the weights know nothing of them) in layer 0" in head, target
        assert "in layers 2, 3;" in carried(notes), target
        assert "in layer 0;" in carried(notes), target
        assert "there is none" in carried(notes), target
        assert any(entry.startswith("value rotation") for entry in notes.refused) == (target == "plain")


def test_sglang_rotates_a_mix_of_layers_once(mixed: tuple[Path, Path], tmp_path: Path):
    """R_V of layers that are folded is the identity, and nothing is absorbed: the engine would absorb into all."""
    source, out = mixed
    export(out, "sglang", tmp_path / "own")
    export(out, "sglang", tmp_path / "source", source=source)
    own, theirs = (
        torch.load(tmp_path / name / "v_rotation.pt", weights_only=True)["layers"] for name in ("own", "source")
    )
    identity = torch.eye(32)
    assert [torch.equal(own[i]["rotation"], identity) for i in range(4)] == [False, True, True, True]
    assert [torch.equal(theirs[i]["rotation"], identity) for i in range(4)] == [False, True, False, False]
    assert 'ABSORB_V_ROTATION="0"' in (tmp_path / "own" / "oscar.env").read_text()
    assert 'ABSORB_V_ROTATION="1"' in (tmp_path / "source" / "oscar.env").read_text()


def test_the_gguf_sidecar_of_a_mix_of_layers(mixed: tuple[Path, Path], tmp_path: Path):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    source, out = mixed
    for name, weights, side, sides, rotated in (
        ("own", None, "mixed", ["online", "none", "folded", "folded"], {0}),
        ("source", source, "mixed", ["online", "none", "online", "online"], {0, 2, 3}),
    ):
        export(out, "gguf", tmp_path / name, source=weights)
        reader = gguf.GGUFReader(tmp_path / name / "rotations.gguf")
        assert reader.fields["kvcompile.v_rotation"].contents() == side
        assert reader.fields["kvcompile.value.side"].contents() == sides
        values = {int(x.name.split(".")[1]) for x in reader.tensors if x.name.endswith("attn_v_rot.weight")}
        assert values == rotated
