"""A restore in place: the point's own guest gets its disks and its domain back, on the volumes that it has now.

    file          a new file next to it, which takes its name when it is complete
    zfs volume    a snapshot first, to which it is rolled back where the restore fails
    other device  written where it is: the run warns that there is no way back

    staged ─▶ devices written ─▶ the ledger turns: what is undone by going back is from here on done by going forward
           ─▶ domain defined, files swapped

It is refused while the guest runs, or has a snapshot of libvirt's, which the old disk holds. If a disk has been enlarged since,
a file gets the point's size again, and the rest of a device becomes zeros. With single disks the domain stays as it is.
"""

import base64
import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog

from synvirt.backups import domain_parts
from synvirt.backups.model import RestoredDomain, RestorePoint, RestoreRequest, Status, Trouble
from synvirt.backups.restores import domain as restoring_domain
from synvirt.backups.restores import new_domain, present
from synvirt.backups.restores.domain import Place, Rewritten
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.restores.new_files import file_writer
from synvirt.backups.runs import Kept
from synvirt.backups.sources.bitmap import delete_checkpoint
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import Copying
from synvirt.destinations.zfs_command import Zfs, ZfsRefused
from synvirt.disks.specs import BlockWriterSpec
from synvirt.durable import sync_file, sync_folder
from synvirt.errors import (
    BackupConflict,
    BackupNotFound,
    Cancelled,
    DiskWriteFailed,
    HostLacks,
    HypervisorAway,
    Internal,
    SynvirtError,
)
from synvirt.jobs.ledger import SWEEP_AWAY_S, Ledger, Order, Undo
from synvirt.jobs.orders import DiskOrder
from synvirt.kvm.connection import translated
from synvirt.repository.manifest import Manifest
from synvirt.repository.specs import PointSpec, RepositorySpec
from synvirt.store.ledger import LedgerEntry

NO_WAY_BACK = "E_BAK_NO_WAY_BACK"
# What a second name for a file gives: it has one already, or there is no file; or a file system, like FAT, has none.
_NO_SECOND_NAME = frozenset({errno.EEXIST, errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP})

# Ledger entries of a run that goes forward: the last of its entries; that all are done; that the guest was started before that,
# so that they will never be done. And a snapshot that stays then.
CHECKPOINTS, RESTORED, OVERTAKEN, KEPT = "checkpoints", "restored", "overtaken", "kept"
FORWARD = frozenset((CHECKPOINTS, RESTORED, OVERTAKEN))
# As long as anything is left, an entry says that the run goes forward: else the next start would begin it again, with disks
# that were copied and are no longer staged.
_PARTS = frozenset(("staged", "dropped", "swap", "defined"))
ORDER = Order(
    late={CHECKPOINTS: 1, OVERTAKEN: 2},
    only_after={"dropped": frozenset(("swap",)), CHECKPOINTS: _PARTS, OVERTAKEN: _PARTS | {CHECKPOINTS}},
)

_log = structlog.get_logger("synvirt.backups")


@dataclass(frozen=True, slots=True)
class Swap:
    """`staged` becomes `path`; the old file at `path` stays as `before` for a moment."""

    staged: str
    path: str

    @property
    def before(self) -> str:
        return f"{self.staged}.before"


