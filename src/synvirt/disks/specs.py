"""Readers and writers as data: the engine stores them, gives them to a worker process, and opens them again after a crash.

    {"format": "vmdk", "over": {"format": "raw", "path": "…/a.ova", "offset": 1536, "length": 73400320}}

An image is read over another reader, the bytes of its file, so any format may be in any other: a VMDK in a tar member is a VMDK
over a range of a raw file. `open_reader` and `open_writer` in this package open a spec.

Plain data classes, so that a copy on the command line does not load pydantic, whose models may have them as fields. Offsets and
lengths are bytes.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from synvirt.disks.noted_files import NotedFile
from synvirt.records import Record, field, replace
from synvirt.remote import Remote

# A VMDK in a gzip in a tar is 3 deep, a differencing chain is not nesting. 8 leaves room and stops a loop.
NESTING_MAX = 8

ImageFormat = Literal["vmdk", "qcow2", "vhdx", "vhd", "vdi"]
QemuDriver = Literal["qcow2", "luks", "qcow", "qed", "bochs", "cloop", "dmg", "parallels", "vdi", "vhdx", "vpc"]
ChecksumAlgorithm = Literal["sha1", "sha256", "sha512"]
Packing = Literal["gzip", "zstd"]

# The root for files named inside an image: a folder of this host, or a remote one.
ImageRoot = str | Remote


class Spec(Record):
    """The base of all specs: an unknown field is an error."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


class RawSpec(Spec):
    """A range of a file or block device, unchanged, for example a tar member; `length` None means up to its end.

    With `remote`, `path` is the file's name in it, and `version` the version that it must still have. `beneath`: the folder
    that the file must be in when it is opened, even if links in its path have changed since.
    """

    format: Literal["raw"] = "raw"
    path: str
    offset: int = 0
    length: int | None = None
    remote: Remote | None = None
    version: str | None = None
    beneath: str | None = field(default=None, compare=False)


class ImageSpec(Spec):
    """A disk image over the bytes of its file.

    `root` is the folder for files named inside the image (backing files, extents, parents); None refuses any.
    `name` is the image's name in errors: a file or member name, never a host path. With a `root` it is the image's path under
    `root`, so that the image's names are looked for in its own folder.
    `parent` is the parent of a differencing image that does not name one itself: VirtualBox' VDI and VMDK.
    `alone`: only what a differencing VHDX has itself, as extents; its parent is not looked for, and the rest is left out.
    """

    format: ImageFormat
    over: "ReaderSpec"
    root: ImageRoot | None = None
    name: str = ""
    parent: "ReaderSpec | None" = None
    alone: bool = False


class NbdSpec(Spec):
    """An NBD export. `bitmap` names a dirty-bitmap context (`qemu:dirty-bitmap:…`): then the extents are its dirty ranges."""

    format: Literal["nbd"] = "nbd"
    uri: str
    bitmap: str | None = None
    connections: int = 4


class DatastoreSpec(Spec):
    """A file of a vSphere datastore, by HTTPS from /folder; `size_bytes` None: the size that its server reports. With `areas`,
    (start, length) each, the rest reads as zeros.

    `session_manager` is the platform's id of the one that logs us in. `hosts`: the ESXi hosts, by name, to which a vCenter may
    redirect the reader, each with its certificate's thumbprint in hex, which may be empty. `direct`: name and port of the host
    that is asked before vCenter, with tickets from vCenter; with `direct_only` vCenter is not asked for bytes. A spec with a
    password goes only to the worker and is never stored.
    """

    format: Literal["datastore"] = "datastore"
    host: str
    port: int = 443
    user: str
    password: str = field(repr=False)
    session_manager: str = "SessionManager"
    api_version: str = "6.5"
    verify_tls: bool = True
    fingerprint_sha256: str | None = None
    hosts: tuple[tuple[str, str], ...] = ()
    direct: tuple[str, int] | None = None
    direct_only: bool = False
    datacenter: str
    datastore: str
    path: str
    size_bytes: int | None
    areas: tuple[tuple[int, int], ...] | None = None


