"""What a run orders from a worker, besides copies: store a guest's disks in a repository, check points for damage, collect
garbage, serve disks, measure them.

    take      disks ─▶ chunks ─▶ packs; the worker says Ready, the service judges, and sends Commit; the worker asks to
              have it signed ─▶ the point exists
    verify_…  every chunk of a point, or every pack of a repository, from where the order before came to
    collect   what no point needs is removed; the worker says Planned, the service keeps that, and sends Go
    serve     disks of a point as NBD exports on Unix sockets, until the worker is stopped
    measure   how many bytes disks of points have that are not zeros

Orders reach a worker on its standard input, as they contain the repository's key.
"""

from typing import ClassVar, Literal

from synvirt.disks.specs import NbdSpec, ReaderSpec, Spec
from synvirt.jobs.wire import Order, Watched, WireModel
from synvirt.repository.specs import PointSpec, RepositorySpec
from synvirt.repository.verify import PacksLooked, PointLooked


class ZfsChangesSpec(Spec):
    """The changes that `zfs send -i since until` lists for a volume; `guid`: the expected guid of the bookmark `since`.
    `program`: zfs."""

    format: Literal["zfs_changes"] = "zfs_changes"
    program: str
    since: str
    guid: str
    until: str
    size_bytes: int


# Keys of progress that is not about one disk: what an order reads or removes, and what it reads to find that.
ALL, PAGES = "all", "pages"

# The origin of a list of changed areas: a bitmap that QEMU serves, or zfs.
ChangesSpec = NbdSpec | ZfsChangesSpec


class DiskToTake(WireModel):
    """`changes`: lists what may differ from the base's disk of the same key; None: not known. `whole_because`: why not, if it
    should be known."""

    key: str
    reader: ReaderSpec
    changes: ChangesSpec | None = None
    whole_because: str = ""


class TakeOrder(Order):
    """`base`: the restore point that changes count from; `base_sha256`: of its manifest, as in a PointSpec. `journal`: a file
    that lists what is stored already (taking_journal.py), of the guest at the moment with the name `moment`."""

    kind: Literal["take"] = "take"
    repository: RepositorySpec
    disks: tuple[DiskToTake, ...]
    base: str | None = None
    base_sha256: str | None = None
    journal: str | None = None
    moment: str = ""
    threads: int | None = None
    bandwidth_bps: int | None = None


class Doubt(WireModel):
    """Result `doubt`: why a disk's changes are not known after all."""

    key: str
    why: str


class Stored(WireModel):
    """Result `stored`: the growth of the repository so far."""

    stored_bytes: int


class DiskIsTaken(WireModel):
    """One disk is stored. Sizes in bytes; `resumed_bytes` of it were stored before the worker began. `whole`: all of it was
    read, not only changes. `checked_to`: the offset at which the next run continues with its samples. `snapshots`: how many its
    image has in itself; 0, where QEMU reads the image for us."""

    key: str
    size_bytes: int
    read_bytes: int
    resumed_bytes: int
    whole: bool
    checked_to: int
    snapshots: int = 0


class Ready(WireModel):
    """Result `ready`: all disks are stored, and the worker waits for Commit."""

    disks: tuple[DiskIsTaken, ...]


class Commit(WireModel):
    """The service's second line: `shown` and `sealed` are the manifest's parts as JSON, `shown` without the disks, which the
    worker adds."""

    shown: str
    sealed: str


class ToSign(WireModel):
    """Result `to_sign`: the digest of the point's statement (repository/manifest.py), the last step before the point exists."""

    sha256: str


class Signed(WireModel):
    """The service's third line: `signature` as JSON; None: this host does not sign. A worker never has the key."""

    signature: str | None


class VerifyPointOrder(Order):
    """Read every chunk of one restore point after `since`, and compare each with its name. `sha256`: as in a PointSpec. The
    worker reports its progress every `mark_every_s` seconds."""

    kind: Literal["verify_point"] = "verify_point"
    repository: RepositorySpec
    point_id: str
    sha256: str | None = None
    since: PointLooked | None = None
    mark_every_s: float = 5.0


class VerifyRepositoryOrder(Order):
    """Read every pack of a repository after `since`, and every manifest, and compare each with its hash. The worker reports its
    progress every `mark_every_s` seconds."""

    kind: Literal["verify_repository"] = "verify_repository"
    repository: RepositorySpec
    since: PacksLooked | None = None
    mark_every_s: float = 5.0


class PointSeen(WireModel):
    """Result `looked`, now and then and at the end: what was checked since the one before (`Looked.parts`). `more`: more parts
    of the same moment follow."""

    looked: PointLooked
    more: bool = False


class PacksSeen(WireModel):
    """Result `looked`, now and then, and when all packs are checked; like that of a point."""

    looked: PacksLooked
    more: bool = False


class RepositoryVerified(WireModel):
    """Result `verified`, several: `report` is a part of a `repository.verify.Report`, as JSON."""

    report: str


class CollectOrder(Order):
    """Remove what no restore point needs; with `dry_run` only count it. `before`: what the order before was about to remove, a
    `repository.garbage.Sweep` as JSON."""

    kind: Literal["collect"] = "collect"
    repository: RepositorySpec
    before: str | None = None
    dry_run: bool = False
    bandwidth_bps: int | None = None


class Planned(WireModel):
    """Result `planned`: `sweep`, a part of a `repository.garbage.Sweep` as JSON, is what will be removed next. The worker waits
    for Go first."""

    sweep: str


class Go(WireModel):
    """The service's line: it has stored the plan."""


class GarbageCollected(WireModel):
    """Result `collected`: a `repository.garbage.Collected` as JSON."""

    collected: str


class ServeOrder(Order):
    """`sockets`: a path for each disk, by its number in the point. `sha256`: as in a PointSpec. Result `serving`, when all of
    them listen."""

    watched: ClassVar[Watched] = Watched.NEVER
    kind: Literal["serve"] = "serve"
    repository: RepositorySpec
    point_id: str
    sockets: dict[int, str]
    sha256: str | None = None


class Serving(WireModel):
    """The exports' URIs, by the disk's number."""

    uris: dict[int, str]


class MeasureOrder(Order):
    """Count what disks of points have to be written to a new volume."""

    kind: Literal["measure"] = "measure"
    disks: tuple[PointSpec, ...]


class Measured(WireModel):
    """Result `measured`: for each disk of the order, its bytes that are not known to be zeros."""

    data_bytes: tuple[int, ...]
