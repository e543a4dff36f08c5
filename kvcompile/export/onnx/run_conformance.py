"""Runs every case of this kit and compares: integers (codes, page bytes, BF16 bits) exactly, floats to 1e-5.

    pip install numpy onnxruntime          # 1.27 or newer, for opset 26
    python run_conformance.py [FOLDER]

To test another engine, replace `answer`: it gets the operation and its inputs, and returns the outputs by name.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

onnxruntime.set_default_logger_severity(3)


def answer(model: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of one operation: ``model.stem`` names it, ``model.parent.name`` the layer."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs), strict=True))


def equal(found: np.ndarray, expected: np.ndarray) -> bool:
    """Exactly for integers, to 1e-5 (relative and absolute) for floats; minus infinity equals itself."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return np.array_equal(found, expected) if expected.dtype.kind in "iu" else np.allclose(found, expected, 1e-5, 1e-5)


def main(folder: Path) -> int:
    """Prints a line per case; how many failed, or 1 where there is none."""
    cases, failed = sorted((folder / "conformance").glob("*/*.npz")), 0
    for case in cases:
        arrays = dict(np.load(case))
        inputs, expected = ({k[len(p) :]: v for k, v in arrays.items() if k.startswith(p)} for p in ("in.", "out."))
        found = answer((folder / case.parent.name / case.stem).with_suffix(".onnx"), inputs)
        wrong = [name for name, value in expected.items() if not equal(found[name], value)]
        print("FAIL" if wrong else "ok  ", f"{case.parent.name}/{case.stem}", *wrong)
        failed += bool(wrong)
    print(f"{len(cases) - failed} of {len(cases)} cases agree")
    return failed if cases else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent) > 0)
