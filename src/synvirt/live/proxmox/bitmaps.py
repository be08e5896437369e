"""Reads disks of a running VM, frozen at one moment, with features of any QEMU since 7.1. Blocking code.

    guest ─▶ disk ─▶ copy-before-write ─▶ the disk's own node, with a dirty bitmap per snapshot
                          └─▶ overlay: old data that the guest has overwritten since
    snapshot-access ◀── both: the disk as it was ─▶ NBD, with the bitmap since an older snapshot

QEMU's docs/interop/bitmaps.rst, qapi/block-core.json, and iotests/tests/image-fleecing. With on-cbw-error=break-snapshot a full
scratch folder breaks our snapshot, never the guest's write. A bitmap is made before its filter, and an older one is copied
after it: each covers a little more than needed, and nothing is missed in between.

If QEMU is Proxmox VE's own and has `backup-access-setup`, that freezes all disks at one moment instead of our filters
(backup_access.py); bitmaps and exports are the same. All names come from the snapshot's name, so their owner is known after a
crash.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from synvirt.errors import Internal, SnapshotFailed
from synvirt.kvm.qmp import Qmp, QmpError, rows
from synvirt.live.proxmox import backup_access

# The smallest unit worth a request of its own; an overlay copies by it.
GRANULARITY_BYTES: Final = 65536
# A write of the guest waits at most this long for its old bytes to be saved; then our snapshot is given up.
SAVE_TIMEOUT_S: Final = 30
END_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05
OURS: Final = "synvirt-"


@dataclass(frozen=True, slots=True)
class Device:
    """A guest's disk: `node` is the node that the guest writes to, `path` its place in QEMU's object tree."""

    key: str
    node: str
    path: str
    size_bytes: int


def devices(qmp: Qmp) -> dict[str, Device]:
    """By the key in the configuration: Proxmox VE names a device, or its drive, so."""
    found = {}
    for one in rows(qmp.ask("query-block")):
        inserted = one.get("inserted")
        if not isinstance(inserted, dict) or not (node := str(inserted.get("node-name", ""))):
            continue
        qdev, device = str(one.get("qdev", "")), str(one.get("device", ""))
        path = qdev if qdev.startswith("/") else f"/machine/peripheral/{qdev}"
        # /machine/peripheral/virtio0/virtio-backend
        key = path.split("/")[3] if qdev else device.removeprefix("drive-")
        image = inserted.get("image")
        size = image.get("virtual-size") if isinstance(image, dict) else None
        found[key] = Device(key, node, path, size if isinstance(size, int) else 0)
    return found


def export_name(name: str, key: str) -> str:
    return f"{name}.{key}"


def overlay_file(name: str, key: str) -> str:
    return f"{name}.{key}.overlay"


def since_bitmap(name: str, key: str, since: str) -> str:
    """What changed between the snapshot `since` and `name`."""
    return f"{export_name(name, key)}.since.{since.rpartition('-')[2]}"


def _node(name: str, key: str, part: str) -> str:
    """QEMU's names of nodes have at most 31 characters."""
    return f"sv-{hashlib.sha256(name.encode()).hexdigest()[:10]}-{key}-{part}"


# ── begin ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def begin(qmp: Qmp, name: str, overlays: Mapping[str, str], socket: str, *, by_access: bool = False) -> None:
    """Freezes these disks, by key with the file of each one's overlay, and serves them at `socket`. Finds them again, if this
    was begun before; SnapshotFailed. `by_access`: by Proxmox VE's own call, unless that is refused."""
    nodes, there = Nodes(qmp), devices(qmp)
    wanted = {key: overlay for key, overlay in overlays.items() if not nodes.has(_node(name, key, "access"))}
    for key in wanted:
        if key not in there:
            raise SnapshotFailed(f"{qmp.what}: QEMU has no disk {key}", hint="was it detached, or is it still to be attached?")
    access: Mapping[str, str] = {}
    if by_access and wanted == dict(overlays):
        for key in wanted:
            _mark(qmp, nodes, name, there[key])
        access = backup_access.begin(qmp, name, overlays)
    if not access:
        for key, overlay in wanted.items():
            _hold(qmp, Nodes(qmp), name, there[key], overlay)
    _remember_changes(qmp, name, overlays)
    _serve(qmp, name, {key: access.get(key) or _node(name, key, "access") for key in overlays}, socket)


def _mark(qmp: Qmp, nodes: "Nodes", name: str, device: Device) -> str:
    """The node with the bitmap of this disk."""
    found = nodes.with_bitmap(export_name(name, device.key))
    if found is not None:
        return found
    if device.node.startswith("sv-"):
        raise SnapshotFailed(
            f"{qmp.what}: disk {device.key} is being read already", hint="another job of SynVirt's reads it: wait"
        )
    bitmap = {"node": device.node, "name": export_name(name, device.key), "granularity": GRANULARITY_BYTES}
    qmp.ask("block-dirty-bitmap-add", bitmap)
    return device.node


