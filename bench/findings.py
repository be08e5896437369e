"""What an attack on an earlier version found, tried again: `python -m bench.findings`. How many of them succeed.

The attacks are tests (tests/regressions/test_findings.py names them); one that fails is a finding that succeeds again.
"""

import subprocess
import sys
import time

from tests.regressions.named_tests import FOLDER
from tests.regressions.test_findings import TESTS


def main() -> None:
    succeeded = 0
    for finding, files in TESTS.items():
        begun = time.monotonic()
        found = [f"{FOLDER / file}::{name}" for file, names in files.items() for name in names]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *found], capture_output=True, check=False
        )
        succeeded += done.returncode != 0
        summary = done.stdout.decode().strip().splitlines()[-1]
        print(
            f"{finding:50} {'succeeds' if done.returncode else 'held':9} {time.monotonic() - begun:5.0f} s  {summary}",
            flush=True,
        )
    print(f"{succeeded} of {len(TESTS)} succeed")
    sys.exit(succeeded > 0)


if __name__ == "__main__":
    main()
