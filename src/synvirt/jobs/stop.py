"""An operator's request to cancel a job, as its threads and its coroutines see it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from synvirt.errors import Cancelled
from synvirt.jobs.calls import Call

T = TypeVar("T")

# How long a stopped call may take to end: it may end at once, and a platform that hangs is not waited for.
CANCEL_WITHIN_S = 5.0


class Stop:
    """The operator's request to cancel, as threads (`is_set`) and coroutines (`or_stop`) see it."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._lock = threading.Lock()
        # Jobs run in event loops of several threads; each must be called in its own.
        self._listening: set[Call] = set()
        self._asleep: set[Call] = set()
        self._asked = False
        # A cancelled call hangs, and may still make something at the source. So nothing is tidied up there now.
        self.left_running = False

    def set(self) -> None:
        """The operator has asked to cancel: every wait ends."""
        self._asked = True
        self.expire()

    def expire(self) -> None:
        """The job's time is over: what runs stops as for a cancel, until `renew`."""
        with self._lock:
            self._flag.set()
            for stopped in self._listening:
                stopped.call()

    def renew(self) -> bool:
        """Ends `expire`. True, where the operator did not ask to cancel meanwhile."""
        with self._lock:
            if not self._asked:
                self._flag.clear()
        return not self._asked

    def is_set(self) -> bool:
        return self._flag.is_set()

    def check(self) -> None:
        """Cancelled, where the operator has asked for it."""
        if self._flag.is_set():
            raise Cancelled

    async def or_stop(self, wanted: Coroutine[Any, Any, T]) -> T:
        """The result of `wanted`. Cancelled, as soon as the operator asks for it; `wanted` is then cancelled too."""
        task = asyncio.ensure_future(wanted)
        stopped = Call()
        with self._lock:
            self._listening.add(stopped)
        try:
            self.check()
            either: set[asyncio.Future[Any]] = {task, stopped.called}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Cancelled
            return task.result()
        finally:
            with self._lock:
                self._listening.discard(stopped)
            # To wait for one that is done takes a timer and two turns of the loop.
            if not task.done():
                task.cancel()
                # What it has begun at a source must end before the source is tidied up.
                _, pending = await asyncio.wait({task}, timeout=CANCEL_WITHIN_S)
                self.left_running |= bool(pending)

    async def sleep(self, seconds: float) -> None:
        """Sleeps. Cancelled, at once when stopped."""
        await self.or_stop(asyncio.sleep(seconds))

    async def sleep_or_wake(self, seconds: float) -> None:
        """Sleeps until `wake`, `seconds` at most. Cancelled, at once when stopped."""
        woken = Call()
        with self._lock:
            self._asleep.add(woken)
        try:
            await self.or_stop(woken.within(seconds))
        finally:
            with self._lock:
                self._asleep.discard(woken)

    def wake(self) -> None:
        """Ends `sleep_or_wake`. From any thread."""
        with self._lock:
            for woken in self._asleep:
                woken.call()
