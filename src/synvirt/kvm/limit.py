"""Calls that may never return, each in a thread of its own that is not waited for.

libvirt's calls cannot be ended from outside: a host that accepts a connection and does not answer blocks its caller forever.
So does a mounted file system whose server is silent.
asyncio's pool has few threads, and a process waits for them at its end; these threads are daemons.
"""

import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

# How long is waited for a folder, at the start or to ask for its free space: the server of a mount may be silent for days.
FOLDER_ANSWERS_S = 5.0
# Whether what was silent for that long answers by now is seen in this time.
AGAIN_S = 0.2


class Single(Generic[T]):
    """A call of which at most one runs at a time, as it may never return: it holds one thread, however often asked for."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._lock = call, threading.Lock()
        self._running: tuple[float, Future[T]] | None = None

    def within(self, limit_s: float) -> T:
        """The result or the error of the call, or of one that runs already. TimeoutError `limit_s` after it began."""
        with self._lock:
            if self._running is None or self._running[1].done():
                self._running = time.monotonic(), begun(self._call)
            began, future = self._running
        return future.result(max(began + limit_s - time.monotonic(), min(AGAIN_S, limit_s)))


def begun(call: Callable[[], T], *, unwanted: Callable[[T], None] = lambda _: None) -> Future[T]:
    """Runs `call` in its caller's context. Cancelling the future does not end the call: its later result is passed to
    `unwanted`."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(call)
        except BaseException as error:  # the waiting caller gets it, whatever it is
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        else:
            unwanted(result)

    threading.Thread(target=run, name="libvirt", daemon=True).start()
    return future


def within(limit_s: float, call: Callable[[], T], *, unwanted: Callable[[T], None] = lambda _: None) -> T:
    """The result or the error of `call`. TimeoutError after `limit_s`: the call itself goes on."""
    future = begun(call, unwanted=unwanted)
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.cancel():
            raise
        return future.result()  # it came at that very moment, or raised a TimeoutError of its own