class InPlace:
    """`resumed`: the run began under an earlier service."""

    def __init__(self, restore_host: RestoreHost, ledger: Ledger, repository: RepositorySpec, *, resumed: bool = False) -> None:
        self._restore_host, self._ledger, self._repository, self._resumed = restore_host, ledger, repository, resumed

    def check(self, point: RestorePoint, request: RestoreRequest) -> None:
        """BackupConflict, if the guest runs, has snapshots, or its disks do not fit the point's."""
        domain = self._domain(point)
        present.refuse_running(domain)
        with translated(Internal, f"the hypervisor does not say how {point.vm_name} is"):
            if domain.snapshotNum():
                raise BackupConflict(
                    f"{point.vm_name} has snapshots, which its present disks hold",
                    hint="delete them with virsh snapshot-delete, or restore to a new domain",
                )
        sizes = {disk.target: disk.size_bytes for disk in point.disks if not request.disks or disk.target in request.disks}
        present.places(present.definition(domain), sizes)

    def restore(self, copying: Copying, manifest: Manifest, point: RestorePoint, request: RestoreRequest) -> None:
        """Restores the disks and the definition while nothing else reads or restores the guest."""
        with self._restore_host.alone(point.vm_id, copying.under_way.stop):
            self._restore(copying, manifest, point, request)

    def _restore(self, copying: Copying, manifest: Manifest, point: RestorePoint, request: RestoreRequest) -> None:
        under_way = copying.under_way
        there = _all_there(self._restore_host, self._ledger, under_way.run.id) if self._resumed else None
        if there is not None:
            under_way.note(domain=there)
            return
        self.check(point, request)
        domain = self._domain(point)
        disks = new_domain.chosen_disks(manifest, request.disks)
        places = present.places(present.definition(domain), {target: disk.size_bytes for target, disk in disks.items()})
        definition = None
        if not request.disks:
            definition = self._tried(under_way, domain, manifest, places)
        under_way.move(Status.TRANSFERRING)
        look_up = partial(self._domain, point)
        restored = _Restored(self._restore_host, self._ledger, copying, look_up, resumed=self._resumed)
        specs = {target: new_domain.point_spec(self._repository, manifest, target) for target in disks}
        restored.disks({target: (places[target], disk.size_bytes, specs[target]) for target, disk in disks.items()})
        if definition is not None:
            restored.parts(present.definition(look_up()), manifest)
        under_way.move(Status.COMMITTING)
        with translated(Internal, f"the hypervisor does not say what {point.vm_name} is called"):
            its_own = RestoredDomain(name=look_up().name(), uuid=UUID(domain.UUIDString()))
        self._check_same(point, request, places)
        if definition is not None:
            present.check_addresses(self._restore_host, look_up(), definition)
        restored.commit(definition)
        under_way.note(domain=its_own)  # a cancel that came meanwhile came too late: the guest has all of it

    def _check_same(self, point: RestorePoint, request: RestoreRequest, places: dict[str, Place]) -> None:
        """In the hours of a copy, its operator may have taken a snapshot, which holds the present disks or lies over them, or
        moved them. As `check`."""
        self.check(point, request)
        there = dict(present.disks_of(present.definition(self._domain(point))))
        for target, place in places.items():
            if there.get(target) != place:
                raise BackupConflict(
                    f"disk {target} of {point.vm_name} was changed during the restore: it is not {place.path} any more",
                    hint="restore again, and leave the guest as it is until that is done",
                )

    def _domain(self, point: RestorePoint) -> Any:
        found = self._restore_host.domain("lookupByUUIDString", point.vm_id)
        if found is None:
            raise BackupNotFound(
                f"this host has no domain {point.vm_name} ({point.vm_id}) any more", hint="restore to a new domain"
            )
        return found

    def _tried(self, under_way: UnderWay, domain: Any, manifest: Manifest, places: dict[str, Place]) -> str:
        """The point's definition with the disks' present places. libvirt checks it before anything is written. HostLacks."""
        now, run_id = present.definition(domain), under_way.run.id
        then = restoring_domain.foreign(manifest.sealed.domain_xml, now, self._restore_host.read_xml)
        with translated(Internal, "the hypervisor does not say how the guest is"):
            before, name = present.xml_of(domain), domain.name()
        restoring_domain.renamed(then, name)
        restoring_domain.new_generation(then)
        restoring_domain.with_disks(then, places, wanted=frozenset(places))
        was_named = restoring_domain.has_uefi(then)
        if restoring_domain.has_uefi(now):
            restoring_domain.name_firmware(then)  # its variables stay in the file that the guest has now
        if restoring_domain.has_uefi(then) and not (was_named and restoring_domain.has_uefi(now)):
            new_domain.put_firmware(self._restore_host, run_id, then)
        restoring_domain.same_variables(then, now)
        differences = [
            *then.differences,
            *(
                f"its disk {target} is no longer attached: {place.path}"
                for target, place in present.disks_of(now)
                if target not in places
            ),
        ]
        present.check_addresses(self._restore_host, domain, then.xml)
        self._ledger.record(run_id, "defined", before)
        with translated(HostLacks, "libvirt does not accept the domain as it was", lambda _: "restore to a new domain"):
            present.define(self._restore_host, then.xml)
        with translated(Internal, "libvirt does not accept the domain as it is"):
            present.define(self._restore_host, before)
        # What its operator changes from here on stays, if the restore fails.
        self._ledger.replace(run_id, [entry for entry in self._ledger.of(run_id) if entry.kind != "defined"])
        for one in differences:
            under_way.warn(restoring_domain.DIFFERS, one, manifest.sealed.vm_id)
        return then.xml


