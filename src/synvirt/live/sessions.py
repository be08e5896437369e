"""Logins that one job after another uses. Without them a thousand held jobs would log in dozens of times a second. asyncio.

    lent ─▶ an idle session, or a new one ─▶ used by one job ─▶ it succeeded: at rest, idle for IDLE_S at most
                                                             └─ any error: closed

A session has one user at a time. Sessions are kept only in the event loop that called `begin`: other loops end too soon.
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

# How long a session stays idle, and how many of one source do: some jobs copy their deltas at the same time.
IDLE_S, IDLE_MOST = 60.0, 4
# Errors about a VM. They mean nothing for the session.
_OF_A_VM = (SnapshotFailed, CbtReset, CbtUnsupported, VmNotFound, Conflict)


@runtime_checkable
class StaysLoggedIn(Protocol):
    """Also implemented by adapters whose login may serve several users in turn. It logs in again if the platform has ended
    it."""

    async def rest(self) -> None:
        """Closes everything except the login, also at the platform."""
        ...


class _Idle(NamedTuple):
    adapter: LiveAdapter
    timer: asyncio.TimerHandle
    changes: int


class Sessions:
    """The sessions with all sources. `open_adapter`: makes the adapter of a source, without a connection."""

    def __init__(self, open_adapter: Callable[[LiveKind, UUID], Awaitable[LiveAdapter]]) -> None:
        self._open = open_adapter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: dict[UUID, list[_Idle]] = {}
        # How often a source was changed: sessions from before a change are not used again.
        self._changes: dict[UUID, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """From now on sessions of this event loop are kept for the next user. Call it in a loop that lasts."""
        self._loop = asyncio.get_running_loop()

    async def end(self) -> None:
        """Closes all idle sessions, and keeps none any more. Call it in the same loop, before it ends."""
        self._loop = None
        found = [one.adapter for idle in self._idle.values() for one in idle]
        self._idle.clear()
        await asyncio.gather(*map(_closed, found), *self._closing)

    def changed(self, source_id: UUID) -> None:
        """The source has another password, endpoint or certificate, or was removed. From any thread."""
        self._changes[source_id] = self._changes.get(source_id, 0) + 1

    @asynccontextmanager
    async def lent(self, kind: LiveKind, source_id: UUID, *, within_s: float | None = None) -> AsyncIterator[LiveAdapter]:
        """A connected session, for the length of the block. SourceUnreachable, when there is none within `within_s`."""
        changes = self._changes.get(source_id, 0)
        adapter = self._taken(source_id, changes) or await self._connected(kind, source_id, within_s)
        try:
            yield adapter
        except BaseException as error:
            well = isinstance(error, _OF_A_VM)
            await (self._back(source_id, adapter, changes) if well else asyncio.shield(_closed(adapter)))
            raise
        await self._back(source_id, adapter, changes)

    async def _connected(self, kind: LiveKind, source_id: UUID, within_s: float | None) -> LiveAdapter:
        adapter = await self._open(kind, source_id)
        try:
            async with asyncio.timeout(within_s):
                await adapter.connect()
        except TimeoutError as error:
            await asyncio.shield(_closed(adapter))
            raise SourceUnreachable(
                f"the source did not complete the login within {within_s:.0f} s", waited_s=within_s or 0.0
            ) from error
        except BaseException:
            # For example it was cancelled meanwhile: only this code knows the adapter.
            await asyncio.shield(_closed(adapter))
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
        rested = False
        try:
            if isinstance(adapter, StaysLoggedIn) and self._may_be_kept(source_id, changes):
                await asyncio.shield(adapter.rest())
                rested = True
        except asyncio.CancelledError:
            await asyncio.shield(_closed(adapter))
            raise
        except Exception as error:  # its user has what it wanted
            log.warning("a session is not used again", kind=adapter.kind, cause=str(error))
        if not rested or not self._may_be_kept(source_id, changes):
            await asyncio.shield(_closed(adapter))
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
    """No error: no caller needs this session any more, and an error would hide the caller's own, or its cancellation."""
    try:
        await adapter.close()
    except Exception as error:
        log.warning("a session is not ended", kind=adapter.kind, cause=str(error))
