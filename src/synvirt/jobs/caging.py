"""The cage of an order: it allows the files that the order names, and no others.

The service writes orders and specs itself; nothing in them comes from the data that is read. So each absolute path in one is a
file that the order needs.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from urllib.parse import unquote

from synvirt.cage import Cage, Network
from synvirt.disks.beneath import pinned_beneath
from synvirt.disks.raw.zvols import device_of
from synvirt.disks.specs import (
    AllocatedSpec,
    AsideSpec,
    AsideWriterSpec,
    BlankSpec,
    BlockWriterSpec,
    ChangedSpec,
    ChecksumSpec,
    DatastoreSpec,
    DeltaSpec,
    DownloadSpec,
    FileWriterSpec,
    GzipSpec,
    ImageSpec,
    JoinedSpec,
    LeaseSpec,
    NbdSpec,
    NbdTlsSpec,
    NfsSpec,
    QemuSpec,
    RawSpec,
    RbdPlace,
    RbdSpec,
    RbdWriterSpec,
    Spec,
    VddkSpec,
    XapiExportSpec,
    XvaSpec,
    written,
)
from synvirt.jobs.orders import CopyOrder, DiskOrder, RepairOrder

# Parameters of an NBD URI that name TLS files or a Unix socket. The socket's folder is opened.
_NBD_FILE = re.compile(r"[?&](?:tls-certificates|tls-psk-file|socket)=([^&#]+)")
# Specs that are read and written on this host, without a connection.
_HERE = (
    *(ImageSpec, ChangedSpec, AllocatedSpec, DeltaSpec, XvaSpec, GzipSpec, JoinedSpec, BlankSpec, QemuSpec, ChecksumSpec),
    *(FileWriterSpec, BlockWriterSpec, AsideSpec, AsideWriterSpec),
)
# Readers that connect by themselves. All other kinds start a program (qemu-nbd, nbdkit, Samba's client), or may do so.
_CONNECTING = (
    *(NbdSpec, NbdTlsSpec, NfsSpec, DatastoreSpec, LeaseSpec, DownloadSpec, XapiExportSpec),
    *(RbdPlace, RbdSpec, RbdWriterSpec),
)
# nbdkit's vddk plugin hands its password on to itself in a file there, whatever TMPDIR says (plugins/vddk/reexec.c).
_NBDKIT_WRITES = ("/tmp",)  # noqa: S108


def cage_of(order: CopyOrder) -> Cage:
    """The cage for a copy: it may read the files of its readers and write its volumes; it has no network if all disks are on
    this host. Files of an import root are opened here, under that root: the cage allows these very files, even if their names
    lead elsewhere later. `enter` closes them."""
    readers = [spec for disk in order.disks for spec in _specs((disk.reader, *disk.checksums))]
    writers = [spec for disk in order.disks for spec in _specs(disk.writer)]
    programs = any(_starts_programs(spec) for spec in readers)
    return Cage(
        reads=(
            *dict.fromkeys(path for spec in readers for path, beneath in _files(spec) if beneath is None),
            *(() if order.yields_to is None else (order.yields_to,)),
        ),
        writes=(
            *(path for spec in writers for path, _ in _files(spec)),
            *(_NBDKIT_WRITES if any(isinstance(spec, VddkSpec) for spec in readers) else ()),
            *dict.fromkeys(posixpath.dirname(disk.hashes.path) for disk in order.disks if disk.hashes is not None),
        ),
        network=_network(readers, writers, programs=programs),
        programs=programs,
        temporary=programs,  # a program has its socket in a temporary folder
        # An NFS server checks the user, and may accept only root's ports.
        as_root=any(isinstance(spec, NfsSpec) for spec in readers),
        opened=tuple(_pinned(dict.fromkeys(file for spec in readers for file in _files(spec)))),
    )


def cage_of_repair(order: RepairOrder) -> Cage:
    """Reads its ledgers and sources; writes its volumes, where there is a source to repair them from."""
    disks = (DiskOrder(key=disk.key, reader=disk.source or written(disk.volume), writer=disk.volume) for disk in order.disks)
    own = cage_of(CopyOrder(disks=tuple(disks)))
    return replace(
        own,
        reads=(*own.reads, *dict.fromkeys(disk.ledger.path for disk in order.disks)),
        writes=own.writes if any(disk.source is not None for disk in order.disks) else (),
    )


def _pinned(files: Iterable[tuple[str, str | None]]) -> Iterator[int]:
    """Descriptors of the files. A file that is gone, or leads out of its root by now, is left out: its reader reports it."""
    for path, beneath in files:
        if beneath is not None and (descriptor := pinned_beneath(beneath, path)) is not None:
            yield descriptor


def _starts_programs(spec: object) -> bool:
    if isinstance(spec, RawSpec):
        return spec.remote is not None and spec.remote.url.startswith("smb")
    return isinstance(spec, QemuSpec) or (isinstance(spec, Spec) and not isinstance(spec, (*_HERE, *_CONNECTING)))


def _network(readers: list[object], writers: list[object], *, programs: bool) -> Network:
    elsewhere = any(_is_elsewhere(spec) for spec in (*readers, *writers))
    local = programs or any(isinstance(spec, NbdSpec) and not _is_elsewhere(spec) for spec in readers)
    return (Network.ELSEWHERE if elsewhere else Network.NONE) | (Network.LOCAL if local else Network.NONE)


def _is_elsewhere(spec: object) -> bool:
    if isinstance(spec, RawSpec):
        return spec.remote is not None
    if isinstance(spec, NbdSpec):
        return "+unix:" not in spec.uri.partition("//")[0]
    return isinstance(spec, Spec) and not isinstance(spec, _HERE)


def _specs(found: object) -> Iterator[object]:
    """The spec, and all specs that it lies over."""
    if isinstance(found, Spec) or is_dataclass(found):
        yield found
        for field in fields(found):
            yield from _specs(getattr(found, field.name))
    elif isinstance(found, tuple):
        for inner in found:
            yield from _specs(inner)


def _files(spec: object) -> Iterator[tuple[str, str | None]]:
    """Each file; and the root that it must lie under, if other users may write there."""
    beneath = getattr(spec, "beneath", None)
    for field in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        # The root of a file is a limit; it is not read itself.
        if isinstance(value, str) and value.startswith("/") and field.name != "beneath":
            yield value, beneath
            if beneath is None and (device := device_of(value)) != value:
                yield device, None  # the volume's link may be gone when it is opened
    if (conf := getattr(spec, "conf", "")).startswith("/"):
        yield posixpath.dirname(conf), None  # Ceph's keys lie next to its settings
    if isinstance(spec, NbdSpec):
        yield from ((unquote(found), None) for found in _NBD_FILE.findall(spec.uri))
