"""Tests whether a restore point boots. Its guest is started next to the others, from its disks in the repository, and watched.

    point's disk ─▶ NbdServer of a worker ─▶ overlay for its writes ─▶ a domain that reaches nothing ─▶ signs of a boot

Nothing is copied before, and nothing stays: each thing is noted before it is made, and removed at the end. The result stays
with the point, and the screen as a file with the point's id.

If the service ended after the test had its result, the next start uses that. If there was none yet, the guest is started again:
the worker that serves its disks ended with the service, so the guest has seen read errors, and its later behaviour shows
nothing about the point. This costs one start; no byte was copied. So it is where that worker died alone.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import structlog

from synvirt.backups.limits import Limits, held
from synvirt.backups.memory import Memory
from synvirt.backups.model import BootTest, RestorePoint, Status
from synvirt.backups.orders import ServeOrder
from synvirt.backups.points import Points
from synvirt.backups.repositories import Repositories
from synvirt.backups.restores import domain as restoring_domain
from synvirt.backups.restores import new_domain
from synvirt.backups.restores.domain import Place
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.restores.new_files import remove_folder
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import RETRY_PAUSES_S, STOP_POLL_S, Served, Working, wait
from synvirt.durable import make_open_folder, put_private_file
from synvirt.errors import (
    BootTestFailed,
    Cancelled,
    DiskWriteFailed,
    DomainDefineFailed,
    GuestBootFailed,
    GuestHasNoRoom,
    HostLacks,
    HypervisorAway,
    Interrupted,
    RepositoryDamaged,
)
from synvirt.hypervisor import eyes
from synvirt.hypervisor.hardware import own_mac
from synvirt.jobs.ledger import SWEEP_AWAY_S, Ledger, Undo
from synvirt.jobs.process import WorkerDied
from synvirt.model.job import Domain
from synvirt.model.values import now
from synvirt.programs import ProgramFailed, run
from synvirt.repository.manifest import Manifest
from synvirt.repository.repository import Repository

OVERLAY_TIMEOUT_S = 60
# A guest that reads an error may end before the service hears why.
WHY_WITHIN_S = 5 * STOP_POLL_S

_log = structlog.get_logger("synvirt.backups")


class BootTesting:
    """Starts the guests of restore points from their repositories, and records whether they boot."""

    def __init__(
        self,
        restore_host: RestoreHost,
        points: Points,
        working: Working,
        repositories: Repositories,
        *,
        ledger: Ledger,
        memory: Memory,
        limits: Limits | None = None,
    ) -> None:
        self._restore_host, self._ledger, self._points, self._limits = restore_host, ledger, points, limits
        self._memory, self._working, self._repositories = memory, working, repositories

    def test(self, under_way: UnderWay, point: RestorePoint) -> None:
        """Tests the point. BootTestFailed, if the guest did not boot; any other error means that it could not be tested."""
        run_id = under_way.run.id
        if not self._ledger.sweep(run_id, away_s=SWEEP_AWAY_S):
            raise Interrupted("what the test had made before the service ended cannot be removed", hint="see the service's log")
        found = self._memory.mark(run_id, BootTest) or self._found(under_way, point)
        self._points.change(point.id, boot_test=found)
        if found.result == "failed":
            raise BootTestFailed(f"{point.vm_name} {found.trouble}", hint="its screenshot may say more; verify the point, too")

    def _found(self, under_way: UnderWay, point: RestorePoint) -> BootTest:
        """The result. A guest whose disks are served no more, as the worker died, is started again."""
        for pause_s in RETRY_PAUSES_S:
            try:
                return self._tried(under_way, point)
            except WorkerDied as error:
                _log.warning("a boot test begins again", cause=error.detail)
            wait(pause_s, under_way.stop)
        return self._tried(under_way, point)

    def _tried(self, under_way: UnderWay, point: RestorePoint) -> BootTest:
        repository, run_id = self._repositories.opened(point.repository_id), under_way.run.id
        with contextlib.ExitStack() as closing:
            closing.enter_context(held(self._limits, under_way, repository))
            try:
                domain, served = self._domain(under_way, repository, point, closing)
                found = self._booted(under_way, domain, served, point)
                self._memory.put_mark(run_id, found)
            finally:
                self._ledger.sweep(run_id, away_s=SWEEP_AWAY_S)  # the guest first, then the export of its disks
        return found

    def _domain(
        self, under_way: UnderWay, repository: Repository, point: RestorePoint, closing: contextlib.ExitStack
    ) -> tuple[Domain, Served]:
        restore_host, run_id = self._restore_host, under_way.run.id
        manifest = repository.parsed(self._repositories.authors.checked(under_way, repository, point.id, point.vm_id))
        domain = restoring_domain.foreign(manifest.sealed.domain_xml, read=restore_host.read_xml)
        name = f"boot-test-{run_id}"
        restoring_domain.renewed(domain, name=name, run_id=run_id, mac=lambda number: own_mac(run_id, str(number)))
        new_domain.fit(restore_host, self._ledger, run_id, domain, manifest)
        restoring_domain.isolated(domain, serial_log=str(restore_host.hypervisor.console_log(run_id)))
        served = closing.enter_context(self._serving(run_id, point, manifest, under_way.stop))
        places = dict(self._overlays(run_id, manifest, served))
        restoring_domain.with_disks(domain, places, wanted=frozenset(places))
        new_domain.put_tpm(restore_host, self._ledger, run_id, manifest)
        return Domain(name=name, uuid=str(run_id), xml=domain.xml), served

    def _folder(self, run_id: UUID) -> Path:
        return self._restore_host.scratch() / str(run_id)

    def _serving(
        self, run_id: UUID, point: RestorePoint, manifest: Manifest, stop: Callable[[], bool]
    ) -> contextlib.AbstractContextManager[Served]:
        folder = self._folder(run_id)
        self._ledger.record(run_id, "scratch", str(folder))
        try:
            make_open_folder(folder)
            for one in (
                folder.parent,
                folder.parent.parent,
            ):  # another part of the service may have made them, with its umask
                self._restore_host.open_to_qemu(one)
        except OSError as error:
            raise DiskWriteFailed(f"the folder of the boot test cannot be made: {error.strerror}") from error
        order = ServeOrder(
            repository=self._repositories.spec(point.repository_id),
            point_id=str(point.id),
            sockets={number: str(folder / str(number)) for number in range(len(manifest.shown.disks))},
            sha256=manifest.sha256,
        )
        return self._working.serving(order, stop)

    def _overlays(self, run_id: UUID, manifest: Manifest, served: Served) -> Iterator[tuple[str, Place]]:
        folder = self._folder(run_id)
        for number, (disk, named) in enumerate(zip(manifest.shown.disks, manifest.sealed.disks, strict=True)):
            overlay = folder / f"{number}.qcow2"
            # -u: qemu-img does not connect to the point's export. It is not confined.
            options = ["-q", "-u", "-f", "qcow2", "-F", "raw", "-b", served.uris[number]]
            self._restore_host.give_to_qemu(folder / str(number))
            try:
                create = ["qemu-img", "create", *options, str(overlay), str(disk.size_bytes)]
                run(create, timeout_s=OVERLAY_TIMEOUT_S, missing=DiskWriteFailed)
            except ProgramFailed as failed:
                served.check(WHY_WITHIN_S)
                raise DiskWriteFailed(f"the overlay of disk {named.target} cannot be made: {failed.stderr}") from failed
            yield named.target, Place(str(overlay), "file", "qcow2")

    def _booted(self, under_way: UnderWay, domain: Domain, served: Served, point: RestorePoint) -> BootTest:
        hypervisor, run_id = self._restore_host.hypervisor, under_way.run.id
        self._ledger.record(run_id, "screen", str(run_id))
        self._ledger.record(run_id, "domain", domain.uuid)
        new_domain.define(self._restore_host, domain)
        under_way.move(Status.TRANSFERRING)
        try:
            hypervisor.start(run_id)
        except HypervisorAway:
            raise
        except DomainDefineFailed as error:
            served.check(WHY_WITHIN_S)
            raise HostLacks(f"the guest cannot be started on this host: {error.detail}", hint=error.hint) from error
        began = time.monotonic()
        try:
            sign = hypervisor.wait_until_booted(
                run_id, self._restore_host.boot_timeout_s, lambda: under_way.stop() or served.ended.is_set()
            )
        except GuestHasNoRoom as error:
            raise HostLacks(error.detail, hint=error.hint) from error
        except (GuestBootFailed, Cancelled) as error:
            trouble = self._why(under_way, served, error)
            found = BootTest(at=now(), result="failed", seconds=round(time.monotonic() - began, 1), trouble=trouble)
            picture = hypervisor.screenshot(run_id)
        else:
            found = BootTest(at=now(), result="booted", seconds=round(time.monotonic() - began, 1), sign=sign)
            picture = self._picture(run_id)
        under_way.move(Status.COMMITTING)
        kept = picture is not None and self._keep(point.id, picture)
        return found.model_copy(update={"screenshot": kept})

    @staticmethod
    def _why(under_way: UnderWay, served: Served, error: GuestBootFailed | Cancelled) -> str:
        """Why the point does not boot. Cancelled; the error of the worker, where that says nothing of the point."""
        if under_way.stop():
            raise Cancelled from error
        try:
            served.check(WHY_WITHIN_S)
        except RepositoryDamaged as damaged:
            return f"cannot be read: {damaged.detail}"
        return error.detail

    def _picture(self, run_id: UUID) -> bytes | None:
        domain = self._restore_host.domain("lookupByUUIDString", str(run_id))
        return None if domain is None else eyes.screenshot(self._restore_host.connection.use(), domain)

    def _keep(self, point_id: UUID, picture: bytes) -> bool:
        """Stores a picture for people; nothing depends on it."""
        with contextlib.suppress(OSError):
            path = self._path(point_id)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            put_private_file(path, picture)
            return True
        return False

    def _path(self, point_id: UUID) -> Path:
        return self._restore_host.screens / f"{point_id}.png"

    def screenshot(self, point_id: UUID) -> bytes | None:
        """The picture of the point's last test, a PNG."""
        try:
            return self._path(point_id).read_bytes()
        except OSError:
            return None

    def forget(self, known: set[UUID]) -> None:
        """Removes the pictures of removed points."""
        for path in self._restore_host.screens.glob("*.png"):
            with contextlib.suppress(ValueError, OSError):
                if UUID(path.stem) not in known:
                    path.unlink()


def undo(restore_host: RestoreHost) -> dict[str, Undo]:
    """How ledger entries of boot tests are undone, by the kind of entry."""

    def scratch(run_id: UUID, name: str) -> None:
        if Path(name).name == str(run_id):
            remove_folder(Path(name))

    return {"scratch": scratch, "screen": lambda run_id, name: restore_host.hypervisor.forget_screenshot(run_id)}
