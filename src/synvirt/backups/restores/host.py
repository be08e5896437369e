"""Where guests are restored: this host's hypervisor and its destinations, as restores and boot tests use them."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synvirt.backups.restores.domain import ReadXml, read_here
from synvirt.destinations import Destination
from synvirt.errors import DiskWriteFailed, Internal
from synvirt.hypervisor import Hypervisor
from synvirt.jobs.exports import Exports
from synvirt.kvm import handing, qemu_user
from synvirt.kvm.connection import Connection, load
from synvirt.kvm.qemu_user import embedded_root

# Who swtpm runs as under the host's own libvirtd (swtpm_user of qemu.conf).
SWTPM_USERS = ("tss",)


@dataclass(frozen=True)
class RestoreHost:
    """`destinations`: by name, the default first. `tpm_folder`: where libvirt keeps its emulated TPMs, each in a folder of its
    domain's UUID. `scratch`: the folder of boot tests, with a path short enough for Unix sockets; both are asked when they
    are needed. `screens`: where their pictures stay. `alone`: within it no other run uses the guest of that UUID, to back it up
    for example; Cancelled, once the given function says so. `read_xml`: parses the XML of points' domains. `exports`: what
    serves points to guests that start at once; None: nothing does."""

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
        """As `handing.give`. DiskWriteFailed."""
        handing.give(self.connection.uri, path, users)

    def give_to_qemu(self, path: Path) -> None:
        """Gives a file to the user that QEMU runs as, where that is another than the service's. DiskWriteFailed."""
        handing.to_qemu(self.connection.uri, path)

    def open_to_qemu(self, folder: Path) -> None:
        """It may be passed, whatever the service's umask took away of its mode."""
        if embedded_root(self.connection.uri) is None or qemu_user.of(self.connection.uri) is not None:
            qemu_user.open_own(folder)

    def default(self) -> tuple[str, Destination]:
        return next(iter(self.destinations.items()))

    def destination(self, name: str) -> Destination:
        """DiskWriteFailed, where no setting names it any more."""
        if name not in self.destinations:
            raise DiskWriteFailed(f"there is no destination {name} any more", hint="put it back into the settings")
        return self.destinations[name]

    def domain(self, lookup: str, key: str) -> Any | None:
        """By `lookupByName` or `lookupByUUIDString`; None, where there is none."""
        libvirt = load()
        try:
            return getattr(self.connection.use(), lookup)(key)
        except libvirt.libvirtError as error:
            if error.get_error_code() in (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_INVALID_ARG):
                return None
            raise Internal(f"the hypervisor does not say whether it has {key}: {error}") from error

    def has_network(self, name: str) -> bool:
        """The embedded driver has none at all."""
        libvirt = load()
        try:
            return bool(self.connection.use().networkLookupByName(name).isActive())
        except libvirt.libvirtError:
            return False

    def has_bridge(self, name: str) -> bool:
        return "/" not in name and Path("/sys/class/net", name).exists()
