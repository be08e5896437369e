"""This host's hypervisor, by libvirt. Blocking; safe from several threads at once.

Ours are the domains that carry a job's id in their metadata (domain_xml.py); any other is never touched.
"""

import base64
import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal
from uuid import UUID

from synvirt.errors import Cancelled, Conflict, DomainDefineFailed, GuestBootFailed, Internal, NotFound, SynvirtError
from synvirt.hypervisor import Volume, console
from synvirt.hypervisor.accel import Accelerator, accelerator
from synvirt.hypervisor.connection import Connection, embedded_root, load, translated
from synvirt.hypervisor.domain_xml import JOB_NAMESPACE, Firmware, Host, build, job_of
from synvirt.model import Domain, Migration
from synvirt.programs import find

# Debian's ovmf, then Fedora's edk2-ovmf: the first that is there.
_UEFI = (
    Firmware("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    Firmware("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    Firmware("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
)
_UEFI_SECURE = (
    Firmware("/usr/share/OVMF/OVMF_CODE_4M.ms.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"),
    Firmware("/usr/share/edk2/ovmf/OVMF_CODE.secboot.fd", "/usr/share/edk2/ovmf/OVMF_VARS.secboot.fd"),
)

POLL_S = 0.2
# A guest agent answers a ping in milliseconds; libvirt also gives it up to 5 s to find its step again.
AGENT_TIMEOUT_S = 2
# A guest with a login prompt but no agent has booted all the same; an agent is started about when the prompt comes.
AGENT_GRACE_S = 30
# With boot_check "running": firmware that finds nothing to boot stays on, but a broken QEMU ends sooner than this.
RUNNING_SETTLE_S = 10
# libvirt waits for a domain's lock for 30 s, and holds it for a little longer where a guest's monitor does not answer.
LOCK_PATIENCE_S = 60
TRIM_EVERY_MS = 5000
# What is asked of a guest's files is small; the guest decides what it sends.
GUEST_FILE_LIMIT_BYTES = 1 << 20

# What libvirt and QEMU say when a domain does not start, and what to do about it. First match wins.
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
    (re.compile(r"Permission denied"), "the hypervisor's user must be able to reach the volume"),
    (re.compile(r"Cannot find .*emulator|qemu-system"), "apt-get install qemu-system-x86"),
)


class LibvirtHost:
    """`data_dir`/libvirt keeps what the embedded driver needs, the guests' console logs and the accelerator found."""

    def __init__(self, uri: str, data_dir: Path, *, boot_check: Literal["agent", "running"] = "agent") -> None:
        self._connection = Connection(uri, self._prepare)
        self._folder = data_dir / "libvirt"
        self._boot_check: Final = boot_check
        self._system = uri.startswith("qemu:///system")
        # The host's libvirtd has virtlogd, which writes where it may and bounds what it writes; for the embedded driver we do.
        self._serial_logs = Path("/var/log/libvirt/qemu") if self._system else self._folder / "serial"
        self._trims = embedded_root(uri) is not None
        self._trimmer: int | None = None

    # ── before ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def domain_xml(self, job: Migration, volumes: list[Volume]) -> Domain:
        # A draft without volumes is asked for before the copy; finding the accelerator may take seconds, and can wait.
        found = self._accelerator().kind if volumes else "tcg"
        host = Host(
            accelerator=found,
            serial_log=str(self._serial_logs / "synvirt-{uuid}.log"),
            network="network:default" if self._system else "user",
            plain_network="network" if self._system else "bridge",
            uefi=installed_uefi(),
            uefi_secure=_installed(_UEFI_SECURE),
            tpm=find("swtpm") is not None and find("swtpm_setup") is not None,
        )
        return build(job, volumes, host)

    def _accelerator(self) -> Accelerator:
        return accelerator(self._folder)

    def check_free(self, name: str, uuid: UUID) -> None:
        if (taken := self._taken(name, uuid)) is not None:
            raise Conflict(taken, hint="give the guest another name in target.name, or remove that domain")

    def _taken(self, name: str, uuid: UUID) -> str | None:
        named, known = self._find("lookupByName", name), self._find("lookupByUUIDString", str(uuid))
        if named is not None and named.UUIDString() != str(uuid):
            return f"a domain {name} ({named.UUIDString()}) exists and is not this job's"
        if known is not None and not _ours(known):
            return f"a domain {known.name()} has the UUID {uuid} and is not this job's"
        return None

    # ── the domain's life ────────────────────────────────────────────────────────────────────────────────────────────

    def define(self, domain: Domain) -> None:
        if (taken := self._taken(domain.name, UUID(domain.uuid))) is not None:
            raise DomainDefineFailed(taken)
        with translated(DomainDefineFailed, f"domain {domain.name} was refused", _start_hint):
            self._connection.use().defineXML(domain.xml)

    def start(self, uuid: UUID) -> None:
        domain = self._find("lookupByUUIDString", str(uuid))
        if domain is None:
            raise DomainDefineFailed(f"domain {uuid} is not defined")
        with translated(DomainDefineFailed, f"domain {domain.name()} does not start", _start_hint):
            _settled(domain)
            if domain.isActive():
                return
            self._forget_console(uuid)
            try:
                _patiently(domain.create)
            except load().libvirtError:
                if not domain.isActive():  # else another thread was quicker
                    raise

    def undefine(self, uuid: UUID) -> None:
        libvirt = load()
        domain = self._find("lookupByUUIDString", str(uuid))
        if domain is not None:
            if not _ours(domain):
                raise Conflict(f"domain {domain.name()} ({uuid}) is not ours: it stays")
            kept = ("MANAGED_SAVE", "SNAPSHOTS_METADATA", "CHECKPOINTS_METADATA", "NVRAM", "TPM")
            flags = sum(getattr(libvirt, f"VIR_DOMAIN_UNDEFINE_{what}", 0) for what in kept)
            with translated(Internal, f"domain {uuid} cannot be removed"):
                for step in (domain.destroy, lambda: domain.undefineFlags(flags)):
                    try:
                        _patiently(step)
                    except libvirt.libvirtError as error:
                        # It stopped, or went, by itself: that is what we want.
                        if error.get_error_code() not in (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN):
                            raise
        self._forget_console(uuid)

    def close(self) -> None:
        if self._trimmer is not None:
            with contextlib.suppress(load().libvirtError):
                load().virEventRemoveTimeout(self._trimmer)
            self._trimmer = None
        self._connection.close()

    # ── signs of life ────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str:
        """`agent`: the guest agent answered. `console`: a login prompt, and no agent. `running`: as the setting asks."""
        began = time.monotonic()
        prompted: float | None = None
        while True:
            if stop():
                raise Cancelled
            domain = self._find("lookupByUUIDString", str(uuid))
            if domain is None:
                raise GuestBootFailed(f"domain {uuid} is not defined")
            if (trouble := _trouble(domain)) is not None:
                raise self._boot_failed(domain, trouble)
            if _agent_answers(domain):
                return "agent"
            waited = time.monotonic() - began
            if self._boot_check == "running" and waited >= RUNNING_SETTLE_S:
                return "running"
            if prompted is None and console.LOGIN_PROMPT.search(console.tail(self._console(uuid))):
                prompted = waited
            if prompted is not None and waited - prompted >= AGENT_GRACE_S:
                return "console"
            if waited >= timeout_s:
                raise self._boot_failed(domain, f"gave no sign of life within {timeout_s:g} s")
            time.sleep(POLL_S)

    def _boot_failed(self, domain: Any, trouble: str) -> GuestBootFailed:
        shown = console.tail(self._console(UUID(domain.UUIDString())))
        known = console.cause(shown)
        parts = [f"guest {domain.name()} {trouble}"]
        if known is not None:
            parts.append(f"probably because {known.cause}")
        parts.append(f"its console ends:\n{shown}" if shown else "its console shows nothing")
        hint = (
            "a guest without the QEMU guest agent gives no sign: set boot_check to running, or install qemu-guest-agent in it"
        )
        return GuestBootFailed("; ".join(parts), hint=known.hint if known else hint)

    def read_guest_file(self, uuid: UUID, path: str) -> bytes:
        domain = self._find("lookupByUUIDString", str(uuid))
        if domain is None:
            raise NotFound(f"domain {uuid} is not defined")
        with translated(Internal, f"the agent of {domain.name()} does not give {path}"):
            opened = _ask_agent(domain, "guest-file-open", path=path, mode="r")
            try:
                answer = _ask_agent(domain, "guest-file-read", handle=opened, count=GUEST_FILE_LIMIT_BYTES)
            finally:
                _ask_agent(domain, "guest-file-close", handle=opened)
        if not isinstance(answer, dict) or not answer.get("eof"):
            raise Internal(f"{path} in {domain.name()} is larger than {GUEST_FILE_LIMIT_BYTES} bytes")
        try:
            return base64.b64decode(str(answer.get("buf-b64", "")))
        except ValueError as error:
            raise Internal(f"the agent of {domain.name()} answers with nonsense for {path}") from error

    # ── below ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self) -> None:
        # It takes seconds where KVM stands still: begun with the first job's first look, it is known when the copy is done.
        threading.Thread(target=self._accelerator, name="accelerator", daemon=True).start()
        if self._trims and self._trimmer is None:
            self._serial_logs.mkdir(parents=True, exist_ok=True)
            self._trimmer = load().virEventAddTimeout(TRIM_EVERY_MS, lambda *_: console.trim(self._serial_logs), None)

    def _find(self, lookup: Literal["lookupByName", "lookupByUUIDString"], key: str) -> Any | None:
        """The domain, or None. A fresh look each time: it may have been redefined or removed meanwhile."""
        connected = self._connection.use()
        libvirt = load()
        try:
            return getattr(connected, lookup)(key)
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return None
            raise Internal(f"the hypervisor does not say whether it has {key}: {error}") from error

    def _console(self, uuid: UUID) -> Path:
        return self._serial_logs / f"synvirt-{uuid}.log"

    def _forget_console(self, uuid: UUID) -> None:
        with contextlib.suppress(OSError):
            self._console(uuid).unlink(missing_ok=True)


def installed_uefi() -> Firmware | None:
    return _installed(_UEFI)


def _installed(builds: tuple[Firmware, ...]) -> Firmware | None:
    return next((build for build in builds if os.access(build.code, os.R_OK) and os.access(build.variables, os.R_OK)), None)


def _start_hint(message: str) -> str | None:
    return next((hint for seen, hint in _START_HINTS if seen.search(message)), None)


def _patiently(step: Callable[[], object]) -> None:
    """After it opened anew, libvirt looks for each guest's monitor with its domain locked: longer than it lets others wait."""
    libvirt = load()
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            step()
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_OPERATION_TIMEOUT or time.monotonic() >= deadline:
                raise
        else:
            return


def _settled(domain: Any) -> None:
    """Wait while the domain starts: in another thread; or in a service that was killed, and then libvirt will soon end it."""
    libvirt = load()
    deadline = time.monotonic() + LOCK_PATIENCE_S
    starting = [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP]
    while domain.state() == starting and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _ours(domain: Any) -> bool:
    libvirt = load()
    try:
        metadata = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, JOB_NAMESPACE)
    except libvirt.libvirtError:
        return False  # none, or gone meanwhile
    return job_of(str(metadata)) == str(domain.UUIDString())


