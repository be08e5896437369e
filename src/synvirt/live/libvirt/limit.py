"""Calls that may never return, each in a thread of its own that is not waited for.

libvirt's calls cannot be ended from outside: a host that takes a connection and does not answer blocks its caller without end.
The threads of asyncio's pool are few, and a process waits for them at its end; these are daemons.
"""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begun(call: Callable[[], T], *, unwanted: Callable[[T], None] = lambda _: None) -> Future[T]:
    """`call` under way, in its caller's context. Cancelling the future ends no call: what that returns later is `unwanted`."""
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
    """What `call` returns or raises. TimeoutError, once `limit_s` are over: the call itself goes on."""
    future = begun(call, unwanted=unwanted)
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.cancel():
            raise
        return future.result()  # it came in that very moment, or raised a TimeoutError of its own
