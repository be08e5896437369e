"""Reads what changed until a guest went off, from its QEMU while that still runs. Blocking code.

Bitmaps are in QEMU's memory, and end with it. Proxmox VE's qmeventd ends a QEMU whose guest has shut down, unless a backup is
running, which vzdump reports on its socket: `{"vzdump": {"vmid": "100"}}`, for as long as the connection lasts (qemu-server,
qmeventd/qmeventd.c: handle_vzdump_handshake, cleanup_client). We do the same for the seconds that it takes to read the bitmaps.
Their content is noted in a file of the service, with the VM's last start and the volumes of its disks: a VM that was started
later may have made changes that no bitmap has, and a disk that was put on another volume since is another disk.
"""

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from synvirt.disks import open_reader
from synvirt.disks.specs import NbdSpec
from synvirt.durable import put_private_file
from synvirt.kvm.qmp import Qmp, QmpError
from synvirt.live.proxmox import bitmaps
from synvirt.live.proxmox.node import QMEVENTD_SOCKET, Node

log = structlog.get_logger(__name__)

# The most changed ranges of all disks and snapshots: 2 million are some 40 MiB of notes, for 128 GiB of small writes.
AREAS_MAX: Final = 2_000_000

# By the name of a snapshot's export (synvirt-JOB-3.scsi0): the changes since it, as (start, length).
Areas = dict[str, list[tuple[int, int]]]


@contextlib.contextmanager
def kept_alive(node: Node, vm_id: str) -> Iterator[None]:
    """During the block the VM's QEMU stays alive after its guest's end. Without qmeventd on the node it does not, and the final
    pass must read whole disks."""
    with contextlib.ExitStack() as held:
        try:
            made = held.enter_context(socket.socket(socket.AF_UNIX))
            made.settimeout(10)
            made.connect(str(node.socket(QMEVENTD_SOCKET)))
            made.sendall(json.dumps({"vzdump": {"vmid": vm_id}}).encode() + b"\n")
        except OSError as error:
            log.warning("QEMU is not kept alive after its guest", vm=vm_id, cause=error.strerror or str(error))
        yield


def changes(qmp: Qmp, node: Node) -> Areas:
    """For each snapshot with a bitmap that still records. The guest does not run: it is off, or was stopped."""
    there = bitmaps.Nodes(qmp)
    marks = {name: source for source, names in there.bitmaps.items() for name in names if _is_mark(name)}
    wanted = {name: source for name, source in marks.items() if name in there.recording}
    if not wanted:
        return {}
    # With a snapshot's name: if we are killed, that snapshot's cleanup finds it.
    remote = node.file(f"{min(wanted).partition('.')[0]}.end.sock")
    with contextlib.suppress(QmpError):
        qmp.ask("nbd-server-start", {"addr": {"type": "unix", "data": {"path": remote}}})
    try:
        for name, source in wanted.items():
            # The bitmap of a read-only export may not record.
            qmp.ask("block-dirty-bitmap-disable", {"node": source, "name": name})
            bitmaps.serve(qmp, f"{name}.end", source, source, [name])
        return _read(node, remote, wanted)
    finally:
        bitmaps.end_exports(qmp, lambda export: export.endswith(".end"))
        # The guest may run on, if it cannot be powered off.
        for name, source in wanted.items():
            with contextlib.suppress(QmpError):
                qmp.ask("block-dirty-bitmap-enable", {"node": source, "name": name})


def _read(node: Node, remote: str, wanted: Iterable[str]) -> Areas:
    found: Areas = {}
    for name in wanted:
        uri = f"nbd+unix:///{name}.end?socket={node.tunnel(remote)}"
        reader = open_reader(NbdSpec(uri=uri, bitmap=f"qemu:dirty-bitmap:{name}", connections=1))
        try:
            found[name] = [(extent.start, extent.length) for extent in reader.extents()]
        finally:
            reader.close()
        if sum(len(areas) for areas in found.values()) > AREAS_MAX:
            log.warning("too many changed places to note", node=node.name)
            return {}
    return found


def _is_mark(bitmap: str) -> bool:
    return bitmap.startswith(bitmaps.OURS) and bitmap.count(".") == 1


# ── notes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Stopped(NamedTuple):
    """A guest that `shut_down` has stopped: its last start, and the task that asked it to shut down."""

    last_start: str
    asked: str | None


class Notes:
    """One file per VM in `folder`, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, vm_id: str, last_start: str, areas: Areas, volumes: Mapping[str, str]) -> None:
        """`volumes`: of the disks, by key. Durable on return; a reader meanwhile gets the older file."""
        noted = {"last_start": last_start, "areas": areas, "volumes": dict(volumes)}
        self._put(self._path(vm_id), json.dumps(noted).encode())

    def since(self, vm_id: str, last_start: str, export: str, volume: str) -> tuple[tuple[int, int], ...] | None:
        """The changes since that snapshot, if they are known, the VM was not started since, and its disk is on this volume."""
        try:
            found: Mapping[str, Any] = json.loads(self._path(vm_id).read_text())
            if (found["last_start"], found["volumes"][export.rpartition(".")[2]]) != (last_start, volume):
                return None
            return tuple((int(start), int(length)) for start, length in found["areas"][export])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget(self, vm_id: str, snapshot: str) -> None:
        """Call it once the snapshot is removed; the file is removed with the last snapshot of its job."""
        try:
            found = json.loads(self._path(vm_id).read_text())
            left = {export: areas for export, areas in found["areas"].items() if not export.startswith(f"{snapshot}.")}
        except (OSError, ValueError, KeyError, AttributeError):
            return
        if left:
            self.put(vm_id, found["last_start"], left, found.get("volumes", {}))
        else:
            self._path(vm_id).unlink(missing_ok=True)

    def held_on(self, snapshot: str, node: str | None) -> str | None:
        """The node with this snapshot's files. With `node`: it is noted, durably, before anything is made there, as a VM may
        move."""
        path = self._folder / f"{snapshot}.node"
        if node is not None:
            self._put(path, node.encode())
            return node
        try:
            return path.read_text()
        except OSError:
            return None

    def let_go(self, snapshot: str) -> None:
        """Removes the note of the snapshot's node."""
        (self._folder / f"{snapshot}.node").unlink(missing_ok=True)

    def stop(self, vm_id: str, last_start: str, asked: str | None) -> None:
        """Notes that `shut_down` is about to stop a guest that it powers off after that. `asked`: the task that asked the guest
        to shut down before. Durable on return: a service that is killed in between would leave a guest that seems to have been
        paused by somebody, whose memory must not be lost."""
        self._put(self._stopped(vm_id), json.dumps({"last_start": last_start, "asked": asked}).encode())

    def stopped(self, vm_id: str) -> Stopped | None:
        """The note of `stop`, as long as the guest is neither off nor runs on."""
        try:
            found = json.loads(self._stopped(vm_id).read_text())
            return Stopped(str(found["last_start"]), None if found["asked"] is None else str(found["asked"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget_stop(self, vm_id: str) -> None:
        """Call it once the guest is off, or runs on."""
        self._stopped(vm_id).unlink(missing_ok=True)

    def _put(self, path: Path, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        put_private_file(path, content)

    def _path(self, vm_id: str) -> Path:
        return self._folder / f"changes-{vm_id}.json"

    def _stopped(self, vm_id: str) -> Path:
        return self._folder / f"stopped-{vm_id}.json"