def leaves_unwritten_out(spec: "ReaderSpec") -> bool:
    """Whether the reader leaves out what its platform's change tracking calls never written."""
    return isinstance(spec, AllocatedSpec) or (isinstance(spec, DatastoreSpec) and spec.areas is not None)


def read_whole(spec: "ReaderSpec") -> "ReaderSpec":
    """The same disk, without leaving out what a platform reports as never written."""
    if isinstance(spec, AllocatedSpec):
        return spec.over
    return replace(spec, areas=None) if isinstance(spec, DatastoreSpec) else spec


class DeltaSpec(Spec):
    """A snapshot's sparse extent from a vSphere datastore, over the disk under it."""

    format: Literal["vmdk_delta"] = "vmdk_delta"
    over: "ReaderSpec"
    parent: "ReaderSpec"
    name: str = ""


class VddkSpec(Spec):
    """A disk in a snapshot of a vSphere VM, by VMware's VDDK: ids are vSphere's, `file` is the disk's `[datastore] path`,
    `libdir` the operator's folder with VDDK. Its password goes only to the worker."""

    format: Literal["vddk"] = "vddk"
    host: str
    port: int = 443
    user: str
    password: str = field(repr=False)
    verify_tls: bool = True
    fingerprint_sha256: str | None = None
    vm_id: str
    snapshot_id: str
    file: str
    libdir: str
    transports: str = ""


class LeaseSpec(Spec):
    """A disk in a snapshot of a vSphere VM that a host sends under an export lease, which its maker keeps alive.

    `target`: the URL's path, which opens the disk to anyone who knows it. `thumbprint`: of the host's certificate, in hex; a
    pin has priority. `cookie` is empty where the host is not the platform itself. `instead`: the same disk in another way,
    which is read from the point where the lease fails."""

    format: Literal["lease"] = "lease"
    host: str
    port: int = 443
    target: str = field(repr=False)
    cookie: str = field(default="", repr=False)
    verify_tls: bool = True
    fingerprint_sha256: str | None = None
    thumbprint: str | None = None
    size_bytes: int
    name: str = ""
    instead: "ReaderSpec | None" = None


class NbdTlsSpec(Spec):
    """An NBD export. Its server shows the certificate in `trusted`, a folder with ca-cert.pem, issued for `host`. `export` may
    open the disk to anyone who knows it: it is in no error. `name` is the export's name in errors."""

    format: Literal["nbd_tls"] = "nbd_tls"
    host: str
    port: int
    export: str = field(repr=False)
    trusted: str
    name: str = ""
    connections: int = 4


class XapiExportSpec(Spec):
    """A VDI that a XenServer host sends from /export_raw_vdi: once, from front to back. `vdi` and `base` are references; with
    `base`, only the difference from that one. `session_id` goes only to the worker: it is never stored."""

    format: Literal["xapi_export"] = "xapi_export"
    host: str
    port: int = 443
    session_id: str = field(repr=False)
    vdi: str
    base: str | None = None
    payload: Literal["vhd", "raw"] = "vhd"
    verify_tls: bool = True
    fingerprint_sha256: str | None = None
    size_bytes: int
    name: str = ""


def comes_once(spec: "ReaderSpec") -> bool:
    """Whether what its extents leave out cannot be read: a stream, or a difference without its base."""
    return isinstance(spec, XapiExportSpec | LeaseSpec) or (isinstance(spec, ImageSpec) and spec.alone)


def begins_anew(spec: "ReaderSpec") -> bool:
    """Whether each reader of it begins at the disk's start, and reads all before an offset to come there."""
    return isinstance(spec, XapiExportSpec | LeaseSpec | DownloadSpec) or (
        isinstance(spec, XvaSpec) and spec.packing is not None
    )


