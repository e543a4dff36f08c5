"""Running the command line inside the test process, and comparing directories before and after."""

import gc
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvcompile.checkpoint import Checkpoint, file_digest, tensor_bytes

QUICK = ("--calibration-tokens", 256)


@dataclass(frozen=True)
class Outcome:
    """What one run of the command line left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one sentence that a failed run must print, with its indented notes."""
        lines = self.err.splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
        assert len(starts) == 1, self.err
        sentence, *notes = lines[starts[0] :]
        assert all(note.startswith("  ") for note in notes), self.err
        return "\n".join([sentence.removeprefix("error: "), *notes])


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """Call `kvcompile` with `arguments`; whatever happens must be an exit code, never a traceback."""
    from kvcompile.cli.main import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert isinstance(exit_.value.code, int)
    return Outcome(exit_.value.code, captured.out, captured.err)


def succeed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """A run that must exit with 0."""
    outcome = run(capsys, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def refuse(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """A run that must exit with 1; its error."""
    outcome = run(capsys, *arguments)
    assert outcome.code == 1, outcome.err
    return outcome.error


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its relative path; an empty directory counts as an entry."""
    return {
        str(path.relative_to(directory)): b"" if path.is_dir() else path.read_bytes() for path in directory.rglob("*")
    }


def workspace(out: Path) -> Path:
    """Where a conversion to `out` works."""
    return out.parent / f".{out.name}.kvcompile"


def overwrite(model: Path, tensor: str, payload: bytes, offset: int = 0) -> None:
    """Replace bytes of one tensor in place."""
    entry = Checkpoint(model).entries[tensor]
    assert offset + len(payload) <= entry.end - entry.begin
    with open(entry.file, "r+b") as file:
        file.seek(entry.begin + offset)
        file.write(payload)


def reseal(artifact: Path, *projections: str) -> None:
    """Make the manifest's digests fit what lies beside it: all files, and these projections."""
    path = artifact / "kvcompile.json"
    manifest = json.loads(path.read_text())
    manifest["sidecar"]["sha256"] = file_digest(artifact / "kvcompile.safetensors")
    weights = manifest["weights"]
    weights["files"] = {name: file_digest(artifact / name) for name in weights["files"]}
    checkpoint = Checkpoint(artifact)
    for name in projections:
        weights["projections"][name] = hashlib.sha256(tensor_bytes(checkpoint.load(name))).hexdigest()
    path.write_text(json.dumps(manifest))


def quick_conversions() -> Iterator[None]:
    """The body of a fixture that makes conversions of tiny models quick.

    They need no second thread, above all on a busy machine; and passes collect garbage, which takes long only because
    of all the modules that a test session has imported.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
