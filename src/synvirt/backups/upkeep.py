"""Runs that look after what is stored: a point verified, a repository verified, garbage collected."""

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from synvirt.backups.limits import Limits, held
from synvirt.backups.model import CollectRequest, RestorePoint, Status
from synvirt.backups.orders import PointVerified, RepositoryVerified, VerifyPointOrder, VerifyRepositoryOrder
from synvirt.backups.points import Points
from synvirt.backups.repositories import Repositories
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import Hear, Message, Working
from synvirt.errors import RepositoryDamaged
from synvirt.jobs.wire import Moved, Result
from synvirt.model.values import now
from synvirt.repository import garbage
from synvirt.repository.verify import Report

_HINT = "back the guests up again; other points may be whole: verify them"


class Upkeep:
    """What verifications and collections do. `limits`: slots of repositories; None: there are no limits."""

    def __init__(self, repositories: Repositories, points: Points, working: Working, *, limits: Limits | None) -> None:
        self._repositories, self._points, self._working, self._limits = repositories, points, working, limits

    def verify_point(self, under_way: UnderWay, point: RestorePoint) -> None:
        """RepositoryDamaged, where the point is not what was backed up, or not what its author signed."""
        repository, authors = self._repositories.opened(point.repository_id), self._repositories.authors
        order = VerifyPointOrder(repository=self._repositories.spec(point.repository_id), point_id=str(point.id))
        found = _Answer()
        hear = found.hearing(lambda moved: under_way.figure(point.size_bytes, moved.bytes_done))
        under_way.move(Status.TRANSFERRING)
        with held(self._limits, under_way, repository):
            self._working.carry_out(lambda: order, hear, under_way.stop)
        verified = PointVerified.of(found.content)
        garbage.condemn(repository.folder, list(verified.damaged_packs))
        try:
            authors.tell(under_way, repository, point.id, point.vm_id)
        except RepositoryDamaged:
            self._tell({point.id: True})
            raise
        self._tell({point.id: verified.wrong is not None})
        if verified.wrong:
            raise RepositoryDamaged(verified.wrong, hint=_HINT)

    def verify_repository(self, under_way: UnderWay, repository_id: UUID) -> None:
        """RepositoryDamaged, where anything in it is: the run has the report."""
        repository, authors = self._repositories.opened(repository_id), self._repositories.authors
        order, found = VerifyRepositoryOrder(repository=self._repositories.spec(repository_id)), _Answer()
        hear = found.hearing(lambda moved: under_way.figure(moved.bytes_total, moved.bytes_done))
        under_way.move(Status.TRANSFERRING)
        with held(self._limits, under_way, repository):
            self._working.carry_out(lambda: order, hear, under_way.stop)
        report = Report.model_validate_json(RepositoryVerified.of(found.content).report)
        repository.refresh()
        if forged := authors.tell_all(under_way, repository):
            wrongs, points_too = (*report.wrongs, *(wrong for _, wrong in forged)), tuple(id_ for id_, _ in forged)
            report = report.model_copy(update={"wrongs": wrongs, "damaged_points": (*report.damaged_points, *points_too)})
        there = set(repository.point_ids())
        mine = [point.id for point in self._points.all() if point.repository_id == repository_id]
        self._tell({id_: id_ in report.damaged_points or id_ not in there for id_ in mine})
        garbage.condemn(repository.folder, list(report.damaged_packs))
        under_way.note(report=report)
        if report.wrongs:
            more = f", and {len(report.wrongs) - 1} more" if len(report.wrongs) > 1 else ""
            raise RepositoryDamaged(f"{report.wrongs[0]}{more}", hint=_HINT)

    def collect(self, under_way: UnderWay, repository_id: UUID, asked: CollectRequest) -> None:
        """What it removed, or would remove, is noted in the run. RepositoryDamaged: nothing was removed."""
        repository = self._repositories.opened(repository_id)
        under_way.move(Status.TRANSFERRING)
        collected = garbage.collect(repository, now=now().timestamp(), dry_run=asked.dry_run)
        under_way.note(collected=collected)

    def _tell(self, damaged: Mapping[UUID, bool]) -> None:
        at = now()
        for point_id, is_damaged in damaged.items():
            state = "damaged" if is_damaged else "ok"
            self._points.put(self._points.get(point_id).model_copy(update={"state": state, "verified_at": at}))


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