class QemuSpec(Spec):
    """An image that only QEMU reads, in a file or a range of one. `driver` is QEMU's name of its format, never probed.

    `key_file` has the passphrase of an encrypted one: the spec is stored and shown, the passphrase never is. `beneath`: as in
    RawSpec, for both files.
    """

    format: Literal["qemu"] = "qemu"
    driver: QemuDriver
    path: str
    offset: int = 0
    length: int | None = None
    name: str = ""
    key_file: str | None = None
    beneath: str | None = field(default=None, compare=False)


class NfsSpec(Spec):
    """A file of an NFSv3 export: `path`, from its root, under `export`. `name` is its name in errors. A port of None comes from
    the server's portmapper."""

    format: Literal["nfs"] = "nfs"
    host: str
    export: str
    path: str
    size_bytes: int | None = None
    name: str = ""
    nfs_port: int | None = None
    mount_port: int | None = None


class IscsiSpec(Spec):
    """A LUN of an iSCSI target, read-only. `portal` is host:port; `initiator` the name that the target accepts."""

    format: Literal["iscsi"] = "iscsi"
    portal: str
    target: str
    lun: int
    initiator: str
    size_bytes: int | None = None
    name: str = ""


class DownloadSpec(Spec):
    """A raw disk that an HTTPS server sends from start to end, without ranges. Its password goes only to the worker."""

    format: Literal["download"] = "download"
    origin: str
    path: str
    user: str
    password: str = field(repr=False)
    verify_tls: bool = True
    fingerprint_sha256: str | None = None
    size_bytes: int
    name: str = ""


class AllocatedSpec(Spec):
    """A disk for which a platform reports that only these areas, (start, length) each, have data: the rest reads as zeros."""

    format: Literal["allocated"] = "allocated"
    over: "ReaderSpec"
    areas: tuple[tuple[int, int], ...]


class ChangedSpec(Spec):
    """Some areas, (start, length) each, of another disk: a delta from a platform that tracks changes."""

    format: Literal["changed"] = "changed"
    over: "ReaderSpec"
    areas: tuple[tuple[int, int], ...]


class XvaSpec(Spec):
    """A disk in an XVA archive: the folder of its pieces, and the size in the archive's ova.xml. `packing`: the whole archive
    is compressed."""

    format: Literal["xva"] = "xva"
    over: "ReaderSpec"
    folder: str
    size_bytes: int
    name: str = ""
    packing: Packing | None = None


class JoinedSpec(Spec):
    """Ranges of files, joined: a file that was cut into chunks."""

    format: Literal["joined"] = "joined"
    parts: tuple[RawSpec, ...]


class GzipSpec(Spec):
    """The content of a gzip file; more than `size_max_bytes` is refused, and less than `size_least_bytes`."""

    format: Literal["gzip"] = "gzip"
    over: "ReaderSpec"
    size_max_bytes: int
    name: str = ""
    size_least_bytes: int = 0


class BlankSpec(Spec):
    """A disk of zeros without a file."""

    format: Literal["blank"] = "blank"
    size_bytes: int


class AsideSpec(Spec):
    """A volume and its side file (`disks.raw.aside`)."""

    format: Literal["aside"] = "aside"
    path: str
    aside: str
    marks: str
    size_bytes: int


class RbdPlace(Spec):
    """A Ceph pool, and its client: `client.{client}` with the key that the ceph.conf at `conf` leads to."""

    conf: str
    client: str
    pool: str


class RbdSpec(Spec):
    """An RBD image; `size_bytes`: the disk's true size, where it is less than the image's."""

    format: Literal["rbd"] = "rbd"
    place: RbdPlace
    image: str
    size_bytes: int | None = None


# Another machine or process serves these disks on request.
ServedSpec = (
    NbdSpec | NbdTlsSpec | DatastoreSpec | VddkSpec | LeaseSpec | XapiExportSpec | RbdSpec | NfsSpec | IscsiSpec | DownloadSpec
)
# These read another spec's bytes.
LaidOverSpec = AllocatedSpec | ChangedSpec | DeltaSpec | XvaSpec | GzipSpec
ReaderSpec = RawSpec | ImageSpec | ServedSpec | QemuSpec | LaidOverSpec | JoinedSpec | BlankSpec | AsideSpec


