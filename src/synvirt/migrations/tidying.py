"""Tidies up what ended jobs have left at their sources or here: at the service's start, then now and then.

    an ended job with ledger entries ─▶ tried ─▶ gone: the entry is deleted; all gone: the job's warning is removed
                                          ├─ not now: again after a minute, then after twice as long, an hour at most
                                          └─ its source was removed: the entry is deleted, as the thing is out of reach

A source may be away for hours. One thread does this, one job at a time, and nothing waits for it. A VM that another job reads
is not touched until that job, of whichever host, has ended.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from uuid import UUID

import structlog

from synvirt.errors import Cancelled, Conflict, NotFound, PersistFailed, SynvirtError
from synvirt.jobs.stop import Stop
from synvirt.migrations import source_vm
from synvirt.migrations.advance import SWEEPERS, undone
from synvirt.migrations.job import Job
from synvirt.migrations.memory import JobMemory, noting
from synvirt.migrations.planning import left_off, taken
from synvirt.migrations.planning.left_off import DONE_WITH
from synvirt.migrations.planning.retrying import kept_on_failure
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.repeating import Pauses, repeated
from synvirt.store import LedgerEntry
from synvirt.store.tables import OWED_KINDS

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
# A platform may take hours to consolidate the disks of a snapshot. The next try finds that task, and goes on waiting.
TRY_TIMEOUT_S = 900.0
# A service that ends does not wait for a source that hangs: the thread ends with its process.
END_TIMEOUT_S = 5.0
# For so long the clock must say that it is too late to power a source on: it may be wrong until a time server sets it.
LATE_FOR_S = 3600.0
_AT_SOURCE = (*OWED_KINDS, "source_power")


class Tidier:
    """Tidies up. `stop` ends it, also during a try."""

    def __init__(self, rooms: Rooms, *, host: str) -> None:
        self._rooms, self._host = rooms, host
        self.stop = Stop()
        self._pauses = Pauses[UUID](FIRST_PAUSE_S, LONGEST_PAUSE_S)
        # By job: since when it is too late to power its source on, by the monotonic clock.
        self._late_since: dict[UUID, float] = {}

    def look(self) -> None:
        """Tries all jobs that are due. Blocks; never raises."""
        try:
            left = self._rooms.store.untidied(host=self._host)
            if self._rooms.receipts is not None:
                # Another host may have taken over a job while this one was frozen.
                self._rooms.receipts.forget_hashes_but(lambda job_id: self._rooms.store.is_of(job_id, self._host))
        except PersistFailed as error:
            log.warning("cannot see what is left to tidy up", cause=error.detail)
            return
        self._pauses.keep({job.id for job in left})
        for migration in left:
            if self.stop.is_set():
                return
            if not self._pauses.is_over(migration.id):
                continue
            if asyncio.run(self._tidied(migration)):
                self._pauses.forget(migration.id)
            else:
                self._pauses.begin(migration.id)

    async def _tidied(self, migration: Migration) -> bool:
        job = Job(migration, self._rooms, self.stop)
        with structlog.contextvars.bound_contextvars(job=str(job.id)):
            try:
                async with asyncio.timeout(TRY_TIMEOUT_S):
                    return await self.stop.or_stop(self._all_of(job))
            except (TimeoutError, Cancelled):
                return False
            except Exception as error:  # the other jobs are tried all the same
                log.warning("cannot be tidied up now", cause=str(error))
                return False

    async def _all_of(self, job: Job) -> bool:
        entries = await job.in_thread(self._rooms.store.ledger, job.id)
        left = [entry for entry in entries if job.migration.state in DONE_WITH or entry.kind in OWED_KINDS]
        # Asked just before each try, as those before it may have taken an hour: a job that has the VM now may count on the
        # change tracking that this job switched on.
        if is_read := await job.in_thread(taken.is_read, self._rooms, job.migration):
            # A guest of it that is left here goes all the same: two copies of one guest must never run at once.
            left = [entry for entry in left if entry.kind not in _AT_SOURCE]
        gone = [entry async for entry in undone(left, partial(self._gone, job))]
        if len(gone) == len(left) and job.migration.state is State.COMPLETED and not is_read:
            # Before its last ledger entry is deleted: after that the job is not looked at again.
            await job.show_no_more()
        for entry in gone:
            await job.strike(entry.kind, entry.name)
        if len(gone) < len(left):
            return False
        if not is_read:
            log.info("tidied up after the job")
        return True

    async def _gone(self, job: Job, entry: LedgerEntry) -> bool:
        try:
            await self._undo(job, entry)
        except PersistFailed:
            raise
        except SynvirtError as error:
            if not isinstance(error, NotFound) or entry.kind not in _AT_SOURCE:  # NotFound: the source or its VM is gone
                log.warning("cannot be tidied up now", kind=entry.kind, name=entry.name, cause=error.detail)
                return False
            log.warning("cannot be tidied up any more", kind=entry.kind, name=entry.name, cause=error.detail)
        return True

    async def _undo(self, job: Job, entry: LedgerEntry) -> None:
        if job.migration.state is State.COMPLETED:
            await source_vm.settle(job, entry)
        elif entry.kind == "source_power" and not await job.in_thread(self._still_wanted, job.migration):
            log.warning("the source is left off: another job has moved it since, or it is too long ago")
        elif entry.kind not in kept_on_failure(job.migration) or job.migration.state is State.CANCELLED:
            await SWEEPERS[entry.kind](job, entry.name)

    def _still_wanted(self, migration: Migration) -> bool:
        """Whether the guest of a failed job must be on at its source; not, where a later job has moved it here, by whichever
        source, or after a day, unless its member is rolled back. Conflict: not known yet. Blocks."""
        store = self._rooms.store
        if not left_off.is_too_late(migration) or store.is_rolling_back(migration.id):
            self._late_since.pop(migration.id, None)
            return not left_off.is_moved_since(store, migration)
        since = self._late_since.setdefault(migration.id, time.monotonic())
        if time.monotonic() - since < LATE_FOR_S:
            raise Conflict("its job ended over a day ago, if this host's clock is right: that is asked again within an hour")
        store.memory.change(migration.id, JobMemory, lambda before: noting(before, power_given_up=True))
        return False


@contextmanager
def tidied(rooms: Rooms, *, host: str) -> Iterator[None]:
    """Tidies up while the block runs."""
    tidier = Tidier(rooms, host=host)
    with repeated(tidier.look, name="tidying", every_s=LOOK_EVERY_S, ends_within_s=END_TIMEOUT_S):
        try:
            yield
        finally:
            tidier.stop.set()
