"""A vSphere disk from the files of its datastore, over HTTPS (/folder). Blocking code.

flat ◀── a snapshot's sparse file ◀── a newer one: each read, and the newest of a block is what counts
"""

import zlib
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal

from synvirt.disks import open_reader
from synvirt.disks.specs import DatastoreSpec, DeltaSpec, ReaderSpec
from synvirt.disks.vmdk.descriptor import parse_descriptor
from synvirt.disks.vmdk.sparse import DESCRIPTOR_BYTES_MAX
from synvirt.disks.vsphere.datastore import DatastoreReader
from synvirt.errors import AuthFailed, Internal, UnsupportedFormat, VmNotFound
from synvirt.live.vsphere.disks import capacity_of, chain
from synvirt.live.vsphere.session import VimSession, library

# Folders may lie in one another; a loop in what a platform says must have an end.
FOLDERS_DEEP_MAX: Final = 64
# That one datastore is mounted on: vSphere's own limit.
HOSTS_MAX: Final = 256
ESXI_PORT: Final = 443


# Whom the files are asked of: a host itself, and vCenter where it does not answer; vCenter alone; a host alone.
Asked = Literal["host first", "vcenter", "host"]


def whole_disk(
    session: VimSession,
    vm_id: str,
    device: Any,
    areas: tuple[tuple[int, int], ...] | None,
    *,
    asked: Asked = "vcenter",
    host: str | None = None,
) -> ReaderSpec:
    """The flat file, and what snapshots of the operator's have laid over it. `areas`: what of it was ever written. `host`: the
    one to ask, by its name; None: any that has the file's datastore.

    The file is knocked at, so that what forbids it is known here: ReadForbidden, where another way may read the disk."""
    layers = chain(device.backing)
    if layers is None:
        raise UnsupportedFormat(
            f"disk {device.key} of {vm_id} is not kept in files that we read",
            hint="move it to another datastore as a thick or thin disk, or install VDDK and set options.vddk_libdir",
        )
    *deltas, base = layers
    flat = _file(session, vm_id, base, capacity_of(device))
    flat = replace(flat, path=flat.path.removesuffix(".vmdk") + "-flat.vmdk")
    flat = _knocked(session, _of_host(session, flat, asked, host))
    if not deltas:
        return replace(flat, areas=areas)
    disk: ReaderSpec = flat
    for delta in reversed(deltas):
        described = _file(session, vm_id, delta, None)
        extent = _sparse_extent(described)
        disk = DeltaSpec(over=replace(described, path=extent), parent=disk, name=extent)
    return disk


def hosts_of(session: VimSession, device: Any) -> list[str]:
    """The ESXi hosts that have the disk's datastore, by name; none, where vCenter does not say, or where the source is one."""
    backing = chain(device.backing)
    store = getattr(backing[-1], "datastore", None) if backing else None
    return [] if store is None else [name for name, _ in _hosts(session, store) if name]


def _of_host(session: VimSession, flat: DatastoreSpec, asked: Asked, host: str | None) -> DatastoreSpec:
    """One host that has the datastore. Of several hosts each file has its own, so that no single one sends all. A host that did
    not answer lately is left out, unless no other may be asked."""
    hosts = [name for name, _ in flat.hosts if name and host in (None, name) and (asked == "host" or not session.is_mute(name))]
    if asked == "vcenter" or not hosts:
        if asked == "host":
            raise UnsupportedFormat(
                f"{session.host} names no ESXi host that has the datastore {flat.datastore}",
                hint="an ESXi host that is the source itself is read by transport datastore; our user may lack System.View",
            )
        return flat
    chosen = hosts[zlib.crc32(flat.path.encode()) % len(hosts)]
    return replace(flat, direct=(chosen, ESXI_PORT), direct_only=asked == "host")


def _knocked(session: VimSession, flat: DatastoreSpec) -> DatastoreSpec:
    """As it can be read: without the host that did not send it."""
    reader = DatastoreReader(flat)
    reader.close()
    if flat.direct is None or flat.direct_only or reader.is_direct:
        return flat
    session.was_mute(flat.direct[0])
    return replace(flat, direct=None)


