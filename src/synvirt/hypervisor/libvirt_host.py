"""This host's hypervisor, by libvirt. Blocking; safe from several threads at once.

Our domains have a job's id in their metadata (domain_xml.py). Other domains are never touched.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from synvirt import xml_document
from synvirt.durable import put_private_file, sweep
from synvirt.errors import (
    Cancelled,
    Conflict,
    DomainDefineFailed,
    GuestBootFailed,
    GuestHasNoRoom,
    Internal,
    NotFound,
    SynvirtError,
)
from synvirt.hypervisor import Capacity, Lived, Paused, Volume, console, early, eyes, facts, held_up, lives
from synvirt.hypervisor.accel import Accelerator, accelerator
from synvirt.hypervisor.boot import Check, Lost, Seen, Watch
from synvirt.hypervisor.domain_xml import Firmware, Host, build
from synvirt.hypervisor.hardware import VCPUS_MAX, uuid_of
from synvirt.hypervisor.locked import gone_or, patiently, settled
from synvirt.hypervisor.machine import Machine
from synvirt.kvm import agent, handing, numbered_ports, orphans, qemu_user
from synvirt.kvm.connection import Connection, find_domain, load, short_root, translated
from synvirt.kvm.identity import CLASH_HINT, Identity, clash, identity_of
from synvirt.kvm.qemu_user import embedded_root
from synvirt.machines.ovmf_store import UefiVariable, added
from synvirt.model.job import Domain
from synvirt.programs import find
from synvirt.sizes import KIB, MIB

# Debian's ovmf, then Fedora's edk2-ovmf: the first that exists.
_UEFI = (
    Firmware("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    Firmware("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    Firmware("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
)
_UEFI_SECURE = (
    Firmware("/usr/share/OVMF/OVMF_CODE_4M.ms.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"),
    Firmware("/usr/share/OVMF/OVMF_CODE.ms.fd", "/usr/share/OVMF/OVMF_VARS.ms.fd"),
    Firmware("/usr/share/edk2/ovmf/OVMF_CODE.secboot.fd", "/usr/share/edk2/ovmf/OVMF_VARS.secboot.fd"),
)

# EFI_FIRMWARE_VOLUME_HEADER.Signature (UEFI Platform Initialization, volume 3, 3.2.1): a raw variable store begins with one.
_VOLUME_MARK_AT, _VOLUME_MARK = 40, b"_FVH"
POLL_S = 0.2
TRIM_EVERY_MS = 5000

# Messages of libvirt and QEMU when a domain does not start, and hints. The first match counts.
_START_HINTS = (
    (
        re.compile(r"[Nn]etwork not found|network '.*' is not active"),
        "map the network in target.network_map, or define and start it",
    ),
    (re.compile(r"Cannot get interface MTU|No such device|bridge"), "the bridge that target.network_map names must exist"),
    (re.compile(r"get \"write\" lock"), "another guest or program uses this volume"),
    (
        re.compile(r"Cannot allocate memory|cannot set up guest memory"),
        "this host lacks the memory: set target.memory_bytes lower",
    ),
    (
        re.compile(r"Permission denied"),
        "the hypervisor's user must be able to reach the volume: `synvirt doctor` says who that is; the setting qemu_user",
    ),
    (re.compile(r"Cannot find .*emulator|qemu-system"), "apt-get install qemu-system-x86"),
)

_NO_CAUSE_HINT = (
    "a guest without a guest agent, a serial console and anything to write gives no sign: install qemu-guest-agent in it, "
    "raise boot_timeout_s, or set boot_check to running"
)


class LibvirtHost:
    """`data_dir`/libvirt has what the embedded driver needs, the guests' console logs, screenshots of failed boots, and the
    accelerator that was found."""

    def __init__(self, uri: str, data_dir: Path, *, boot_check: Check = "any", boot_activity_s: float = 60) -> None:
        self._connection = Connection(uri, self._prepare)
        self._folder = data_dir / "libvirt"
        self._boot_check: Final = boot_check
        self._boot_activity_s: Final = boot_activity_s
        self._system = uri.startswith("qemu:///system")
        self.default_network: Final = "network:default" if self._system else "user"
        # The host's libvirtd has virtlogd, which limits console logs. For the embedded driver we do that.
        self._serial_logs = Path("/var/log/libvirt/qemu") if self._system else self._folder / "serial"
        self._screens = self._folder / "screens"
        self._root = embedded_root(uri)
        self._trimmer: int | None = None

    # ── before ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def domain_xml(self, machine: Machine, volumes: list[Volume]) -> Domain:
        # A draft is made before the copy. Finding the accelerator may take seconds, and can wait.
        found = self._accelerator().kind if volumes else "tcg"
        host = Host(
            accelerator=found,
            serial_log=str(self._serial_logs / "synvirt-{uuid}.log"),
            network=self.default_network,
            plain_network="network" if self._system else "bridge",
            uefi=self._uefi(machine.id, _UEFI),
            uefi_secure=self._uefi(machine.id, _UEFI_SECURE),
            variables=self.own_variables(machine.id),
            tpm=find("swtpm") is not None and find("swtpm_setup") is not None,
            numbered_ports=numbered_ports.possible(),
        )
        return build(machine, volumes, host)

    def networks(self) -> list[str]:
        found = [self.default_network]
        # A driver may have none, as the embedded one.
        with contextlib.suppress(Internal), translated(Internal, "the hypervisor does not say which networks it has"):
            found += sorted(f"network:{network.name()}" for network in self._connection.use().listAllNetworks())
        found += sorted(f"bridge:{folder.parent.name}" for folder in Path("/sys/class/net").glob("*/bridge"))
        return list(dict.fromkeys(found))

    def capacity(self) -> Capacity:
        libvirt = load()
        with translated(DomainDefineFailed, "the hypervisor does not say what this host has"):
            connection = self._connection.use()
            _, memory_mib, cpus, *_ = connection.getInfo()
            guests = [domain.info() for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE)]
            capabilities = connection.getDomainCapabilities(None, None, "q35", None, 0)
        vcpus = xml_document.parse(capabilities, "what libvirt says a domain can have", wrong=DomainDefineFailed).find("vcpu")
        return Capacity(
            memory_bytes=memory_mib * MIB,
            cpu_count=cpus,
            guests_memory_bytes=sum(most_kib for _, most_kib, *_ in guests) * KIB,
            guests_cpus=sum(vcpus for _, _, _, vcpus, *_ in guests),
            vcpus_max=min(int(vcpus.get("max") or 0), VCPUS_MAX) if vcpus is not None else 0,
        )

    def keep_variables(self, job_id: UUID, content: bytes) -> bool:
        """Stores the variables completely, or not at all, even after a power cut. libvirt copies them, as the template in the
        domain's XML, at the first start."""
        sizes = {Path(build.variables).stat().st_size for build in (*_UEFI, *_UEFI_SECURE) if _is_installed(build)}
        if len(content) not in sizes or content[_VOLUME_MARK_AT : _VOLUME_MARK_AT + len(_VOLUME_MARK)] != _VOLUME_MARK:
            return False
        path = self.variables_file(job_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            put_private_file(path, content)
        except OSError as error:
            raise DomainDefineFailed(f"the guest's UEFI variables cannot be kept: {error.strerror}") from error
        return True

    def add_entries(self, job_id: UUID, entries: Sequence[UefiVariable], *, secure: bool) -> bool:
        firmware = self._uefi(job_id, _UEFI_SECURE if secure else _UEFI)
        if firmware is None:
            return False
        try:
            return self.keep_variables(job_id, added(Path(firmware.variables).read_bytes(), entries))
        except Internal:
            return False

    def forget_variables(self, job_id: UUID) -> None:
        path = self.variables_file(job_id)
        for one in (path, path.with_suffix(".partial")):  # an earlier version wrote them there first
            one.unlink(missing_ok=True)
        sweep(path.parent, path.name)

    def _uefi(self, job_id: UUID, builds: tuple[Firmware, ...]) -> Firmware | None:
        """The build for a job. With stored variables, one whose own variables have the same size, as its code expects that."""
        try:
            size = self.variables_file(job_id).stat().st_size
        except FileNotFoundError:
            return _installed(builds)
        fitting = tuple(build for build in builds if _is_installed(build) and Path(build.variables).stat().st_size == size)
        return Firmware(fitting[0].code, str(self.variables_file(job_id)), kept=True) if fitting else _installed(builds)

    def own_variables(self, job_id: UUID) -> str | None:
        root = short_root(self._connection.uri)
        # Where libvirt itself puts them (src/qemu/qemu_conf.c: nvramDir).
        folder = "/var/lib/libvirt/qemu/nvram" if self._system else None if root is None else f"{root}/lib/qemu/nvram"
        return None if folder is None else f"{folder}/{job_id}_VARS.fd"

    def firmware(self, job_id: UUID, *, secure: bool) -> tuple[str, str] | None:
        found = self._uefi(job_id, _UEFI_SECURE if secure else _UEFI)
        return None if found is None else (found.code, found.variables)

    def variables_file(self, job_id: UUID) -> Path:
        return self._folder / "variables" / f"{job_id}.fd"

    def emulates(self) -> bool:
        """Whether KVM does not work here. The first call takes seconds."""
        return self._accelerator().kind == "tcg"

    def _accelerator(self) -> Accelerator:
        return accelerator(self._folder)

    def check_free(self, wanted: Identity) -> None:
        """MAC addresses of the host's own network cards count too: no bridge works with one address twice."""
        for other in self._all():
            if (why := clash(wanted, other)) is not None:
                raise Conflict(why, hint=CLASH_HINT)
        if shared := sorted(wanted.macs & _host_macs()):
            raise Conflict(f"a network card of this host has the guest's MAC address {shared[0]}", hint=CLASH_HINT)

    def _all(self) -> list[Identity]:
        libvirt, found = load(), []
        with translated(Internal, "the hypervisor does not say which domains it has"):
            domains = self._connection.use().listAllDomains()
        for domain in domains:
            with contextlib.suppress(libvirt.libvirtError):  # it went meanwhile
                found.append(identity_of(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)))
        return found

    # ── the domain's life ────────────────────────────────────────────────────────────────────────────────────────────

    def define(self, domain: Domain, moved: Sequence[Volume] = ()) -> None:
        present, xml = self._find(domain.uuid), domain.xml
        if present is not None and moved:
            with translated(DomainDefineFailed, f"the hypervisor does not say how domain {domain.name} is defined"):
                xml = early.on_volumes(present, xml, moved)
        self.check_free(identity_of(xml))
        if present is not None:
            self._stop_on_another_rung(present, identity_of(xml))
        with translated(DomainDefineFailed, f"domain {domain.name} was refused", _start_hint):
            self._connection.use().defineXML(xml)

    def _stop_on_another_rung(self, present: Any, wanted: Identity) -> None:
        with translated(Internal, f"domain {wanted.name} cannot be stopped, to try it on {wanted.bus}"):
            running = identity_of(present.XMLDesc()) if present.isActive() else wanted
            if running.bus != wanted.bus:
                gone_or(present.destroy)

    def start(self, uuid: UUID) -> None:
        domain = self._find(uuid)
        if domain is None:
            raise DomainDefineFailed(f"domain {uuid} is not defined")
        with translated(DomainDefineFailed, f"domain {domain.name()} does not start", _start_hint):
            settled(domain)
            if domain.isActive():
                return
            self._forget_console(uuid)
            if (user := qemu_user.of(self._connection.uri)) is not None and self._root is not None:
                handing.over(domain.XMLDesc(), user, self._root)
            try:
                patiently(domain.create)
            except load().libvirtError:
                if not domain.isActive():  # else another thread has started it
                    self._forget_console(uuid)  # QEMU has made it, and the guest has never run
                    raise

    def lived(self, uuid: UUID) -> Lived | None:
        domain = self._find(uuid)
        if domain is None:
            return None
        with translated(Internal, f"{domain.name()} does not say whether it runs"):
            return lives.lived(domain, self.console_log(uuid))

    def job_of(self, uuid: UUID) -> str | None:
        domain = self._find(uuid)
        with translated(Internal, f"the hypervisor does not say which job has made domain {uuid}"):
            return None if domain is None else identity_of(domain.XMLDesc()).job_id

    def undefine(self, uuid: UUID, job_id: UUID) -> None:
        domain = self._find(uuid)
        if domain is not None:
            libvirt = load()
            kept = ("MANAGED_SAVE", "SNAPSHOTS_METADATA", "CHECKPOINTS_METADATA", "NVRAM", "TPM")
            flags = sum(getattr(libvirt, f"VIR_DOMAIN_UNDEFINE_{what}", 0) for what in kept)
            with translated(Internal, f"domain {uuid} cannot be removed"):
                present = identity_of(domain.XMLDesc())
                if present.job_id != str(job_id):
                    return
                gone_or(domain.destroy)
                gone_or(lambda: domain.undefineFlags(flags))
            self._forget_logs(present.name)
        self._forget_tpm(uuid)
        self._forget_console(uuid)

    def close(self) -> None:
        if self._trimmer is not None:
            with contextlib.suppress(load().libvirtError):
                load().virEventRemoveTimeout(self._trimmer)
            self._trimmer = None
        self._connection.close()

    # ── before its volumes are whole ─────────────────────────────────────────────────────────────────────────────────

    def lay(self, volume: Volume, size_bytes: int) -> None:
        if volume.early is None:
            raise Internal(f"volume {volume.disk_key} has no layers")
        early.overlay(volume.early.top, f"nbd+unix:///?socket={volume.early.socket}", size_bytes)
        self._give(volume.early.top)

    def resume(self, uuid: UUID) -> Paused | None:
        domain, libvirt = self._find(uuid), load()
        with contextlib.suppress(libvirt.libvirtError):  # it went, or goes on by itself
            if domain is not None and held_up.is_held_up(domain):
                paused = held_up.why(domain)
                domain.resume()
                return paused
        return None

    def onto_volumes(self, uuid: UUID, volumes: list[Volume], stop: Callable[[], bool]) -> None:
        for volume in volumes:
            early.onto_volume(lambda: self._defined(uuid), volume, self._give, stop)

    def has_moved(self, uuid: UUID, volumes: list[Volume]) -> bool:
        domain = self._find(uuid)
        with translated(Internal, f"domain {uuid} does not say which disks it has"):
            return domain is not None and early.has_moved(domain, volumes)

    def _give(self, path: str) -> None:
        handing.to_qemu(self._connection.uri, Path(path))

    # ── signs of life ────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str:
        domain = self._find(uuid)
        if domain is None:
            raise GuestBootFailed(f"domain {uuid} is not defined")
        watch = Watch(self._boot_check, timeout_s, self._boot_activity_s)
        began = time.monotonic()
        with eyes.restarts(self._connection.use(), domain) as restarts:
            while True:
                if stop():
                    raise Cancelled
                seen = eyes.look(domain, self.console_log(uuid), at_s=time.monotonic() - began, resets=len(restarts))
                if not eyes.can_see(domain) and time.monotonic() - began < timeout_s:
                    # libvirtd was restarted, for example by an upgrade, maybe during this look; its guests run on.
                    with contextlib.suppress(DomainDefineFailed, Internal):
                        domain = self._find(uuid) or domain
                    time.sleep(POLL_S)
                    continue
                match watch.judge(seen):
                    case str() as sign:
                        return sign
                    case Lost() as lost:
                        raise self._boot_failed(domain, lost, seen)
                time.sleep(POLL_S)

    def _boot_failed(self, domain: Any, lost: Lost, seen: Seen) -> GuestBootFailed:
        if lost.full:
            return GuestHasNoRoom(f"guest {domain.name()} {lost.trouble}", hint="free space there, and try again")
        pictured = self._keep_screenshot(domain)
        parts = [f"guest {domain.name()} {lost.trouble}"]
        if lost.cause is not None:
            parts.append(f"probably because {lost.cause.cause}")
        ends = [
            f"its {where} ends:\n{console.quoted(text, lost.cause)}"
            for where, text in (("console", seen.console), ("screen", seen.screen))
            if text
        ]
        nothing = "its console shows nothing" + ("; the screenshot may" if pictured else "")
        return GuestBootFailed(
            ", ".join(parts),
            shown="; ".join(ends) or nothing,
            hint=lost.cause.hint if lost.cause else _NO_CAUSE_HINT,
            other_bus_may_help=lost.other_bus_may_help,
        )

    def _keep_screenshot(self, domain: Any) -> bool:
        """Stores a screenshot for people. Nothing depends on it: no trouble with it may hide why the guest did not boot."""
        with contextlib.suppress(load().libvirtError, SynvirtError, OSError):
            picture = eyes.screenshot(self._connection.use(), domain)
            job_id = identity_of(domain.XMLDesc()).job_id
            if picture is not None and job_id is not None:
                self._screens.mkdir(parents=True, exist_ok=True, mode=0o700)
                put_private_file(self._screen(UUID(job_id)), picture)
                return True
        return False

    def screenshot(self, job_id: UUID) -> bytes | None:
        try:
            return self._screen(job_id).read_bytes()
        except OSError:
            return None

    def forget_screenshot(self, job_id: UUID) -> None:
        with contextlib.suppress(OSError):
            self._screen(job_id).unlink(missing_ok=True)

    def picture(self, uuid: UUID) -> bytes | None:
        domain = self._find(uuid)
        return None if domain is None else eyes.screenshot(self._connection.use(), domain)

    def guest_facts(self, uuid: UUID) -> dict[str, str]:
        domain = self._defined(uuid)
        with translated(Internal, f"the agent of {domain.name()} does not answer"):
            return agent.facts(domain, programs=True)

    def machine_facts(self, machine: Machine) -> tuple[dict[str, str], dict[str, str]]:
        domain = self._defined(uuid_of(machine))
        with translated(Internal, f"{domain.name()} cannot be described"):
            xml = domain.XMLDesc()
            targets = [
                one.get("dev", "")
                for one in xml_document.parse(xml, "a domain", wrong=Internal).iterfind("devices/disk/target")
            ]
            sizes = {target: domain.blockInfo(target)[0] for target in targets}
        return facts.of_source(machine), facts.of_domain(xml, machine, sizes)

    def read_guest_file(self, uuid: UUID, path: str) -> bytes:
        return agent.read_file(self._defined(uuid), path)

    def addresses(self, uuid: UUID) -> list[str]:
        domain = self._defined(uuid)
        with translated(Internal, f"the agent of {domain.name()} does not answer"):
            return agent.addresses(domain)

    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        return agent.run(self._defined(uuid), argv, timeout_s)

    def _defined(self, uuid: UUID) -> Any:
        domain = self._find(uuid)
        if domain is None:
            raise NotFound(f"domain {uuid} is not defined")
        return domain

    # ── below ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self) -> None:
        # It takes seconds where KVM does not work. Begun with the first job, it is known when the copy is done.
        threading.Thread(target=self._accelerator, name="accelerator", daemon=True).start()
        if self._root is not None and self._trimmer is None:
            self._serial_logs.mkdir(parents=True, exist_ok=True)
            self._trimmer = load().virEventAddTimeout(TRIM_EVERY_MS, lambda *_: console.trim(self._serial_logs), None)

    def _find(self, uuid: UUID | str) -> Any | None:
        return find_domain(self._connection, "lookupByUUIDString", str(uuid))

    def console_log(self, uuid: UUID) -> Path:
        return self._serial_logs / f"synvirt-{uuid}.log"

    def _screen(self, job_id: UUID) -> Path:
        return self._screens / f"{job_id}.png"

    def _forget_logs(self, name: str) -> None:
        """Removes the embedded driver's logs, named after the domain. libvirtd removes its own."""
        if self._root is None:
            return
        for log in (f"qemu/{name}.log", f"swtpm/{name}-swtpm.log"):
            with contextlib.suppress(OSError):
                (self._root / "log" / log).unlink(missing_ok=True)

    def _forget_tpm(self, uuid: UUID) -> None:
        """libvirtd, which no signal to the service ends, removes it itself."""
        if (root := short_root(self._connection.uri)) is None:
            return
        try:
            orphans.forget_tpm(root, str(uuid))
        except OSError as error:
            raise Internal(f"the TPM's state of domain {uuid} cannot be removed: {error.strerror}") from error

    def _forget_console(self, uuid: UUID) -> None:
        with contextlib.suppress(OSError):
            self.console_log(uuid).unlink(missing_ok=True)


def installed_uefi(*, secure: bool = False) -> Firmware | None:
    return _installed(_UEFI_SECURE if secure else _UEFI)


def _installed(builds: tuple[Firmware, ...]) -> Firmware | None:
    return next(filter(_is_installed, builds), None)


def _is_installed(build: Firmware) -> bool:
    return os.access(build.code, os.R_OK) and os.access(build.variables, os.R_OK)


def _start_hint(message: str) -> str | None:
    return next((hint for seen, hint in _START_HINTS if seen.search(message)), None)


def _host_macs() -> set[str]:
    found = set()
    for address in Path("/sys/class/net").glob("*/address"):
        with contextlib.suppress(OSError):
            found.add(address.read_text().strip().lower())
    return found
