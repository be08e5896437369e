"""The guests of this host for a run: how each is held at one moment, by a table of ways.

    zfs       all its disks are volumes of one pool: an atomic snapshot, changes from `zfs send` (zfs.py)
    offline   it is shut off: its disks are at rest, and watched (offline.py)
    bitmap    it runs: a backup job of libvirt's, changes of qcow2 disks from a checkpoint (bitmap.py)

The first way that fits is used. Each gives readers for the disks at that moment, and, if it can, the areas that have changed
since the base restore point. If these are not known for certain, they are None, and the whole disk is read.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol
from uuid import UUID, uuid4

import structlog

from synvirt.backups.orders import ChangesSpec
from synvirt.backups.sources.made import Made, MadeRows
from synvirt.disks.specs import ReaderSpec
from synvirt.errors import BackupNotFound, Cancelled, Internal, SynvirtError
from synvirt.kvm.connection import Connection, find_domain, translated
from synvirt.model.values import now
from synvirt.nearest import in_short
from synvirt.repository.manifest import Manifest, Mark
from synvirt.sizes import counted

LOCK_POLL_S = 0.2
# The code of a run's warning.
SNAPSHOTS_LEFT_OUT = "E_BAK_SNAPSHOTS_LEFT_OUT"

Consistency = Literal["application", "filesystem", "crash", "offline"]

_log = structlog.get_logger("synvirt.backups")


@dataclass(frozen=True, slots=True)
class SourceDisk:
    """`changes`: lists what may differ from the base's disk of the same target; None: not known. `whole_because`: why the
    changes are not known; empty, if nobody expected them to be. `mark`: what the next run can count from."""

    target: str
    path: str
    spec: ReaderSpec
    changes: ChangesSpec | None = None
    whole_because: str = ""
    mark: Mark | None = None


@dataclass(frozen=True)
class Guest:
    """`at`: when its disks were held. `keep_marks` is called before the restore point exists, `marks_kept` after: then the
    marks of the run before can be removed. `freeze_ms`: how long its file systems were frozen. `moment`: a text that differs
    whenever the disks may differ."""

    vm_id: str
    name: str
    domain_xml: str
    nvram: str | None
    tpm: dict[str, str] | None
    disks: tuple[SourceDisk, ...]
    check_unchanged: Callable[[], None]
    way: Literal["zfs", "bitmap", "scan", "offline"] = "offline"
    consistency: Consistency = "offline"
    quiesced: bool = False
    freeze_ms: int | None = None
    base: Manifest | None = None
    at: datetime = field(default_factory=now)
    moment: str = field(default_factory=lambda: str(uuid4()))
    keep_marks: Callable[[], None] = lambda: None
    marks_kept: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Ask:
    """A run's request for a guest. `base`: the job's newest restore point with marks, by a guest's UUID. `move` and `warn` set
    the run's status; `stop` is checked while it waits."""

    vm_id: str
    job_id: UUID
    quiesce: Literal["off", "try", "require"]
    base: Callable[[str], Manifest | None]
    move: Callable[[Literal["quiescing", "snapshotting"]], None]
    warn: Callable[[str, str], None]
    stop: Callable[[], bool]


class Way(Protocol):
    """`fits`: None, or why the domain cannot be read this way. `end`: removes what it has made, except the marks; `sweep`: the
    marks too. Both idempotent."""

    name: str

    def fits(self, domain: Any) -> str | None: ...
    def open(self, domain: Any, ask: Ask) -> contextlib.AbstractContextManager[Guest]: ...
    def end(self, made: Made) -> None: ...
    def sweep(self, made: Made) -> None: ...


class Sources:
    """`ways` are tried in this order. Safe from several threads; a guest is read by one run at a time."""

    def __init__(self, connection: Connection, ledger: MadeRows, ways: tuple[Way, ...]) -> None:
        self._connection, self._ledger, self._ways = connection, ledger, ways
        self._locks: dict[str, threading.Lock] = {}
        self._locking = threading.Lock()
        self._sweepers: list[threading.Thread] = []

    def start(self) -> None:
        """Removes what a killed service left, in a thread of its own: it may have to wait for a guest."""
        if any(made.state != "lasting" for made in self._ledger.all()):
            self._sweepers.append(threading.Thread(target=self._sweep_all, name="backup-sweep", daemon=True))
            self._sweepers[-1].start()

    def close(self) -> None:
        """Waits until the sweeping in the background has ended."""
        for sweeper in self._sweepers:
            sweeper.join()

    @contextlib.contextmanager
    def open(self, ask: Ask) -> Iterator[Guest]:
        """The guest of that name or UUID, held at one moment. BackupNotFound, QuiesceFailed, Source…"""
        domain = found(self._connection, ask.vm_id)
        vm_id = _uuid(domain, ask.vm_id)
        with self.alone(vm_id, ask.stop):
            self._sweep(vm_id)
            _warn_of_snapshots(domain, ask)
            for way in self._ways:
                why_not = way.fits(domain)
                if why_not is None:
                    _log.info("guest is backed up", guest=vm_id, way=way.name)
                    with way.open(domain, ask) as guest:
                        yield guest
                    return
                _log.debug("guest cannot be backed up in this way", guest=vm_id, way=way.name, cause=why_not)
        raise Internal(f"there is no way to back up {ask.vm_id}")

    def id_of(self, vm_id: str) -> str:
        """The UUID of the guest of that name or UUID. BackupNotFound."""
        return _uuid(found(self._connection, vm_id), vm_id)

    def forget(self, job_id: UUID) -> None:
        """Removes the marks of a removed job, as at the start. What cannot be reached now is tried again at the next start."""
        for made in self._ledger.all():
            if made.job_id == job_id:
                self._ledger.put(made.model_copy(update={"state": "working"}))
        self.start()

    @contextlib.contextmanager
    def alone(self, vm_id: str, stop: Callable[[], bool]) -> Iterator[None]:
        """No other run reads or restores the guest of that UUID within the block. Cancelled, once `stop()` is true."""
        with self._locking:
            lock = self._locks.setdefault(vm_id, threading.Lock())
        while not lock.acquire(timeout=LOCK_POLL_S):
            if stop():
                raise Cancelled
        try:
            yield
        finally:
            lock.release()

    def _sweep_all(self) -> None:
        for vm_id in sorted({made.vm_id for made in self._ledger.all() if made.state != "lasting"}):
            with self.alone(vm_id, lambda: False):
                self._sweep(vm_id)

    def _sweep(self, vm_id: str) -> None:
        """Removes it while no other run uses the guest."""
        for made in self._ledger.all():
            if made.vm_id != vm_id or made.state == "lasting":
                continue
            way = next(way for way in self._ways if way.name == made.way)
            with _failure_logged(made):
                if made.state == "keeping":
                    way.end(made)
                    self._ledger.put(made.model_copy(update={"state": "lasting"}))
                else:
                    way.sweep(made)
                    self._ledger.strike(made)