def _trouble(domain: Any) -> str | None:
    """Why this domain will not boot any more; None while it may."""
    libvirt = load()
    try:
        state, reason = domain.state()
    except libvirt.libvirtError:
        return "is gone"
    if state in (libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_BLOCKED, libvirt.VIR_DOMAIN_NOSTATE):
        return None
    if state == libvirt.VIR_DOMAIN_PAUSED:
        if reason == libvirt.VIR_DOMAIN_PAUSED_IOERROR:
            return "was paused, since a volume could not be read or written: is the disk full?"
        # An operator who pauses the guest will let it go on; libvirt itself pauses it while it starts.
        return "crashed" if reason == libvirt.VIR_DOMAIN_PAUSED_CRASHED else None
    if state == libvirt.VIR_DOMAIN_CRASHED or reason == libvirt.VIR_DOMAIN_SHUTOFF_CRASHED:
        return "crashed and stopped"
    return "stopped before it had booted"


def _agent_answers(domain: Any) -> bool:
    try:
        _ask_agent(domain, "guest-ping")
    except (load().libvirtError, SynvirtError):
        return False
    return True


def _ask_agent(domain: Any, command: str, **arguments: object) -> object:
    """One command of the QEMU guest agent; libvirt bounds its answer. libvirtError, or Internal on a senseless answer."""
    import libvirt_qemu

    question = json.dumps({"execute": command, "arguments": arguments} if arguments else {"execute": command})
    answer = libvirt_qemu.qemuAgentCommand(domain, question, AGENT_TIMEOUT_S, 0)
    try:
        return json.loads(answer)["return"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Internal(f"the guest's agent answers {command} with nonsense") from error