def _hold(qmp: Qmp, nodes: "Nodes", name: str, device: Device, overlay: str) -> None:
    key = device.key
    source = _mark(qmp, nodes, name, device)
    if not nodes.has(_node(name, key, "save")):
        file = {"driver": "file", "filename": overlay}
        qmp.ask("blockdev-add", {"driver": "qcow2", "node-name": _node(name, key, "save"), "file": file})
    if not nodes.has(_node(name, key, "filter")):
        qmp.ask(
            "blockdev-add",
            {
                "driver": "copy-before-write",
                "node-name": _node(name, key, "filter"),
                "file": source,
                "target": _node(name, key, "save"),
                "on-cbw-error": "break-snapshot",
                "cbw-timeout": SAVE_TIMEOUT_S,
            },
        )
    qmp.ask("qom-set", {"path": device.path, "property": "drive", "value": _node(name, key, "filter")})
    qmp.ask(
        "blockdev-add",
        {"driver": "snapshot-access", "node-name": _node(name, key, "access"), "file": _node(name, key, "filter")},
    )


def _remember_changes(qmp: Qmp, name: str, keys: Mapping[str, object]) -> None:
    """Stores the changes since each older snapshot of the same job, as copies that record no more. An older bitmap that does
    not record was left so by a killed service (farewell.py), and may lack changes."""
    job = name.rpartition("-")[0]
    nodes = Nodes(qmp)
    for key in keys:
        source = nodes.with_bitmap(export_name(name, key))
        if source is None:
            raise SnapshotFailed(f"{qmp.what}: the bitmap of {name} on disk {key} is gone: somebody removed it")
        there = nodes.bitmaps[source]
        for older in there:
            snapshot, _, of = older.partition(".")
            if of != key or snapshot == name or snapshot.rpartition("-")[0] != job or older not in nodes.recording:
                continue
            copy = since_bitmap(name, key, snapshot)
            if copy not in there:
                add = {"node": source, "name": copy, "granularity": GRANULARITY_BYTES, "disabled": True}
                merge = {"node": source, "target": copy, "bitmaps": [older]}
                actions = [{"type": "block-dirty-bitmap-add", "data": add}, {"type": "block-dirty-bitmap-merge", "data": merge}]
                qmp.ask("transaction", {"actions": actions})


def _serve(qmp: Qmp, name: str, accesses: Mapping[str, str], socket: str) -> None:
    """`accesses`: the node of each frozen disk, by key."""
    exported = exports(qmp)
    wanted = [key for key in accesses if export_name(name, key) not in exported]
    if not wanted:
        return
    _open_server(qmp, socket, in_use=bool(exported))
    nodes = Nodes(qmp)
    for key in wanted:
        source = nodes.with_bitmap(export_name(name, key))
        prefix = f"{export_name(name, key)}.since."
        bitmaps = [one for one in nodes.bitmaps.get(source or "", ()) if one.startswith(prefix)]
        serve(qmp, export_name(name, key), accesses[key], source or "", bitmaps)


def serve(qmp: Qmp, export: str, node: str, bitmap_node: str, bitmaps: list[str]) -> None:
    """Makes a read-only NBD export of a node, with its dirty bitmaps."""
    qmp.ask(
        "block-export-add",
        {
            "type": "nbd",
            "id": export,
            "name": export,
            "node-name": node,
            "writable": False,
            "bitmaps": [{"node": bitmap_node, "name": one} for one in bitmaps],
        },
    )


def _open_server(qmp: Qmp, socket: str, *, in_use: bool) -> None:
    """QEMU has one NBD server. One without exports was left by a killed service, or is not needed any more."""
    address = {"addr": {"type": "unix", "data": {"path": socket}}}
    try:
        qmp.ask("nbd-server-start", address)
    except QmpError as error:
        if "already running" not in error.detail:
            raise SnapshotFailed(error.detail) from error
        if in_use:
            raise SnapshotFailed(
                f"{qmp.what}: QEMU's NBD server is in use by somebody else",
                hint="a migration of its disks, or another tool's backup: it is tried again when that is over",
            ) from error
        qmp.ask("nbd-server-stop")
        qmp.ask("nbd-server-start", address)


# ── present state ────────────────────────────────────────────────────────────────────────────────────────────────────


