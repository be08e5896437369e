"""python -m tests.running.last_failed --at-most N: says which tests the last run failed, and fails where they are more.

A run that is made once more for a few tests must not hide a change that breaks many.
"""

import argparse
import json
import sys
from pathlib import Path

CACHE = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.running.last_failed", description=__doc__)
    parser.add_argument("--at-most", type=int, required=True)
    at_most = parser.parse_args().at_most
    failed = sorted(json.loads(CACHE.read_text())) if CACHE.exists() else []
    print(*(f"failed: {name}" for name in failed), sep="\n")
    if len(failed) > at_most:
        print(f"{len(failed)} tests failed, and at most {at_most} are tried again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