class FileWriterSpec(Spec):
    """A sparse file of exactly `size_bytes`, made by its destination."""

    kind: Literal["file"] = "file"
    path: str
    size_bytes: int


class AsideWriterSpec(Spec):
    """A file that must stay as it is: what is written goes to its side file (`disks.raw.aside`). `folds`: it need not stay any
    more; the side file is folded into it first, and then the file itself is written."""

    kind: Literal["aside"] = "aside"
    path: str
    aside: str
    marks: str
    size_bytes: int
    folds: bool


class BlockWriterSpec(Spec):
    """A block device (a zvol) of at least `size_bytes`: the disk's true size, which may be less than the device's."""

    kind: Literal["block"] = "block"
    path: str
    size_bytes: int


class RbdWriterSpec(Spec):
    """An RBD image of at least `size_bytes`: the disk's true size."""

    kind: Literal["rbd"] = "rbd"
    place: RbdPlace
    image: str
    size_bytes: int


class Qcow2WriterSpec(Spec):
    """A new qcow2 file, which `qemu-img` writes from its first byte to its last: an interrupted copy starts over. Not a
    DiskWriter: `disks.nbd.qcow2_writer` makes the file from a whole disk."""

    kind: Literal["qcow2"] = "qcow2"
    path: str


WriterSpec = FileWriterSpec | AsideWriterSpec | BlockWriterSpec | RbdWriterSpec


def written(writer: WriterSpec) -> ReaderSpec:
    """How to read a volume back."""
    if isinstance(writer, RbdWriterSpec):
        return RbdSpec(place=writer.place, image=writer.image, size_bytes=writer.size_bytes)
    if isinstance(writer, AsideWriterSpec):
        return AsideSpec(path=writer.path, aside=writer.aside, marks=writer.marks, size_bytes=writer.size_bytes)
    return RawSpec(path=writer.path, length=writer.size_bytes)


class ChecksumSpec(Spec):
    """A file range whose digest is checked in the same pass as the copy (a line of an OVA's manifest)."""

    path: str
    offset: int = 0
    length: int
    algorithm: ChecksumAlgorithm
    expected: str
    name: str
    remote: Remote | None = None
    version: str | None = None
    beneath: str | None = field(default=None, compare=False)


def format_name(spec: ReaderSpec) -> str:
    """The format's name for people."""
    return spec.driver if isinstance(spec, QemuSpec) else spec.format


def paths(spec: ReaderSpec) -> list[str]:
    """The files of this host that the spec itself names, without files named inside an image."""
    return [
        path
        for leaf in _leaves(spec)
        if leaf.format == "qemu" or leaf.remote is None
        for path in (leaf.path, leaf.key_file if leaf.format == "qemu" else None)
        if path is not None
    ]


def versions(spec: ReaderSpec) -> list[NotedFile]:
    """The remote files that the spec names, each at its version."""
    remote = [leaf for leaf in _leaves(spec) if leaf.format == "raw"]
    return [NotedFile(f"{leaf.remote.url}{leaf.path}", str(leaf.version)) for leaf in remote if leaf.remote is not None]


def elsewhere(spec: ReaderSpec) -> bool:
    """Whether another machine or process serves the disk on request: a read mostly waits. A URL's file is fetched ahead."""
    if isinstance(spec, ServedSpec):
        return True
    match spec:
        case AllocatedSpec() | ChangedSpec() | DeltaSpec():
            return elsewhere(spec.over)
        case _:
            return False


def _leaves(spec: ReaderSpec) -> Iterator[RawSpec | QemuSpec]:
    match spec:
        case RawSpec() | QemuSpec():
            yield spec
        case ImageSpec():
            yield from _leaves(spec.over)
            if spec.parent is not None:
                yield from _leaves(spec.parent)
        case AllocatedSpec() | ChangedSpec() | XvaSpec() | GzipSpec():
            yield from _leaves(spec.over)
        case JoinedSpec():
            yield from spec.parts
