"""A vSphere disk from the files of its datastore, over HTTPS (/folder). Blocking code.

flat ◀── a snapshot's sparse file ◀── a newer one: each read, and the newest of a block is what counts
"""

from dataclasses import replace
from typing import Any, Final

from synvirt.disks import open_reader
from synvirt.disks.specs import DatastoreSpec, DeltaSpec, ReaderSpec
from synvirt.disks.vmdk.descriptor import parse_descriptor
from synvirt.disks.vmdk.sparse import DESCRIPTOR_BYTES_MAX
from synvirt.errors import Internal, UnsupportedFormat
from synvirt.live.vsphere.disks import capacity_of, chain
from synvirt.live.vsphere.session import VimSession, library

# Folders may lie in one another; a loop in what a platform says must have an end.
FOLDERS_DEEP_MAX: Final = 64


def whole_disk(session: VimSession, vm_id: str, device: Any, areas: tuple[tuple[int, int], ...] | None) -> ReaderSpec:
    """The flat file, and what snapshots of the operator's have laid over it. `areas`: what of it was ever written.

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
    open_reader(flat).close()
    if not deltas:
        return replace(flat, areas=areas)
    disk: ReaderSpec = flat
    for delta in reversed(deltas):
        described = _file(session, vm_id, delta, None)
        extent = _sparse_extent(described)
        disk = DeltaSpec(over=replace(described, path=extent), parent=disk, name=extent)
    return disk


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
    return DatastoreSpec(
        host=session.host,
        port=session.port,
        user=session.login_.user,
        password=session.login_.password,
        session_manager=session.session_manager,
        verify_tls=session.options.verify_tls,
        fingerprint_sha256=session.options.fingerprint_sha256,
        datacenter=_datacenter(session, vm_id, lies_in),
        datastore=store,
        path=path,
        size_bytes=size,
    )


def _datacenter(session: VimSession, vm_id: str, store: Any) -> str:
    """The inventory path of the datacenter that the disk's datastore lies in: /folder names datastores by it."""
    vim = library().vim
    within = session.machine(vm_id) if store is None else store
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
