"""python -m bench.damage [NUMBER]: this many damages of a store, 10,000 by default: which are reported, and by whom.

A bit flipped, a file cut off, removed, put in another's place, or 512 bytes of it zeroed: each must be reported by verify, or
by the restore of a point that is known; and what is restored in spite of it must be what was backed up. Each by its number.
"""

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.repository.test_faults import Damaged

STEP = 250


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    found: Counter[str] = Counter()
    with ProcessPoolExecutor() as pool:
        for counted in pool.map(_part, range(0, number, STEP), [number] * len(range(0, number, STEP))):
            found.update(counted)
    silent = found.pop("nobody", 0)
    print(f"{number} damages: {', '.join(f'{count} reported {by}' for by, count in found.most_common())}; {silent} by nobody")
    sys.exit(1 if silent else 0)


def _part(first: int, number: int) -> Counter[str]:
    damaged = Damaged()
    return Counter(damaged.reported_by(seed) for seed in range(first, min(first + STEP, number)))


if __name__ == "__main__":
    main()
