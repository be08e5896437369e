"""A rate that several jobs copy within, on all hosts: each piece of a copy waits for its turn. asyncio.

    worker ─▶ WantedRate ─▶ the next piece of the rate, behind those that others were given (blocks) ─▶ its turn ─▶ GivenRate

A piece is a quarter of a second of the whole rate at the most, so that those who share it take even turns. A guest that is off
is waited for: its last copy takes larger pieces, and so more of the rate.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from synvirt.copying import request_bytes
from synvirt.errors import Cancelled
from synvirt.jobs.orders import GivenRate
from synvirt.jobs.process import Worker
from synvirt.jobs.stop import Stop

log = structlog.get_logger(__name__)

PIECES_A_SECOND = 4
# How many turns' worth of the rate a last copy is given at once.
LAST_PIECES = 4
# A database that does not answer is asked again.
AGAIN_S = 1.0
# A worker that is to stop is answered at once, and asks again until it has heard so.
STOPPED_S = 0.05


@dataclass(frozen=True, slots=True)
class SharedRate:
    """`take(seconds)`: the next so many seconds of the whole rate; in how many seconds they begin. Blocks. SynvirtError."""

    bps: int
    take: Callable[[float], float]

    def piece_bytes(self, *, last: bool) -> int:
        """No smaller than a request of a copy of this rate."""
        return max(request_bytes(self.bps), self.bps // PIECES_A_SECOND) * (LAST_PIECES if last else 1)


class Turns:
    """Of one worker: `want` what it asks for, and it is sent when its turn has come."""

    def __init__(self, worker: Worker, rate: SharedRate, stop: Stop) -> None:
        self._worker, self._rate, self._stop = worker, rate, stop
        self._wanted: asyncio.Queue[int] = asyncio.Queue()

    def want(self, amount: int) -> None:
        self._wanted.put_nowait(amount)

    async def give(self) -> None:
        """Until it is cancelled."""
        while True:
            amount = await self._wanted.get()
            try:
                await self._stop.sleep(await self._begins_in(amount))
            except Cancelled:
                await asyncio.sleep(STOPPED_S)
                amount = 0
            await self._worker.send(GivenRate(bytes=amount))

    async def _begins_in(self, amount: int) -> float:
        """Cancelled."""
        while True:
            self._stop.check()
            try:
                return await asyncio.to_thread(self._rate.take, amount / self._rate.bps)
            except Exception as error:  # whatever it was, a worker that gets no answer would wait for ever
                log.warning("a copy waits for its share of a rate", cause=str(error))
                await self._stop.sleep(AGAIN_S)


@asynccontextmanager
async def sharing(worker: Worker, rate: SharedRate | None, stop: Stop) -> AsyncIterator[Turns | None]:
    """None, where it is nobody else's."""
    if rate is None:
        yield None
        return
    turns = Turns(worker, rate, stop)
    giving = asyncio.create_task(turns.give())
    try:
        yield turns
    finally:
        giving.cancel()
        with suppress(asyncio.CancelledError):
            await giving
