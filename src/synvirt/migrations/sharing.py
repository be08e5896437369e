"""A rate that several jobs on all hosts share: each piece of a copy waits for its turn. asyncio.

    worker ─▶ WantedRate ─▶ the next piece of the rate, after those given to others (blocks) ─▶ its turn ─▶ GivenRate

A piece is at most a quarter of a second of the whole rate, so that the copies take even turns. The last copy of a guest that is
off takes larger pieces, and so more of the rate.
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
# How many pieces a last copy gets at once.
LAST_PIECES = 4
# The pause before a database that does not answer is asked again.
AGAIN_S = 1.0
# A worker that must stop is answered at once. It asks again until it has seen that it must stop.
STOPPED_S = 0.05


@dataclass(frozen=True, slots=True)
class SharedRate:
    """`take(seconds)`: takes the next `seconds` of the whole rate, and gives in how many seconds they begin. Blocks.
    SynvirtError."""

    bps: int
    take: Callable[[float], float]

    def piece_bytes(self, *, last: bool) -> int:
        """The size of a piece, at least a request of a copy at this rate."""
        return max(request_bytes(self.bps), self.bps // PIECES_A_SECOND) * (LAST_PIECES if last else 1)


class Turns:
    """The turns of one worker. `want` notes what it asks for; it gets that when its turn has come."""

    def __init__(self, worker: Worker, rate: SharedRate, stop: Stop) -> None:
        self._worker, self._rate, self._stop = worker, rate, stop
        self._wanted: asyncio.Queue[int] = asyncio.Queue()

    def want(self, amount: int) -> None:
        self._wanted.put_nowait(amount)

    async def give(self) -> None:
        """Gives turns until it is cancelled."""
        while True:
            amount = await self._wanted.get()
            try:
                await self._stop.sleep(await self._begins_in(amount))
            except Cancelled:
                await asyncio.sleep(STOPPED_S)
                amount = 0
            await self._worker.send(GivenRate(bytes=amount))

    async def _begins_in(self, amount: int) -> float:
        """In how many seconds the turn begins. Cancelled."""
        while True:
            self._stop.check()
            try:
                return await asyncio.to_thread(self._rate.take, amount / self._rate.bps)
            except Exception as error:  # of any kind: a worker without an answer would wait forever
                log.warning("a copy waits for its share of a rate", cause=str(error))
                await self._stop.sleep(AGAIN_S)


@asynccontextmanager
async def sharing(worker: Worker, rate: SharedRate | None, stop: Stop) -> AsyncIterator[Turns | None]:
    """The worker's turns while the block runs. None, where the rate is not shared."""
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
