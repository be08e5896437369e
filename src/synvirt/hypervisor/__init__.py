"""The hypervisor of this host: define, start, see it boot. Blocking code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

from synvirt.hypervisor.machine import Machine
from synvirt.kvm.identity import Identity
from synvirt.machines.ovmf_store import UefiVariable
from synvirt.model.job import Domain


@dataclass(frozen=True, slots=True)
class Paused:
    """Why QEMU has paused a guest: a disk cannot be read or written. `full`: what has no room for what the guest writes, in
    words; None: the disk has another trouble."""

    full: str | None = None


@dataclass(frozen=True, slots=True)
class Early:
    """The layers of a guest whose volume is not complete yet (early.py): overlays in qcow2, and the Unix socket of the NBD
    export under the first one."""

    top: str
    between: str
    socket: str


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of the job: the disk's key in the manifest, and what a domain opens. With `early`, what it opens until the
    volume is complete. `over`: the file is an overlay in qcow2, over this raw file, which the domain only reads."""

    disk_key: str
    path: str
    device_type: str  # file | block | rbd
    early: Early | None = None
    over: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory and processors of this host, and how much of both the running guests may use. `vcpus_max`: the most that one
    guest can have, which may be more than the host has; 0 where that is not known."""

    memory_bytes: int
    cpu_count: int
    guests_memory_bytes: int = 0
    guests_cpus: int = 0
    vcpus_max: int = 0


@dataclass(frozen=True, slots=True)
class Lived:
    """Whether a domain `runs`, or has a saved memory; and `trace`, what shows that it was once started, as a sentence; None:
    nothing does. `is_sure`: False, where nothing shows that it was never started, either."""

    runs: bool
    trace: str | None
    is_sure: bool = True


class Hypervisor(Protocol):
    """- `domain_xml(machine, volumes)`: the machine's domain on its present rung, with UUID, name and differences. The same
      machine always gives the same. Without volumes it is a draft.
    - `networks()`: what a guest's card can be connected to here, as in a plan (`network:default`); first the
      `default_network`, for cards that a plan does not map. DomainDefineFailed.
    - `capacity()`: this host's resources, and how much its guests use. DomainDefineFailed.
    - `keep_variables(job_id, content)`: stores the source's UEFI variables for this job's domain; call it before `domain_xml`.
      False, where no firmware of this host can use them. `forget_variables(job_id)`: idempotent.
    - `add_entries(job_id, entries, secure)`: stores this host's own variables with these boot entries, like `keep_variables`.
      False, where this host has no UEFI, or it keeps its variables in another form.
    - `firmware(job_id, secure)`: this host's UEFI for that job's domain, as (code, template of its variables); the template is
      the stored variables, if there are any. None, where this host has no such firmware.
    - `own_variables(job_id)`: the path of that job's domain's own copy, which no other domain has; None: libvirt chooses one.
    - `variables_file(job_id)`: the path of the stored variables. `console_log(uuid)`: the path of that domain's console log.
    - `emulates()`: whether KVM does not work here.
    - `check_free(wanted)`: Conflict, when a domain of another job has its name, its UUID or one of its MACs.
    - `define(domain)`, `start(uuid)`: idempotent. DomainDefineFailed, or Conflict as above. A guest that runs on another rung
      of its job is stopped first: only its volumes go from one rung to the next. `moved`: volumes onto which the guest moves:
      if it is defined, only the disks on these become as in `domain`, and all else stays as somebody may have changed it.
    - `lived(uuid)`: whether the domain runs, or has ever run; None, where there is no such domain.
    - `job_of(uuid)`: the job that has made the domain, None where there is none, or it is not ours.
    - `wait_until_booted(uuid, timeout_s, stop)`: the sign that was seen (`agent`, …). GuestBootFailed, with the cause and the
      end of the console, after a screenshot was stored; Cancelled, as soon as `stop()` is true.
    - `lay(volume, size_bytes)`: makes a new overlay for a guest whose volume is not complete, once its export is served.
      DiskWriteFailed.
    - `resume(uuid)`: resumes a guest that was paused because a disk could not be read or written, and says why it was; None,
      where it runs, is off or does not exist.
    - `onto_volumes(uuid, volumes, stop)`: moves a guest that was started early onto its complete volumes; a running one goes
      on, with all that it wrote. If the guest is off, its definition may still name the layers: define it next, and call this
      again, as it may have been started in between. Called again after an interruption, it goes on. DiskWriteFailed, where a
      disk cannot be moved; Cancelled.
    - `has_moved(uuid, volumes)`: whether a disk of that guest is on its volume already. False, where there is no such guest.
    - `screenshot(job_id)`: the PNG of the last failed boot; None. `forget_screenshot(job_id)`.
    - `picture(uuid)`: the screen of the running guest as a PNG; None, where it has none.
    - `guest_facts(uuid)`: facts of the running guest by its agent, as in ReportsGuestFacts.
    - `machine_facts(machine)`: facts of the machine, at its source and here, as the hypervisor has its domain. NotFound.
    - `read_guest_file(uuid, path)`: a small file inside the running guest, by its agent. NotFound, Internal.
    - `addresses(uuid)`: the addresses of the running guest, by its agent; none, where there is no agent.
    - `run_in_guest(uuid, argv, timeout_s)`: runs a program inside the guest, by its agent, and gives how it ended. NotFound,
      Internal.
    - `undefine(uuid, job_id)`: stops and removes this job's domain, with its NVRAM and TPM state; idempotent. A domain of that
      UUID that belongs to no such job stays.

    Of a libvirtd that is away, all that ask it raise HypervisorAway: it says nothing about the guest. `wait_until_booted` waits
    for it instead.
    """

    @property
    def default_network(self) -> str: ...
    def domain_xml(self, machine: Machine, volumes: list[Volume]) -> Domain: ...
    def networks(self) -> list[str]: ...
    def capacity(self) -> Capacity: ...
    def keep_variables(self, job_id: UUID, content: bytes) -> bool: ...
    def add_entries(self, job_id: UUID, entries: Sequence[UefiVariable], *, secure: bool) -> bool: ...
    def forget_variables(self, job_id: UUID) -> None: ...
    def firmware(self, job_id: UUID, *, secure: bool) -> tuple[str, str] | None: ...
    def own_variables(self, job_id: UUID) -> str | None: ...
    def variables_file(self, job_id: UUID) -> Path: ...
    def console_log(self, uuid: UUID) -> Path: ...
    def emulates(self) -> bool: ...
    def check_free(self, wanted: Identity) -> None: ...
    def define(self, domain: Domain, moved: Sequence[Volume] = ()) -> None: ...
    def start(self, uuid: UUID) -> None: ...
    def lived(self, uuid: UUID) -> Lived | None: ...
    def job_of(self, uuid: UUID) -> str | None: ...
    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str: ...
    def picture(self, uuid: UUID) -> bytes | None: ...
    def guest_facts(self, uuid: UUID) -> dict[str, str]: ...
    def machine_facts(self, machine: Machine) -> tuple[dict[str, str], dict[str, str]]: ...
    def read_guest_file(self, uuid: UUID, path: str) -> bytes: ...
    def addresses(self, uuid: UUID) -> list[str]: ...
    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int: ...
    def lay(self, volume: Volume, size_bytes: int) -> None: ...
    def resume(self, uuid: UUID) -> Paused | None: ...
    def onto_volumes(self, uuid: UUID, volumes: list[Volume], stop: Callable[[], bool]) -> None: ...
    def has_moved(self, uuid: UUID, volumes: list[Volume]) -> bool: ...
    def screenshot(self, job_id: UUID) -> bytes | None: ...
    def forget_screenshot(self, job_id: UUID) -> None: ...
    def undefine(self, uuid: UUID, job_id: UUID) -> None: ...
    def close(self) -> None: ...
