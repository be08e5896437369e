"""Runs that look after what is stored: a point verified, a repository verified, garbage collected."""

from uuid import UUID

from synvirt.backups.model import RestorePoint, Status
from synvirt.backups.points import Points
from synvirt.backups.under_way import UnderWay
from synvirt.errors import BackupNotFound, RepositoryDamaged
from synvirt.model import now
from synvirt.repository import garbage
from synvirt.repository.repository import Repository
from synvirt.repository.verify import verify_point, verify_repository

_HINT = "back the guests up anew; other points may be whole: verify them"


def verify_one(under_way: UnderWay, repository: Repository, points: Points, point: RestorePoint) -> None:
    """RepositoryDamaged, where the point is not what was backed up."""
    under_way.move(Status.TRANSFERRING)
    damaged: set[str] = set()
    try:
        wrong = verify_point(
            repository,
            point.id,
            stop=under_way.stop,
            on_progress=lambda count: under_way.figure(point.size_bytes, count),
            damaged=damaged,
        )
    except (BackupNotFound, RepositoryDamaged) as error:
        wrong = error.detail
    _tell(points, {point.id: wrong is not None})
    garbage.condemn(repository.folder, sorted(damaged))
    if wrong:
        raise RepositoryDamaged(wrong, hint=_HINT)


def verify_all(under_way: UnderWay, repository: Repository, points: Points, repository_id: UUID) -> None:
    """RepositoryDamaged, where anything in it is: the run has the report."""
    under_way.move(Status.TRANSFERRING)
    report = verify_repository(repository, stop=under_way.stop, on_progress=under_way.figure)
    there = set(repository.point_ids())
    mine = [point.id for point in points.all() if point.repository_id == repository_id]
    _tell(points, {id_: id_ in report.damaged_points or id_ not in there for id_ in mine})
    garbage.condemn(repository.folder, list(report.damaged_packs))
    under_way.note(report=report)
    if report.wrongs:
        more = f", and {len(report.wrongs) - 1} more" if len(report.wrongs) > 1 else ""
        raise RepositoryDamaged(f"{report.wrongs[0]}{more}", hint=_HINT)


def collect(under_way: UnderWay, repository: Repository, *, dry_run: bool) -> None:
    under_way.move(Status.TRANSFERRING)
    collected = garbage.collect(repository, now=now().timestamp(), dry_run=dry_run)
    under_way.note(collected=collected)


def _tell(points: Points, damaged: dict[UUID, bool]) -> None:
    at = now()
    for point_id, is_damaged in damaged.items():
        state = "damaged" if is_damaged else "ok"
        points.put(points.get(point_id).model_copy(update={"state": state, "verified_at": at}))
