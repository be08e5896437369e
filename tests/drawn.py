"""Contents of disks that cannot be squeezed, and other large things that the tests of a file share.

In memory as long as a worker runs they would come to some 100 MiB: so they are forgotten at the end of each file of tests
(`tests/running/kept_small.py`)."""

import functools
import random
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_forgetting: list[Callable[[], None]] = []


def shared_in_a_file(make: Callable[P, T]) -> Callable[P, T]:
    """The last two that were made, by their arguments."""
    made = functools.lru_cache(2)(make)
    _forgetting.append(made.cache_clear)
    return cast(Callable[P, T], made)


def forget() -> None:
    for one in _forgetting:
        one()


@shared_in_a_file
def drawn(length: int, *, zeros: int = 0, end: int = 0, seed: int = 1) -> bytes:
    """As many random bytes, then zeros, then random bytes once more: the same each time."""
    numbers = random.Random(seed)
    return b"".join((numbers.randbytes(length), bytes(zeros), numbers.randbytes(end)))