@contextlib.contextmanager
def running(sources: Sources) -> Iterator[Sources]:
    """Begins to remove what a killed service left, and waits for that at the end of the block."""
    sources.start()
    try:
        yield sources
    finally:
        sources.close()


class Keeping:
    """What a run makes of a guest, on the ledger before it is made. If the run has called `commit`, only the marks are left at
    the block's end, and the marks of the job's runs before are removed; else everything is removed."""

    def __init__(self, ledger: MadeRows, way: Way, made: Made) -> None:
        self._ledger, self._way, self._made, self._committed = ledger, way, made, False

    def __enter__(self) -> "Keeping":
        self._before = [one for one in self._ledger.all() if (one.vm_id, one.job_id) == (self._made.vm_id, self._made.job_id)]
        self._ledger.put(self._made)
        return self

    def keep(self) -> None:
        """Call it before the restore point exists: if the service is killed after that, its marks are still known."""
        self._ledger.put(self._made.model_copy(update={"state": "keeping"}))

    def commit(self) -> None:
        self._committed = True

    def __exit__(self, *_: object) -> None:
        """What cannot be removed now stays on the ledger: the next run of the guest, and the next start, try again. Also if the
        ledger is away, the guest's job ends now, as its guest needs more and more space meanwhile."""
        if not self._committed:
            with _failure_logged(self._made):
                self._ledger.put(self._made)
            with _failure_logged(self._made):
                self._way.sweep(self._made)
                self._ledger.strike(self._made)
            return
        with _failure_logged(self._made):
            self._way.end(self._made)
            self._ledger.put(self._made.model_copy(update={"state": "lasting"}))
        for one in self._before:
            with _failure_logged(one):
                self._ledger.put(one.model_copy(update={"state": "working"}))
                self._way.sweep(one)
                self._ledger.strike(one)


@contextlib.contextmanager
def _failure_logged(made: Made) -> Iterator[None]:
    try:
        yield
    except SynvirtError as error:
        _log.warning("what a run made is not gone", guest=made.vm_id, name=made.name, cause=error.detail)


def found(connection: Connection, vm_id: str) -> Any:
    """The domain of that name or UUID. BackupNotFound."""
    domain = find_domain(connection, "lookupByName", vm_id) or find_domain(connection, "lookupByUUIDString", vm_id)
    if domain is None:
        raise BackupNotFound(f"this host has no domain {vm_id}", hint="vm_ids are names or UUIDs of this host's libvirt")
    return domain


def _warn_of_snapshots(domain: Any, ask: Ask) -> None:
    """Warns of the guest's snapshots that libvirt knows: a point has its disks as they are now, and no state before."""
    with translated(Internal, f"the hypervisor does not say which snapshots {ask.vm_id} has"):
        name, names = domain.name(), [str(one.getName()) for one in domain.listAllSnapshots(0)]
    if names:
        ask.warn(SNAPSHOTS_LEFT_OUT, f"{name} has {counted(len(names), 'snapshot')}, not backed up: {in_short(names)}")


def _uuid(domain: Any, vm_id: str) -> str:
    with translated(Internal, f"the hypervisor does not say how {vm_id} is"):
        return str(domain.UUIDString())


def new_name(job_id: UUID, taken: Iterable[str] = ()) -> str:
    """A name for what a run makes: the job's, and a number larger than those before."""
    start = f"synvirt-{job_id.hex[:16]}"
    numbers = [int(last) for first, _, last in (one.rpartition("-") for one in taken) if first == start and last.isdecimal()]
    return f"{start}-{max([time.time_ns() // 1_000_000, *(number + 1 for number in numbers)])}"
