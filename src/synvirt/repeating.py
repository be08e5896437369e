"""What is done again and again: by a thread until the end of a block, or after a failure, with pauses."""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def pause_after(tries: int, pauses: Sequence[float]) -> float:
    """The pause after so many failed tries, counted from 0. The last of `pauses` is also that of all further tries."""
    return pauses[min(tries, len(pauses) - 1)]


def tried_again(attempt: Callable[[], T], *, tries: int, after: Callable[[Exception], object]) -> T:
    """What `attempt` returns. It is called again at once after an error that `after` is true for, `tries` times in all."""
    for tries_left in reversed(range(tries)):
        try:
            return attempt()
        except Exception as error:
            if not tries_left or not after(error):
                raise
    raise AssertionError("the last try returns or raises")


class Pauses(Generic[K]):
    """For each thing that failed: when it is tried again. Each pause is twice as long as the one before."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._over: dict[K, tuple[float, float]] = {}

    def is_over(self, thing: K) -> bool:
        return time.monotonic() >= self.over_at(thing)

    def over_at(self, thing: K) -> float:
        """The end of its last pause, by the monotonic clock; 0: it has not failed."""
        return self._over.get(thing, (0.0, 0.0))[0]

    def begin(self, thing: K) -> None:
        """Starts a pause after a failure, twice as long as the one before."""
        pause_s = self._over.get(thing, (0.0, self._first_s))[1]
        self._over[thing] = time.monotonic() + pause_s, min(2 * pause_s, self._longest_s)

    def forget(self, thing: K) -> None:
        self._over.pop(thing, None)

    def keep(self, things: Collection[K]) -> None:
        """Forgets all others, as they exist no more."""
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
    """Runs `look` repeatedly. An error that it does not handle itself is logged, and it goes on. At the end of the block a
    running `look` is waited for, `ends_within_s` at most (None: until it is done); after that the thread ends with its process.
    `wake` is called then, for a `look` that waits."""
    ending = threading.Event()

    def go_on() -> None:
        while True:
            try:
                look()
            except Exception:
                log.exception("this failed, and is tried again", what=name)
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
