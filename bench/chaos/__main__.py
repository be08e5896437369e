"""Chaos on PostgreSQL: three services, many jobs, random faults. `python -m bench.chaos --jobs 60 --faults 200 --seed 1`

What goes wrong: the table of bench/chaos/faults.py. In the end every job has the right bytes, or a cause, and nothing is left;
no volume ever had two writers, and no slot was given that was not there. Exit 1, where any of that is not so.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from bench.chaos.running import run


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    asked.add_argument("--jobs", type=int, default=60)
    asked.add_argument("--faults", type=int, default=200)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--pause-s", type=float, default=2.0, help="between two faults, at most")
    asked.add_argument("--folder", type=Path, help="kept, with the services' logs")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-") as made:
        folder = options.folder or Path(made)
        outcome = run(folder, jobs=options.jobs, faults=options.faults, seed=options.seed, pause_s=options.pause_s)
    print(outcome.summary())
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
