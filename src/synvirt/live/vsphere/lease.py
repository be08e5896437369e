"""The third way to vSphere's disks: ExportSnapshot, and the lease (HttpNfcLease) under which a host sends them. Blocking code.

    ask ─▶ initializing ─▶ ready: one URL per disk ─▶ regular reports of progress, while they are read ─▶ complete (else abort)

«vSphere Web Services API», HttpNfcLease. A lease without reports of progress ends after `leaseTimeout`, for example after the
service's whole host went down. If only the service was killed, `lease_guard` aborts the lease at once. A lease belongs to the
session that requested it.
"""

import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from synvirt.disks.specs import LeaseSpec
from synvirt.errors import Internal, SnapshotFailed, SourceUnreachable, SynvirtError, UnsupportedFormat, VmNotFound
from synvirt.live.vsphere.disks import capacity_of, place_name, virtual_disks
from synvirt.live.vsphere.lease_guard import LeaseGuard
from synvirt.live.vsphere.session import VimSession, library

READY_TIMEOUT_S: Final = 120.0
READY_POLL_S: Final = 0.5
# vSphere's own limit is 300 s: for that long the lease of a crash blocks the next one.
BUSY_TIMEOUT_S: Final = 360.0
BUSY_POLL_S: Final = 5.0
# How often it is renewed, or three times within the lease's time where that is short.
RENEWED_EVERY_S: Final = 30.0
RENEWED_IN_ITS_TIME: Final = 4
HTTPS_PORT: Final = 443

_WHAT: Final = "export a snapshot"

log = structlog.get_logger(__name__)


