"""The disks of a restore point as read-only NBD exports, each on its own Unix socket: nothing is restored for it.

    chunks that are read ─▶ PointReader ─▶ NbdServer ─▶ nbdfuse, guestfish, qemu-img, a virtual machine

The sockets are in a folder that no other user may enter, and are removed with it.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from synvirt.backups.restores.new_domain import chosen_disks
from synvirt.backups.restores.new_files import file_name_of
from synvirt.cage.scratch import scratch_folder
from synvirt.disks.nbd.server import NbdServer
from synvirt.errors import BackupBadRequest, SynvirtError
from synvirt.repository.disk import PointReader
from synvirt.repository.manifest import Manifest
from synvirt.repository.repository import Repository


@dataclass(frozen=True)
class MountedDisk:
    """A served disk of a restore point. `uris`: of its NBD export, all of the same disk."""

    target: str
    size_bytes: int
    uris: tuple[str, ...]
    server: NbdServer

    @property
    def failure(self) -> SynvirtError | None:
        """The first thing that could not be read."""
        return self.server.failure


@contextlib.contextmanager
def mounted(
    repository: Repository, manifest: Manifest, targets: tuple[str, ...] = (), *, port: int | None = None
) -> Iterator[tuple[MountedDisk, ...]]:
    """Serves the disks until the block ends. `manifest`: of the point. `targets`: empty: all disks. `port`: also on 127.0.0.1,
    where every user of this host can read it; only for a single disk."""
    disks = chosen_disks(manifest, targets)
    if unknown := set(targets) - disks.keys():
        raise BackupBadRequest(f"the restore point has no disk {sorted(unknown)[0]}")
    if not disks:
        raise BackupBadRequest("the restore point has no disks, so there is nothing to serve")
    if port is not None and len(disks) != 1:
        raise BackupBadRequest(f"a port serves one disk, and the restore point has {len(disks)}", hint="name one with --disk")
    with contextlib.ExitStack() as closing:
        folder = closing.enter_context(scratch_folder("mount"))
        found = []
        for number, (target, disk) in enumerate(disks.items()):
            server = NbdServer(PointReader(repository, disk))
            closing.callback(server.close)
            uris = [server.listen(folder / _socket_name(number, target, folder))]
            if port is not None:
                uris.append(server.listen_loopback(port))
            found.append(MountedDisk(target, disk.size_bytes, tuple(uris), server))
        yield tuple(found)


def _socket_name(number: int, target: str, folder: Path) -> str:
    """The name of the disk's socket in the folder. Targets come from a domain's XML: two may have the same letters, or none."""
    name = file_name_of(target)
    return name if name and not (folder / name).exists() else f"{number}.{name}"
