"""The order to copy disks, which every kind of job gives."""

from typing import ClassVar, Literal
from uuid import UUID

from synvirt.disks.checking.receipt_rows import LedgerSpec
from synvirt.disks.specs import ChecksumSpec, Qcow2WriterSpec, ReaderSpec, WriterSpec
from synvirt.jobs.wire import Order, Watched, WireModel
from synvirt.repository.specs import PointSpec

WANTED_RATE = "wanted_rate"
# A `result` without content: the worker prepares a copy, which is no progress of a pass (copying_disks.Preparing).
PREPARING = "preparing"
# A `result` whose content is a SourceFiles: the worker has opened a disk.
SOURCE_FILES = "source_files"
DIFFERING, LEFT = "differing", "left"


class HashesOrder(WireModel):
    """Hash the volume's content into the file at `path`, in the job's own folder. `last`: no pass comes after this one, so all
    that has no hash yet is read back."""

    path: str
    token: UUID
    last: bool


class DiskOrder(WireModel):
    """One disk of a pass. `since_bytes`: all bytes before it are on the destination already. `fresh`: the volume has only zeros
    and what this pass wrote, so zeros need not be written. `compare`: the volume may have the right bytes already; those are
    not written again. `sample`: samples are compared of what the reader's extents leave out, at places chosen by this text;
    with `verify`, all of it is. `zero_rest`: the volume is larger than the disk; the rest becomes zeros.
    `still`: the files of this host that it is read from must not change meanwhile."""

    key: str
    reader: ReaderSpec | PointSpec
    writer: WriterSpec | Qcow2WriterSpec
    checksums: tuple[ChecksumSpec, ...] = ()
    since_bytes: int = 0
    fresh: bool = True
    compare: bool = False
    sample: str | None = None
    verify: bool = False
    zero_rest: bool = False
    still: bool = False
    hashes: HashesOrder | None = None


class WantedRate(WireModel):
    """A `result` of the worker, where its rate is shared: it asks to read this many bytes."""

    bytes: int


class GivenRate(WireModel):
    """The service's answer: the bytes may be read now. 0: the copy is to end."""

    bytes: int


class SourceFiles(WireModel):
    """The plain files that a disk is read from, also those that its image names (`disks.noted_files`)."""

    key: str
    files: tuple[str, ...]


class CopyOrder(Order):
    """`bandwidth_bps`: the limit of this copy, in bytes a second. `shared_bytes`: other copies share the rate; this one asks
    for pieces of at most this size (WantedRate)."""

    watched: ClassVar[Watched] = Watched.WHILE_READING
    kind: Literal["copy"] = "copy"
    disks: tuple[DiskOrder, ...]
    threads: int | None = None
    bandwidth_bps: int | None = None
    shared_bytes: int | None = None
    flush_every_s: float = 5.0
    yields_to: str | None = None


class OpenedBeneath(WireModel):
    """`offline.OpenedDisk`, as a caged importer answers it."""

    reader: ReaderSpec
    checksums: tuple[ChecksumSpec, ...] = ()


class DiskRepairOrder(WireModel):
    """One volume, compared with its ledger. `since_bytes`: all before it was compared, and what was repaired there is durable.
    `source`: what differs is repaired from there; None: nothing is written."""

    key: str
    ledger: LedgerSpec
    volume: WriterSpec
    source: ReaderSpec | None = None
    since_bytes: int = 0


class RepairOrder(Order):
    """An order to compare and repair volumes. The worker's Flushed messages say how far each volume is."""

    kind: Literal["repair"] = "repair"
    disks: tuple[DiskRepairOrder, ...]
    threads: int | None = None


class DiskSpans(WireModel):
    """The worker's `result` named DIFFERING: the ranges (start, length) that are not as the ledger says. The worker waits for
    Noted before it writes there. The `result` named LEFT has the ranges among them that the source does not have either."""

    key: str
    spans: tuple[tuple[int, int], ...]


class Noted(WireModel):
    """The service's answer to DIFFERING: the ranges are in the store now."""

    key: str
