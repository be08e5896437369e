"""What a run orders of a worker, beside copies: a guest's disks taken into a repository, points read for damage, garbage
collected, disks served.

    take      disks ─▶ chunks ─▶ packs; the worker says Ready, the service judges, and sends Commit; the worker asks to
              have it signed ─▶ the point exists
    verify_…  every chunk of a point, or every pack of a repository, from where the order before came to
    collect   what no point needs is removed; the worker says Planned, the service keeps that, and sends Go
    serve     disks of a point as NBD exports on Unix sockets, until the worker is stopped

Orders reach a worker on its standard input: the repository's key is in them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from synvirt.disks.specs import NbdSpec, ReaderSpec, Spec
from synvirt.jobs.wire import Order, Watched, WireModel
from synvirt.repository.specs import RepositorySpec
from synvirt.repository.verify import PacksLooked, PointLooked


@dataclass(frozen=True, slots=True, kw_only=True)
class ZfsChangesSpec(Spec):
    """What `zfs send -i since until` says of a volume; `guid`: what that of the bookmark `since` must be. `program`: zfs."""

    format: Literal["zfs_changes"] = "zfs_changes"
    program: str
    since: str
    guid: str
    until: str
    size_bytes: int


# The key of what an order reads or removes, where that is no disk; and of what it reads to find that.
ALL, PAGES = "all", "pages"

# Where a list of changed areas comes from: a bitmap that QEMU serves, or zfs.
ChangesSpec = NbdSpec | ZfsChangesSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskToTake(WireModel):
    """`changes`: what may differ from the base's disk of the same key; None: that is not known. `whole_because`: why,
    where it should be known."""

    key: str
    reader: ReaderSpec
    changes: ChangesSpec | None = None
    whole_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOrder(Order):
    """`base`: the restore point that changes count from, `base_sha256`: of its manifest, as of a PointSpec. `journal`: a file
    of what is stored already (taking_journal.py), of the guest at the moment that `moment` names."""

    kind: Literal["take"] = "take"
    repository: RepositorySpec
    disks: tuple[DiskToTake, ...]
    base: str | None = None
    base_sha256: str | None = None
    journal: str | None = None
    moment: str = ""
    threads: int | None = None
    bandwidth_bps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt(WireModel):
    """Result `doubt`: why what has changed of a disk is not known after all."""

    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(WireModel):
    """Result `stored`: what the repository grew by so far."""

    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskIsTaken(WireModel):
    """One disk is stored. Sizes in bytes; `resumed_bytes` of it were stored before the worker began. `whole`: all of it was
    read, not only changes. `checked_to`: the offset at which the next run goes on with its samples."""

    key: str
    size_bytes: int
    read_bytes: int
    resumed_bytes: int
    whole: bool
    checked_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(WireModel):
    """Result `ready`: all disks are stored, and the worker waits for Commit."""

    disks: tuple[DiskIsTaken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(WireModel):
    """The service's second line: `shown` and `sealed` are the manifest's parts as JSON, `shown` without the disks, which the
    worker has."""

    shown: str
    sealed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSign(WireModel):
    """Result `to_sign`: the digest of the point's statement (repository/manifest.py), as the last before the point exists."""

    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed(WireModel):
    """The service's third line: `signature` as JSON; None: this host signs nothing. The key is never a worker's to hold."""

    signature: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPointOrder(Order):
    """Read every chunk of one restore point that comes after `since`, and compare each with its name. `sha256`: as of a
    PointSpec. The worker says how far it is each `mark_every_s` seconds."""

    kind: Literal["verify_point"] = "verify_point"
    repository: RepositorySpec
    point_id: str
    sha256: str | None = None
    since: PointLooked | None = None
    mark_every_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRepositoryOrder(Order):
    """Read every pack of a repository that comes after `since`, and every manifest, and compare each with its hash. The worker
    says how far it is each `mark_every_s` seconds."""

    kind: Literal["verify_repository"] = "verify_repository"
    repository: RepositorySpec
    since: PacksLooked | None = None
    mark_every_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSeen(WireModel):
    """Result `looked`, now and then and at the end: what has come since the one before (`Looked.parts`). `more`: of the same
    moment follow more."""

    looked: PointLooked
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PacksSeen(WireModel):
    """Result `looked`, now and then, and when all packs are looked at; as of a point."""

    looked: PacksLooked
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryVerified(WireModel):
    """Result `verified`, several: `report` is a part of a `repository.verify.Report`, as JSON."""

    report: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOrder(Order):
    """Take out of use what no restore point needs; with `dry_run` it is only counted. `before`: what the order before was about
    to do, a `repository.garbage.Sweep` as JSON."""

    kind: Literal["collect"] = "collect"
    repository: RepositorySpec
    before: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(WireModel):
    """Result `planned`: `sweep`, a part of a `repository.garbage.Sweep` as JSON, is about to be done. The worker waits for Go
    first."""

    sweep: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Go(WireModel):
    """The service's line: it has kept what is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageCollected(WireModel):
    """Result `collected`: a `repository.garbage.Collected` as JSON."""

    collected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOrder(Order):
    """`sockets`: a path for each disk, by its number in the point. `sha256`: as of a PointSpec. Result `serving` when all of
    them listen."""

    watched: ClassVar[Watched] = Watched.NEVER
    kind: Literal["serve"] = "serve"
    repository: RepositorySpec
    point_id: str
    sockets: dict[int, str]
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(WireModel):
    """The exports' URIs, by the disk's number."""

    uris: dict[int, str]