class _Restored:
    """What one run has written next to the guest's files, and how that becomes the guest's. `look_up`: the guest's domain, by a
    connection that works: in the hours of a copy, libvirtd may be restarted."""

    def __init__(
        self, restore_host: RestoreHost, ledger: Ledger, copying: Copying, look_up: Callable[[], Any], *, resumed: bool
    ) -> None:
        self._restore_host, self._ledger, self._copying, self._look_up = restore_host, ledger, copying, look_up
        self._vm_id = str(look_up().UUIDString())
        self._under_way, self._run_id, self._resumed = copying.under_way, copying.under_way.run.id, resumed
        self._swaps: list[Swap] = []
        self._snapshots: list[str] = []

    def disks(self, wanted: dict[str, tuple[Place, int, PointSpec]]) -> None:
        """Each with its size. Files first: they are separate from the guest's until the end."""
        if not self._resumed:  # else it has written a part of them
            measured = self._copying.working.data_bytes([spec for *_, spec in wanted.values()], self._under_way.stop)
            sizes = zip(wanted.items(), measured, strict=True)
            present.check_room([(target, place, data_bytes) for (target, (place, *_)), data_bytes in sizes])
        for kind, write in (("file", self._file), ("block", self._device)):
            for target, (place, size_bytes, spec) in wanted.items():
                if place.device_type == kind:
                    present.refuse_running(self._look_up())
                    write(target, place, size_bytes, spec)

    def _file(self, target: str, place: Place, size_bytes: int, spec: PointSpec) -> None:
        with self._staged(Path(place.path)) as staged:
            if self._resumed and not staged.exists():
                self._copying.forget(target)  # what was copied is gone
            writer = file_writer(staged, size_bytes, place.format)
            self._copying.copy(DiskOrder(key=target, reader=spec, writer=writer))

    def parts(self, now: Rewritten, manifest: Manifest) -> None:
        """UEFI variables, and the TPM's state."""
        variables = domain_parts.variables_path(now.root, self._restore_host.tpm_folder())
        if manifest.sealed.nvram is not None and variables is not None:
            with self._staged(variables) as staged:
                staged.write_bytes(base64.b64decode(manifest.sealed.nvram))
        if manifest.sealed.tpm:
            folder = self._restore_host.tpm_folder() / self._vm_id
            for path, content in new_domain.tpm_files(self._restore_host, folder, manifest):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with self._staged(path) as staged:
                    staged.write_bytes(content)

    @contextlib.contextmanager
    def _staged(self, path: Path) -> Iterator[Path]:
        """A file next to `path`; at the end of the block it is durable and has the owner of `path`."""
        path = path.resolve()  # a symbolic link stays one
        swap = Swap(str(path.parent / f".synvirt-{self._run_id}-{len(self._swaps)}"), str(path))
        self._ledger.record(self._run_id, "staged", swap.staged)
        try:
            yield Path(swap.staged)
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                os.chown(swap.staged, status.st_uid, status.st_gid)
                Path(swap.staged).chmod(stat.S_IMODE(status.st_mode))
            sync_file(Path(swap.staged))
            sync_folder(path.parent)  # `_swap` takes a file that is not there for one that has its place
        except OSError as error:
            raise DiskWriteFailed(f"{path.name} cannot be restored: {error.strerror}") from error
        self._swaps.append(swap)

    def _device(self, target: str, place: Place, size_bytes: int, spec: PointSpec) -> None:
        """Written from its first byte, even if the service ended meanwhile: a guest that was started since may have written."""
        volume = present.zfs_volume(place.path)
        snapshot = f"{volume}@synvirt-restore-{self._run_id}"
        if volume is None:
            text = f"disk {target} is written where it is: if the restore fails, its present content is lost ({place.path})"
            self._under_way.warn(NO_WAY_BACK, text, self._vm_id)
        else:
            self._ledger.record(self._run_id, "snapshot", json.dumps([snapshot, self._vm_id]))
            try:
                Zfs()("snapshot", snapshot)
            except ZfsRefused as refused:
                if not (self._resumed and refused.reason == "exists"):
                    raise
            self._snapshots.append(snapshot)
        writer = BlockWriterSpec(path=place.path, size_bytes=present.size_of(place))
        order = DiskOrder(key=target, reader=spec, writer=writer, fresh=False, zero_rest=True)
        if self._resumed:
            self._copying.forget(target)
        try:
            self._copying.copy(order, self._stop)
        except Cancelled:
            domain = self._look_up()
            if present.runs(domain) or not self._under_way.stop():
                raise present.running(domain) from None
            raise

    def _stop(self) -> bool:
        if self._under_way.stop():
            return True
        with contextlib.suppress(SynvirtError):  # libvirtd is away for a moment, and starts no guest meanwhile
            return present.runs(self._look_up())
        return False

    def commit(self, definition: str | None) -> None:
        """From here on the restore goes forward, if needed at the next start of the service."""
        present.refuse_running(self._look_up())
        forward = [LedgerEntry("staged", swap.before) for swap in self._swaps]
        forward += [LedgerEntry("dropped", snapshot) for snapshot in self._snapshots]
        for swap in self._swaps:
            forward.append(LedgerEntry("swap", json.dumps([swap.staged, swap.path, _mark(swap.path), self._vm_id])))
        if definition is not None:
            forward.append(LedgerEntry("defined", definition))
        forward.append(LedgerEntry(CHECKPOINTS, self._vm_id))
        self._ledger.replace(self._run_id, tuple(forward))
        for swap in self._swaps:
            _swap(swap)
        if self._was_started():  # at this moment: it has the old files open, and they get their names back
            for swap in self._swaps:
                with contextlib.suppress(FileNotFoundError):
                    Path(swap.before).replace(swap.path)
            for snapshot in self._snapshots:
                text = f"a disk was restored when its guest was started: {snapshot} has what it held before"
                self._under_way.warn(NO_WAY_BACK, text, self._vm_id)
            self._ledger.replace(self._run_id, tuple(forward[: len(self._swaps)]))
            raise present.running(self._look_up())  # even if it is off again by now: it has its old files
        if not self._ledger.sweep(self._run_id, then=(LedgerEntry(RESTORED, self._vm_id),), away_s=SWEEP_AWAY_S):
            raise Internal(
                "the disks are restored, and the rest is not finished: see the service's log",
                hint="it is finished at the service's next start; leave the guest off until then",
            )

    def _was_started(self) -> bool:
        """Whether the guest was started in the moment in which its files were replaced. A libvirtd that went away starts no
        guest; one that is started later has the new files."""
        try:
            return present.runs(self._look_up())
        except HypervisorAway:
            return False


