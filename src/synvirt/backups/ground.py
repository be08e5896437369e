"""What restored guests land on: this host's hypervisor and its destinations, as restores and boot tests use them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from synvirt.destinations import Destination
from synvirt.errors import DiskWriteFailed, Internal
from synvirt.hypervisor.connection import Connection, load
from synvirt.model import Domain


class Lands(Protocol):
    """Of `synvirt.hypervisor.Hypervisor`, and of the host that it rules: where it keeps what belongs to a domain."""

    def define(self, domain: Domain) -> None: ...
    def start(self, uuid: UUID) -> None: ...
    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str: ...
    def undefine(self, uuid: UUID, job_id: UUID) -> None: ...
    def screenshot(self, job_id: UUID) -> bytes | None: ...
    def forget_screenshot(self, job_id: UUID) -> None: ...
    def keep_variables(self, job_id: UUID, content: bytes) -> bool: ...
    def forget_variables(self, job_id: UUID) -> None: ...
    def variables_file(self, job_id: UUID) -> Path: ...
    def console_log(self, uuid: UUID) -> Path: ...
    def emulates(self) -> bool: ...


@dataclass(frozen=True)
class Ground:
    """`destinations`: by name, the default first. `tpm_folder`: where libvirt keeps its emulated TPMs, each in a folder of its
    domain's UUID. `scratch`: a folder of our own, for boot tests."""

    hypervisor: Lands
    connection: Connection
    destinations: Mapping[str, Destination]
    tpm_folder: Path
    scratch: Path
    boot_timeout_s: float

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
