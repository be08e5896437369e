"""Ctrl-C: when it ends the process at once, and when it is KeyboardInterrupt, after which everything begun is tidied up.

    modules are loaded         ends it: nothing is begun, and a traceback from the middle of an import does not help
    a command runs             KeyboardInterrupt
    a service starts or ends   ends it, as kill -9 would: what it has begun outlives that, and a step that waits in a thread
                               for a guest to boot would keep the process alive
    a service runs             it stops (api/server.py)

If Ctrl-C was set otherwise before (nohup ignores it), that stays.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# How soon a Ctrl-C that came during an import is handled.
AGAIN_S = 0.02


def end_at_once() -> None:
    """From here on, Ctrl-C ends the process at once."""
    if _is_ours_to_change(signal.default_int_handler, _interrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def raised() -> Iterator[None]:
    """Within the block, Ctrl-C raises KeyboardInterrupt."""
    if not _is_ours_to_change(signal.SIG_DFL):
        yield
        return
    signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        end_at_once()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Not during an import: a module in C or Rust crashes or raises another type, and the next import finds an incomplete
    module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_ours_to_change(*present: object) -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in present
