"""What a task waits for in its event loop, and any thread may call."""

import asyncio
from contextlib import suppress


class Call:
    """Made in the event loop of the task that waits. `called`: done once somebody has called."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.called: asyncio.Future[None] = self._loop.create_future()

    def call(self) -> None:
        """May be called from any thread, and any number of times."""
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self.called.done():
            self.called.set_result(None)

    async def within(self, seconds: float) -> None:
        """Waits for the call, this long at most."""
        await asyncio.wait({self.called}, timeout=seconds)
