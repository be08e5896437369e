"""Logins that one job after another uses: a thousand held jobs would else log in dozens of times a second. asyncio.

    lent ─▶ one that lies idle, or a new one, connected ─▶ used by one job ─▶ went well: at rest, idle for IDLE_S at the most
                                                                          └─ any trouble: closed

A session has one user at a time. Only in the event loop that said `begin`: another ends before anybody could use it again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol, runtime_checkable
from uuid import UUID

import structlog

from synvirt.errors import CbtReset, CbtUnsupported, Conflict, SnapshotFailed, SourceUnreachable, VmNotFound
from synvirt.live import LiveAdapter
from synvirt.model.kinds import LiveKind

log = structlog.get_logger(__name__)

# Between two uses, and how many lie idle of one source: some jobs take their deltas at the same time.
IDLE_S, IDLE_MOST = 60.0, 4
# What a platform says of a VM, and means nothing for the session.
_OF_A_VM = (SnapshotFailed, CbtReset, CbtUnsupported, VmNotFound, Conflict)


@runtime_checkable
class StaysLoggedIn(Protocol):
    """What an adapter is too whose login may serve one user after another. It renews one that the platform has forgotten."""

    async def rest(self) -> None:
        """As `close`, but for the login: nothing is open any more, at the platform neither."""
        ...


class _Idle(NamedTuple):
    adapter: LiveAdapter
    timer: asyncio.TimerHandle
    changes: int


class Sessions:
    """`open_adapter`: the adapter of a source, not connected yet."""

    def __init__(self, open_adapter: Callable[[LiveKind, UUID], Awaitable[LiveAdapter]]) -> None:
        self._open = open_adapter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: dict[UUID, list[_Idle]] = {}
        # How often a source was changed: what was opened before is of no use after.
        self._changes: dict[UUID, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """In an event loop that lasts: from now on its sessions are kept for the next user."""
        self._loop = asyncio.get_running_loop()

    async def end(self) -> None:
        """In that loop, before it ends: nothing is kept any more, and none lies idle when it returns."""
        self._loop = None
        found = [one.adapter for idle in self._idle.values() for one in idle]
        self._idle.clear()
        await asyncio.gather(*map(_closed, found), *self._closing)

    def changed(self, source_id: UUID) -> None:
        """From any thread: another password, endpoint or certificate, or no such source any more."""
        self._changes[source_id] = self._changes.get(source_id, 0) + 1

    @asynccontextmanager
    async def lent(self, kind: LiveKind, source_id: UUID, *, within_s: float | None = None) -> AsyncIterator[LiveAdapter]:
        """Connected. SourceUnreachable, when it does not stand within `within_s`."""
        changes = self._changes.get(source_id, 0)
        adapter = self._taken(source_id, changes) or await self._connected(kind, source_id, within_s)
        try:
            yield adapter
        except BaseException as error:
            well = isinstance(error, _OF_A_VM)
            await (self._back(source_id, adapter, changes) if well else asyncio.shield(adapter.close()))
            raise
        await self._back(source_id, adapter, changes)

    async def _connected(self, kind: LiveKind, source_id: UUID, within_s: float | None) -> LiveAdapter:
        adapter = await self._open(kind, source_id)
        try:
            async with asyncio.timeout(within_s):
                await adapter.connect()
        except TimeoutError as error:
            await asyncio.shield(adapter.close())
            raise SourceUnreachable(
                f"the source did not let us in within {within_s:.0f} s", waited_s=within_s or 0.0
            ) from error
        except BaseException:
            # Cancelled in the middle, say: nobody else knows of it yet.
            await asyncio.shield(adapter.close())
            raise
        return adapter

    def _is_kept_here(self) -> bool:
        return self._loop is not None and self._loop is asyncio.get_running_loop()

    def _may_be_kept(self, source_id: UUID, changes: int) -> bool:
        few = len(self._idle.get(source_id, ())) < IDLE_MOST
        return few and self._is_kept_here() and self._changes.get(source_id, 0) == changes

    def _taken(self, source_id: UUID, changes: int) -> LiveAdapter | None:
        if not self._is_kept_here():
            return None
        idle = self._idle.get(source_id, [])
        while idle:
            one = idle.pop()
            one.timer.cancel()
            if one.changes == changes:
                return one.adapter
            self._close_soon(one.adapter)
        return None

    async def _back(self, source_id: UUID, adapter: LiveAdapter, changes: int) -> None:
        if not isinstance(adapter, StaysLoggedIn) or not self._may_be_kept(source_id, changes):
            await asyncio.shield(adapter.close())
            return
        try:
            await asyncio.shield(adapter.rest())
        except asyncio.CancelledError:
            await asyncio.shield(adapter.close())
            raise
        except Exception as error:  # what its user wanted of it is done
            log.warning("a session is not used again", kind=adapter.kind, cause=str(error))
            await asyncio.shield(_closed(adapter))
            return
        if not self._may_be_kept(source_id, changes):
            await asyncio.shield(adapter.close())
            return
        timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, source_id, adapter)
        self._idle.setdefault(source_id, []).append(_Idle(adapter, timer, changes))

    def _expire(self, source_id: UUID, adapter: LiveAdapter) -> None:
        idle = self._idle.get(source_id, [])
        if any(one.adapter is adapter for one in idle):
            self._idle[source_id] = [one for one in idle if one.adapter is not adapter]
            self._close_soon(adapter)

    def _close_soon(self, adapter: LiveAdapter) -> None:
        task = asyncio.get_running_loop().create_task(_closed(adapter))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _closed(adapter: LiveAdapter) -> None:
    try:
        await adapter.close()
    except Exception as error:  # whatever it was: nobody waits for this session any more
        log.warning("a session is not ended", kind=adapter.kind, cause=str(error))
