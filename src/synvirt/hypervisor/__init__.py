"""The hypervisor of this host: define, start, see it boot. Blocking code."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

from synvirt.hypervisor.machine import Machine
from synvirt.kvm.identity import Identity
from synvirt.model.job import Domain


@dataclass(frozen=True, slots=True)
class Early:
    """Where a guest runs whose volume is not whole yet (early.py): overlays in qcow2, and the Unix socket of the NBD export
    that lies under the first."""

    top: str
    between: str
    socket: str


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of the job: the disk's key in the manifest, and where a domain finds it; with `early`, where it finds the disk
    until then."""

    disk_key: str
    path: str
    device_type: str  # file | block | rbd
    early: Early | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of this host: its memory and processors, and how much of both the guests that run are promised. `vcpus_max`: as many as
    a guest can have, which may be more than the host has; 0 where that is not known."""

    memory_bytes: int
    cpu_count: int
    guests_memory_bytes: int = 0
    guests_cpus: int = 0
    vcpus_max: int = 0


@dataclass(frozen=True, slots=True)
class Lived:
    """Of a domain: whether it `runs`, or holds a memory that was saved; and what tells that it was started at some time, as a
    sentence; None: nothing does."""

    runs: bool
    trace: str | None


class Hypervisor(Protocol):
    """- `domain_xml(machine, volumes)`: its domain on the rung it stands on, UUID, name and differences included; the same for
      the same machine. Without volumes a draft.
    - `networks()`: what a guest's card can be plugged into here, in a plan's words (`network:default`); the default first.
    - `capacity()`: what this host has, and what its guests take of it. DomainDefineFailed.
    - `keep_variables(job_id, content)`: the source's UEFI variables, for the domain of this job; before `domain_xml`. False,
      where no firmware of this host can use them. `forget_variables(job_id)`: idempotent.
    - `firmware(job_id, secure)`: this host's UEFI for that job's domain, as (code, template of its variables): those that were
      kept, where they were. None, where this host has no such.
    - `variables_file(job_id)`: where those lie. `console_log(uuid)`: where the console of that domain is looked for.
    - `emulates()`: KVM does not work here.
    - `check_free(wanted)`: Conflict, when a domain that is not of the same job has its name, its UUID or one of its MACs.
    - `define(domain)`, `start(uuid)`: idempotent. DomainDefineFailed, or Conflict as above. A guest that runs on another rung
      of its job is stopped first: nothing but its volumes goes from one rung to the next.
    - `lived(uuid)`: whether the domain runs, or did; None, where there is no such domain.
    - `wait_until_booted(uuid, timeout_s, stop)`: the sign that was seen (`agent`, …); GuestBootFailed with the cause, what the
      console said, and a screenshot kept; or Cancelled as soon as `stop()` is true.
    - `lay(volume, size_bytes)`: a new overlay for a guest whose volume is not whole, once its export is served.
      DiskWriteFailed.
    - `resume(uuid)`: a guest that stands still, since a disk could not be read or written, tries it again; True, where it did.
      Of one that runs, is off or is not there: False.
    - `onto_volumes(uuid, volumes, stop)`: the disks of a guest that was started early are its whole volumes when this returns;
      one that runs runs on, with all that it wrote. What is defined may still name the layers, where it is off: define it next.
      Again after it was cut off: it goes on. DiskWriteFailed, where a disk stays where it is; Cancelled.
    - `screenshot(job_id)`: that of the last boot that failed, a PNG; None. `forget_screenshot(job_id)`.
    - `picture(uuid)`: what the screen of the running guest shows, a PNG; None, where it has none.
    - `guest_facts(uuid)`: what the running guest says of itself, by its agent, as TellsOfGuest has it.
    - `machine_facts(machine)`: what it is made of, at its source and here, as the hypervisor has its domain. NotFound.
    - `read_guest_file(uuid, path)`: a small file inside the running guest, by its agent. NotFound, Internal.
    - `addresses(uuid)`: where the running guest is reached, by its agent's word; none, where there is no agent.
    - `run_in_guest(uuid, argv, timeout_s)`: a program inside the running guest, by its agent: how it ended. NotFound, Internal.
    - `undefine(uuid, job_id)`: this job's domain is stopped and gone, with its NVRAM and TPM state; idempotent. A domain of
      that UUID that is not this job's stays.
    """

    def domain_xml(self, machine: Machine, volumes: list[Volume]) -> Domain: ...
    def networks(self) -> list[str]: ...
    def capacity(self) -> Capacity: ...
    def keep_variables(self, job_id: UUID, content: bytes) -> bool: ...
    def forget_variables(self, job_id: UUID) -> None: ...
    def firmware(self, job_id: UUID, *, secure: bool) -> tuple[str, str] | None: ...
    def variables_file(self, job_id: UUID) -> Path: ...
    def console_log(self, uuid: UUID) -> Path: ...
    def emulates(self) -> bool: ...
    def check_free(self, wanted: Identity) -> None: ...
    def define(self, domain: Domain) -> None: ...
    def start(self, uuid: UUID) -> None: ...
    def lived(self, uuid: UUID) -> Lived | None: ...
    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str: ...
    def picture(self, uuid: UUID) -> bytes | None: ...
    def guest_facts(self, uuid: UUID) -> dict[str, str]: ...
    def machine_facts(self, machine: Machine) -> tuple[dict[str, str], dict[str, str]]: ...
    def read_guest_file(self, uuid: UUID, path: str) -> bytes: ...
    def addresses(self, uuid: UUID) -> list[str]: ...
    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int: ...
    def lay(self, volume: Volume, size_bytes: int) -> None: ...
    def resume(self, uuid: UUID) -> bool: ...
    def onto_volumes(self, uuid: UUID, volumes: list[Volume], stop: Callable[[], bool]) -> None: ...
    def screenshot(self, job_id: UUID) -> bytes | None: ...
    def forget_screenshot(self, job_id: UUID) -> None: ...
    def undefine(self, uuid: UUID, job_id: UUID) -> None: ...
    def close(self) -> None: ...
