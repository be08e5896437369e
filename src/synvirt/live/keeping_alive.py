"""A session that its platform ends after a while without requests: it is asked now and then. asyncio."""

import asyncio
import contextlib
from collections.abc import Callable

from synvirt.errors import SynvirtError


class KeptAlive:
    """Calls `ask`, which blocks, every `every_s` seconds from `begin` to `end`."""

    def __init__(self, ask: Callable[[], None], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._asking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._asking = asyncio.create_task(self._again_and_again())

    def end(self) -> None:
        """Idempotent."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            with contextlib.suppress(SynvirtError):  # the next call of an adapter raises it
                await asyncio.to_thread(self._ask)
