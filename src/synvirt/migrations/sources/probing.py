"""Tests whether a source works, in the order in which a connection is made; the first failure ends the test. asyncio.

    address ─▶ port ─▶ certificate ─▶ login ─▶ privileges ─▶ deep: snapshot ─▶ read ─▶ each way, each host ─▶ cleanup

A failed check is an answer for the operator: what was found, and what to do about it.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final, Literal, TypeVar

from synvirt import outgoing
from synvirt.disks import open_reader
from synvirt.disks.specs import ReaderSpec
from synvirt.errors import BadRequest, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live import About, HasWays, LiveAdapter, Reach, SnapshotRef
from synvirt.model.access import SourceOptions
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.sources import SourceCheck, SourceTest
from synvirt.model.values import now
from synvirt.sizes import MIB
from synvirt.store.sources import Trial
from synvirt.transport import tls

T = TypeVar("T")
# Notes a snapshot of a VM before it is made. The note is deleted when the block ends without an error.
Noted = Callable[[str], AbstractAsyncContextManager[Trial]]

ADDRESS_TIMEOUT_S = 10.0
# If a login takes longer, the platform is down or a firewall drops packets.
LOGIN_TIMEOUT_S = 60.0
# A snapshot of a busy VM with a quiesced file system takes minutes.
SNAPSHOT_TIMEOUT_S = 600.0
# For each way that a deep test tries besides the one that jobs use. It reads enough that caches do not decide the rate, and
# little enough that a slow site (1 MiB/s) still answers in time.
WAY_TIMEOUT_S, MEASURED_BYTES = 120.0, 16 * MIB
# The prefix of the name of a way's check.
WAY: Final = "way "


class _Ended(Exception):
    """A check failed: the later ones would only repeat its error."""


class _Probe:
    def __init__(self) -> None:
        self.checks: list[SourceCheck] = []
        self.latency_ms: float | None = None
        self.about: About | None = None

    def passed(self, name: str, detail: str) -> None:
        self.checks.append(SourceCheck(name=name, ok=True, detail=detail))

    def failed(self, name: str, detail: str, hint: str | None) -> _Ended:
        self.checks.append(SourceCheck(name=name, ok=False, detail=detail, hint=hint))
        return _Ended()

    async def tried(
        self, name: str, wanted: Awaitable[T], timeout_s: float, described: Callable[[T], str], *, hint: str | None = None
    ) -> T:
        """Runs one check. `hint`: what its failure means, if the error does not say."""
        try:
            async with asyncio.timeout(timeout_s):
                found = await wanted
        except TimeoutError:
            slow = hint or "is the platform overloaded?"
            raise self.failed(name, f"no answer within {timeout_s:.0f} s", slow) from None
        except SynvirtError as error:
            raise self.failed(name, f"{error.code}: {error.detail}", hint or error.hint) from None
        self.passed(name, described(found))
        return found

    # ── one by one ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def address(self, reach: Reach) -> None:
        try:
            async with asyncio.timeout(ADDRESS_TIMEOUT_S):
                found = await asyncio.to_thread(outgoing.sources().addresses, reach.host, reach.port)
        except BadRequest as error:
            raise self.failed("address", error.detail, error.hint) from None
        except (SourceUnreachable, TimeoutError) as error:
            cause = getattr(error.__cause__, "strerror", None) or "no answer"
            raise self.failed(
                "address",
                f"the name {reach.host} does not resolve to an address: {cause}",
                "check the spelling, and this host's DNS",
            ) from None
        self.passed("address", f"{reach.host} is {', '.join(found)}")

    async def port(self, reach: Reach) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(ADDRESS_TIMEOUT_S):
                dialled = await asyncio.to_thread(outgoing.sources().dial, reach.host, reach.port, timeout_s=ADDRESS_TIMEOUT_S)
        except BadRequest as error:
            raise self.failed("port", error.detail, error.hint) from None
        except (OSError, TimeoutError) as error:
            cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "no answer"
            hint = "is it running, is the port right, and does a firewall let this host through?"
            raise self.failed("port", f"{reach.host} accepts no connection on port {reach.port}: {cause}", hint) from None
        self.latency_ms = round((time.monotonic() - began) * 1000, 3)
        dialled.close()
        self.passed("port", f"{reach.host} accepts connections on port {reach.port}")

    async def certificate(self, reach: Reach, options: SourceOptions) -> None:
        try:
            shown = await asyncio.to_thread(tls.look, reach.host, reach.port)
        except BadRequest as error:
            raise self.failed("certificate", error.detail, error.hint) from None
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise self.failed("certificate", f"port {reach.port} shows no certificate: {cause}", "is the port right?") from None
        what = f"SHA-256 {shown.fingerprint}, {shown.words}"
        if options.fingerprint_sha256 is not None:
            if shown.fingerprint != options.fingerprint_sha256:
                changed = tls.certificate_changed(reach.host, shown.fingerprint, options.fingerprint_sha256)
                raise self.failed("certificate", f"{changed.detail}; it is {shown.words}", changed.hint)
            self.passed("certificate", f"{what}; as pinned")
        elif reach.own_authority:
            self.passed("certificate", f"{what}; the log-in shows whether its credentials trust it")
        elif shown.refused is None:
            self.passed("certificate", f"{what}; this host trusts its issuer")
        elif not options.verify_tls:
            self.passed("certificate", f"{what}; not checked, as options.verify_tls is false")
        else:
            pin = f"{shown.fingerprint} (options.fingerprint_sha256; sources change --fingerprint)"
            hint = f"compare it with the one on the platform; if it is the same, pin it: {pin}"
            raise self.failed("certificate", f"{what} is not trusted by this host: {shown.refused}", hint)

    async def login(self, adapter: LiveAdapter) -> None:
        began = time.monotonic()
        await self.tried("login", adapter.connect(), LOGIN_TIMEOUT_S, lambda _: "logged in")
        if self.latency_ms is None:
            self.latency_ms = round((time.monotonic() - began) * 1000, 3)

    async def privileges(self, adapter: LiveAdapter) -> None:
        self.about = about = await self.tried(
            "platform", adapter.about(), LOGIN_TIMEOUT_S, lambda found: f"{found.product} {found.version}"
        )
        self.checks.extend(about.checks)
        if not all(check.ok for check in about.checks):
            raise _Ended

    async def deep(self, adapter: LiveAdapter, vm_id: str | None, noted: Noted) -> None:
        """Makes a snapshot of one VM, reads a MiB from it, and removes both."""
        vm = await self.tried(
            "choose", _chosen(adapter, vm_id), LOGIN_TIMEOUT_S, lambda found: f"trying on {found.name} ({found.vm_id})"
        )
        disk = vm.disks[0]
        async with noted(vm.vm_id) as trial:
            try:
                snapshot = await self.tried(
                    "snapshot",
                    adapter.snapshot(vm.vm_id, trial.name, [disk.key]),
                    SNAPSHOT_TIMEOUT_S,
                    lambda _: f"made one of {vm.name}",
                )
                with suppress(_Ended):  # reported; another way may work
                    await self.tried(
                        "read",
                        _read(adapter, vm.vm_id, snapshot, disk),
                        SNAPSHOT_TIMEOUT_S,
                        lambda found: f"read {found} bytes of its first disk, {disk.label}",
                    )
                if isinstance(adapter, HasWays):
                    await self.ways(adapter, vm.vm_id, snapshot, disk)
            except _Ended:
                pass  # reported; a snapshot that failed may exist all the same
            await self.tried(
                "cleanup",
                adapter.cleanup(vm.vm_id, trial.name),
                SNAPSHOT_TIMEOUT_S,
                lambda _: "the snapshot is gone again",
                hint=f"snapshot {trial.name} may still be there; its removal is tried again until it is gone",
            )

    async def ways(self, adapter: HasWays, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> None:
        """Tests each way on its own with its rate, and each host that sends disks. One that does not work is a warning."""
        with suppress(SynvirtError):
            for way in await adapter.ways_to(vm_id, snapshot, disk):
                await self.way(adapter, way, vm_id, snapshot, disk)
        with suppress(SynvirtError, TimeoutError):
            async with asyncio.timeout(WAY_TIMEOUT_S):
                self.checks.extend(await adapter.hosts())

    async def way(self, adapter: HasWays, way: str, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> None:
        name = f"{WAY}{way}"
        try:
            async with asyncio.timeout(WAY_TIMEOUT_S):
                spec = await adapter.open_by(way, vm_id, snapshot, disk)
                read, seconds = await asyncio.to_thread(_read_measured, spec)
        except TimeoutError:
            detail, hint = f"no answer within {WAY_TIMEOUT_S:.0f} s", "is the platform overloaded?"
            self.checks.append(SourceCheck(name=name, ok=True, warning=True, detail=detail, hint=hint))
        except SynvirtError as error:
            detail = f"{error.code}: {error.detail}"
            self.checks.append(SourceCheck(name=name, ok=True, warning=True, detail=detail, hint=error.hint))
        else:
            bytes_per_s = read / max(seconds, 1e-6)
            detail = f"read {read} bytes of {disk.label} with {bytes_per_s / MIB:.1f} MiB/s, one request after another"
            self.checks.append(SourceCheck(name=name, ok=True, detail=detail, bytes_per_s=round(bytes_per_s, 1)))


def measured_rates(test: SourceTest) -> dict[str, float]:
    """The rates of the ways that a deep test could read by, in bytes a second."""
    return {check.name.removeprefix(WAY): check.bytes_per_s for check in test.checks if check.bytes_per_s}


async def probe(
    adapter: LiveAdapter,
    reach: Reach | None,
    options: SourceOptions,
    *,
    deep: Noted | Literal[False],
    vm_id: str | None,
) -> SourceTest:
    """Runs the test. `deep`: also with a snapshot of `vm_id`, or of any running VM; `noted` notes it."""
    found = _Probe()
    try:
        if reach is not None:
            await found.address(reach)
            await found.port(reach)
            if reach.tls:
                await found.certificate(reach, options)
        await found.login(adapter)
        await found.privileges(adapter)
        if deep:
            await found.deep(adapter, vm_id, deep)
    except _Ended:
        pass
    finally:
        await adapter.close()
    return SourceTest(
        ok=all(check.ok for check in found.checks),
        product=found.about.product if found.about else None,
        version=found.about.version if found.about else None,
        latency_ms=found.latency_ms,
        checks=tuple(found.checks),
        at=now(),
    )


async def _chosen(adapter: LiveAdapter, vm_id: str | None) -> VmManifest:
    """The VM for the test: it must have a disk."""
    if vm_id is None:
        rows = await adapter.list_vms()
        if not rows:
            raise VmNotFound("there is no virtual machine to try on")
        vm_id = next((row.vm_id for row in rows if row.power_state == "on"), rows[0].vm_id)
    manifest = await adapter.inspect(vm_id)
    if not manifest.disks:
        raise VmNotFound(f"{manifest.name} has no disk to read", hint="name another: --vm, or ?vm_id=")
    return manifest


async def _read(adapter: LiveAdapter, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> int:
    spec = await adapter.open_disk(vm_id, snapshot, disk, None)
    return await asyncio.to_thread(_read_first, spec)


def _read_first(spec: ReaderSpec) -> int:
    return _read_measured(spec, MIB)[0]


def _read_measured(spec: ReaderSpec, most: int = MEASURED_BYTES) -> tuple[int, float]:
    """Bytes read from its beginning, and the seconds for that, including the opening."""
    began, reader = time.monotonic(), open_reader(spec)
    try:
        length = min(most, reader.size)
        piece = bytearray(MIB)
        for at in range(0, length, MIB):
            reader.read_into(at, memoryview(piece)[: min(MIB, length - at)])
    finally:
        reader.close()
    return length, time.monotonic() - began
