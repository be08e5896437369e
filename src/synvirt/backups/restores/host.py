"""What restores and boot tests use of this host: its hypervisor and its destinations."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synvirt.backups.restores.domain import ReadXml, read_here
from synvirt.destinations import Destination
from synvirt.errors import DiskWriteFailed
from synvirt.hypervisor import Hypervisor
from synvirt.jobs.exports import Exports
from synvirt.kvm import handing, qemu_user
from synvirt.kvm.connection import Connection, Lookup, find_domain, load
from synvirt.kvm.qemu_user import embedded_root

# The user of swtpm under the host's own libvirtd (swtpm_user of qemu.conf).
SWTPM_USERS = ("tss",)


@dataclass(frozen=True)
class RestoreHost:
    """`destinations`: by name, the default first. `tpm_folder`: where libvirt keeps its emulated TPMs, each in a folder of its
    domain's UUID. `scratch`: the folder of boot tests, with a path short enough for Unix sockets; both are asked for when they
    are needed. `screens`: the folder of their pictures. `alone`: within the block no other run uses the guest of that UUID, for
    example to back it up; Cancelled, once the given function says so. `read_xml`: parses the XML of points' domains. `exports`:
    serves points to guests that start at once; None: no instant starts."""

    hypervisor: Hypervisor
    connection: Connection
    destinations: Mapping[str, Destination]
    tpm_folder: Callable[[], Path]
    scratch: Callable[[], Path]
    screens: Path
    boot_timeout_s: float
    alone: Callable[[str, Callable[[], bool]], contextlib.AbstractContextManager[None]]
    read_xml: ReadXml = read_here
    exports: Exports | None = None

    def give(self, path: Path, users: tuple[str, ...]) -> None:
        """Like `handing.give`. DiskWriteFailed."""
        handing.give(self.connection.uri, path, users)

    def give_to_qemu(self, path: Path) -> None:
        """Gives a file to QEMU's user, if that is not the service's. DiskWriteFailed."""
        handing.to_qemu(self.connection.uri, path)

    def open_to_qemu(self, folder: Path) -> None:
        """Lets QEMU pass through the folder, whatever the service's umask has removed from its mode."""
        if embedded_root(self.connection.uri) is None or qemu_user.of(self.connection.uri) is not None:
            qemu_user.open_own(folder)

    def default(self) -> tuple[str, Destination]:
        return next(iter(self.destinations.items()))

    def destination(self, name: str) -> Destination:
        """The destination. DiskWriteFailed, if no setting names it any more."""
        if name not in self.destinations:
            raise DiskWriteFailed(f"there is no destination {name} any more", hint="put it back into the settings")
        return self.destinations[name]

    def domain(self, lookup: Lookup, key: str) -> Any | None:
        """As `find_domain`."""
        return find_domain(self.connection, lookup, key)

    def has_network(self, name: str) -> bool:
        """Whether the network exists. The embedded driver has no networks."""
        libvirt = load()
        try:
            return bool(self.connection.use().networkLookupByName(name).isActive())
        except libvirt.libvirtError:
            return False

    def has_bridge(self, name: str) -> bool:
        return "/" not in name and Path("/sys/class/net", name).exists()
