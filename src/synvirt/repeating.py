"""A thread that does something at once, and again and again until the end of a block; and pauses for what it cannot do yet."""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Pauses(Generic[K]):
    """Of each thing that could not be done: when it is tried again. Each pause is twice as long as the one before."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._over: dict[K, tuple[float, float]] = {}

    def is_over(self, thing: K) -> bool:
        return time.monotonic() >= self._over.get(thing, (0.0, 0.0))[0]

    def begin(self, thing: K) -> None:
        """The thing failed: its pause begins, twice as long as the one before."""
        pause_s = self._over.get(thing, (0.0, self._first_s))[1]
        self._over[thing] = time.monotonic() + pause_s, min(2 * pause_s, self._longest_s)

    def forget(self, thing: K) -> None:
        self._over.pop(thing, None)

    def keep(self, things: Collection[K]) -> None:
        """Forget all others: they are there no more."""
        self._over = {thing: over for thing, over in self._over.items() if thing in things}


@contextmanager
def repeated(
    look: Callable[[], object],
    *,
    name: str,
    every_s: float,
    ends_within_s: float | None = None,
    wake: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """`look` must not raise: what it may meet, and what that means, it knows itself. One that is under way when the block ends
    is waited for, for so long (None: until it is done); after that the thread ends with its process. `wake`: called then, for
    a look that rests."""
    ending = threading.Event()

    def go_on() -> None:
        while True:
            look()
            if ending.wait(every_s):
                return

    thread = threading.Thread(target=go_on, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        wake()
        thread.join(ends_within_s)
