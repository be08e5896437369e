"""A hypervisor in memory that keeps the laws of the real one, and fails where a test wants it to fail."""

import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from uuid import UUID

from synvirt.errors import Cancelled, Conflict, DiskWriteFailed, DomainDefineFailed, GuestBootFailed, HypervisorAway
from synvirt.hypervisor import Capacity, Lived, Paused, Volume, facts
from synvirt.hypervisor.domain_xml import Firmware, Host, build
from synvirt.hypervisor.hardware import uuid_of
from synvirt.hypervisor.machine import Machine
from synvirt.kvm.identity import CLASH_HINT, Identity, clash, identity_of
from synvirt.machines.ovmf_store import UefiVariable
from synvirt.model.job import Domain
from synvirt.model.machine import DiskBus
from synvirt.sizes import GIB

HOST = Host(
    accelerator="tcg",
    serial_log="/var/lib/synvirt/libvirt/serial/{uuid}.log",
    uefi=Firmware("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    uefi_secure=Firmware("/usr/share/OVMF/OVMF_CODE_4M.ms.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"),
)

BUSES: tuple[DiskBus, ...] = ("virtio", "scsi", "sata", "ide")
PICTURE = b"\x89PNG a screen"
Fault = Literal["define", "start", "boot", "silent", "pivot"]


@dataclass
class FakeDomain:
    domain: Domain
    running: bool = False
    started: bool = False
    held_up: bool = False
    written: list[tuple[int, int, bytes]] = field(default_factory=list)
    on: list[str] = field(default_factory=list)


class FakeHypervisor:
    """`fail`: what goes wrong: define or start is refused; the guest stops at boot, on any bus; it runs but never shows a sign
    (silent); it does not get onto its volumes (pivot). `boots_from`: the buses that its guests have a driver for."""

    def __init__(self, *, fail: str | Fault | None = None, boots_from: tuple[DiskBus, ...] = BUSES) -> None:
        self.fail = fail
        self.boots_from = boots_from
        self.has = Capacity(64 * GIB, 16, vcpus_max=255)
        self.default_network = "user"
        # How many more calls it does not answer.
        self.away = 0
        self.source_away = False
        self.is_full = False
        self.facts: dict[str, str] = {}
        self.screenshots: dict[UUID, bytes] = {}
        self.variables: dict[UUID, bytes] = {}
        self.domains: dict[UUID, FakeDomain] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> "FakeHypervisor":
        """As it is now. A lock cannot be copied, and nobody holds it."""
        made = copy(self)
        for name, value in vars(self).items():
            setattr(made, name, threading.Lock() if name == "_lock" else deepcopy(value, memo))
        return made

    def networks(self) -> list[str]:
        self._check_answers()
        return [self.default_network, "network:default", "bridge:br0"]

    def capacity(self) -> Capacity:
        self._check_answers()
        running = [ET.fromstring(one.domain.xml) for one in self.domains.values() if one.running]
        return replace(
            self.has,
            guests_memory_bytes=sum(int(xml.findtext("memory", "0")) for xml in running),
            guests_cpus=sum(int(xml.findtext("vcpu", "0")) for xml in running),
        )

    def add_foreign(self, name: str, uuid: UUID, mac: str = "") -> None:
        """A domain that somebody else made: no mark of ours."""
        card = f"<devices><interface><mac address='{mac}'/></interface></devices>" if mac else ""
        xml = f"<domain><name>{name}</name><uuid>{uuid}</uuid>{card}</domain>"
        self.domains[uuid] = FakeDomain(Domain(name=name, uuid=str(uuid), xml=xml))

    def power_off(self, uuid: UUID) -> None:
        """As a guest does by itself."""
        self.domains[uuid].running = False

    def domain_xml(self, machine: Machine, volumes: list[Volume]) -> Domain:
        kept = machine.id in self.variables
        builds = {name: replace(getattr(HOST, name), kept=kept) for name in ("uefi", "uefi_secure")}
        return build(machine, volumes, replace(HOST, **builds))

    def keep_variables(self, job_id: UUID, content: bytes) -> bool:
        if content.startswith(b"useless"):
            return False
        self.variables[job_id] = content
        return True

    def add_entries(self, job_id: UUID, entries: Sequence[UefiVariable], *, secure: bool) -> bool:
        self.variables[job_id] = repr([one.name for one in entries]).encode()
        return True

    def forget_variables(self, job_id: UUID) -> None:
        self.variables.pop(job_id, None)

    def firmware(self, job_id: UUID, *, secure: bool) -> tuple[str, str] | None:
        return "/fw/own/CODE.fd", str(self.variables_file(job_id)) if job_id in self.variables else "/fw/own/VARS.fd"

    def own_variables(self, job_id: UUID) -> str | None:
        return None

    def variables_file(self, job_id: UUID) -> Path:
        return Path(f"/var/lib/synvirt/libvirt/variables/{job_id}.fd")

    def console_log(self, uuid: UUID) -> Path:
        return Path(HOST.serial_log.format(uuid=uuid))

    def emulates(self) -> bool:
        return HOST.accelerator == "tcg"

    def check_free(self, wanted: Identity) -> None:
        self._check_answers()
        with self._lock:
            self._check_free(wanted)

    def _check_answers(self) -> None:
        """Called by all that asks libvirt, as a daemon may be away. (`wait_until_booted` waits for that itself.)"""
        if self.away:
            self.away -= 1
            raise HypervisorAway("client socket is closed", hint="this host's libvirtd was restarted")

    def define(self, domain: Domain, moved: Sequence[Volume] = ()) -> None:
        self._check_answers()
        if self.fail == "define":
            raise DomainDefineFailed("the fake hypervisor does not like this domain")
        with self._lock:
            self._check_free(identity_of(domain.xml))
            present = self.domains.setdefault(UUID(domain.uuid), FakeDomain(domain))
            if identity_of(present.domain.xml).bus != identity_of(domain.xml).bus:
                present.running = False
            present.domain = domain

    def start(self, uuid: UUID) -> None:
        self._check_answers()
        if self.fail == "start":
            raise DomainDefineFailed("the fake hypervisor cannot start this domain")
        with self._lock:
            if uuid not in self.domains:
                raise DomainDefineFailed(f"domain {uuid} is not defined")
            found = self.domains[uuid]
            if not found.running:
                found.on = _volumes(found.domain.xml)
            found.running, found.started = self.fail != "boot", True

    def lived(self, uuid: UUID) -> Lived | None:
        self._check_answers()
        found = self.domains.get(uuid)
        return None if found is None else Lived(runs=found.running, trace="its console has a log" if found.started else None)

    def job_of(self, uuid: UUID) -> str | None:
        self._check_answers()
        found = self.domains.get(uuid)
        return None if found is None else identity_of(found.domain.xml).job_id

    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            if stop():
                raise Cancelled
            found = self.domains.get(uuid)
            if found is None or not found.running:
                raise GuestBootFailed("the guest stopped: no boot device", hint="is it the right disk?")
            facts = identity_of(found.domain.xml)
            if facts.bus not in self.boots_from:
                self.screenshots[UUID(facts.job_id)] = PICTURE
                raise GuestBootFailed(f"no root file system on {facts.bus}", other_bus_may_help=True)
            if self.fail != "silent":
                return "agent"
            if time.monotonic() >= deadline:
                raise GuestBootFailed(f"no sign of life within {timeout_s:g} s")
            time.sleep(0.01)

    def picture(self, uuid: UUID) -> bytes | None:
        self._check_answers()
        found = self.domains.get(uuid)
        return PICTURE if found is not None and found.running else None

    def guest_facts(self, uuid: UUID) -> dict[str, str]:
        self._check_answers()
        return dict(self.facts)

    def machine_facts(self, machine: Machine) -> tuple[dict[str, str], dict[str, str]]:
        """The disks' sizes are those of their files."""
        self._check_answers()
        xml = self.domains[uuid_of(machine)].domain.xml
        sizes = {}
        for disk in ET.fromstring(xml).iterfind("devices/disk"):
            source, target = disk.find("source"), disk.find("target")
            if source is not None and target is not None and (path := Path(source.get("file", ""))).is_file():
                sizes[target.get("dev", "")] = path.stat().st_size
        return facts.of_source(machine), facts.of_domain(xml, machine, sizes)

    def read_guest_file(self, uuid: UUID, path: str) -> bytes:
        self._check_answers()
        if not self.domains[uuid].running:
            raise GuestBootFailed("the agent does not answer")
        return f"{path} of {uuid}\n".encode()

    def addresses(self, uuid: UUID) -> list[str]:
        self._check_answers()
        return []

    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        """`true` and `false` are all that its guests have."""
        self._check_answers()
        return 0 if argv[0] == "true" else 1

    def lay(self, volume: Volume, size_bytes: int) -> None:
        assert volume.early is not None
        running = [one for one in self.domains.values() if one.running and volume.early.top in one.domain.xml]
        assert not running, "what a guest wrote is laid anew"
        Path(volume.early.top).write_bytes(b"")

    def resume(self, uuid: UUID) -> Paused | None:
        self._check_answers()
        found = self.domains.get(uuid)
        if found is None or not found.running or not found.held_up:
            return None
        found.held_up = self.source_away or self.is_full
        return Paused(full="the file system at /small (0-top.qcow2)" if self.is_full else None)

    def guest_writes(self, uuid: UUID, disk: int, offset: int, content: bytes) -> None:
        """What it writes early stays apart until it is on its volume; then it goes there at once."""
        with self._lock:
            found = self.domains[uuid]
            found.written.append((disk, offset, content))
            if found.on:
                _put(Path(found.on[disk]), offset, content)

    def onto_volumes(self, uuid: UUID, volumes: list[Volume], stop: Callable[[], bool]) -> None:
        self._check_answers()
        with self._lock:
            if self.fail == "pivot":
                raise DiskWriteFailed("the fake hypervisor cannot commit")
            found = self.domains[uuid]
            for number, volume in enumerate(volumes):
                if stop():
                    raise Cancelled
                for disk, offset, content in found.written:
                    if disk == number:
                        _put(Path(volume.path), offset, content)
            if found.running:  # else its definition names the layers still
                found.on = [volume.path for volume in volumes]
            found.held_up = False

    def has_moved(self, uuid: UUID, volumes: list[Volume]) -> bool:
        self._check_answers()
        found = self.domains.get(uuid)
        return found is not None and any(volume.path in found.on for volume in volumes)

    def screenshot(self, job_id: UUID) -> bytes | None:
        return self.screenshots.get(job_id)

    def forget_screenshot(self, job_id: UUID) -> None:
        self.screenshots.pop(job_id, None)

    def undefine(self, uuid: UUID, job_id: UUID) -> None:
        self._check_answers()
        with self._lock:
            if uuid in self.domains and identity_of(self.domains[uuid].domain.xml).job_id == str(job_id):
                del self.domains[uuid]

    def close(self) -> None:
        pass

    def _check_free(self, wanted: Identity) -> None:
        for other in self.domains.values():
            if (why := clash(wanted, identity_of(other.domain.xml))) is not None:
                raise Conflict(why, hint=CLASH_HINT)


def _volumes(xml: str) -> list[str]:
    """None of a guest whose disks are layers."""
    disks = [] if "backingStore" in xml else ET.fromstring(xml).findall("devices/disk/source")
    return [source.get("file", "") for source in disks]


def _put(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
