"""The words given to libvirt and ssh, and what is made of their answers, without either program."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import AuthFailed, Conflict, Internal, SnapshotFailed, SourceUnreachable, SynvirtError
from synvirt.kvm.library import load
from synvirt.live import SourceAccess
from synvirt.live import ssh as libvirt_remote_ssh
from synvirt.live.libvirt import domain as domains
from synvirt.live.libvirt.adapter import LibvirtRemote
from synvirt.live.libvirt.backup import Server, _hint
from synvirt.live.libvirt.form import FORM
from synvirt.live.libvirt.host import Host
from synvirt.live.libvirt.manifest import Seen, manifest, parse
from synvirt.live.ssh import FAST_CIPHERS, Door
from tests.needs import need_libvirt


@pytest.fixture
def libvirt() -> Any:
    return need_libvirt()


@pytest.mark.parametrize(
    ("stderr", "reported"),
    [
        ("Could not create '/s/x.scratch': Permission denied", "AppArmor or SELinux"),
        ("Failed to bind socket to /s/x.sock: Permission denied", "AppArmor or SELinux"),
        ("qemu-img: /s/x.scratch: No space left on device", "is full"),
        ("The certificate /pki/server-cert.pem basic constraints show a CA", "backup_tls_x509_cert_dir"),
        ("nbd-server-start: UNIX socket path '/s/x.sock' is too long", "a shorter path"),
        ("nbd-server-start: Failed to bind socket: Cannot assign requested address", "options.nbd_address"),
        ("unable to find tls x509 certificates", "backup_tls_x509_cert_dir"),
        ("Operation not supported: cannot perform disk backup for inactive domain", "the next try reads it"),
        ("something that nobody foresaw", None),
    ],
)
def test_a_refusal_that_is_known_says_what_to_do(stderr: str, reported: str | None) -> None:
    hint = _hint(stderr, Server("/s"))
    assert (hint is None) if reported is None else reported in str(hint)


@pytest.mark.parametrize(
    ("kind", "version", "warm", "readable"),
    [
        ("QEMU", 9_000_000, True, True),
        ("QEMU", 7_006_000, True, True),
        ("QEMU", 7_005_000, False, True),
        ("QEMU", 6_010_000, False, False),
        ("Xen", 9_000_000, False, False),
    ],
)
def test_a_host_that_cannot_be_read_is_reported_before_its_guest_is_shut_down(
    kind: str, version: int, warm: bool, readable: bool
) -> None:
    adapter = LibvirtRemote(SourceAccess("qemu:///system"))
    adapter._host._open = SimpleNamespace(getType=lambda: kind, getLibVersion=lambda: version)
    assert (adapter._too_old() is None, adapter._unreadable() is None) == (warm, readable)
    domain = parse("<domain><uuid>6d6f7665-6d65-4d6f-8f76-656d656d6f76</uuid><name>web</name><devices/></domain>")
    found = manifest(domain, Seen({}, "on", too_old=adapter._too_old(), unreadable=adapter._unreadable()))
    assert (found.cbt_available, [one.id for one in found.concerns]) == (warm, [] if readable else ["host-unreadable"])


@pytest.mark.parametrize(
    ("code", "message", "reported"),
    [
        ("AUTH_UNAVAILABLE", "no polkit agent available to authenticate action 'org.libvirt.unix.manage'", "put mover into"),
        ("AUTH_FAILED", "authentication failed: access denied by policy", "into the group libvirt there"),
        ("AUTH_CANCELLED", "authentication cancelled: user cancelled authentication process", "org.libvirt.unix.manage"),
        ("SYSTEM_ERROR", "Failed to connect socket to '/run/libvirt/libvirt-sock': Permission denied", "group libvirt"),
        ("ACCESS_DENIED", "access denied: 'QEMU' denied access", "allow mover the actions org.libvirt.api.*"),
        ("OPERATION_DENIED", "operation forbidden: read only access prevents virDomainBackupBegin", "read-only socket"),
        ("AUTH_FAILED", "authentication failed: Failed to step SASL negotiation: -13", "check user and password"),
        ("SYSTEM_ERROR", "Cannot create '/s/x.scratch': Permission denied", None),
    ],
)
def test_a_right_that_is_missing_is_named_with_who_lacks_it(
    libvirt: Any, code: str, message: str, reported: str | None
) -> None:
    host = Host(*FORM.read(SourceAccess("qemu+ssh://mover@kvm7/system")))
    error = libvirt.libvirtError(message)
    error.err = (getattr(libvirt, f"VIR_ERR_{code}"), 10, message, 1, None, None, None, 0, 0)
    found = host.translated(error, "domain web cannot be read", Internal)
    assert type(found) is (Internal if reported is None else AuthFailed)
    assert (found.hint is None) if reported is None else reported in str(found.hint)


@pytest.mark.parametrize(
    ("cpuinfo", "chosen"),
    [
        ("flags\t\t: fpu sse2 aes avx\n", True),
        ("Features\t: fp asimd aes pmull\n", True),
        ("flags\t\t: fpu sse2 vaes_not\n", False),
        ("model name\t: aes\n", False),
        (None, False),
    ],
)
def test_ciphers_are_those_that_the_processor_is_fast_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, chosen: bool
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    monkeypatch.setattr(libvirt_remote_ssh, "_CPUINFO", path)
    libvirt_remote_ssh._has_aes.cache_clear()
    argv = Door(host="kvm7", port=22, user=None, folder=tmp_path).argv()
    libvirt_remote_ssh._has_aes.cache_clear()
    assert (f"Ciphers={FAST_CIPHERS}" in argv) == chosen


class Domain:
    """What libvirt says of a domain whose guest was moved to another host, or of one that is off or paused."""

    def __init__(self, state: tuple[int, int], notes: str = "<state/>") -> None:
        self.now, self.notes, self.asked = state, notes, list[str]()

    def state(self) -> list[int]:
        return list(self.now)

    def name(self) -> str:
        return "web"

    def isActive(self) -> bool:  # noqa: N802 - libvirt's names
        return bool(self.now[0] != load(SynvirtError).VIR_DOMAIN_SHUTOFF)

    def hasManagedSaveImage(self) -> bool:  # noqa: N802 - libvirt's names
        return False

    def isPersistent(self) -> bool:  # noqa: N802
        return True

    def ID(self) -> int:  # noqa: N802
        return 7 if self.isActive() else -1

    def metadata(self, *_: object) -> str:
        return self.notes

    def setMetadata(self, _kind: int, xml: str | None, *_: object) -> None:  # noqa: N802
        self.notes = xml or "<state/>"
        self.asked.append("note")

    def destroyFlags(self, _flags: int) -> None:  # noqa: N802
        libvirt = load(SynvirtError)
        self.now = (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED)

    def createWithFlags(self, _flags: int) -> None:  # noqa: N802
        self.asked.append("start paused")

    def create(self) -> None:
        self.asked.append("start")


@pytest.mark.parametrize(
    ("state", "reason", "error"),
    [
        ("SHUTOFF", "SHUTOFF_MIGRATED", Conflict),
        ("PAUSED", "PAUSED_MIGRATION", SourceUnreachable),
        ("PAUSED", "PAUSED_POSTCOPY", SourceUnreachable),
    ],
)
def test_a_guest_that_was_moved_to_another_host_is_neither_off_nor_started_here(
    libvirt: Any, state: str, reason: str, error: type[SynvirtError]
) -> None:
    """It runs there on the same disks: to QEMU here they would be free, and a job would start a second copy of it."""
    domain = Domain((getattr(libvirt, f"VIR_DOMAIN_{state}"), getattr(libvirt, f"VIR_DOMAIN_{reason}")))
    assert domains.power_state(domain) == "unknown"
    uses: list[Callable[[], None]] = [
        lambda: domains.power_on(domain),
        lambda: domains.shut_down(domain, 0, lambda: False),
    ]
    if state == "SHUTOFF":
        uses.append(lambda: domains.start_to_read(domain, "synvirt-a-1"))
    for use in uses:
        with pytest.raises(error, match=r"web (was|is being) migrated"):
            use()
    assert domain.asked == []


def test_a_guest_that_is_off_is_off_whatever_libvirt_remembers(libvirt: Any) -> None:
    for reason in ("UNKNOWN", "SHUTDOWN", "DESTROYED", "CRASHED", "SAVED", "FAILED"):
        off = (libvirt.VIR_DOMAIN_SHUTOFF, getattr(libvirt, f"VIR_DOMAIN_SHUTOFF_{reason}"))
        assert domains.power_state(Domain(off)) == "off"


def test_a_guest_that_ran_and_whose_libvirtd_was_restarted_may_run_on_another_host(libvirt: Any) -> None:
    """libvirt forgets that a domain was migrated: it is off there like one that was shut down."""
    domain = Domain((libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_BOOTED))
    domains.note_running(domain)
    domain.now = (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_UNKNOWN)
    domain.asked.clear()
    assert domains.power_state(domain) == "unknown"
    uses: list[Callable[[], None]] = [
        lambda: domains.power_on(domain),
        lambda: domains.shut_down(domain, 0, lambda: False),
        lambda: domains.start_to_read(domain, "synvirt-a-1"),
    ]
    for use in uses:
        with pytest.raises(Conflict, match="web ran when it was last read"):
            use()
    assert domain.asked == []


@pytest.mark.parametrize(("reads", "writes"), [(0, 0), (1, 0), (0, 1)])
def test_a_guest_that_somebody_resumed_is_not_ended_though_it_was_started_to_be_read(
    libvirt: Any, monkeypatch: pytest.MonkeyPatch, reads: int, writes: int
) -> None:
    """It is paused again, for another reason: its first instructions have read a disk, and its memory is its own."""
    paused = (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER)
    domain: Any = Domain(paused, "<state reading='synvirt-a-1'/>")
    monkeypatch.setattr(domain, "blockStats", lambda _: (reads, 0, writes, 0, 0), raising=False)
    disk = "<disk type='file'><source file='/d'/><target dev='vda'/></disk>"
    monkeypatch.setattr(domain, "XMLDesc", lambda _: f"<domain><devices>{disk}</devices></domain>", raising=False)
    has_run = reads + writes > 0
    assert domains.power_state(domain) == ("suspended" if has_run else "off")
    domains.stop_reading(domain)
    assert domain.isActive() == has_run
    assert domains.noted(domain) == {}


def test_saved_memory_is_not_used_up_by_reading_the_disks(libvirt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    domain: Any = Domain((libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_SAVED))
    monkeypatch.setattr(domain, "hasManagedSaveImage", lambda: True)
    with pytest.raises(SnapshotFailed, match="saved memory"):
        domains.start_to_read(domain, "synvirt-a-1")
    assert domain.asked == []


@pytest.mark.parametrize(("state", "reason"), [("PAUSED", "PAUSED_IOERROR"), ("PMSUSPENDED", "PMSUSPENDED_UNKNOWN")])
def test_a_guest_that_is_suspended_while_it_is_asked_loses_nothing(libvirt: Any, state: str, reason: str) -> None:
    domain = Domain((getattr(libvirt, f"VIR_DOMAIN_{state}"), getattr(libvirt, f"VIR_DOMAIN_{reason}")))
    with pytest.raises(Conflict, match="is suspended"):
        domains.shut_down(domain, 0, lambda: False)
    assert domain.isActive()
    domains.shut_down(domain, 0, lambda: False, "force")
    assert not domain.isActive()


def test_a_guest_that_we_shut_down_is_off_though_libvirtd_was_restarted_since(libvirt: Any) -> None:
    domain = Domain((libvirt.VIR_DOMAIN_RUNNING, libvirt.VIR_DOMAIN_RUNNING_BOOTED))
    domains.note_running(domain)
    domains.shut_down(domain, 0, lambda: False)
    domain.now = (libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_UNKNOWN)
    assert domains.power_state(domain) == "off"
