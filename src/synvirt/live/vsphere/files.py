"""A vSphere disk from the files of its datastore, over HTTPS (/folder). Blocking code.

flat ◀── a snapshot's sparse file ◀── a newer one: all are read, and for each block the newest counts
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
from synvirt.live.vsphere.disks import capacity_of, chain, split
from synvirt.live.vsphere.session import VimSession, library

# Folders may be nested; a loop in a platform's answer must end.
FOLDERS_DEEP_MAX: Final = 64
# The most hosts that mount one datastore: vSphere's own limit.
HOSTS_MAX: Final = 256
ESXI_PORT: Final = 443


# The source of the files: a host itself, and vCenter where it does not answer; only vCenter; only a host.
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
    """The flat file, under the operator's snapshots. `areas`: its parts that were ever written. `host`: the one to ask, by its
    name; None: any with the file's datastore.

    It opens the file as a test, so that a refusal is known here: ReadForbidden, where another way may read the disk."""
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
    """The ESXi hosts with the disk's datastore, by name; none, if vCenter does not list them or the source is a host."""
    backing = chain(device.backing)
    store = getattr(backing[-1], "datastore", None) if backing else None
    return [] if store is None else [name for name, _ in _hosts(session, store) if name]


def _of_host(session: VimSession, flat: DatastoreSpec, asked: Asked, host: str | None) -> DatastoreSpec:
    """One host with the datastore. Several files are spread over the hosts, so that no single one sends all. A host that did
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
    """The spec that can be read: without a host that did not send the file."""
    reader = DatastoreReader(flat)
    reader.close()
    if flat.direct is None or flat.direct_only or reader.is_direct:
        return flat
    session.was_mute(flat.direct[0])
    return replace(flat, direct=None)


def small_file(session: VimSession, vm_id: str, name: str, most: int) -> bytes:
    """A file of the VM's home; only its first `most` bytes, where it is longer. ReadForbidden, where we may not read it."""
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
    """`name`: in vSphere's form, «[store] folder/file». `lies_in`: that store, where it is known."""
    store, path = split(name)
    if "] " in path:
        store, path = split(name, _store_names(session, vm_id))
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


def _store_names(session: VimSession, vm_id: str) -> list[str]:
    """Of the VM's datastores."""
    held = session.properties(session.machine(vm_id), ("datastore",), what=f"look at {vm_id}").get("datastore") or ()
    found = session.each([(store, ("summary.name",)) for store in held], what="look at datastores").values()
    return [str(store.get("summary.name")) for store in found]


def _hosts(session: VimSession, within: Any) -> tuple[tuple[str, str], ...]:
    """The hosts that have the datastore, or run the VM: by name, with the thumbprint that vCenter knows. None, where it does
    not list them; none for an ESXi host as the source, which redirects to no other."""
    if str(session.content.about.apiType) != "VirtualCenter":
        return ()
    path = "runtime.host" if isinstance(within, library().vim.VirtualMachine) else "host"
    with suppress(AuthFailed, VmNotFound):  # we may not see it, or it was removed meanwhile
        held = session.properties(within, (path,), what="look at a datastore").get(path)
        hosts = [mount.key for mount in held or ()] if path == "host" else [held]
        wanted = [(host, ("name", "summary.config.sslThumbprint")) for host in hosts if host is not None][:HOSTS_MAX]
        found = session.each(wanted, what="look at the hosts of a datastore").values()
        return tuple((str(one.get("name") or ""), str(one.get("summary.config.sslThumbprint") or "")) for one in found)
    return ()


def _datacenter(session: VimSession, vm_id: str, within: Any) -> str:
    """The inventory path of the datacenter with the disk's datastore: /folder names datastores by it."""
    vim = library().vim
    found = session.properties(within, ("name", "parent"), what="look at a datastore")
    parent, names = found.get("parent"), list[str]()
    for _ in range(FOLDERS_DEEP_MAX):
        # The root folder is not part of a path; our user may not even see it.
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
    """The path of the file with the bytes of a snapshot's disk; `described` is its descriptor."""
    reader = open_reader(described)
    try:
        content = bytearray(min(reader.size, DESCRIPTOR_BYTES_MAX))
        reader.read_into(0, memoryview(content))
    finally:
        reader.close()
    extents = parse_descriptor(content, described.path).extents
    if len(extents) != 1 or extents[0].kind not in ("VMFSSPARSE", "SESPARSE") or "/" in extents[0].file:
        raise UnsupportedFormat(
            f"{described.path} is not a snapshot's disk in one sparse file",
            hint="remove the VM's snapshots, or install VDDK and set options.vddk_libdir",
        )
    folder, slash, _ = described.path.rpartition("/")
    return folder + slash + extents[0].file
