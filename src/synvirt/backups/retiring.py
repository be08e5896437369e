"""Which restore points of a job its retention removes: shown before, and done after each of its runs."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from threading import Lock
from uuid import UUID

from synvirt.backups.model import BackupJob, PointFate, RestorePoint
from synvirt.backups.points import Points
from synvirt.backups.repositories import Repositories
from synvirt.backups.retention import Retention, kept
from synvirt.errors import BackupConflict, BackupImmutable, SynvirtError
from synvirt.model.values import now


def fates(
    points: Iterable[RestorePoint],
    retention: Retention,
    *,
    protected: Collection[UUID] = (),
    gone: Collection[UUID] = (),
    moment: datetime | None = None,
) -> list[PointFate]:
    """What happens to one job's points, newest first. A damaged point never displaces a good one: what retention would keep of
    the good ones alone stays too, so the newest good one always stays. Nor does one of those that are `gone` from the
    repository, or one whose time has not come at `moment` (by default now): it was made by a clock that was ahead, and each new
    point would be an old one."""
    by_guest: dict[str, list[RestorePoint]] = defaultdict(list)
    for point in points:
        by_guest[point.vm_id].append(point)
    found, moment = [], moment or now()
    for mine in by_guest.values():
        good = [point for point in mine if point.state != "damaged"]
        present = [point for point in good if point.created_at <= moment and point.id not in gone]
        stays = [kept(((point.id, point.created_at) for point in some), retention) for some in (mine, good, present)]
        for point in mine:
            reasons = dict.fromkeys(line for lines in stays for line in lines.get(point.id, ()))
            if point.id in protected:
                reasons["protected"] = None
            found.append(
                PointFate(
                    restore_point_id=point.id,
                    vm_id=point.vm_id,
                    vm_name=point.vm_name,
                    created_at=point.created_at,
                    kept_by=tuple(reasons),
                    removed=not reasons,
                )
            )
    return sorted(found, key=lambda fate: fate.created_at, reverse=True)


class Retiring:
    """Applies retention to the restore points of backup jobs. `remove` removes one. `in_use`: points that runs read now, which
    stay."""

    def __init__(
        self,
        repositories: Repositories,
        points: Points,
        remove: Callable[[UUID], None],
        *,
        in_use: Callable[[], Collection[UUID]] = tuple,
    ) -> None:
        self._repositories, self._points, self._remove, self._in_use = repositories, points, remove, in_use
        self._protecting = defaultdict[UUID, Lock](Lock)

    def planned(self, job: BackupJob, retention: Retention | None = None, *, vm_id: str | None = None) -> list[PointFate]:
        """What `retention`, by default the job's own, would remove now."""
        of_job = {"job_id": [str(job.id)], "repository_id": [str(job.repository_id)]}
        mine = self._points.all(of_job if vm_id is None else of_job | {"vm_id": [vm_id]})
        repository = self._repositories.opened(job.repository_id)
        protected = {*repository.kept_ids(), *self._in_use()}
        gone = {point.id for point in mine}.difference(repository.point_ids())  # removed by another host, for example
        return fates(mine, retention or job.retention, protected=protected, gone=gone)

    def retire(self, job: BackupJob, *, vm_id: str | None = None) -> list[PointFate]:
        """Removes them. An error with one does not stop the others; it is raised at the end."""
        planned = self.planned(job, vm_id=vm_id)
        refused: SynvirtError | None = None
        for fate in planned:
            if not fate.removed:
                continue
            try:
                self._remove(fate.restore_point_id)
            except (BackupImmutable, BackupConflict):
                continue  # a peer keeps it for longer, or a run has begun to read it: a later run removes it
            except SynvirtError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return planned

    def protect(self, point_id: UUID, check: Callable[[RestorePoint], None], *, protected: bool) -> RestorePoint:
        """Protects a point, or ends that. The repository stores it: so another host that uses the repository does not remove
        the point either. `check`: raises, where the point as it is stays. BackupNotFound."""
        repository_id = self._points.get(point_id).repository_id
        # One after the other: the repository and the store have no common transaction. A server that hangs stops only the
        # protections in its own repository.
        with self._protecting[repository_id]:
            check(self._points.get(point_id))
            self._repositories.opened(repository_id).keep(point_id, kept=protected)
            return self._points.change(point_id, protected=protected)
