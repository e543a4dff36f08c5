"""Interrupt conversions at random moments of every stage, resume each, and compare every byte with a whole run.

python -m benchmarks.interruptions --moments 200
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.commands import contents
from tests.conftest import EXAMPLE
from tests.interruption import Conversions, interrupt_and_resume, moments

SHARES = {"kill -9": 0.5, "SIGTERM": 0.1, "SIGINT": 0.1, "full disk": 0.15, "read error": 0.15}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, started = random.Random(arguments.seed), time.monotonic()
    ends: Counter[tuple[str, int]] = Counter()
    before = contents(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        conversions = Conversions(arguments.model, Path(folder))
        for fault, share in SHARES.items():
            stages = conversions.calls(out, fault)
            expected = contents(out)
            shutil.rmtree(out)
            for stage, at in moments(stages, round(share * arguments.moments), draw):
                outcome = interrupt_and_resume(conversions, out, fault, at, expected)
                ends[fault, outcome.code] += 1
                print(f"{fault} in {stage}, call {at} of {stages['exit']}: exit {outcome.code}", flush=True)
    assert contents(arguments.model) == before, "the source was touched"
    for (fault, code), count in sorted(ends.items()):
        print(f"{count} x {fault}: exit {code}")
    print(
        f"{ends.total()} moments in {time.monotonic() - started:.0f} s; all ended whole, or resumed to the same bytes"
    )


if __name__ == "__main__":
    main()
