"""Disks: a file or a package per format. `open_reader` and `open_writer` open what a spec describes; `detect` finds a format.

The tables are written out: a format is a line here, and one in `formats.py` where it has a magic. Its module is imported when
an image of it is opened, so that listing jobs and copying raw disks load none.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synvirt.blocks import DiskReader, DiskWriter
from synvirt.disks.formats import MAGICS, ImageOpeners, by_magic, is_fixed_vhd
from synvirt.disks.nbd.fallback import driver_of, passphrase, qemu_spec
from synvirt.disks.raw.files import RawReader, open_file_writer
from synvirt.disks.specs import (
    NESTING_MAX,
    AllocatedSpec,
    AsideSpec,
    AsideWriterSpec,
    BlankSpec,
    BlockWriterSpec,
    ChangedSpec,
    DatastoreSpec,
    DeltaSpec,
    DownloadSpec,
    FileWriterSpec,
    GzipSpec,
    ImageSpec,
    IscsiSpec,
    JoinedSpec,
    LeaseSpec,
    NbdTlsSpec,
    NfsSpec,
    QemuSpec,
    RawSpec,
    RbdSpec,
    ReaderSpec,
    ServedSpec,
    Spec,
    VddkSpec,
    WriterSpec,
    XapiExportSpec,
    XvaSpec,
)
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.sizes import SECTOR_BYTES

if TYPE_CHECKING:
    from synvirt.disks.passed import Pace


def _qcow2(over: DiskReader, spec: ImageSpec) -> DiskReader:
    from synvirt.disks.qcow2.reader import Qcow2Reader

    return Qcow2Reader(over, root=spec.root, name=spec.name, images=IMAGES)


def _vhdx(over: DiskReader, spec: ImageSpec) -> DiskReader:
    from synvirt.disks.vhdx.reader import VhdxReader

    return VhdxReader(over, root=spec.root, name=spec.name, alone=spec.alone)


def _vdi(over: DiskReader, spec: ImageSpec) -> DiskReader:
    from synvirt.disks.vdi import VdiReader

    return _over_parent(spec, lambda parent: VdiReader(over, root=spec.root, name=spec.name, parent=parent))


def _over_parent(spec: ImageSpec, opened: Callable[[DiskReader | None], DiskReader]) -> DiskReader:
    """Opens the image over the spec's parent, which it then owns."""
    parent = None if spec.parent is None else open_reader(spec.parent)
    try:
        return opened(parent)
    except BaseException:
        if parent is not None:
            parent.close()
        raise


def _vhd(over: DiskReader, spec: ImageSpec) -> DiskReader:
    from synvirt.disks.vhd import VhdReader

    return VhdReader(over, root=spec.root, name=spec.name)


def _vmdk(over: DiskReader, spec: ImageSpec) -> DiskReader:
    from synvirt.disks.vmdk.reader import VmdkReader

    return _over_parent(spec, lambda parent: VmdkReader(over, root=spec.root, name=spec.name, parent=parent))


def _delta(over: DiskReader, spec: DeltaSpec) -> DiskReader:
    from synvirt.disks.vmdk.reader import open_delta

    parent = open_reader(spec.parent)
    try:
        return open_delta(over, parent, spec.name)
    except BaseException:
        parent.close()
        raise


def _xva(over: DiskReader, spec: XvaSpec, pace: "Pace | None") -> DiskReader:
    if spec.packing is not None:
        from synvirt.disks.xva.stream import XvaStream

        stream = XvaStream(over, spec.packing, spec.folder, spec.size_bytes, spec.name)
        if pace is not None:
            stream.pass_others(pace)
        return stream
    from synvirt.disks.xva.reader import XvaReader

    return XvaReader(over, spec.folder, spec.size_bytes, spec.name)


def _raw(spec: RawSpec) -> DiskReader:
    if spec.remote is None and spec.beneath is None:
        return RawReader(spec.path, spec.offset, spec.length)
    from synvirt.disks.roots import open_spec

    return open_spec(spec)


def _joined(spec: JoinedSpec) -> DiskReader:
    from synvirt.disks.joined import JoinedReader

    return JoinedReader(spec.parts)


