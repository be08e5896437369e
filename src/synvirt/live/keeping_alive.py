"""A session that its platform ends after a while without requests: it is asked now and then. asyncio."""

import asyncio
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


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
            try:
                await asyncio.to_thread(self._ask)
            except Exception as error:  # if the session has ended, the next call of an adapter raises that
                log.info("a session could not be kept alive; tried again", cause=str(error))
