"""Contents of disks that cannot be squeezed. Tests that want the same one share it; the rest of a run it is not in memory."""

import functools
import random


@functools.lru_cache(2)
def drawn(length: int, *, zeros: int = 0, end: int = 0, seed: int = 1) -> bytes:
    """As many random bytes, then zeros, then random bytes once more: the same each time."""
    numbers = random.Random(seed)
    return b"".join((numbers.randbytes(length), bytes(zeros), numbers.randbytes(end)))
