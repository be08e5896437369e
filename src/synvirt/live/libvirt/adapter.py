"""libvirt_remote: the virtual machines of another libvirt, by SSH, TLS or TCP, or of this host's own.

    adapter (asyncio, here) ─▶ threads ─▶ host      the connection, tunnels, access to its disks
                                          domain    off and on, marks, agent, its facts
                                          backup    pull-mode backup jobs, checkpoints with dirty bitmaps
                                          freeze    a process that freezes a guest for that moment
                                          manifest  domain XML as a VmManifest

QEMU tracks changes in bitmaps inside qcow2 images: docs/platforms/libvirt.md. All libvirt calls block, possibly forever: each
method runs in a thread of its own, for a limited time (limit).
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

import structlog

from synvirt.disks import open_reader
from synvirt.disks.specs import NbdSpec, ReaderSpec
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    CbtReset,
    CbtUnsupported,
    SnapshotFailed,
    SourceUnreachable,
    VmNotFound,
)
from synvirt.kvm import agent
from synvirt.kvm.limit import begun
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.libvirt import backup, scratch
from synvirt.live.libvirt import domain as domains
from synvirt.live.libvirt.form import FORM, Login, Options
from synvirt.live.libvirt.freeze import FROZEN_MOST_S, Hold, frozen
from synvirt.live.libvirt.host import UNTRUSTED_DISKS, Host, library
from synvirt.live.libvirt.manifest import manifest, untracked
from synvirt.live.libvirt.variables import uefi_variables
from synvirt.live.odd import reading
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck

__all__ = ["FORM", "LibvirtRemote", "Login", "Options", "libvirt_remote"]

log = structlog.get_logger(__name__)

# The first version where backups in pull mode and checkpoints are switched on for everybody: 7.6.0.
LEAST_VERSION: Final = 7_006_000
# Debian 11's, which can back up whole disks: a cold copy. Ubuntu 20.04's 6.0 cannot even do that.
OLDEST_VERSION: Final = 7_000_000
# A checkpoint that is made only to test whether the domain can have checkpoints. A service that is killed meanwhile leaves the
# checkpoint, and the domain that was started for it: the next cleanup of one of our jobs removes both.
PROBE: Final = f"{backup.PREFIX}probe"
# No answer takes this long: a wait for a domain's lock ends after half a minute, a freeze and a thaw end after two and a half
# minutes, and a guest with much memory starts within a few. A call that takes longer hangs.
ANSWER_TIMEOUT_S: Final = 600.0
# For a call that is running when its session is closed: a login's limit, and some more. It is waited for, since the next
# session cleans up what it makes on the other host, and that must exist by then.
CLOSE_WAIT_S: Final = 60.0

T = TypeVar("T")


class LibvirtRemote:
    """The LiveAdapter of libvirt. A VM's id is its UUID; a change id is the name of a checkpoint."""

    def __init__(self, access: SourceAccess) -> None:
        self._access = access
        place, login, self._options = FORM.read(access)
        if place.path.startswith("/embed"):
            raise BadRequest("endpoint: an embedded driver belongs to one process, and cannot be shared with it")
        self._plain = place.scheme == "qemu+tcp" and not self._options.allow_plain_nbd
        self._host = Host(place, login, self._options)
        # One call at a time: a session is short, and its tunnels are made when they are needed.
        self._lock = threading.Lock()
        self._watch: scratch.Watch | None = None
        self._closing = threading.Event()
        # An idle connection may be lost before its next use.
        self._rested = False

    @property
    def kind(self) -> LiveKind:
        return LiveKind.LIBVIRT_REMOTE

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        self._closing.clear()
        await self._asked("connect", self._host.open)

    async def rest(self) -> None:
        """The connection stays open. Tunnels to disks are closed, as sshd has room for only a few."""
        await self._asked("come to rest", self._rest)

    def _rest(self) -> None:
        self._end_watch()
        self._host.leave_disks()
        self._rested = True

    async def close(self) -> None:
        self._closing.set()
        await asyncio.shield(asyncio.wrap_future(begun(self._closed)))

    def _closed(self) -> None:
        free = self._lock.acquire(timeout=CLOSE_WAIT_S)
        try:
            ended = self._end_watch(CLOSE_WAIT_S if free else 0.0) and free
            if not ended:
                log.warning("a call does not end; its session is closed without it", host=self._host.name)
            self._host.close(in_use=not ended)
        finally:
            if free:
                self._lock.release()

    def _end_watch(self, limit_s: float | None = None) -> bool:
        """Whether its last check has ended."""
        watch, self._watch = self._watch, None
        return watch is None or watch.stop(limit_s)

    async def about(self) -> About:
        return await self._asked("say who it is", self._about)

    def _about(self) -> About:
        connection = self._host.connection
        versions = f"libvirt {_version(connection.getLibVersion())}, {connection.getType()} {_version(connection.getVersion())}"
        old = self._too_old()
        checks = [SourceCheck(name="backups", ok=old is None, detail=old or "incremental backups are supported", hint=_UPGRADE)]
        if self._plain:
            checks.append(
                SourceCheck(
                    name="encryption",
                    ok=False,
                    detail="disks would come over the network in the clear",
                    hint="use qemu+tls or qemu+ssh; on a network of its own, set options.allow_plain_nbd",
                )
            )
        checks.append(self._rights())
        return About(f"libvirt on {self._host.name}", versions, tuple(checks))

    def _rights(self) -> SourceCheck:
        """By calls that change nothing here but could, so they are refused to a read-only user; the second asks for secrets."""
        libvirt, connection, who = library(), self._host.connection, self._host.user_name
        questions: list[Callable[[], object]] = [
            partial(connection.domainXMLFromNative, "none", "nothing", 0),
            *(partial(domain.XMLDesc, libvirt.VIR_DOMAIN_XML_SECURE) for domain in connection.listAllDomains(0)[:1]),
        ]
        for question in questions:
            try:
                question()
            except libvirt.libvirtError as error:
                if (hint := self._host.lacking(error)) is not None:
                    detail = f"{who} may look at domains, not manage them: {error.get_error_message() or error}"
                    return SourceCheck(name="privileges", ok=False, detail=detail, hint=hint)
        return SourceCheck(name="privileges", ok=True, detail=f"{who} may manage domains")

    async def supports_warm(self) -> bool:
        return await self._asked("say its version", self._too_old) is None

    def _too_old(self) -> str | None:
        connection = self._host.connection
        if str(connection.getType()) != "QEMU":
            return f"its hypervisor is {connection.getType()}, and only QEMU tracks changes"
        if connection.getLibVersion() < LEAST_VERSION:
            return f"libvirt {_version(connection.getLibVersion())} has no incremental backups: {_version(LEAST_VERSION)} has"
        return None

    def _unreadable(self) -> str | None:
        """Why no copy of its domains is possible, not even of those that are off."""
        connection = self._host.connection
        if str(connection.getType()) != "QEMU":
            return f"its hypervisor is {connection.getType()}, and disks are read from QEMU only"
        if connection.getLibVersion() < OLDEST_VERSION:
            return f"libvirt {_version(connection.getLibVersion())} has no backups, by which disks are read: 7.0 has"
        return None

    # ── discovery ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_vms(self) -> list[VmRow]:
        return await self._asked("list its domains", self._list_vms)

    def _list_vms(self) -> list[VmRow]:
        """One request for all of them; a domain whose monitor is busy has fewer facts."""
        libvirt = library()
        wanted = libvirt.VIR_DOMAIN_STATS_STATE | libvirt.VIR_DOMAIN_STATS_VCPU | libvirt.VIR_DOMAIN_STATS_BALLOON
        found = self._host.connection.getAllDomainStats(wanted, libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT)
        with reading(self._host.name, "for its domains"):
            return [_row(domain, stats) for domain, stats in found]

    async def inspect(self, vm_id: str) -> VmManifest:
        return await self._with_domain(vm_id, "be described", self._inspect)

    def _inspect(self, domain: Any) -> VmManifest:
        with reading(self._host.name, f"for {domain.name()[:60]}"):
            root = domains.machine_described(domain)
            return manifest(root, domains.seen(domain, root, too_old=self._too_old(), unreadable=self._unreadable()))

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        def read(domain: Any) -> bytes | None:
            return uefi_variables(self._host.connection, domains.described(domain))

        return await self._with_domain(vm_id, "give its UEFI variables", read)

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        return await self._with_domain(vm_id, "say what runs in it", agent.facts)

    # ── change tracking and snapshots ────────────────────────────────────────────────────────────────────────────────

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        await self._with_domain(vm_id, "track its changes", lambda domain: self._enable_cbt(domain, frozenset(disks)))

    def _enable_cbt(self, domain: Any, disks: frozenset[str]) -> None:
        """By trying: an image of qcow2's first version has no bitmaps, and some snapshots exclude them."""
        before = domains.tracked(domain)
        if disks <= before:
            return
        reasons = [reason for key, reason in untracked(domains.described(domain)).items() if key in disks]
        if not reasons:
            with domains.active(domain, PROBE):
                reason = backup.can_hold_checkpoint(domain, PROBE, disks)
            reasons = [reason] if reason else []
        if reasons:
            raise CbtUnsupported(f"{domain.name()}: {'; '.join(reasons)}")
        self._refuse_closed(domain)
        domains.note(domain, tracking=" ".join(sorted(disks | before)))

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        return await self._with_domain(vm_id, "be read at one moment", lambda domain: self._snapshot(domain, name, disks))

    def _snapshot(self, domain: Any, name: str, disks: Collection[str] | None) -> SnapshotRef:
        if self._plain:
            raise SnapshotFailed(
                "the disks would come over the network in the clear",
                hint="use qemu+tls or qemu+ssh; on a network of its own, set options.allow_plain_nbd",
            )
        job = name.rpartition("-")[0]
        found = backup.running(domain)
        if found is not None and found.snapshot != name:
            if found.snapshot is None or found.snapshot.rpartition("-")[0] != job:
                raise SnapshotFailed(
                    f"another backup job of {domain.name()} is running ({found.snapshot or 'not one of ours'}): "
                    "QEMU has one at a time",
                    hint="wait until it is over; virsh domjobinfo NAME shows it",
                )
            self._refuse_closed(domain)
            # Its pass is done, and its bitmap stays: its frozen data is not needed any more.
            backup.end(domain, lambda other: other != name)
            found = None
        if found is None:
            self._begin(domain, name, disks)
        tracked = domains.tracked(domain) if backup.has_checkpoint(domain, name) else frozenset()
        exports = backup.running(domain)
        keys = [key for key in exports.exports if key in tracked] if exports is not None else []
        return SnapshotRef(id=name, change_ids=dict.fromkeys(keys, name))

    def _begin(self, domain: Any, name: str, disks: Collection[str] | None) -> None:
        domains.start_to_read(domain, name)
        try:
            wanted = backup.backed_up(domain, disks)
            self._refuse_no_room(domain, wanted)
            domains.note_running(domain)
            with self._quiet(domain, name):
                self._refuse_closed(domain)
                backup.begin(domain, name, self._server(), disks=wanted, track=domains.tracked(domain))
                if self._closing.is_set():
                    backup.end(domain, lambda other: other == name)
                    backup.delete(domain, name)
                    self._refuse_closed(domain)
        except BaseException:
            with contextlib.suppress(Exception):
                domains.stop_reading(domain)
            raise

    def _refuse_closed(self, domain: Any) -> None:
        """A guest may take minutes to freeze. If the session was closed meanwhile, its objects were already removed."""
        if self._closing.is_set():
            raise SourceUnreachable(f"the session was closed before {domain.name()} could be read")

    def _refuse_no_room(self, domain: Any, disks: Collection[str]) -> None:
        free = scratch.make(self._host.connection, self._options.scratch_dir)
        wanted = scratch.least_free(domains.capacity_bytes(domain, disks))
        if free is not None and free < wanted:
            raise SnapshotFailed(
                f"{self._options.scratch_dir} on {self._host.name} has {free} bytes free, and {wanted} are needed: "
                "it holds what the guest overwrites while it is read",
                hint="make room there, or set options.scratch_dir to a folder with more",
            )

    def _server(self) -> backup.Server:
        folder = self._options.scratch_dir
        if not self._host.by_network:
            return backup.Server(folder)
        return backup.Server(folder, self._host.nbd_address(), self._options.nbd_ports, tls=self._host.encrypted)

    @contextlib.contextmanager
    def _quiet(self, domain: Any, name: str) -> Iterator[None]:
        """The guest's file systems are frozen, where its agent can; they are thawed again in any case."""
        quiesce = self._options.quiesce
        if domains.power_state(domain) != "on" or quiesce == "off":
            yield
            return
        holding = frozen(self._access, domain.UUIDString()) if domains.may_freeze(domain) else contextlib.nullcontext(Hold())
        with contextlib.ExitStack() as after, holding as hold:
            after.callback(lambda: hold.killed and domains.thaw(domain))
            if quiesce == "require" and not hold.quiet:
                raise SnapshotFailed(
                    f"{domain.name()} cannot be quiesced: its guest agent does not answer",
                    hint="install qemu-guest-agent in it, or set options.quiesce to try",
                )
            yield
            if hold.quiet and not hold.lasted():
                log.warning("guest was thawed before its backup had begun", domain=domain.name())
                if quiesce == "require":
                    backup.end(domain, lambda other: other == name)
                    raise SnapshotFailed(
                        f"{domain.name()} was thawed after {FROZEN_MOST_S:.0f} s, before its backup had begun",
                        hint="its host is busy: it is tried again; or set options.quiesce to try",
                    )

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        return await self._with_domain(vm_id, "give its disk", lambda domain: self._open(domain, snapshot, disk, since))

    def _open(self, domain: Any, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        found = backup.running(domain)
        if found is None or found.snapshot != snapshot.id:
            raise SnapshotFailed(
                f"the backup job {snapshot.id} of {domain.name()} no longer exists: its QEMU ended, restarted, or lacked room",
                hint=f"{self._options.scratch_dir} on that host must hold what the guest overwrites during a pass",
            )
        export = found.exports.get(disk.key)
        if export is None:
            raise SnapshotFailed(f"disk {disk.key} was not there when {snapshot.id} was made")
        if since is not None and (since != found.since or export.bitmap is None):
            raise CbtReset(
                f"disk {disk.key} of {domain.name()}: what changed since {since} is not known any more: "
                "its checkpoint was deleted, or its bitmap lost when QEMU ended without closing the image"
            )
        if since is not None and (other := backup.image_was_of(domain, disk.key, since)) is not None:
            raise CbtReset(
                f"disk {disk.key} of {domain.name()}: its image was that of {other} when {since} was made",
                hint="the whole disk is compared once",
            )
        bitmap = export.bitmap if since is not None else None
        spec = self._host.spec(export.name, path=found.path, port=found.port, bitmap=bitmap)
        self._knock(domain, snapshot.id, spec, found.path)
        if self._watch is None:
            self._watch = scratch.Watch(
                self._host.connection,
                self._options.scratch_dir,
                scratch.least_free(domains.capacity_bytes(domain, found.exports)),
                lambda: backup.end(domain, lambda other: other == snapshot.id),
            )
        return spec

    def _knock(self, domain: Any, snapshot: str, spec: NbdSpec, path: str | None) -> None:
        """While libvirt lists the job, its disks exist and only the way to them is broken: what was read of them counts. The
        cause may be a firewall, an sshd with too many callers, or the mode of a socket."""
        try:
            open_reader(spec).close()
        except SourceUnreachable as error:
            now = backup.running(domain)  # raises, where the host itself is gone
            cause = ": ".join(filter(None, (error.detail, self._host.tunnel_cause(path))))
            detail = f"the disks of {domain.name()} are not served: {cause}"
            if now is None or now.snapshot != snapshot:
                raise SnapshotFailed(detail) from error
            # sshd does not say why it opens no socket: the file's mode is the likely cause.
            if self._host.needs_leave:
                raise AuthFailed(
                    f"{self._host.user_name} may not open the socket of the disks of {domain.name()}: {cause}",
                    hint=f"log in as root, or as {_USER}",
                ) from error
            if self._host.encrypted and UNTRUSTED_DISKS.search(error.detail):
                # QEMU read it when the job began: the next job uses a new one.
                hint = f"QEMU shows the one in backup_tls_x509_cert_dir: {self._host.pki.wanted_of_disks}"
                raise SnapshotFailed(detail, hint=hint) from error
            raise SourceUnreachable(detail, hint=self._host.way_to_disks) from error

    async def release(self, vm_id: str, name: str) -> None:
        await self._unless_gone(vm_id, f"end {name}", lambda domain: self._release(domain, name))

    def _release(self, domain: Any, name: str) -> None:
        self._end_watch()
        backup.end(domain, lambda other: other == name)
        if domains.noted(domain).get("reading") in (name, PROBE):
            domains.stop_reading(domain)

    async def cleanup(self, vm_id: str, name: str) -> None:
        await self._unless_gone(vm_id, f"clear {name} away", lambda domain: self._cleanup(domain, name))
        # Also for a domain that is gone: its files may still exist.
        await self._asked("clear up", lambda: scratch.clear(self._host.connection, self._options.scratch_dir, name))

    def _cleanup(self, domain: Any, name: str) -> None:
        self._end_watch()
        backup.end(domain, lambda other: other == name)
        for ours in (name, PROBE):
            if backup.has_checkpoint(domain, ours) and domains.is_elsewhere(domain.state()):
                backup.forget(domain, ours)
            elif backup.has_checkpoint(domain, ours):
                with domains.active(domain, name):
                    backup.delete(domain, ours)
        if domains.noted(domain).get("reading") in (name, PROBE):
            domains.stop_reading(domain)
        if not backup.any_checkpoint(domain):
            with contextlib.suppress(library().libvirtError):
                domains.note(domain, tracking=None, running=None)

    # ── off, on, moved ───────────────────────────────────────────────────────────────────────────────────────────────

    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        off_s, stop = self._options.shutdown_timeout_s if timeout_s is None else timeout_s, self._closing.is_set
        await self._asked(
            f"domain {vm_id} cannot shut down",
            lambda: domains.shut_down(self._domain(vm_id), off_s, stop, manner),
            limit_s=off_s + ANSWER_TIMEOUT_S,
        )

    async def last_start(self, vm_id: str) -> str:
        return await self._with_domain(vm_id, "say when it was started", domains.last_start)

    async def power_on(self, vm_id: str) -> None:
        await self._with_domain(vm_id, "start", domains.power_on)

    async def mark(self, vm_id: str, note: str) -> None:
        """A domain that is gone needs no mark, as it cannot start."""
        await self._unless_gone(vm_id, "be marked", lambda domain: domains.mark_moved(domain, note))

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _with_domain(self, vm_id: str, doing: str, use: Callable[[Any], T]) -> T:
        return await self._asked(f"domain {vm_id} cannot {doing}", lambda: use(self._domain(vm_id)))

    async def _unless_gone(self, vm_id: str, doing: str, use: Callable[[Any], None]) -> None:
        """A domain that is gone has nothing of ours left."""
        with contextlib.suppress(VmNotFound):
            await self._with_domain(vm_id, doing, use)

    def _domain(self, vm_id: str) -> Any:
        try:
            return self._host.connection.lookupByUUIDString(str(UUID(vm_id)))
        except ValueError as error:
            raise VmNotFound(f"{self._host.name} knows its domains by UUID, and {vm_id[:60]!r} is none") from error

    async def _asked(self, doing: str, use: Callable[[], T], limit_s: float | None = None) -> T:
        def guarded() -> T:
            with self._lock, self._host.asked(doing):
                if self._rested:
                    self._host.renew()
                    self._rested = False
                return use()

        limit_s = ANSWER_TIMEOUT_S if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await asyncio.wrap_future(begun(guarded))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise SourceUnreachable(
                f"{self._host.name}: {doing}: no answer within {limit_s:.0f} s",
                hint="its libvirtd, or the domain's QEMU, hangs",
            ) from error


_USER = "a user of the groups libvirt and, unless disks come by TLS or TCP, QEMU's (libvirt-qemu, kvm or qemu there)"


def _row(domain: Any, stats: dict[str, Any]) -> VmRow:
    libvirt = library()
    states = {libvirt.VIR_DOMAIN_SHUTOFF: "off", libvirt.VIR_DOMAIN_CRASHED: "off", libvirt.VIR_DOMAIN_PAUSED: "suspended"}
    states[libvirt.VIR_DOMAIN_PMSUSPENDED] = "suspended"
    state, memory = stats.get("state.state"), stats.get("balloon.maximum")
    elsewhere = domains.is_elsewhere((state or 0, stats.get("state.reason", 0)))
    return VmRow(
        vm_id=str(domain.UUIDString()),
        name=str(domain.name()),
        power_state="unknown" if elsewhere else states.get(state, "on"),
        cpu_count=stats.get("vcpu.current"),
        memory_bytes=None if memory is None else int(memory) << 10,
    )


def _version(number: int) -> str:
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


_UPGRADE = "upgrade libvirt there; until then its VMs are copied cold, where it is 7.0 at least"


def libvirt_remote(access: SourceAccess) -> LibvirtRemote:
    return LibvirtRemote(access)