# ── ledger, and going forward ────────────────────────────────────────────────────────────────────────────────────────


def _swap(swap: Swap) -> None:
    """Idempotent: once it is done, nothing is staged."""
    try:
        if Path(swap.staged).exists():
            try:
                os.link(swap.path, swap.before)
            except OSError as error:
                if error.errno not in _NO_SECOND_NAME:
                    raise
            Path(swap.staged).replace(swap.path)
            sync_folder(Path(swap.path).parent)
    except OSError as error:
        raise DiskWriteFailed(f"{Path(swap.path).name} cannot be replaced: {error.strerror}") from error


def _mark(path: str) -> list[int]:
    """A mark of the file that changes when the file is written or replaced. Empty, if there is no file."""
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DiskWriteFailed(f"{Path(path).name} cannot be reached: {error.strerror}") from error
    return [status.st_ino, status.st_mtime_ns]


def gone_forward(restore_host: RestoreHost, ledger: Ledger, run_id: UUID) -> RestoredDomain | None:
    """The guest, which now has all its restored parts. None: the run has not come so far, cannot go on now, or never can, as
    the guest was started in between and has written to its old disks."""
    entries = ledger.of(run_id)
    found = {entry.kind: entry.name for entry in entries}
    if CHECKPOINTS in found and OVERTAKEN not in found:
        vm_id = found[CHECKPOINTS]
        if any(entry.kind == "swap" and _is_overtaken(restore_host, entry.name) for entry in entries):
            # A snapshot is the only place of what its disk held before: it stays, for a person to decide.
            left = (LedgerEntry(KEPT, json.dumps([one.name, vm_id])) if one.kind == "dropped" else one for one in entries)
            ledger.replace(run_id, (LedgerEntry(OVERTAKEN, vm_id), *left))
            return None
        if not ledger.sweep(run_id, then=(LedgerEntry(RESTORED, vm_id),)):
            return None
        found = {RESTORED: vm_id}
    domain = restore_host.domain("lookupByUUIDString", found[RESTORED]) if RESTORED in found else None
    if domain is None:
        return None
    with translated(Internal, "the hypervisor does not say what the guest is called"):
        return RestoredDomain(name=domain.name(), uuid=UUID(domain.UUIDString()))


