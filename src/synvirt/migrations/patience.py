"""How long a job waits for trouble that may end by itself. asyncio.

    trouble ─▶ again after a pause ─▶ after half a minute: shown by the job's last_error, which is not fatal
                   │                      over: the earlier last_error is shown again
                   └─ too long: the trouble itself, and the job fails

For example a source is away; a destination's file system is not mounted yet; another tool is just backing up the VM; a
password was changed while a job is held; another host has changed the sealing key, which is not copied here yet.
"""

import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

import structlog

from synvirt.destinations import AWAY_PAUSES_S, DestinationAway, as_away
from synvirt.errors import (
    AuthFailed,
    DiskReadFailed,
    DiskWriteFailed,
    HypervisorAway,
    SnapshotFailed,
    SourceUnreachable,
    SynvirtError,
)
from synvirt.guests import AdoptFailed
from synvirt.live import GuestStaysOn
from synvirt.migrations.job import Job
from synvirt.migrations.secrets import SealedElsewhere
from synvirt.model.kinds import Mode
from synvirt.model.values import now
from synvirt.repeating import pause_after

log = structlog.get_logger(__name__)

T = TypeVar("T")


class SnapshotNotMade(SnapshotFailed):
    """The source cannot make a snapshot now. (SnapshotFailed itself: an existing snapshot is gone.)"""


# Errors that may end by themselves, and the pauses between tries; the last pause repeats. A wrong password is tried so rarely
# that no account is locked.
PAUSES_S: dict[type[SynvirtError], tuple[float, ...]] = {
    SourceUnreachable: (1, 2, 4, 8, 16, 30, 60),
    SnapshotNotMade: (60,),
    # An operator copies the fleet's key to this host.
    SealedElsewhere: (1, 2, 4, 8, 16, 30),
    AuthFailed: (300,),
    # The guest must not be powered off by force: its updates will end, or its owner will shut it down.
    GuestStaysOn: (60,),
    # The destination is full, or its pool is suspended. The changes are kept until they are in the volumes.
    AdoptFailed: (60,),
    DestinationAway: AWAY_PAUSES_S,
    # An update restarts this host's libvirtd in seconds.
    HypervisorAway: (1, 2, 4, 8, 16, 30),
}
# For these a whole step is called again, not only the call that failed.
HERE = (DestinationAway, HypervisorAway, SealedElsewhere)
# From the first error, including the time before it in which the source did not answer. A short interruption is not shown; a
# longer one is shown within a minute.
SHOWN_FROM_S = 30.0
# While the guest runs, waiting costs nothing and keeps the copy: a host's maintenance or a nightly backup ends within that
# time. A guest that is off could not be powered on while its source is away; but its owner must know soon.
GUEST_RUNS_S, GUEST_OFF_S = 86_400.0, 1_800.0


def _bearable_s(job: Job, trouble: SynvirtError) -> float:
    """How long to wait for the end of a trouble. An error other than silence may pass only if the job has copied something
    before; else it is raised at once, as nothing is lost yet. While the guest is off the wait is short: a failed job powers it
    on."""
    runs_on = job.migration.mode_effective is Mode.WARM and not job.guest_is_off
    copied = job.migration.progress.bytes_done > 0
    if isinstance(trouble, HERE):
        return GUEST_OFF_S if job.guest_is_off else GUEST_RUNS_S
    if isinstance(trouble, GuestStaysOn):  # the guest runs, whatever the job's state says
        return GUEST_RUNS_S
    if isinstance(trouble, AdoptFailed):  # a volume with half of a conversion is lost, so a file would be copied again
        return GUEST_OFF_S if job.migration.plan.source.Live is not None else GUEST_RUNS_S
    if isinstance(trouble, SourceUnreachable):
        return GUEST_RUNS_S if runs_on and copied else GUEST_OFF_S
    if isinstance(trouble, SnapshotNotMade) and not runs_on:
        return 0.0
    return (GUEST_RUNS_S if runs_on else GUEST_OFF_S) if copied else 0.0