class Nodes:
    """QEMU's block nodes at one moment: their names, and the bitmaps of each. `recording`: the bitmaps that record changes."""

    def __init__(self, qmp: Qmp) -> None:
        self.bitmaps: dict[str, list[str]] = {}
        self.recording: set[str] = set()
        for one in rows(qmp.ask("query-named-block-nodes", {"flat": True})):
            found = [bitmap for bitmap in one.get("dirty-bitmaps") or () if isinstance(bitmap, dict)]
            self.bitmaps[str(one.get("node-name", ""))] = [str(bitmap.get("name", "")) for bitmap in found]
            self.recording.update(str(bitmap.get("name", "")) for bitmap in found if bitmap.get("recording") is True)

    def has(self, node: str) -> bool:
        return node in self.bitmaps

    def with_bitmap(self, bitmap: str) -> str | None:
        """The node with the bitmap: the disk's own, whatever is above it. A filter shows those under it without names."""
        return next((node for node, names in self.bitmaps.items() if bitmap in names), None)


def exports(qmp: Qmp) -> list[str]:
    return [str(one.get("id", "")) for one in rows(qmp.ask("query-block-exports"))]


def held(qmp: Qmp) -> list[str]:
    """Our snapshots that freeze disks, by the existing bitmaps and filters."""
    nodes = Nodes(qmp)
    filtered = {
        snapshot
        for snapshot, key in _marks(nodes)
        if nodes.has(_node(snapshot, key, "access")) or nodes.has(_node(snapshot, key, "filter"))
    }
    return sorted(filtered | set(backup_access.held(qmp).values()))


def marked(qmp: Qmp) -> list[str]:
    """Our snapshots that have left anything."""
    return sorted({snapshot for snapshot, _ in _marks(Nodes(qmp))})


def _marks(nodes: Nodes) -> Iterator[tuple[str, str]]:
    """(snapshot, key) of each bitmap that records changes since a snapshot."""
    for names in nodes.bitmaps.values():
        for one in names:
            snapshot, _, key = one.partition(".")
            if snapshot.startswith(OURS) and key and "." not in key:
                yield snapshot, key


def is_held(qmp: Qmp, name: str, key: str) -> bool:
    """Whether the snapshot of this disk still exists and is served."""
    if export_name(name, key) not in exports(qmp):
        return False
    return Nodes(qmp).has(_node(name, key, "access")) or backup_access.held(qmp).get(backup_access.fleecing(key)) == name


def saving(qmp: Qmp, name: str, keys: Collection[str]) -> list[str]:
    """The disks whose overlay QEMU has open."""
    nodes = Nodes(qmp)
    return [key for key in keys if nodes.has(_node(name, key, "save"))]


def has_changes(qmp: Qmp, name: str, key: str, since: str) -> bool:
    return Nodes(qmp).with_bitmap(since_bitmap(name, key, since)) is not None


# ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def end(qmp: Qmp, name: str, *, forget: bool) -> None:
    """Ends the snapshot's freeze, so that the guest writes directly to its disks. `forget`: also removes the record of later
    changes. Idempotent."""
    end_exports(qmp, lambda export: export.startswith(f"{name}."))
    backup_access.end(qmp, name)
    _let_go(qmp, name)
    nodes = Nodes(qmp)
    for node, names in nodes.bitmaps.items():
        for one in names:
            if one.startswith(f"{name}.") and (forget or ".since." in one):
                qmp.ask("block-dirty-bitmap-remove", {"node": node, "name": one})


def end_exports(qmp: Qmp, ours: Callable[[str], bool]) -> None:
    """Ends the exports that are `ours`, and the NBD server with the last one."""
    gone = [one for one in exports(qmp) if ours(one)]
    for one in gone:
        qmp.ask("block-export-del", {"id": one, "mode": "hard"})
    _until(lambda: not set(gone) & set(exports(qmp)), f"{qmp.what}: its exports do not end")
    if gone and not exports(qmp):
        qmp.ask("nbd-server-stop")


def _let_go(qmp: Qmp, name: str) -> None:
    """The reader first: while a filter is read, nothing else may write there. The bitmap shows which node was the disk's."""
    nodes, there = Nodes(qmp), devices(qmp)
    for snapshot, key in list(_marks(nodes)):
        if snapshot != name:
            continue
        if nodes.has(_node(name, key, "access")):
            qmp.ask("blockdev-del", {"node-name": _node(name, key, "access")})
        source = nodes.with_bitmap(export_name(name, key))
        device = there.get(key)
        if device is not None and device.node == _node(name, key, "filter"):
            qmp.ask("qom-set", {"path": device.path, "property": "drive", "value": source})
        for part in ("filter", "save"):
            if nodes.has(_node(name, key, part)):
                qmp.ask("blockdev-del", {"node-name": _node(name, key, part)})


def _until(happened: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while not happened():
        if time.monotonic() > deadline:
            raise Internal(otherwise)
        time.sleep(_POLL_S)