class ExportLease:
    """All disks of one snapshot. `open`, then `disk` of each; `renew` every `renewed_every_s`; `end` in any case."""

    def __init__(self, session: VimSession, snapshot_id: str) -> None:
        self._session, self.snapshot_id = session, snapshot_id
        self._lease: Any = None
        self._urls: Sequence[Any] = ()
        self._guard: LeaseGuard | None = None
        self.renewed_every_s = RENEWED_EVERY_S

    def open(self, busy_timeout_s: float | None = None) -> None:
        """SnapshotFailed, when the snapshot is gone; SourceUnreachable, when the platform gives us no lease in time."""
        self._guard = LeaseGuard(self._session)
        try:
            self._lease = self._asked(BUSY_TIMEOUT_S if busy_timeout_s is None else busy_timeout_s)
            self._guard.watch(self._lease._moId)  # noqa: SLF001 - pyvmomi's own name of an object's id
            self._wait_until_ready()
        except VmNotFound as error:
            raise SnapshotFailed(error.detail, hint="the snapshot or its lease no longer exists: it is taken again") from error

    def _asked(self, timeout_s: float) -> Any:
        fault = library().vim.fault
        busy: list[str] = []

        def ask(_: Any) -> Any:
            try:
                return self._session.snapshot(self.snapshot_id).ExportSnapshot()
            except (fault.TaskInProgress, fault.InvalidState) as error:
                busy.append(type(error).__name__.rpartition(".")[2])
                return None

        deadline = time.monotonic() + timeout_s
        while (lease := self._session.call(_WHAT, ask)) is None:
            if time.monotonic() > deadline:
                raise SourceUnreachable(
                    f"{self._session.host} cannot export snapshot {self.snapshot_id} for {timeout_s:.0f} s: {busy[-1]}",
                    hint="another export of this VM is under way (look at its tasks), or it cannot be exported at all",
                )
            time.sleep(BUSY_POLL_S)
        return lease

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            paths = ("state", "error", "info.deviceUrl", "info.leaseTimeout")
            found = self._session.properties(self._lease, paths, what=_WHAT)
            if found.get("state") == "ready":
                self._urls = [url for url in found.get("info.deviceUrl") or () if url.disk is not False]
                lasts_s = float(found.get("info.leaseTimeout") or 0)
                if lasts_s > 0:
                    self.renewed_every_s = min(RENEWED_EVERY_S, lasts_s / RENEWED_IN_ITS_TIME)
                return
            if found.get("error") is not None:
                with self._session.mapped(_WHAT):
                    raise found["error"]
            if found.get("state") not in ("initializing", None):
                raise SourceUnreachable(f"{self._session.host} ended the export of {self.snapshot_id} before it began")
            if time.monotonic() > deadline:
                raise SourceUnreachable(
                    f"{self._session.host} was not ready to export {self.snapshot_id} within {READY_TIMEOUT_S:.0f} s",
                    hint="look at the VM's tasks and events, and at its host",
                )
            time.sleep(READY_POLL_S)

    def renew(self) -> bool:
        """False: there is nothing left to renew."""
        try:
            self._session.call("keep an export alive", self._say_progress)
        except (VmNotFound, Internal) as error:
            log.warning("an export lease is lost; its readers will learn it", snapshot=self.snapshot_id, cause=error.detail)
            return False
        except SynvirtError as error:
            log.warning("an export lease could not be kept alive; tried again", snapshot=self.snapshot_id, cause=error.detail)
        return True

    def _say_progress(self, _: Any) -> None:
        try:
            # Only its reader, in another process, knows the progress; the platform accepts any number as a sign of life.
            self._lease.HttpNfcLeaseProgress(percent=0)
        except library().vim.fault.Timedout as error:  # for a lease it means that it has expired, not that a retry may help
            raise Internal(f"{self._session.host} has ended the lease: it ran out") from error

    def end(self) -> None:
        """Completes the lease; aborts it where it was never ready, or has expired. Idempotent."""
        lease, self._lease, self._urls = self._lease, None, ()
        if lease is not None:
            self._end(lease)
        if self._guard is not None:
            self._guard.leave()

    def _end(self, lease: Any) -> None:
        for end in (lease.HttpNfcLeaseComplete, lease.HttpNfcLeaseAbort):
            try:
                self._session.call("end an export", lambda _: end())  # noqa: B023
            except VmNotFound:
                return  # it has ended
            except SynvirtError as error:
                log.info("an export lease does not end as asked", snapshot=self.snapshot_id, cause=error.detail)
            else:
                return

    # ── its URLs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def disk(self, device: Any, devices: Sequence[Any]) -> LeaseSpec:
        """How to read one of the snapshot's `devices`. UnsupportedFormat, where the lease does not have the disk."""
        url = self._url_of(device, devices)
        where = urlsplit(str(url.url))
        session, options = self._session, self._session.options
        if where.scheme != "https" or not where.hostname or where.username is not None:
            raise UnsupportedFormat(f"{session.host} exports disk {device.key} by {where.scheme or 'nothing'}, not by HTTPS")
        # vCenter names the host with the disk. A host as the source does not know its own name: «*».
        own = where.hostname == "*"
        host = session.host if own else where.hostname
        port = where.port or (session.port if own else HTTPS_PORT)
        at_home = (host, port) == (session.host, session.port)
        thumbprint = str(url.sslThumbprint or "").strip() or None
        return LeaseSpec(
            host=host,
            port=port,
            target=where.path + (f"?{where.query}" if where.query else ""),
            verify_tls=options.verify_tls,
            # The platform's own certificate was checked: the one that it names for its host is right, no matter who signed it.
            thumbprint=thumbprint,
            fingerprint_sha256=options.fingerprint_sha256 if at_home else None,
            # The session's cookie is only for the platform, and is sent to no other host. The URL itself has a secret.
            cookie=session.cookie if at_home else "",
            size_bytes=capacity_of(device),
            name=str(getattr(device.backing, "fileName", None) or f"disk {device.key}"),
        )

    def _url_of(self, device: Any, devices: Sequence[Any]) -> Any:
        """By the place where it is attached («/vm-12/ParaVirtualSCSIController0:1»), which is the end of its key."""
        wanted = place_name(device, devices)
        found = [url for url in self._urls if str(url.key).rpartition("/")[2] == wanted]
        if len(found) == 1:
            return found[0]
        if len(self._urls) == 1 and len(virtual_disks(devices)) == 1:
            return self._urls[0]
        raise UnsupportedFormat(
            f"{self._session.host} exports {len(self._urls)} disks, and {len(found)} of them as {wanted}",
            hint="leave the disk out by skip_disks, or choose options.transport datastore or vddk",
        )
