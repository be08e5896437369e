"""A thread that does something at once, and again and again until the end of a block."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(look: Callable[[], object], *, name: str, every_s: float, ends_within_s: float | None = None) -> Iterator[None]:
    """`look` must not raise: what it may meet, and what that means, it knows itself. One that is under way when the block ends
    is waited for, for so long (None: until it is done); after that the thread ends with its process."""
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
        thread.join(ends_within_s)
