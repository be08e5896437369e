"""Runs that maintain what is stored: verify a point, verify a repository, collect garbage.

Each stores its progress in its memory. After its service has ended, a verification continues with the first unchecked chunk or
pack, a collection with what is not removed yet. The data that shows this (manifests, pages, footers) is read again: a 30,000th
of the bytes.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from uuid import UUID

from pydantic import RootModel

from synvirt.backups.limits import Limits, held
from synvirt.backups.memory import Memory
from synvirt.backups.model import CollectRequest, RestorePoint, Status
from synvirt.backups.orders import (
    ALL,
    CollectOrder,
    GarbageCollected,
    Go,
    PacksSeen,
    Planned,
    PointSeen,
    RepositoryVerified,
    VerifyPointOrder,
    VerifyRepositoryOrder,
)
from synvirt.backups.points import Points
from synvirt.backups.repositories import Repositories
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import Message, Working
from synvirt.errors import BackupNotFound, RepositoryDamaged, SynvirtError
from synvirt.jobs.wire import Moved, Result
from synvirt.model.values import now
from synvirt.nearest import in_short
from synvirt.repository import garbage
from synvirt.repository.garbage import Collected, Sweep
from synvirt.repository.repository import Repository
from synvirt.repository.verify import PacksLooked, PointLooked, Report
from synvirt.sizes import counted

# After a kill, a verification reads at most this many seconds again.
MARK_EVERY_S = 5.0
# The packs of 32 TiB: a verification keeps its findings in memory.
NAMED_MAX = 1 << 19
_HINT = "back the guests up again; other points may be whole: verify them"


class _OfPoint(RootModel[PointLooked]):
    """The mark of a point's verification."""


class _OfPacks(RootModel[PacksLooked]):
    """The mark of a repository's verification."""


F = TypeVar("F", PointLooked, PacksLooked, Report)


def _bounded(found: F) -> F:
    """RepositoryDamaged, if it names more than NAMED_MAX: the worker has read data that may be hostile."""
    named = (found.wrongs, found.damaged_points, found.damaged_packs) if isinstance(found, Report) else (found.broken,)
    if max(map(len, named)) > NAMED_MAX:
        raise RepositoryDamaged(f"more than {NAMED_MAX:,} packs and restore points are damaged", hint=_HINT)
    return found


def _damaged_point(point: RestorePoint, wrong: str, disks: Sequence[int]) -> RepositoryDamaged:
    """`disks`: the numbers of the damaged ones; none: it is not known which are whole."""
    if not disks:
        return RepositoryDamaged(wrong, hint=_HINT)
    targets = [point.disks[number].target for number in disks if number < len(point.disks)]
    are = "disk {} is" if len(targets) == 1 else "disks {} are"
    is_all = len(targets) == len(point.disks)
    others = "" if is_all else "the other disks of this point are whole, and can be restored by their names; "
    return RepositoryDamaged(f"{are.format(in_short(targets))} damaged: {wrong}", hint=f"{others}{_HINT}")


def _condemn(under_way: UnderWay, repository: Repository, broken: Sequence[str]) -> None:
    """Takes the packs out of use. A repository that is full, or read-only, must not hide the damage: it gives a warning."""
    try:
        garbage.condemn(repository.folder, broken)
    except SynvirtError as error:
        again = "verify again once the repository can be written to: until then backups rely on what is in them"
        packs = counted(len(broken), "damaged pack")
        under_way.warn(error.code, f"{packs} cannot be taken out of use: {error.detail}; {again}")