def small_file(session: VimSession, vm_id: str, name: str, most: int) -> bytes:
    """A file of the VM's home, whole; its first `most` bytes, where it has more. ReadForbidden, where we may not read it."""
    reader = open_reader(_named_file(session, vm_id, name, None, None))
    try:
        content = bytearray(min(reader.size, most))
        reader.read_into(0, memoryview(content))
    finally:
        reader.close()
    return bytes(content)


def _file(session: VimSession, vm_id: str, backing: Any, size: int | None) -> DatastoreSpec:
    return _named_file(session, vm_id, str(backing.fileName), getattr(backing, "datastore", None), size)


def _named_file(session: VimSession, vm_id: str, name: str, lies_in: Any, size: int | None) -> DatastoreSpec:
    """`name`: as vSphere writes it, «[store] folder/file». `lies_in`: that store, where it is known."""
    store, _, path = name.removeprefix("[").partition("] ")
    within = session.machine(vm_id) if lies_in is None else lies_in
    return DatastoreSpec(
        host=session.host,
        port=session.port,
        user=session.login_.user,
        password=session.login_.password,
        session_manager=session.session_manager,
        api_version=session.api_version,
        verify_tls=session.options.verify_tls,
        fingerprint_sha256=session.options.fingerprint_sha256,
        hosts=_hosts(session, within),
        datacenter=_datacenter(session, vm_id, within),
        datastore=store,
        path=path,
        size_bytes=size,
    )


def _hosts(session: VimSession, within: Any) -> tuple[tuple[str, str], ...]:
    """Those that have the datastore, or run the VM: by name, with the thumbprint that vCenter knows. None where it does not
    say, and none of an ESXi host, which has no other to send us to."""
    if str(session.content.about.apiType) != "VirtualCenter":
        return ()
    path = "runtime.host" if isinstance(within, library().vim.VirtualMachine) else "host"
    with suppress(AuthFailed, VmNotFound):  # not for us to see, or removed meanwhile
        held = session.properties(within, (path,), what="look at a datastore").get(path)
        hosts = [mount.key for mount in held or ()] if path == "host" else [held]
        wanted = [(host, ("name", "summary.config.sslThumbprint")) for host in hosts if host is not None][:HOSTS_MAX]
        found = session.each(wanted, what="look at the hosts of a datastore").values()
        return tuple((str(one.get("name") or ""), str(one.get("summary.config.sslThumbprint") or "")) for one in found)
    return ()


def _datacenter(session: VimSession, vm_id: str, within: Any) -> str:
    """The inventory path of the datacenter that the disk's datastore lies in: /folder names datastores by it."""
    vim = library().vim
    found = session.properties(within, ("name", "parent"), what="look at a datastore")
    parent, names = found.get("parent"), list[str]()
    for _ in range(FOLDERS_DEEP_MAX):
        # The root folder has no place in a path; our user may not even see it.
        if parent is None or parent._moId == session.content.rootFolder._moId:  # noqa: SLF001 - pyvmomi's own name
            break
        found = session.properties(parent, ("name", "parent"), what="look at a folder")
        if isinstance(parent, vim.Datacenter) or names:
            names.insert(0, str(found.get("name", "")))
        parent = found.get("parent")
    if not names:
        raise Internal(f"{vm_id} lies in no datacenter that {session.login_.user} may see")
    return "/".join(names)


def _sparse_extent(described: DatastoreSpec) -> str:
    """The path of the file with the bytes of a snapshot's disk, of which `described` is the descriptor."""
    reader = open_reader(described)
    try:
        content = bytearray(min(reader.size, DESCRIPTOR_BYTES_MAX))
        reader.read_into(0, memoryview(content))
    finally:
        reader.close()
    extents = parse_descriptor(content, described.path).extents
    if len(extents) != 1 or extents[0].kind not in ("VMFSSPARSE", "SESPARSE") or "/" in extents[0].file:
        raise UnsupportedFormat(
            f"{described.path} is no snapshot's disk in one sparse file",
            hint="remove the VM's snapshots, or install VDDK and set options.vddk_libdir",
        )
    folder, slash, _ = described.path.rpartition("/")
    return folder + slash + extents[0].file