def _blank(spec: BlankSpec) -> DiskReader:
    from synvirt.disks.raw.blank import BlankReader

    return BlankReader(spec.size_bytes)


def _aside(spec: AsideSpec) -> DiskReader:
    from synvirt.disks.raw.aside import AsideReader

    return AsideReader(spec)


def _changed(over: DiskReader, spec: ChangedSpec) -> DiskReader:
    from synvirt.disks.changed import ChangedReader

    return ChangedReader(over, spec.areas)


def _allocated(over: DiskReader, spec: AllocatedSpec) -> DiskReader:
    from synvirt.disks.changed import AllocatedReader

    return AllocatedReader(over, spec.areas)


def _gzipped(over: DiskReader, spec: GzipSpec, pace: "Pace | None") -> DiskReader:
    from synvirt.disks.packed.gzipped import GzippedReader

    return GzippedReader(over, spec.size_max_bytes, spec.name, pace, size_least_bytes=spec.size_least_bytes)


def _served(spec: ServedSpec) -> DiskReader:  # noqa: PLR0911 - a table in the form of code
    if isinstance(spec, NfsSpec | IscsiSpec | DownloadSpec):
        return _by_network(spec)
    if isinstance(spec, RbdSpec):
        from synvirt.disks.rbd import RbdReader

        return RbdReader(spec)
    if isinstance(spec, DatastoreSpec):
        from synvirt.disks.vsphere.datastore import DatastoreReader

        return DatastoreReader(spec)
    if isinstance(spec, VddkSpec):
        from synvirt.disks.vsphere.vddk import VddkReader

        return VddkReader(spec)
    if isinstance(spec, LeaseSpec):
        from synvirt.disks.vsphere.exported import EitherReader, ExportedReader

        return ExportedReader(spec) if spec.instead is None else EitherReader(spec, open_reader)
    if isinstance(spec, XapiExportSpec):
        from synvirt.disks.xen.exported import VdiReader

        return VdiReader(spec)
    from synvirt.disks.nbd.reader import TLS_CONNECTIONS, NbdReader, by_tls

    if isinstance(spec, NbdTlsSpec):
        return NbdReader(by_tls(spec), connections=min(spec.connections, TLS_CONNECTIONS), name=spec.name)
    return NbdReader(spec.uri, bitmap=spec.bitmap, connections=spec.connections)


def _by_network(spec: NfsSpec | IscsiSpec | DownloadSpec) -> DiskReader:
    if isinstance(spec, NfsSpec):
        from synvirt.disks.nfs import NfsReader

        return NfsReader(spec)
    if isinstance(spec, IscsiSpec):
        from synvirt.disks.nbd.iscsi import IscsiReader

        return IscsiReader(spec)
    from synvirt.disks.download import DownloadReader

    return DownloadReader(spec)


def _qemu(spec: QemuSpec) -> DiskReader:
    from synvirt.disks.nbd.qemu import QemuNbdReader

    return QemuNbdReader(
        spec.path,
        spec.driver,
        offset=spec.offset,
        length=spec.length,
        name=spec.name,
        passphrase=passphrase(spec),
        beneath=spec.beneath,
    )


IMAGES: ImageOpeners = {
    "vmdk": _vmdk,
    "qcow2": _qcow2,
    "vhdx": _vhdx,
    "vdi": _vdi,
    "vhd": _vhd,
}


def open_reader(spec: ReaderSpec, pace: "Pace | None" = None) -> DiskReader:
    """The reader that the spec describes. DiskReadFailed, MalformedArchive, UnsupportedFormat, SourceUnreachable.

    With a `pace`, what must be read before the disk's first byte is read here, at that pace: Cancelled, too.
    """
    return _open_reader(spec, 1, pace)


# The specs that lie over no other one.
_BY_THEMSELVES: dict[type[Spec], Callable[[Any], DiskReader]] = {
    RawSpec: _raw,
    QemuSpec: _qemu,
    JoinedSpec: _joined,
    BlankSpec: _blank,
    AsideSpec: _aside,
}


