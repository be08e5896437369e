"""The part of a wave that only a job's host can do: check that its guest is healthy, and roll the guest back to its source.

    Completed ─▶ checks, each until it passes or its time is over ─▶ healthy │ failed
    rolling back ─▶ job cancelled, or: source asked ─▶ guest stopped here, its domain gone ─▶ source powered on ─▶ rolled back

Two copies of one guest never run: the domain is removed before the source is powered on. Its volumes stay.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from uuid import UUID

import structlog

from synvirt.errors import NotFound, PersistFailed, SynvirtError
from synvirt.fleet.changing import change_members
from synvirt.fleet.model import Member, MemberState, Wave
from synvirt.fleet.seeing import Seen
from synvirt.migrations.memory import JobMemory, noting
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.source_vm import refuse_another
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, State
from synvirt.model.values import now
from synvirt.proof.health import Checker
from synvirt.repeating import Pauses

log = structlog.get_logger(__name__)

# Checks wait for guests that boot, which costs nothing.
CHECKS_AT_ONCE = 16
AGAIN_S = 1.0
# The least time for an answer when a check's time is nearly over.
LEAST_S = 1.0
# A source that hangs is tried again. A host that lost its lease waits for this to end, and is fenced a little later.
POWER_ON_S = 30.0
# A source that answers slowly delays other waves no longer than this, and the time for one VM.
GIVING_BACK_S = 8.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0

_LOST = (
    "Its host {host} is lost, and its guest may run there: it is rolled back once that host is back. "
    "If that host is off for good, take its job over, or power its source on, if the job has completed."
)

Failed = Callable[[Wave, Member, str], None]


class HostSide:
    """`cancel(job_id)`: asks a job of this host to end. `failed`: what a wave does after a member failed."""

    def __init__(self, rooms: Rooms, checker: Checker, *, cancel: Callable[[UUID], object], failed: Failed) -> None:
        self.host = rooms.host
        self.default_destination = next(iter(rooms.destinations))
        self._rooms, self._checker, self._cancel, self._failed = rooms, checker, cancel, failed
        self._pool = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="checks")
        self._checking: dict[UUID, Future[str | None]] = {}
        self._closing = threading.Event()
        self._pauses = Pauses[UUID](FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Begins nothing new; running threads stop soon."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self, seen: Seen, *, leads: bool) -> bool:
        """`leads`: this host submits jobs, so a missing job was never submitted. One that cannot be read is left alone. False:
        sources are slow, and some VMs were not rolled back yet; look again soon."""
        wave, until, in_time = seen.wave, time.monotonic() + GIVING_BACK_S, True
        known = [
            (one.job_id, one)
            for one in wave.members
            if one.job_id is not None
            and (one.state is MemberState.CUTTING_OVER or seen.rows[one.id].rolling_back)
            and one.job_id not in seen.unreadable
        ]
        elsewhere: dict[str, str] = {}
        # Those that have waited longest first: if a source is slow, there is time for only a few of them.
        for job_id, member in sorted(known, key=lambda one: self._pauses.over_at(one[0])):
            whose = member.host or (self.host if leads else None)
            host, job = seen.jobs.get(job_id, (whose, None))
            if host != self.host:
                if leads and host is not None and seen.rows[member.id].rolling_back:
                    elsewhere[member.id] = host
                continue
            if seen.rows[member.id].rolling_back:
                if in_time := time.monotonic() < until:
                    self._roll_back(wave, member, job)
            elif job is not None and job.state is State.COMPLETED:
                self._look_at_safely(wave, member, job)
        if elsewhere:
            self._name_lost_hosts(seen, elsewhere)
        return in_time

    def _name_lost_hosts(self, seen: Seen, elsewhere: Mapping[str, str]) -> None:
        """Says why members that other hosts are to roll back wait, where such a host is lost. `elsewhere`: hosts by member."""
        alive = {row.id for row in self._rooms.store.hosts.all() if not row.fenced and row.left_s > 0}
        said: dict[str, str | None] = {}
        for name, host in elsewhere.items():
            reason, before = _LOST.format(host=host), seen.rows[name].waits_for
            if (host in alive) == (before == reason):
                said[name] = None if host in alive else reason
        self._rooms.store.waves.put_reasons(seen.wave.id, said)

    # ── healthy ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_at_safely(self, wave: Wave, member: Member, job: Migration) -> None:
        """As `_look_at`. An error that nobody expected stays with this member, which is checked again after a pause."""
        if not self._pauses.is_over(job.id):
            return
        try:
            self._look_at(wave, member, job)
        except (PersistFailed, NotFound):
            raise
        except Exception as error:
            self._pauses.begin(job.id)
            log.warning("a guest cannot be checked now", wave=str(wave.id), member=member.id, exc_info=not _is_known(error))
            waits_for = f"Its guest is not checked yet: {_cause_of(error)}"
            self._rooms.store.waves.put_reasons(wave.id, {member.id: waits_for})

    def _look_at(self, wave: Wave, member: Member, job: Migration) -> None:
        future = self._checking.get(job.id)
        if future is None:
            self._checking[job.id] = self._pool.submit(self._checked, member, job)
            return
        if not future.done():
            return
        del self._checking[job.id]
        if self._closing.is_set():
            return
        trouble = future.result()
        self._pauses.forget(job.id)
        if trouble is not None:
            self._failed(wave, member, trouble)
            return
        fields = {"state": MemberState.HEALTHY, "healthy_at": now(), "outage_s": job.downtime_s, "cause": None}
        change_members(self._rooms.store.waves, wave.id, [member], {MemberState.CUTTING_OVER}, fields)

    def _checked(self, member: Member, job: Migration) -> str | None:
        """What is wrong; None, if the guest is healthy. The engine has seen it boot."""
        assert job.domain is not None
        uuid = UUID(job.domain.uuid)
        for check in member.checks:
            deadline = time.monotonic() + check.within_s
            while (trouble := self._checker.trouble(check, uuid, max(deadline - time.monotonic(), LEAST_S))) is not None:
                if time.monotonic() >= deadline:
                    return f"It booted, but {trouble}, for {check.within_s:g} s."
                if self._closing.wait(AGAIN_S):
                    return trouble
        return None

    # ── rolled back ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _roll_back(self, wave: Wave, member: Member, job: Migration | None) -> None:
        store = self._rooms.store
        if job is not None and job.restarted_by is not None:
            return  # the member gets that job first
        if job is not None and not job.ended:
            if not store.cancel_requested(job.id):
                self._cancel(job.id)
            return
        try:
            if job is not None and job.state is State.COMPLETED:
                if not self._pauses.is_over(job.id):
                    return
                self._move_back(job)
                self._pauses.forget(job.id)
            elif job is not None and self._is_owed_still(job):
                reason = "Its source is not powered on yet: its job tries it again."
                store.waves.put_reasons(wave.id, {member.id: reason})
                return
        except PersistFailed:
            raise
        except Exception as error:  # whatever it was, the other VMs are rolled back
            assert job is not None
            self._pauses.begin(job.id)
            cause, is_known = _cause_of(error), _is_known(error)
            log.warning("a VM is not rolled back yet", wave=str(wave.id), member=member.id, cause=cause, exc_info=not is_known)
            store.waves.put_reasons(wave.id, {member.id: f"Its source is not powered on yet: {cause}"})
            return
        fields = {"state": MemberState.ROLLED_BACK}
        change_members(store.waves, wave.id, [member], {member.state}, fields, rolling_back=False)

    def _stop_here(self, job: Migration) -> None:
        if job.domain is not None:
            self._rooms.hypervisor.undefine(UUID(job.domain.uuid), job.id)

    def is_owed_power(self, job: Migration) -> bool:
        """Whether this job has shut its source down, which is not on again. A job that failed powers it on by itself
        (`migrations.tidying`)."""
        return any(entry.kind == "source_power" for entry in self._rooms.store.ledger(job.id))

    def _is_owed_still(self, job: Migration) -> bool:
        """The same; also where that was not tried any more after a day: from now on it is tried again."""
        store, ref = self._rooms.store, job.plan.source_ref
        if ref.kind == "live_vm" and store.memory.get(job.id, JobMemory).power_given_up:
            store.record(job.id, "source_power", ref.vm_id)
            store.memory.change(job.id, JobMemory, lambda before: noting(before, power_given_up=False))
        return self.is_owed_power(job)

    def _move_back(self, job: Migration) -> None:
        """Stops the guest here, and powers the source on if this job has shut it down."""
        plan, ref, store = job.plan, job.plan.source_ref, self._rooms.store
        if plan.source.Live is None or ref.kind != "live_vm" or not self.is_owed_power(job):
            self._stop_here(job)
            return
        asyncio.run(self._swap(plan.source.Live, ref.source_id, ref.vm_id, job))
        for kind in ("mark", "source_power"):  # it does not count as moved any more
            store.strike(job.id, kind, ref.vm_id)

    async def _swap(self, kind: LiveKind, source_id: UUID, vm_id: str, job: Migration) -> None:
        """The source is asked first: the guest runs on here while its VM there cannot be reached, or is gone."""
        adapter = await self._rooms.connect(kind, source_id)
        try:
            async with asyncio.timeout(POWER_ON_S):
                await adapter.connect()
                refuse_another(job.manifest, await adapter.inspect(vm_id))
            await asyncio.to_thread(self._stop_here, job)  # in its own time, as the limit is the source's
            async with asyncio.timeout(POWER_ON_S):
                await adapter.power_on(vm_id)
        finally:
            await adapter.close()


def _is_known(error: Exception) -> bool:
    return isinstance(error, SynvirtError | TimeoutError)


def _cause_of(error: Exception) -> str:
    if isinstance(error, SynvirtError):
        return error.detail
    return f"nothing came within {POWER_ON_S:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
