"""Looking at many pieces of a disk with several threads, until the first of them is not as it should be.

    pieces, ascending ─▶ threads ─▶ look(piece, buffer) ─▶ None, or what was found

Pieces are handed out in order, and one that was handed out is looked at to its end. So when something is found, everything
before it has been looked at: the answer is the same however many threads there are.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from synvirt.buffers import new_buffer
from synvirt.copying import PROGRESS_EVERY_S, REQUEST_BYTES
from synvirt.errors import Cancelled

Piece = TypeVar("Piece")
Found = TypeVar("Found")

# No piece is larger: `look` may read one into a buffer of this size, of which each thread has two.
PIECE_BYTES = REQUEST_BYTES


class Tally:
    """How many bytes were looked at, for threads to add to."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        """Adds to the count, from any thread."""
        with self._lock:
            self.total += amount


# Of a failure to say which piece is next: what was found in those before it counts more.
_LAST = sys.maxsize


class _Round(Generic[Piece, Found]):
    def __init__(
        self,
        pieces: Iterator[Piece],
        look: Callable[[Piece, memoryview, memoryview], Found | None],
        stop: Callable[[], bool],
    ) -> None:
        self._pieces = enumerate(pieces)
        self._look, self._stop = look, stop
        self._lock = threading.Lock()
        self._ended = False
        # Of what was found, and of what went wrong, only the first in the disk's order counts.
        self.first: tuple[int, Found | BaseException] | None = None

    def work(self) -> None:
        buffers = new_buffer(PIECE_BYTES), new_buffer(PIECE_BYTES)
        while True:
            number = _LAST
            try:
                taken = self._take()
                if taken is None:
                    return
                number, piece = taken
                found: Found | BaseException | None = self._look(piece, *buffers)
            except BaseException as error:
                found = error
            if found is not None:
                self._end(number, found)
                return

    def _take(self) -> tuple[int, Piece] | None:
        with self._lock:
            if self._stop():
                raise Cancelled
            return None if self._ended else next(self._pieces, None)

    def _end(self, number: int, found: Found | BaseException) -> None:
        with self._lock:
            self._ended = True
            if self.first is None or number < self.first[0]:
                self.first = number, found

    def end(self) -> None:
        with self._lock:
            self._ended = True


def first_found(
    pieces: Iterator[Piece],
    look: Callable[[Piece, memoryview, memoryview], Found | None],
    *,
    threads: int,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[], None] = lambda: None,
) -> Found | None:
    """What `look` says of the first piece of which it says anything; None when it says nothing of any.

    `look` is called from `threads` threads at once, with two buffers of PIECE_BYTES that are that thread's own; what it raises
    is raised, unless something was found before it. `on_progress` is called from the caller's thread. Cancelled, once `stop()`.
    """
    one_round = _Round(pieces, look, stop)
    with ThreadPoolExecutor(threads, thread_name_prefix="look") as pool:
        try:
            working = {pool.submit(one_round.work) for _ in range(threads)}
            while wait(working, PROGRESS_EVERY_S).not_done:
                on_progress()
        finally:
            one_round.end()
    on_progress()
    if one_round.first is None:
        return None
    _, found = one_round.first
    if isinstance(found, BaseException):
        raise found
    return found
