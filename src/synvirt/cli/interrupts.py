"""Signals that end a command: Ctrl-C, SIGTERM, and SIGHUP, which comes when a terminal is closed. When one ends the process at
once, and when it is KeyboardInterrupt, after which everything begun is tidied up.

    modules are loaded         ends it: nothing is begun, and a traceback from the middle of an import does not help
    a command runs             KeyboardInterrupt; the exit code is 128 and the signal's number
    a service starts or ends   ends it, as kill -9 would: what it has begun outlives that, and a step that waits in a thread
                               for a guest to boot would keep the process alive
    a service runs             it stops (api/server.py)

If a signal was set otherwise before (nohup ignores SIGHUP), that stays.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

# `signal` wraps its own base, `_signal`, and makes three enumerations of its numbers: 3 of the 107 million instructions in
# which a raw disk of 1 MiB is copied. The plain numbers are enough here.
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How soon a signal is handled that came during an import, or as Python freed an object.
AGAIN_S = 0.02
# The signals that came, the last one last.
_came: list[int] = []


def end_at_once() -> None:
    """From here on, these signals end the process at once."""
    _set(signal.SIG_DFL, signal.default_int_handler, _interrupt)


@contextmanager
def raised() -> Iterator[None]:
    """Within the block, these signals raise KeyboardInterrupt."""
    if not _set(_interrupt, signal.SIG_DFL):
        yield
        return
    signal.signal(signal.SIGALRM, _interrupt)
    before = sys.unraisablehook
    sys.unraisablehook = _raised_again(before)
    try:
        yield
    finally:
        end_at_once()
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = before


def exit_code() -> int | None:
    """Of a command that one of these signals ended; None: none came."""
    return 128 + _came[-1] if _came else None


def is_hung_up() -> bool:
    """Whether the terminal was closed: what fails then fails because no message gets there any more."""
    return signal.SIGHUP in _came


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Not during an import: a module in C or Rust crashes or raises another type, and the next import finds an incomplete
    module."""
    if number != signal.SIGALRM:
        _came.append(number)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _raised_again(before: Callable[[Any], object]) -> Callable[[Any], None]:
    """A hook for errors that Python drops: those of finalizers, and of callbacks as an object is freed. Such code runs between
    any two lines, so KeyboardInterrupt may be among them, and the signal would be lost."""

    def dropped(what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            before(what)

    return dropped


def _set(handler: object, *present: object) -> bool:
    """Sets the handler of those signals that have one of the present ones. Whether any has."""
    if threading.current_thread() is not threading.main_thread():
        return False
    ours = [number for number in ENDING if signal.getsignal(number) in present]
    for number in ours:
        signal.signal(number, handler)  # type: ignore[arg-type]
    return bool(ours)
