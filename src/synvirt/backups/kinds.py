"""What each kind of run does, from its row and its memory; and which repository and restore points it uses meanwhile.

backup   backing_up.py     restore   restores/     boot_test   restores/boot_test.py     verify, collect   upkeep.py
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from synvirt.backups.backing_up import BackingUp
from synvirt.backups.jobs import Jobs
from synvirt.backups.memory import Memory
from synvirt.backups.model import BackupJob, BackupRun, CollectRequest, RestorePoint, RestoreRequest
from synvirt.backups.points import Points
from synvirt.backups.restores import new_domain
from synvirt.backups.restores.boot_test import BootTesting
from synvirt.backups.restores.restoring import Restoring
from synvirt.backups.runs import RunKind, Work
from synvirt.backups.under_way import UnderWay
from synvirt.backups.upkeep import Upkeep
from synvirt.errors import BackupConflict, BackupNotFound, Interrupted
from synvirt.store.documents import Unreadable

# The words for what a run does with the points that it names; other kinds of run name points that they made, or none.
READS = {"restore": "restored", "verify": "verified", "boot_test": "tested"}


@dataclass(frozen=True)
class Kinds:
    """`testing`: BackupBadRequest, if this host starts no guests. `succeeded`: called when a job's run succeeded."""

    jobs: Jobs
    points: Points
    memory: Memory
    backing_up: BackingUp
    restoring: Restoring
    upkeep: Upkeep
    testing: Callable[[], BootTesting]
    succeeded: Callable[[UUID], None]

    def all(self) -> dict[str, RunKind]:
        """The kinds by their names."""
        return {
            "backup": RunKind(self._backup),
            "restore": RunKind(self._restoration, come_to=self.restoring.come_to),
            "verify": RunKind(self._verification),
            "boot_test": RunKind(self._boot),
            "collect": RunKind(self._collection),
        }

    def _backup(self, run: BackupRun) -> Work:
        if run.job_id is None:
            raise BackupNotFound("the run has no job")
        return partial(self._back_up, job=self.jobs.get(run.job_id), goes_on=run.started_at is not None)

    def _back_up(self, under_way: UnderWay, job: BackupJob, *, goes_on: bool) -> None:
        self.backing_up.back_up(under_way, job, goes_on=goes_on)
        self.succeeded(job.id)

    def _restoration(self, run: BackupRun) -> Work:
        return self.restoring.work(run, self._point_of(run))

    def _verification(self, run: BackupRun) -> Work:
        if run.restore_point_ids:
            return partial(self.upkeep.verify_point, point=self._point_of(run))
        return partial(self.upkeep.verify_repository, repository_id=self._repository_of(run))

    def _boot(self, run: BackupRun) -> Work:
        return partial(self.testing().test, point=self._point_of(run))

    def _collection(self, run: BackupRun) -> Work:
        asked = self.memory.asked(run.id, CollectRequest)
        return partial(self.upkeep.collect, repository_id=self._repository_of(run), asked=asked)

    def refuse_same(self, run: BackupRun, asked: RestoreRequest, others: Iterable[BackupRun]) -> None:
        """BackupConflict, if one of the other runs makes the folder or the guest of that name: it is there only at the end."""
        name = self._new_guest(run, asked)
        for other in (one for one in others if one.kind == "restore"):
            if run.path is not None and other.path == run.path:
                raise BackupConflict(f"run {other.id} exports to {run.path} already", hint="choose another name")
            with contextlib.suppress(BackupNotFound, Interrupted, Unreadable):  # it ends at this moment
                if name is not None and name == self._new_guest(other, self.memory.asked(other.id, RestoreRequest)):
                    raise BackupConflict(f"run {other.id} restores a guest {name} already", hint="choose another name")

    def _new_guest(self, run: BackupRun, asked: RestoreRequest) -> str | None:
        """The name of the guest that the restore makes; None, if it makes none."""
        return new_domain.name_of(self._point_of(run), asked) if asked.target == "new_domain" else None

    # ── what a run uses ──────────────────────────────────────────────────────────────────────────────────────────────

    def uses(self, run: BackupRun, repository_id: UUID) -> bool:
        """What a run of any kind uses."""
        try:
            return self._repository_of(run) == repository_id
        except BackupNotFound:
            return False

    def _repository_of(self, run: BackupRun) -> UUID:
        """The run's repository. BackupNotFound, if it has none to use."""
        if run.repository_id is not None:
            return run.repository_id
        if not run.restore_point_ids:
            raise BackupNotFound("the run has no repository")
        return self._point_of(run).repository_id  # a restore or a boot test of an earlier version

    def _point_of(self, run: BackupRun) -> RestorePoint:
        return self.points.get(run.restore_point_ids[0])


def being_read(runs: Iterable[BackupRun]) -> dict[UUID, BackupRun]:
    """For each restore point, one of these runs that reads it. A guest may run from a point (docs/instant.md)."""
    return {point_id: run for run in runs if run.kind in READS for point_id in run.restore_point_ids}