def _open_reader(spec: ReaderSpec, depth: int, pace: "Pace | None") -> DiskReader:
    if depth > NESTING_MAX:
        raise MalformedArchive(f"images lie in one another more than {NESTING_MAX} deep")
    if isinstance(spec, ServedSpec):
        return _served(spec)
    if isinstance(spec, RawSpec | QemuSpec | JoinedSpec | BlankSpec | AsideSpec):
        return _BY_THEMSELVES[type(spec)](spec)
    over = _open_reader(spec.over, depth + 1, pace)
    try:
        return _laid_over(over, spec, pace)
    except BaseException:
        over.close()
        raise


def _laid_over(
    over: DiskReader,
    spec: ImageSpec | AllocatedSpec | ChangedSpec | DeltaSpec | XvaSpec | GzipSpec,
    pace: "Pace | None",
) -> DiskReader:
    match spec:
        case AllocatedSpec():
            return _allocated(over, spec)
        case ChangedSpec():
            return _changed(over, spec)
        case XvaSpec():
            return _xva(over, spec, pace)
        case DeltaSpec():
            return _delta(over, spec)
        case GzipSpec():
            return _gzipped(over, spec, pace)
    opener = IMAGES.get(spec.format)
    if opener is None:
        raise UnsupportedFormat(f"{spec.name or 'the image'} is a {spec.format} image, which is not read yet")
    if spec.alone and spec.format != "vhdx":
        raise UnsupportedFormat(f"{spec.name or 'the image'} is a {spec.format} image, which is not read without its parent")
    return opener(over, spec)


def snapshots_inside(spec: Spec, reader: DiskReader | None = None) -> int:
    """How many snapshots a qcow2 image has in itself. No reader reads them. `reader`: the spec's, where it is open."""
    if not isinstance(spec, ImageSpec) or spec.format != "qcow2":
        return 0
    if reader is None:
        with closing(open_reader(spec)) as opened:
            return snapshots_inside(spec, opened)
    from synvirt.disks.qcow2.reader import Qcow2Reader

    return reader.header.snapshots if isinstance(reader, Qcow2Reader) else 0


def sector_bytes(spec: Spec, reader: DiskReader) -> int:
    """The size of the sectors that the spec's disk, which is open, has for its guest. Only a VHDX says it."""
    if not isinstance(spec, ImageSpec) or spec.format != "vhdx":
        return SECTOR_BYTES
    from synvirt.disks.vhdx.reader import VhdxReader

    return reader.metadata.sector_bytes if isinstance(reader, VhdxReader) else SECTOR_BYTES


def open_writer(spec: WriterSpec) -> DiskWriter:
    """The writer that the spec describes. DiskWriteFailed."""
    if isinstance(spec, FileWriterSpec):
        return open_file_writer(spec.path, spec.size_bytes)
    if isinstance(spec, AsideWriterSpec):
        from synvirt.disks.raw.aside import AsideWriter, fold

        if not spec.folds:
            return AsideWriter(spec)
        fold(spec)
        return open_file_writer(spec.path, spec.size_bytes)
    if isinstance(spec, BlockWriterSpec):
        from synvirt.disks.raw.direct import open_direct_writer

        return open_direct_writer(spec.path, spec.size_bytes)
    from synvirt.disks.rbd import RbdWriter

    return RbdWriter(spec)


def detect(
    path: Path, *, offset: int = 0, length: int | None = None, name: str = "", root: Path | None = None
) -> RawSpec | ImageSpec | QemuSpec:
    """How to read a file, or the range of it that is an archive's member, by its magic; raw where there is none.

    An image that our own readers do not read is QEMU's (see `fallback`). `root`: the folder in which files that the image
    names may lie, at or above its own, which is the default.

    Only for a person's own command line: a guest can write any magic into its raw disk, so elsewhere the format is always
    given.
    """
    root = root or path.parent
    name = name or str(path.relative_to(root))
    raw = RawSpec(path=str(path), offset=offset, length=length)
    reader = RawReader(raw.path, raw.offset, raw.length)
    try:
        fixed = is_fixed_vhd(reader)
        driver = None if fixed else driver_of(reader)
        found = "vhd" if fixed else None if driver else by_magic(reader, MAGICS)
    finally:
        reader.close()
    if driver is not None:
        return qemu_spec(raw, driver, name)
    return raw if found is None else ImageSpec(format=found, over=raw, root=str(root), name=name)