class Patience:
    """A context around one thing that is tried again and again. At its end the job no longer shows the error. `limit_s`: the
    longest wait, instead of the one by the guest's state."""

    def __init__(self, job: Job, limit_s: float | None = None) -> None:
        self._job, self._limit_s = job, limit_s
        self._since: float | None = None
        self._tries = 0
        self._silent_s = 0.0
        # A service that ended in the meantime may have shown the error already.
        self._shown = True

    async def __aenter__(self) -> "Patience":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):  # not when the service ends: then the job still waits
            await self.over()

    async def wait(self, trouble: SynvirtError) -> None:
        """Pauses before the next try. Raises the trouble, when it has lasted too long. Cancelled."""
        job, moment = self._job, time.monotonic()
        self._since = moment if self._since is None else self._since
        limit_s = _bearable_s(job, trouble) if self._limit_s is None else self._limit_s
        left_s = self._since + limit_s - moment
        pauses_s = next(pauses for kind, pauses in PAUSES_S.items() if isinstance(trouble, kind))
        pause_s = pause_after(self._tries, pauses_s)
        if left_s <= 0 or (self._limit_s is not None and pause_s > left_s):
            raise trouble
        self._tries += 1
        log.warning("waited for", job=str(job.id), code=trouble.code, cause=trouble.detail, again_s=pause_s)
        if job.migration.progress.rate_bps:
            await job.change(progress=job.migration.progress.stopped())
            job.rooms.board.pin(job.id, job.migration.state, job.migration.progress)
        self._silent_s += trouble.waited_s if isinstance(trouble, SourceUnreachable) else 0.0
        if max(pause_s, moment - self._since + self._silent_s) >= SHOWN_FROM_S:
            until = now() + timedelta(seconds=left_s)
            every = f"{pause_s / 60:.0f} min" if pause_s >= 60 else f"{pause_s:.0f} s"
            again = f"It is tried again every {every} until {until:%Y-%m-%d %H:%M} UTC"
            await self.show(type(trouble)(f"{trouble.detail.rstrip('.')}. {again}", hint=trouble.hint))
        job.leave_turn()
        if isinstance(trouble, GuestStaysOn):
            await job.leave_slots()
        source_ref = job.migration.plan.source_ref
        if source_ref.kind == "live_vm":
            with job.rooms.waiting.held(source_ref.source_id, job.stop):
                await job.stop.sleep_or_wake(min(pause_s, left_s))
        else:
            await job.stop.sleep(min(pause_s, left_s))
        await job.take_turn()
        if isinstance(trouble, GuestStaysOn):
            await job.take_slots()

    async def show(self, trouble: SynvirtError) -> None:
        """Shows what is waited for, until it is over."""
        await self._job.show(trouble)
        self._shown = True

    async def over(self) -> None:
        """The trouble is over. The next one counts from its own start."""
        self._since, self._tries, self._silent_s = None, 0, 0.0
        if self._shown:
            await self._job.show_no_more()
            self._shown = False


async def patiently(job: Job, attempt: Callable[[Patience], Awaitable[T]], limit_s: float | None = None) -> T:
    """The result of `attempt`, which is called again while an error may pass. An attempt that takes long may itself call
    `over` when the trouble is over."""
    async with Patience(job, limit_s) as patience:
        while True:
            try:
                return await attempt(patience)
            except HERE:  # here it would be waited for twice
                raise
            except tuple(PAUSES_S) as error:
                await patience.wait(error)


async def while_something_here_is_away(job: Job, step: Callable[[Job], Awaitable[T]]) -> T:
    """The step's result. The step is called again while its destination, this host's libvirtd or the fleet's key is away, also
    where it went in the step's middle."""
    try:
        return await _tried(job, step)
    except HERE as error:
        away = error
    async with Patience(job) as patience:
        while True:
            await patience.wait(away)
            try:
                return await _tried(job, step)
            except HERE as error:
                away = error


async def _tried(job: Job, step: Callable[[Job], Awaitable[T]]) -> T:
    try:
        return await step(job)
    except (DiskWriteFailed, DiskReadFailed) as error:  # a volume is read, too: for its hashes, and to compare it
        raise await job.in_thread(as_away, job.destination, error) from error
