"""A restore whose guest starts at once: it runs over the point, is copied while it runs, and moves onto its volumes.

    point served ─▶ overlays laid ─▶ domain over them defined, started
                                       └▶ its disks are copied to the volumes, and yield to what the guest reads
    all copied ─▶ the guest's layers become its volumes, without a stop ─▶ domain over the volumes defined ─▶ export ended

It runs in the run's thread; a second thread keeps the guest running meanwhile. After the guest's start, no failure ends the run
(runs.py). It can be continued from any point: the run's `instant` has its progress.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from synvirt.backups.model import RestoredDomain, RestorePoint, RestoreRequest, Status, Trouble
from synvirt.backups.restores.domain import Place
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.restores.new_domain import START_FAILED, NewDomain, Volumes, chosen_disks, define, put_tpm
from synvirt.backups.trouble import until_it_goes_well
from synvirt.backups.under_way import Sum, UnderWay
from synvirt.backups.working import Copying
from synvirt.errors import BackupBadRequest, BackupDiskWriteFailed, Internal, SynvirtError
from synvirt.hypervisor import Early, Paused, Volume
from synvirt.jobs.exporting import ACTIVITY
from synvirt.jobs.exports import Exports
from synvirt.jobs.instant import (
    LOOK_EVERY_S,
    NO_SPACE_HINT,
    OTHER_DESTINATION,
    is_started,
    keep_going,
    layers,
    room_news,
    why_not_onto,
)
from synvirt.model.job import Domain, Instant, InstantState, Progress
from synvirt.model.values import now
from synvirt.repeating import repeated
from synvirt.repository.manifest import DiskMap, Manifest
from synvirt.repository.specs import PointSpec

_log = structlog.get_logger("synvirt.backups")


class InstantDomain(NewDomain):
    """A new domain that is started before its disks are copied."""

    def check(self, point: RestorePoint, request: RestoreRequest) -> None:
        super().check(point, request)
        if not request.start:
            raise BackupBadRequest("instant: an instant start with start false starts nothing", hint="leave one of them out")
        if self._restore_host.exports is None:
            raise BackupBadRequest("instant: this service serves no disks to its guests", hint="leave instant out")
        if (why := why_not_onto(self._restore_host.default()[1])) is not None:
            raise BackupBadRequest(f"instant: {why}", hint=OTHER_DESTINATION)

    def restore(self, copying: Copying, manifest: Manifest, point: RestorePoint, request: RestoreRequest) -> None:
        under_way, run_id = copying.under_way, copying.under_way.run.id
        disks = chosen_disks(manifest, request.disks)
        if under_way.run.instant is None:
            self._refuse_lived(run_id, point)
            self._check_room(copying, manifest, disks)
        domain = self._domain(under_way, point, manifest, request)
        # Once the guest moves onto them, they belong to QEMU.
        is_made = _state(under_way) in ("moving", "done")
        volumes = self._named(run_id, disks) if is_made else self._volumes(copying, disks)
        early = {target: layers(self._exports, str(run_id), number) for number, target in enumerate(disks)}
        guest = _Guest(under_way, manifest, disks, volumes, early, [self._spec(manifest, target) for target in disks])
        self._ledger.record(run_id, "export", str(run_id))
        with self._kept_going(guest):
            if guest.state in (None, "preparing"):
                self._begin(guest, self._over(under_way, domain, guest.early_places(), point, request))

            def onto_its_volumes() -> None:
                self._copy(guest, copying)
                fitted = self._domain(under_way, point, manifest, request)
                self._move(guest, self._over(under_way, fitted, volumes.places(), point, request))

            until_it_goes_well(under_way, onto_its_volumes)
        if not is_started(under_way.run.instant):
            self._start(under_way, run_id, point)
        self._exports.end(str(run_id))

    @property
    def _exports(self) -> Exports:
        if self._restore_host.exports is None:
            raise Internal("this service serves no disks to its guests")
        return self._restore_host.exports

    def _begin(self, guest: "_Guest", defined: Domain) -> None:
        """Starts the guest. If it does not start, it is copied first. A guest's writes are never overwritten with new
        overlays."""
        under_way, run_id, hypervisor = guest.under_way, guest.under_way.run.id, self._restore_host.hypervisor
        is_new = not is_started(under_way.run.instant)
        if is_new:
            guest.serve(self._exports)
            put_tpm(self._restore_host, self._ledger, run_id, guest.manifest)
            for volume in guest.layered():
                hypervisor.lay(volume, guest.disks[volume.disk_key].size_bytes)
            self._ledger.record(run_id, "domain", str(run_id))
            define(self._restore_host, defined)
            # Noted before the start: from now on its writes must be kept.
            under_way.move(
                Status.PREPARING,
                instant=Instant(state="preparing", started_at=now()),
                domain=RestoredDomain(name=defined.name, uuid=run_id),
            )
        try:
            hypervisor.start(run_id)
        except SynvirtError as error:
            if not is_new or self._runs(run_id):
                raise
            under_way.note(instant=Instant(state="preparing"))
            under_way.warn(START_FAILED, f"it does not start at once, and is copied first: {error.detail}")
        else:
            guest.be("running")

    def _copy(self, guest: "_Guest", copying: Copying) -> None:
        if guest.state in ("moving", "done"):
            return
        guest.under_way.move(Status.TRANSFERRING)
        if self._restore_host.hypervisor.has_moved(guest.under_way.run.id, guest.layered()):
            guest.be("moving")  # the store is older than that, as if it was put back from a copy: the volumes are the guest's
            return
        guest.serve(self._exports)
        activity = self._exports.folder(str(guest.under_way.run.id)) / ACTIVITY
        yielding = replace(copying, done=Sum(guest.under_way, Progress()), yields_to=str(activity))
        for (target, disk), reader in zip(guest.disks.items(), guest.readers, strict=True):
            guest.volumes.fill(yielding, target, disk.size_bytes, reader)
        guest.be("moving")

    def _move(self, guest: "_Guest", defined: Domain) -> None:
        """Moves the guest; its disks are its volumes on return."""
        if guest.state == "done":
            return
        under_way = guest.under_way
        under_way.move(Status.COMMITTING)
        move = partial(self._restore_host.hypervisor.onto_volumes, under_way.run.id, guest.layered(), under_way.stop)
        move()
        define(self._restore_host, defined, guest.layered())
        move()  # one that was off may have been started from its layers before that
        under_way.move(Status.COMMITTING)  # the last moment at which a cancel is possible
        guest.be("done")

    @contextlib.contextmanager
    def _kept_going(self, guest: "_Guest") -> Iterator[None]:
        """Within the block, once the guest has started: serves it, and resumes it when it is paused and can go on."""

        def look() -> None:
            with contextlib.suppress(SynvirtError):  # of the store: tried again the next time
                guest.look(self._exports, self._restore_host)

        with repeated(look, name="instant-restore", every_s=LOOK_EVERY_S):
            yield


@dataclass(frozen=True)
class _Guest:
    """The restored parts of the guest, and their places. Its disks are numbered in this order."""

    under_way: UnderWay
    manifest: Manifest
    disks: dict[str, DiskMap]
    volumes: Volumes
    early: dict[str, Early]
    readers: list[PointSpec]
    serving: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> InstantState | None:
        return _state(self.under_way)

    def be(self, state: InstantState, *, only_if: tuple[InstantState, ...] = ()) -> None:
        """Moves to the state; does nothing, if it is so already, or its state is not in `only_if`."""
        with self.under_way.lock:
            instant = self.under_way.run.instant
            if instant is None:
                raise Internal("the guest of an instant start was never defined")
            if instant.state != state and (not only_if or instant.state in only_if):
                self.under_way.note(instant=instant.model_copy(update={"state": state}))

    def layered(self) -> list[Volume]:
        """Each volume with its layers."""
        places = self.volumes.places()
        return [Volume(target, place.path, place.device_type, self.early[target]) for target, place in places.items()]

    def early_places(self) -> dict[str, Place]:
        return {target: replace(place, early=self.early[target]) for target, place in self.volumes.places().items()}

    def serve(self, exports: Exports) -> None:
        with self.serving:
            exports.serve(str(self.under_way.run.id), self.readers)

    def look(self, exports: Exports, restore_host: RestoreHost) -> None:
        """Checks once that it is served and goes on."""
        run = self.under_way.run
        if not is_started(run.instant):
            return
        try:
            with self.serving:
                paused = keep_going(exports, restore_host.hypervisor, str(run.id), self.readers, run.id)
        except SynvirtError as error:
            _log.warning("the guest's disks are not served now", run=str(run.id), cause=error.detail)
            paused = Paused()
        self._show_room(paused)
        self.be("waiting" if paused else "running", only_if=("running", "waiting"))

    def _show_room(self, paused: Paused | None) -> None:
        with self.under_way.lock:
            shown = self.under_way.run.error
            news = room_news(None if shown is None else shown.message, paused)
            if news:
                _log.warning("the guest has no room for what it writes", run=str(self.under_way.run.id), cause=news)
                trouble = Trouble(code=BackupDiskWriteFailed.code, message=news, hint=NO_SPACE_HINT)
                self.under_way.note(error=trouble)
            elif news is not None:
                self.under_way.note(error=None)


def _state(under_way: UnderWay) -> InstantState | None:
    instant = under_way.run.instant
    return None if instant is None else instant.state