class Upkeep:
    """The work of verifications and collections. `limits`: slots of repositories; None: there are no limits."""

    def __init__(
        self, repositories: Repositories, points: Points, memory: Memory, working: Working, *, limits: Limits | None
    ) -> None:
        self._repositories, self._points, self._memory = repositories, points, memory
        self._working, self._limits = working, limits

    def verify_point(self, under_way: UnderWay, point: RestorePoint) -> None:
        """RepositoryDamaged, if the point is not what was backed up, or not what its author signed."""
        repository, authors = self._repositories.opened(point.repository_id), self._repositories.authors
        spec, run_id = self._repositories.spec(point.repository_id), under_way.run.id

        mark = self._memory.mark(run_id, _OfPoint)
        found = PointLooked() if mark is None else mark.root
        try:
            sha256 = authors.checked(under_way, repository, point.id, point.vm_id).sha256
        except RepositoryDamaged as error:
            self._note_states({point.id: True})
            raise RepositoryDamaged(error.detail, hint=error.hint or _HINT) from error

        def order() -> VerifyPointOrder:
            return VerifyPointOrder(
                repository=spec, point_id=str(point.id), sha256=sha256, since=found, mark_every_s=MARK_EVERY_S
            )

        def on_message(message: Message) -> None:
            nonlocal found
            if isinstance(message, Moved):
                under_way.figure(point.size_bytes, message.bytes_done)
            elif isinstance(message, Result):
                seen = PointSeen.of(message.content)
                found = _bounded(seen.looked.after(found))
                if not seen.more:
                    self._memory.put_mark(run_id, _OfPoint(found))

        under_way.move(Status.TRANSFERRING)
        with held(self._limits, under_way, repository):
            self._working.carry_out(order, on_message, under_way.stop)
        # Zeros are not read, and a chunk only once: what that comes to is known only now.
        under_way.figure(found.bytes_read, found.bytes_read)
        self._note_states({point.id: found.wrong is not None})
        _condemn(under_way, repository, sorted(found.broken))
        if found.wrong:
            raise _damaged_point(point, found.wrong, found.disks)

    def verify_repository(self, under_way: UnderWay, repository_id: UUID) -> None:
        """RepositoryDamaged, if any part is damaged: the run has the report."""
        repository, authors = self._repositories.opened(repository_id), self._repositories.authors
        spec, run_id = self._repositories.spec(repository_id), under_way.run.id
        mark, report = self._memory.mark(run_id, _OfPacks), Report()
        since = None if mark is None else mark.root

        def order() -> VerifyRepositoryOrder:
            nonlocal report
            report = Report()
            return VerifyRepositoryOrder(repository=spec, since=since, mark_every_s=MARK_EVERY_S)

        def on_message(message: Message) -> None:
            nonlocal report, since
            if isinstance(message, Moved) and message.key == ALL:
                under_way.figure(message.bytes_total, message.bytes_done)
            elif isinstance(message, Result) and message.name == "verified":
                part = Report.model_validate_json(RepositoryVerified.of(message.content).report)
                report = _bounded(part.after(report))
            elif isinstance(message, Result):
                seen = PacksSeen.of(message.content)
                since = _bounded(seen.looked.after(since or PacksLooked()))
                if not seen.more:
                    self._memory.put_mark(run_id, _OfPacks(since))

        under_way.move(Status.TRANSFERRING)
        with held(self._limits, under_way, repository):
            # Before the packs are listed: what a point that comes later lies in may not be read.
            mine = [point.id for point in self._points.all({"repository_id": [str(repository_id)]})]
            self._working.carry_out(order, on_message, under_way.stop)
        under_way.figure(report.bytes_read, report.bytes_read)
        repository.refresh()
        if forged := authors.warn_of_all(under_way, repository):
            wrongs, points_too = (*report.wrongs, *(wrong for _, wrong in forged)), tuple(id_ for id_, _ in forged)
            report = report.model_copy(update={"wrongs": wrongs, "damaged_points": (*report.damaged_points, *points_too)})
        sound = set(repository.point_ids()).difference(report.damaged_points)
        self._note_states({id_: id_ not in sound for id_ in (*mine, *report.damaged_points)})
        under_way.note(report=report.listed())
        _condemn(under_way, repository, report.damaged_packs)
        if report.wrongs:
            more = f", and {len(report.wrongs) - 1} more" if len(report.wrongs) > 1 else ""
            raise RepositoryDamaged(f"{report.wrongs[0]}{more}", hint=_HINT)

    def collect(self, under_way: UnderWay, repository_id: UUID, asked: CollectRequest) -> None:
        """Notes in the run what it removed, or would remove. RepositoryDamaged: nothing was removed."""
        run_id = under_way.run.id
        under_way.move(Status.TRANSFERRING)
        collected = self._collected(
            under_way,
            repository_id,
            dry_run=asked.dry_run,
            bandwidth_bps=asked.bandwidth_bps,
            before=self._memory.mark(run_id, Sweep),
            on_sweep=lambda sweep: self._memory.put_mark(run_id, sweep),
            on_progress=under_way.figure,
        )
        under_way.note(collected=collected)

    def collect_after(self, under_way: UnderWay, repository_id: UUID, bandwidth_bps: int | None) -> None:
        """Collects at a backup's end: the figures of the run stay those of the backup. RepositoryDamaged: nothing was
        removed."""
        self._collected(under_way, repository_id, urgent=True, bandwidth_bps=bandwidth_bps)

    def _collected(
        self,
        under_way: UnderWay,
        repository_id: UUID,
        *,
        dry_run: bool = False,
        urgent: bool = False,
        bandwidth_bps: int | None = None,
        before: Sweep | None = None,
        on_sweep: Callable[[Sweep], None] = lambda sweep: None,
        on_progress: Callable[[int, int], None] = lambda total, done: None,
    ) -> Collected:
        """`on_sweep`: stores what will be removed next; `before` is what was stored last. `on_progress`: bytes of packs."""
        repository, spec = self._repositories.opened(repository_id), self._repositories.spec(repository_id)
        collected = Collected()

        def order() -> CollectOrder:
            begun = None if before is None else before.model_dump_json()
            return CollectOrder(repository=spec, before=begun, dry_run=dry_run, bandwidth_bps=bandwidth_bps)

        def on_message(message: Message) -> Go | None:
            nonlocal before, collected
            if isinstance(message, Result) and message.name == "planned":
                before = Sweep.model_validate_json(Planned.of(message.content).sweep)
                on_sweep(before)
                return Go()
            if isinstance(message, Result):
                collected = Collected.model_validate_json(GarbageCollected.of(message.content).collected)
            elif message.key == ALL:
                on_progress(message.bytes_total, message.bytes_done)
            return None

        with held(self._limits, under_way, repository, urgent=urgent):
            self._working.carry_out(order, on_message, under_way.stop)
        repository.refresh()
        return collected

    def _note_states(self, damaged: Mapping[UUID, bool]) -> None:
        at = now()
        for point_id, is_damaged in damaged.items():
            state = "damaged" if is_damaged else "ok"
            with contextlib.suppress(BackupNotFound):  # it was removed meanwhile
                self._points.change(point_id, state=state, verified_at=at)
