"""Runs that look after what is stored: a point verified, a repository verified, garbage collected."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

from synvirt.backups.authors import Authors
from synvirt.backups.limits import Limits, held
from synvirt.backups.model import RestorePoint, Status
from synvirt.backups.orders import PointVerified, RepositoryVerified, VerifyPointOrder, VerifyRepositoryOrder
from synvirt.backups.points import Points
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import Hear, Message, Working
from synvirt.errors import RepositoryDamaged
from synvirt.jobs.wire import Moved, Result
from synvirt.model.values import now
from synvirt.repository import garbage
from synvirt.repository.repository import Repository
from synvirt.repository.specs import RepositorySpec
from synvirt.repository.verify import Report

_HINT = "back the guests up anew; other points may be whole: verify them"


def verify_one(
    under_way: UnderWay,
    repository: Repository,
    points: Points,
    point: RestorePoint,
    *,
    authors: Authors,
    working: Working,
    spec: RepositorySpec,
    limits: Limits | None = None,
) -> None:
    """RepositoryDamaged, where the point is not what was backed up, or not what its author signed."""
    under_way.move(Status.TRANSFERRING)
    order, found = VerifyPointOrder(repository=spec, point_id=str(point.id)), _Answer()
    with held(limits, under_way, repository):
        working.carry_out(
            lambda: order, found.hearing(lambda moved: under_way.figure(point.size_bytes, moved.bytes_done)), under_way.stop
        )
    verified = PointVerified.of(found.content)
    garbage.condemn(repository.folder, list(verified.damaged_packs))
    try:
        authors.tell(under_way, repository, point.id, point.vm_id)
    except RepositoryDamaged:
        _tell(points, {point.id: True})
        raise
    _tell(points, {point.id: verified.wrong is not None})
    if verified.wrong:
        raise RepositoryDamaged(verified.wrong, hint=_HINT)


def verify_all(
    under_way: UnderWay,
    repository: Repository,
    points: Points,
    repository_id: UUID,
    *,
    authors: Authors,
    working: Working,
    spec: RepositorySpec,
    limits: Limits | None = None,
) -> None:
    """RepositoryDamaged, where anything in it is: the run has the report."""
    under_way.move(Status.TRANSFERRING)
    order, found = VerifyRepositoryOrder(repository=spec), _Answer()
    with held(limits, under_way, repository):
        working.carry_out(
            lambda: order, found.hearing(lambda moved: under_way.figure(moved.bytes_total, moved.bytes_done)), under_way.stop
        )
    report = Report.model_validate_json(RepositoryVerified.of(found.content).report)
    repository.refresh()
    if forged := authors.tell_all(under_way, repository):
        wrongs, points_too = (*report.wrongs, *(wrong for _, wrong in forged)), tuple(id_ for id_, _ in forged)
        report = report.model_copy(update={"wrongs": wrongs, "damaged_points": (*report.damaged_points, *points_too)})
    there = set(repository.point_ids())
    mine = [point.id for point in points.all() if point.repository_id == repository_id]
    _tell(points, {id_: id_ in report.damaged_points or id_ not in there for id_ in mine})
    garbage.condemn(repository.folder, list(report.damaged_packs))
    under_way.note(report=report)
    if report.wrongs:
        more = f", and {len(report.wrongs) - 1} more" if len(report.wrongs) > 1 else ""
        raise RepositoryDamaged(f"{report.wrongs[0]}{more}", hint=_HINT)


class _Answer:
    """What a worker answers at its end."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def hearing(self, moved: Callable[[Moved], None]) -> Hear:
        def hear(message: Message) -> None:
            if isinstance(message, Result):
                self.content = message.content
            elif isinstance(message, Moved):
                moved(message)

        return hear


def collect(under_way: UnderWay, repository: Repository, *, dry_run: bool) -> None:
    """The work of a run that collects garbage. What it removed is noted in the run."""
    under_way.move(Status.TRANSFERRING)
    collected = garbage.collect(repository, now=now().timestamp(), dry_run=dry_run)
    under_way.note(collected=collected)


def _tell(points: Points, damaged: dict[UUID, bool]) -> None:
    at = now()
    for point_id, is_damaged in damaged.items():
        state = "damaged" if is_damaged else "ok"
        points.put(points.get(point_id).model_copy(update={"state": state, "verified_at": at}))
