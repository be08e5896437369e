"""A worker's tasks for backups (orders.py): they handle a guest's bytes, outside the service.

Imported only by the worker, and by tests.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import UUID

from synvirt.backups.orders import (
    ALL,
    PAGES,
    ChangesSpec,
    CollectOrder,
    Commit,
    DiskIsTaken,
    DiskToTake,
    Doubt,
    GarbageCollected,
    Measured,
    MeasureOrder,
    PacksSeen,
    Planned,
    PointSeen,
    Ready,
    RepositoryVerified,
    ServeOrder,
    Serving,
    Signed,
    Stored,
    TakeOrder,
    ToSign,
    VerifyPointOrder,
    VerifyRepositoryOrder,
    ZfsChangesSpec,
)
from synvirt.backups.sources import zfs_stream
from synvirt.backups.worker.caging import cage_of_collecting, cage_of_look, cage_of_measuring, cage_of_serving, cage_of_take
from synvirt.backups.worker.taking import Taken, ToTake, take
from synvirt.backups.worker.taking_journal import Journal
from synvirt.blocks import DiskReader, Extent
from synvirt.copying import Copied
from synvirt.disks import open_reader, snapshots_inside
from synvirt.disks.nbd.server import NbdServer
from synvirt.errors import BackupNotFound, Cancelled, RepositoryDamaged
from synvirt.jobs import dataclass_json
from synvirt.jobs.copying_disks import Progress
from synvirt.jobs.wire import Moved, Result, Wire, WireModel
from synvirt.jobs.worker import Task
from synvirt.repository.garbage import Sweep, collect
from synvirt.repository.manifest import Manifest, Sealed, Shown, Signature
from synvirt.repository.opening import OpenRepositories
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session
from synvirt.repository.specs import PointSpec
from synvirt.repository.verify import Looked, PacksLooked, PointLooked, judged, look_at_packs, verify_point

STOP_POLL_S = 0.2


def _result(name: str, content: WireModel, *, waits: bool = False) -> Result:
    return Result(name=name, content=dataclass_json.plain(content), waits=waits)


# ── disks into a repository ──────────────────────────────────────────────────────────────────────────────────────────


# This worker's streams, by their specs.
_sends: dict[ZfsChangesSpec, zfs_stream.Send] = {}


def begin_sends(order: TakeOrder) -> None:
    """Starts `zfs send` before the cage, as zfs checks its caller and would refuse it afterwards."""
    for disk in order.disks:
        if isinstance(disk.changes, ZfsChangesSpec):
            _sends[disk.changes] = zfs_stream.send(disk.changes)


def take_disks(order: TakeOrder, wire: Wire) -> None:
    """Stores each disk, then sends Ready. The point exists when the service has sent Commit and this returns."""
    with OpenRepositories() as repositories, ExitStack() as stack:
        repository = repositories.repository(order.repository)
        session = Session(repository)
        base = None if order.base is None else repository.manifest(UUID(order.base), order.base_sha256)
        journal = None
        if order.journal is not None:
            journal = stack.enter_context(closing(Journal(Path(order.journal), order.moment + repository.keys.epoch)))
        taken: list[Taken] = []
        for number, disk in enumerate(order.disks):
            figures = _Figures(disk.key, wire, session)
            taken.append(
                take(
                    _to_take(disk, number, journal),
                    base,
                    repository,
                    session,
                    stop=wire.stop,
                    on_progress=figures.moved,
                    doubt=partial(_doubt, wire, disk.key),
                    threads=order.threads,
                    bandwidth_bps=order.bandwidth_bps,
                )
            )
            figures.ended(taken[-1])
        wire.say(_result("ready", Ready(disks=tuple(map(_disk_is_taken, order.disks, taken))), waits=True))
        commit = Commit.from_line(wire.next_line())
        shown = Shown.model_validate({**json.loads(commit.shown), "disks": tuple(one.disk for one in taken)})
        if not _is_there(repository, shown):
            session.commit(Manifest(shown=shown, sealed=Sealed.model_validate_json(commit.sealed)), partial(_signed, wire))
        figures = _Figures(ALL, wire, session)
        figures.stored()


def _is_there(repository: Repository, shown: Shown) -> bool:
    """Whether a worker before this one has committed the point, and died before it could say so. Written again, its seal would
    have other bytes, and a peer replaces nothing."""
    try:
        return repository.manifest(shown.id).shown == shown
    except (BackupNotFound, RepositoryDamaged):
        return False


def _signed(wire: Wire, digest: str) -> Signature | None:
    wire.say(_result("to_sign", ToSign(sha256=digest), waits=True))
    signature = Signed.from_line(wire.next_line()).signature
    return None if signature is None else Signature.model_validate_json(signature)


def _to_take(disk: DiskToTake, number: int, journal: Journal | None) -> ToTake:
    return ToTake(
        target=disk.key,
        open=partial(open_reader, disk.reader),
        changed=None if disk.changes is None else partial(_changed, disk.changes),
        whole_because=disk.whole_because,
        stored=(lambda files: {}) if journal is None else partial(journal.stored, number),
        on_named=(lambda chunk, name: None) if journal is None else partial(journal.add, number),
    )


def _changed(changes: ChangesSpec) -> Iterable[Extent]:
    if isinstance(changes, ZfsChangesSpec):
        yield from zfs_stream.changed(_sends.pop(changes) if changes in _sends else zfs_stream.send(changes))
        return
    with closing(open_reader(changes)) as reader:
        yield from reader.extents()


def _doubt(wire: Wire, key: str, why: str) -> None:
    wire.say(_result("doubt", Doubt(key=key, why=why)))


def _disk_is_taken(disk: DiskToTake, taken: Taken) -> DiskIsTaken:
    return DiskIsTaken(
        key=disk.key,
        size_bytes=taken.disk.size_bytes,
        read_bytes=taken.read_bytes,
        resumed_bytes=taken.resumed_bytes,
        whole=taken.whole,
        checked_to=taken.checked_to,
        snapshots=snapshots_inside(disk.reader),
    )


class _Figures:
    """Progress of a disk, and with it the growth of the repository."""

    def __init__(self, key: str, wire: Wire, session: Session) -> None:
        self._progress, self._wire, self._session = Progress(key, wire), wire, session
        self._last, self._key, self._stored_bytes = Copied(0, 0, 0, 0), key, -1

    def moved(self, copied: Copied) -> None:
        self._last = copied
        self._progress.moved(copied)
        self.stored()

    def ended(self, taken: Taken) -> None:
        """The last figure is always reported, even soon after another one."""
        last = self._last
        self._wire.say(
            Moved(key=self._key, bytes_total=taken.read_bytes, bytes_done=taken.read_bytes, bytes_zero=last.bytes_zero)
        )
        self.stored()

    def stored(self) -> None:
        if self._session.stored_bytes != self._stored_bytes:
            self._stored_bytes = self._session.stored_bytes
            self._wire.say(_result("stored", Stored(stored_bytes=self._stored_bytes)))


# ── verification ─────────────────────────────────────────────────────────────────────────────────────────────────────


L = TypeVar("L", bound=Looked)


class _Marks(Generic[L]):
    """The progress of a verification, reported now and then: what was checked after the last report is checked again after a
    kill. `since`: what the service has; `seen`: makes a message of what was added to that."""

    def __init__(self, wire: Wire, every_s: float, since: L, seen: Callable[[L, bool], WireModel]) -> None:
        self._wire, self._every_s, self._sent, self._seen = wire, every_s, since, seen
        self._broken_sent, self._sent_at = len(since.broken), time.monotonic()

    def looked(self, so_far: L) -> None:
        if time.monotonic() - self._sent_at >= self._every_s:
            self.say(so_far)

    def say(self, so_far: L) -> None:
        *first, last = so_far.parts(self._sent, self._broken_sent)
        for part in first:
            self._wire.say(_result("looked", self._seen(part, True)))
        self._wire.say(_result("looked", self._seen(last, False)))
        self._sent, self._broken_sent, self._sent_at = so_far, len(so_far.broken), time.monotonic()


def verify_one(order: VerifyPointOrder, wire: Wire) -> None:
    """The task of a VerifyPointOrder: sends PointSeen now and then, and at its end."""
    since, progress = order.since or PointLooked(), Progress(ALL, wire)
    marks = _Marks(wire, order.mark_every_s, since, lambda part, more: PointSeen(looked=part, more=more))

    def looked(so_far: PointLooked) -> None:
        progress.moved(Copied(so_far.bytes_read, so_far.bytes_read, 0, 0))
        marks.looked(so_far)

    with OpenRepositories() as repositories:
        try:
            found = verify_point(
                repositories.repository(order.repository),
                UUID(order.point_id),
                sha256=order.sha256,
                stop=wire.stop,
                since=order.since,
                on_looked=looked,
            )
        except (BackupNotFound, RepositoryDamaged) as error:
            found = replace(since, wrong=error.detail, disks=())
    marks.say(found)


def verify_all(order: VerifyRepositoryOrder, wire: Wire) -> None:
    """The task of a VerifyRepositoryOrder: sends PacksSeen now and then, the parts of RepositoryVerified at its end."""
    progress, pages, speaking = Progress(ALL, wire), Progress(PAGES, wire), threading.Lock()
    marks = _Marks(wire, order.mark_every_s, order.since or PacksLooked(), lambda part, more: PacksSeen(looked=part, more=more))

    def read(total: int, done: int) -> None:
        with speaking:
            progress.moved(Copied(total, done, 0, 0))

    with OpenRepositories() as repositories:
        repository = repositories.repository(order.repository)
        looked = look_at_packs(repository, wire.stop, read, since=order.since, on_looked=marks.looked)
        marks.say(looked)
        report = judged(repository, looked, wire.stop, lambda count: pages.moved(Copied(count, count, 0, 0)))
    for part in report.parts():
        wire.say(_result("verified", RepositoryVerified(report=part.model_dump_json())))


# ── garbage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def collect_garbage(order: CollectOrder, wire: Wire) -> None:
    """The task of a CollectOrder: reports what it will remove, removes it once the service has stored that; GarbageCollected at
    its end."""
    pages, packs, durable_bytes = Progress(PAGES, wire), Progress(ALL, wire), 0

    def planned(sweep: Sweep) -> None:
        wire.say(_result("planned", Planned(sweep=sweep.model_dump_json()), waits=True))
        wire.next_line()

    def progressed(copied: Copied) -> None:
        nonlocal durable_bytes
        say = packs.flushed if copied.watermark > durable_bytes else packs.moved
        durable_bytes = copied.watermark
        say(copied)

    with OpenRepositories() as repositories:
        collected = collect(
            repositories.repository(order.repository),
            dry_run=order.dry_run,
            bandwidth_bps=order.bandwidth_bps,
            before=None if order.before is None else Sweep.model_validate_json(order.before),
            on_looked=lambda bytes_read: pages.moved(Copied(bytes_read, bytes_read, 0, 0)),
            on_sweep=planned,
            on_progress=progressed,
            stop=wire.stop,
        )
    wire.say(_result("collected", GarbageCollected(collected=collected.model_dump_json())))


# ── disks served to a guest ──────────────────────────────────────────────────────────────────────────────────────────


def serve(order: ServeOrder, wire: Wire) -> None:
    """Serves until the worker is stopped: Cancelled, or the error of a read."""
    with OpenRepositories() as repositories, ExitStack() as stack:
        servers = {}
        for number in order.sockets:
            spec = PointSpec(repository=order.repository, point_id=order.point_id, number=number, sha256=order.sha256)
            servers[number] = server = NbdServer(stack.enter_context(closing(repositories.point(spec))))
            stack.callback(server.close)
        uris = {number: server.listen(Path(order.sockets[number])) for number, server in servers.items()}
        wire.say(_result("serving", Serving(uris=uris)))
        pause = threading.Event()
        while not wire.stop() and not any(server.failure for server in servers.values()):
            pause.wait(STOP_POLL_S)
        for server in servers.values():
            if server.failure is not None:
                raise server.failure
        raise Cancelled


# ── how much there is to restore ─────────────────────────────────────────────────────────────────────────────────────


def measure(order: MeasureOrder, wire: Wire) -> None:
    """The task of a MeasureOrder: Measured. It reads the lists of chunks, and no chunk."""
    with OpenRepositories() as repositories:
        data_bytes = tuple(_data_bytes(repositories.point(spec)) for spec in order.disks)
    wire.say(_result("measured", Measured(data_bytes=data_bytes)))


def _data_bytes(disk: DiskReader) -> int:
    return sum(extent.length for extent in disk.extents() if not extent.zero)


TASKS: dict[str, Task[Any]] = {
    "take": Task(TakeOrder, take_disks, cage_of_take, begin_sends),
    "verify_point": Task(VerifyPointOrder, verify_one, cage_of_look),
    "verify_repository": Task(VerifyRepositoryOrder, verify_all, cage_of_look),
    "collect": Task(CollectOrder, collect_garbage, cage_of_collecting),
    "serve": Task(ServeOrder, serve, cage_of_serving),
    "measure": Task(MeasureOrder, measure, cage_of_measuring),
}
