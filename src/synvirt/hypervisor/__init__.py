"""The hypervisor of this host: define, start, see it boot. Blocking code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from synvirt.model import Domain, Migration


@dataclass(frozen=True, slots=True)
class Volume:
    """A finished volume of the job: the disk's key in the manifest, and where a domain finds it."""

    disk_key: str
    path: str
    device_type: str  # file | block


class Hypervisor(Protocol):
    """- `domain_xml(job, volumes)`: the domain of this job, its UUID and name included; the same for the same job.
    - `check_free(name, uuid)`: Conflict, when a domain that is not ours has this name or UUID.
    - `define(domain)`, `start(uuid)`: idempotent. DomainDefineFailed.
    - `wait_until_booted(uuid, timeout_s, stop)`: the sign that was seen (`agent`, …); GuestBootFailed with the cause, or
      Cancelled as soon as `stop()` is true.
    - `read_guest_file(uuid, path)`: a small file inside the running guest, by its agent. NotFound, Internal.
    - `undefine(uuid)`: stopped, gone, with its NVRAM; idempotent.
    """

    def domain_xml(self, job: Migration, volumes: list[Volume]) -> Domain: ...
    def check_free(self, name: str, uuid: UUID) -> None: ...
    def define(self, domain: Domain) -> None: ...
    def start(self, uuid: UUID) -> None: ...
    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str: ...
    def read_guest_file(self, uuid: UUID, path: str) -> bytes: ...
    def undefine(self, uuid: UUID) -> None: ...
    def close(self) -> None: ...