def _all_there(restore_host: RestoreHost, ledger: Ledger, run_id: UUID) -> RestoredDomain | None:
    """As `gone_forward`, for a run that the store had left meanwhile. Internal, if it cannot go on now."""
    found = gone_forward(restore_host, ledger, run_id)
    if found is None and not FORWARD.isdisjoint(entry.kind for entry in ledger.of(run_id)):
        raise Internal(
            "the restore was interrupted while it replaced the disks",
            hint="it is finished at the service's next start, if its guest is off until then",
        )
    return found


def _is_overtaken(restore_host: RestoreHost, swap: str) -> bool:
    """Whether the guest was started before the run went on, and has written to its present disk."""
    new, path, mark, vm_id = json.loads(swap)
    domain = restore_host.domain("lookupByUUIDString", vm_id)
    return Path(new).exists() and (mark != _mark(path) or (domain is not None and present.runs(domain)))


def _zfs(*arguments: str) -> None:
    """What is gone already is no error."""
    try:
        Zfs()(*arguments)
    except ZfsRefused as refused:
        if refused.reason != "missing":
            raise


def _roll_back(restore_host: RestoreHost, run_id: UUID, name: str, kept: Kept) -> None:
    """Goes back to a snapshot. It stays, for a person to decide, where that would take what the guest or others did
    meanwhile."""
    snapshot, vm_id = json.loads(name) if name.startswith("[") else (name, "")  # an earlier version named no guest
    domain, why = restore_host.domain("lookupByUUIDString", vm_id), ""
    if domain is not None and present.runs(domain):
        why = "its guest was started"
    else:
        try:
            _zfs("rollback", snapshot)
        except ZfsRefused as refused:
            if refused.reason != "newer":
                raise
            why = "its volume has newer snapshots"
    if why:
        _log.error("a volume is not rolled back", why=why, kept=snapshot, run=str(run_id), guest=vm_id)
        text = f"a disk is restored in part, and is not rolled back, as {why}: {snapshot} has what it held before"
        kept.setdefault(run_id, []).append(Trouble(code=NO_WAY_BACK, message=text, vm_id=vm_id or None))
    else:
        _zfs("destroy", snapshot)


def undo(restore_host: RestoreHost, kept: Kept) -> dict[str, Undo]:
    """How ledger entries of in-place restores are undone, by the kind of entry. `kept` gets what is left for a person."""

    def swap(run_id: UUID, name: str) -> None:
        """What the guest wrote is kept, and the restore has failed."""
        new, path, _, vm_id = json.loads(name)
        if _is_overtaken(restore_host, name):
            _log.error("a guest was started in the middle of its restore", run=str(run_id), guest=vm_id, kept=Path(path).name)
            staged(run_id, new)
            return
        _swap(Swap(new, path))

    def staged(run_id: UUID, name: str) -> None:
        assert f".synvirt-{run_id}-" in Path(name).name
        try:
            Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise DiskWriteFailed(f"{Path(name).name} cannot be removed: {error.strerror}") from error

    def defined(run_id: UUID, xml: str) -> None:
        with translated(Internal, "libvirt does not accept the domain's definition"):
            present.define(restore_host, xml)

    def checkpoints(run_id: UUID, vm_id: str) -> None:
        """Nothing counts from them any more. Their bitmaps are in the disks that were not restored, too."""
        domain = restore_host.domain("lookupByUUIDString", vm_id)
        with translated(Internal, "the guest's checkpoints cannot be forgotten"):
            for one in [] if domain is None else domain.listAllCheckpoints(0):
                delete_checkpoint(domain, str(one.getName()))

    def keep(run_id: UUID, name: str) -> None:
        snapshot, vm_id = json.loads(name)
        _log.error("a guest was started in the middle of its restore", run=str(run_id), guest=vm_id, kept=snapshot)
        text = f"a guest was started in the middle of its restore: {snapshot} has what its disk held before"
        kept.setdefault(run_id, []).append(Trouble(code=NO_WAY_BACK, message=text, vm_id=vm_id))

    undos: dict[str, Undo] = {
        "staged": staged,
        "swap": swap,
        "snapshot": lambda run_id, name: _roll_back(restore_host, run_id, name, kept),
        "dropped": lambda run_id, name: _zfs("destroy", name),
        "defined": defined,
        KEPT: keep,
        CHECKPOINTS: checkpoints,
        RESTORED: lambda run_id, name: None,
        OVERTAKEN: lambda run_id, name: None,
    }
    return undos
