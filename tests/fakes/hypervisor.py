"""A hypervisor in memory that keeps the laws of the real one, and fails where it is told to."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from synvirt.errors import Cancelled, Conflict, DomainDefineFailed, GuestBootFailed
from synvirt.hypervisor import Volume
from synvirt.hypervisor.domain_xml import Firmware, Host, build, job_of
from synvirt.model import Domain, Migration

HOST = Host(
    accelerator="tcg",
    serial_log="/var/lib/synvirt/libvirt/serial/{uuid}.log",
    uefi=Firmware("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    uefi_secure=Firmware("/usr/share/OVMF/OVMF_CODE_4M.ms.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"),
)

Fault = Literal["define", "start", "boot", "silent"]


@dataclass
class FakeDomain:
    domain: Domain
    running: bool = False


class FakeHypervisor:
    """`fail`: what goes wrong: define or start is refused; the guest stops at boot; it runs but never shows a sign (silent)."""

    def __init__(self, *, fail: str | Fault | None = None) -> None:
        self.fail = fail
        self.domains: dict[UUID, FakeDomain] = {}
        self._lock = threading.Lock()

    def add_foreign(self, name: str, uuid: UUID) -> None:
        """A domain that somebody else made: no mark of ours."""
        self.domains[uuid] = FakeDomain(Domain(name=name, uuid=str(uuid), xml="<domain/>"))

    def power_off(self, uuid: UUID) -> None:
        """As a guest does by itself."""
        self.domains[uuid].running = False

    def domain_xml(self, job: Migration, volumes: list[Volume]) -> Domain:
        return build(job, volumes, HOST)

    def check_free(self, name: str, uuid: UUID) -> None:
        with self._lock:
            self._check_free(name, uuid, Conflict)

    def define(self, domain: Domain) -> None:
        if self.fail == "define":
            raise DomainDefineFailed("the fake hypervisor does not like this domain")
        with self._lock:
            self._check_free(domain.name, UUID(domain.uuid), DomainDefineFailed)
            self.domains.setdefault(UUID(domain.uuid), FakeDomain(domain)).domain = domain

    def start(self, uuid: UUID) -> None:
        if self.fail == "start":
            raise DomainDefineFailed("the fake hypervisor cannot start this domain")
        with self._lock:
            if uuid not in self.domains:
                raise DomainDefineFailed(f"domain {uuid} is not defined")
            self.domains[uuid].running = self.fail != "boot"

    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            if stop():
                raise Cancelled
            found = self.domains.get(uuid)
            if found is None or not found.running:
                raise GuestBootFailed("the guest stopped: no boot device", hint="is it the right disk?")
            if self.fail != "silent":
                return "agent"
            if time.monotonic() >= deadline:
                raise GuestBootFailed(f"no sign of life within {timeout_s:g} s")
            time.sleep(0.01)

    def read_guest_file(self, uuid: UUID, path: str) -> bytes:
        if not self.domains[uuid].running:
            raise GuestBootFailed("the agent does not answer")
        return f"{path} of {uuid}\n".encode()

    def undefine(self, uuid: UUID) -> None:
        with self._lock:
            if uuid in self.domains and not self._ours(uuid):
                raise Conflict(f"domain {uuid} is not ours")
            self.domains.pop(uuid, None)

    def close(self) -> None:
        pass

    def _ours(self, uuid: UUID) -> bool:
        return job_of(self.domains[uuid].domain.xml) == str(uuid)

    def _check_free(self, name: str, uuid: UUID, error: type[Conflict] | type[DomainDefineFailed]) -> None:
        for known, other in self.domains.items():
            if (known == uuid and not self._ours(known)) or (known != uuid and other.domain.name == name):
                raise error(f"a domain {other.domain.name} ({known}) exists and is not this job's")
