"""Readers and writers as data: what the engine stores, hands to a worker process, and opens again after a crash.

    {"format": "vmdk", "over": {"format": "raw", "path": "…/a.ova", "offset": 1536, "length": 73400320}}

An image lies over another reader, the bytes of its file, so any format may lie in any other: a VMDK in a tar member is a
VMDK over a range of a raw file. `open_reader` and `open_writer` in this package turn a spec into the thing.

Plain data classes: a model of pydantic's may have one as a field, and `spec_json` reads and writes one by itself, yet a copy
on the command line need not wait for pydantic. Offsets and lengths are bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from synvirt.remote import Remote

# A VMDK in a gzip in a tar is 3 deep, a differencing chain is not nesting. 8 leaves room and stops a loop.
NESTING_MAX = 8

ImageFormat = Literal["vmdk", "qcow2", "vhdx", "vhd", "vdi"]
QemuDriver = Literal["qcow2", "luks", "qcow", "qed", "bochs", "cloop", "dmg", "parallels", "vdi", "vhdx", "vpc"]
ChecksumAlgorithm = Literal["sha1", "sha256", "sha512"]
Packing = Literal["gzip", "zstd"]

# Where files named inside an image are looked for: under a folder of this host, or one elsewhere.
ImageRoot = str | Remote


class Spec:
    """What all specs share: a field that is not known is an error, not silence."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSpec(Spec):
    """A range of a file or block device, as it is. A tar member is one; `length` None means up to its end.

    With `remote`, `path` is the file's name below it, and `version` what it must still be. `beneath`: the folder that the
    file must lie in when it is opened, whatever links have become of its name since it was looked at.
    """

    format: Literal["raw"] = "raw"
    path: str
    offset: int = 0
    length: int | None = None
    remote: Remote | None = None
    version: str | None = None
    beneath: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec(Spec):
    """A disk image over the bytes of its file.

    `root` is the folder that files named inside the image (backing files, extents, parents) must lie in; None refuses any.
    `name` is how errors call the image: a file or member name, never a host path. Where `root` is set it is the image's path
    under `root`, so that what the image names is looked for in the image's own folder.
    `parent` is what a differencing image lies over, where the image itself cannot say: VirtualBox' VDI and VMDK.
    `alone`: of a differencing VHDX what it holds itself, as extents; its parent is not looked for, and the rest is left out.
    """

    format: ImageFormat
    over: "ReaderSpec"
    root: ImageRoot | None = None
    name: str = ""
    parent: "ReaderSpec | None" = None
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NbdSpec(Spec):
    """An NBD export. `bitmap` names a dirty-bitmap context (`qemu:dirty-bitmap:…`): extents are then the dirty ones only."""

    format: Literal["nbd"] = "nbd"
    uri: str
    bitmap: str | None = None
    connections: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DatastoreSpec(Spec):
    """A file of a vSphere datastore, by HTTPS from /folder; `size_bytes` None: as large as its server says. With `areas`,
    (start, length) each, the rest reads as zeros.

    `session_manager` is the platform's id of the one that logs us in. `hosts`: by name the ESXi hosts that a vCenter may send
    the reader on to, each with its certificate's thumbprint in hex, which may be empty. `direct`: the name and the port of the
    one among them that is asked before vCenter, by tickets of vCenter's; with `direct_only` vCenter is not asked for bytes. A
    spec with a password in it goes to the worker alone and is never stored.
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
    """The same disk, and nothing of it left out because a platform says that it was never written."""
    if isinstance(spec, AllocatedSpec):
        return spec.over
    return replace(spec, areas=None) if isinstance(spec, DatastoreSpec) else spec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec(Spec):
    """A snapshot's sparse extent as a vSphere datastore keeps it, over the disk below it."""

    format: Literal["vmdk_delta"] = "vmdk_delta"
    over: "ReaderSpec"
    parent: "ReaderSpec"
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VddkSpec(Spec):
    """A disk in a snapshot of a vSphere VM, by VMware's VDDK: ids are vSphere's, `file` is the disk's `[datastore] path`,
    `libdir` where the operator has put VDDK. Its password is given to the worker and to nobody else."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpec(Spec):
    """A disk in a snapshot of a vSphere VM, as a host sends it under an export lease, which its maker keeps alive.

    `target`: of the URL its path, which opens the disk to anyone who knows it. `thumbprint`: of the host's certificate, in hex;
    a pin goes before it. `cookie` is empty where the host is not the platform itself. `instead`: the same disk by another way,
    which is read from where the lease fails on."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NbdTlsSpec(Spec):
    """An NBD export whose server shows the certificate that `trusted`, a folder, holds as ca-cert.pem, made out to `host`.
    `export` may open the disk to anyone who knows it: it is in no error. `name` is how errors call the export."""

    format: Literal["nbd_tls"] = "nbd_tls"
    host: str
    port: int
    export: str = field(repr=False)
    trusted: str
    name: str = ""
    connections: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class XapiExportSpec(Spec):
    """A VDI as a XenServer host sends it from /export_raw_vdi: once, from front to back. `vdi` and `base` are references; with
    `base`, what differs from that one alone. `session_id` is given to the worker and to nobody else: it is never stored."""

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
    """Has the reader nothing to show of what its extents leave out: a stream, a difference without what it lies over?"""
    return isinstance(spec, XapiExportSpec | LeaseSpec) or (isinstance(spec, ImageSpec) and spec.alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuSpec(Spec):
    """An image that only QEMU reads, in a file or a range of one. `driver` is QEMU's name of its format, never probed.

    `key_file` holds the passphrase of an encrypted one: the spec is stored and shown, the passphrase never is. `beneath`: as in
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NfsSpec(Spec):
    """A file of an NFSv3 export: `path`, from its root, under `export`. `name` is how errors call it. A port that is None: as
    the server's portmapper says."""

    format: Literal["nfs"] = "nfs"
    host: str
    export: str
    path: str
    size_bytes: int | None = None
    name: str = ""
    nfs_port: int | None = None
    mount_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IscsiSpec(Spec):
    """A LUN of an iSCSI target, read-only. `portal` is host:port; `initiator` the name that the target lets in."""

    format: Literal["iscsi"] = "iscsi"
    portal: str
    target: str
    lun: int
    initiator: str
    size_bytes: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSpec(Spec):
    """A raw disk that an HTTPS server sends from its start to its end, and knows no ranges. Its password is given to the worker
    and to nobody else."""

    format: Literal["download"] = "download"
    origin: str
    path: str
    user: str
    password: str = field(repr=False)
    verify_tls: bool = True
    fingerprint_sha256: str | None = None
    size_bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedSpec(Spec):
    """A disk of which a platform says that only these areas, (start, length) each, hold data: the rest reads as zeros."""

    format: Literal["allocated"] = "allocated"
    over: "ReaderSpec"
    areas: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSpec(Spec):
    """Some areas, (start, length) each, of another disk: a delta as a platform that tracks changes lists it."""

    format: Literal["changed"] = "changed"
    over: "ReaderSpec"
    areas: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class XvaSpec(Spec):
    """A disk in an XVA archive: the folder of its pieces, and the size that the archive's ova.xml gives. `packing`: the file
    is the archive compressed as a whole."""

    format: Literal["xva"] = "xva"
    over: "ReaderSpec"
    folder: str
    size_bytes: int
    name: str = ""
    packing: Packing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSpec(Spec):
    """Ranges of files, one after the other: a file that was cut into chunks."""

    format: Literal["joined"] = "joined"
    parts: tuple[RawSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GzipSpec(Spec):
    """What a gzip file holds; more than `size_max_bytes` of it are refused."""

    format: Literal["gzip"] = "gzip"
    over: "ReaderSpec"
    size_max_bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlankSpec(Spec):
    """A disk of zeros, which lies in no file."""

    format: Literal["blank"] = "blank"
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RbdPlace(Spec):
    """A Ceph pool, and the client that uses it: `client.{client}` with the key that the ceph.conf at `conf` leads to."""

    conf: str
    client: str
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RbdSpec(Spec):
    """An RBD image; `size_bytes`: the disk's true size, where it is less than the image's."""

    format: Literal["rbd"] = "rbd"
    place: RbdPlace
    image: str
    size_bytes: int | None = None


# Another machine or process serves these disks when it is asked.
ServedSpec = (
    NbdSpec | NbdTlsSpec | DatastoreSpec | VddkSpec | LeaseSpec | XapiExportSpec | RbdSpec | NfsSpec | IscsiSpec | DownloadSpec
)
ReaderSpec = (
    RawSpec
    | ImageSpec
    | ServedSpec
    | QemuSpec
    | AllocatedSpec
    | ChangedSpec
    | DeltaSpec
    | XvaSpec
    | JoinedSpec
    | GzipSpec
    | BlankSpec
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWriterSpec(Spec):
    """A sparse file of exactly `size_bytes`, already made by its destination."""

    kind: Literal["file"] = "file"
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWriterSpec(Spec):
    """A block device (a zvol) of at least `size_bytes`: the disk's true size, which may be less than the device's."""

    kind: Literal["block"] = "block"
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RbdWriterSpec(Spec):
    """An RBD image of at least `size_bytes`: the disk's true size."""

    kind: Literal["rbd"] = "rbd"
    place: RbdPlace
    image: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Qcow2WriterSpec(Spec):
    """A new qcow2 file, which `qemu-img` writes from its first byte to its last: a copy into one that was cut off starts over.
    No DiskWriter: `disks.qcow2.writer` makes one of a whole disk."""

    kind: Literal["qcow2"] = "qcow2"
    path: str


WriterSpec = FileWriterSpec | BlockWriterSpec | RbdWriterSpec


def written(writer: WriterSpec) -> ReaderSpec:
    """How a volume is read back."""
    if isinstance(writer, RbdWriterSpec):
        return RbdSpec(place=writer.place, image=writer.image, size_bytes=writer.size_bytes)
    return RawSpec(path=writer.path, length=writer.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumSpec(Spec):
    """A file range whose digest is checked in the same pass as the copy (an OVA's manifest line)."""

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
    """What people call the format."""
    return spec.driver if isinstance(spec, QemuSpec) else spec.format


def paths(spec: ReaderSpec) -> list[str]:
    """The files of this host that the spec itself names; what an image names inside is not among them."""
    return [
        path
        for leaf in _leaves(spec)
        if leaf.format == "qemu" or leaf.remote is None
        for path in (leaf.path, leaf.key_file if leaf.format == "qemu" else None)
        if path is not None
    ]


def versions(spec: ReaderSpec) -> list[str]:
    """The files elsewhere that the spec names, each with the version that it is of."""
    return [
        f"{leaf.remote.url}{leaf.path} {leaf.version}"
        for leaf in _leaves(spec)
        if leaf.format == "raw" and leaf.remote is not None
    ]


def elsewhere(spec: ReaderSpec) -> bool:
    """Whether another machine or process serves the disk when it is asked. Then reading it is mostly waiting. A file by URL
    does not count, as its reader fetches ahead."""
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
