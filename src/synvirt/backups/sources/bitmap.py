"""A running guest, by libvirt's pull-mode backup job: QEMU serves its disks by NBD as they were when the job began.

What the guest overwrites meanwhile is first copied to scratch files. A checkpoint, which is a bitmap inside each qcow2 image,
begins with the job and counts changes from that moment; the next run reads it. Other formats hold no bitmap, and are read
whole. QEMU allows one backup job for a domain.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from synvirt.backups import domain_parts
from synvirt.backups.sources.definition import definition
from synvirt.backups.sources.guest import Ask, Guest, Keeping, SourceDisk, new_name
from synvirt.backups.sources.made import Made, MadeRows
from synvirt.backups.sources.quiescing import held
from synvirt.cage.launch import image_tool
from synvirt.disks.specs import NbdSpec
from synvirt.errors import Internal, SnapshotFailed, SourceReadFailed, SourceSnapshotFailed, SourceUnsupported
from synvirt.kvm import qemu_user
from synvirt.kvm.connection import Connection, find_domain, translated
from synvirt.kvm.qemu_user import embedded_root
from synvirt.live.libvirt import backup as jobs
from synvirt.live.libvirt import scratch
from synvirt.live.libvirt.manifest import backed_up_disks, data_disks, disk_format, parse
from synvirt.programs import ProgramFailed, run
from synvirt.repeating import repeated
from synvirt.repository.manifest import Manifest, Mark

LOOK_EVERY_S = 1.0
QEMU_IMG_TIMEOUT_S = 60
# Of its message about an image that another program has open (QEMU's block/file-posix.c, raw_check_lock_bytes).
LOCKED = "Failed to get"


class ByJob:
    """`folder`: for sockets and scratch files; QEMU's user must be able to make files there, and its path must be short."""

    name = "bitmap"

    def __init__(
        self, connection: Connection, ledger: MadeRows, *, folder: Callable[[], Path], tpm_folder: Callable[[], Path]
    ) -> None:
        self._connection, self._ledger, self._folder, self._tpm_folder = connection, ledger, folder, tpm_folder
        self._embedded = embedded_root(connection.uri) is not None

    def fits(self, domain: Any) -> str | None:
        with translated(Internal, "the hypervisor does not say how the guest is"):
            return None if domain.isActive() else "it is shut off"

    @contextlib.contextmanager
    def open(self, domain: Any, ask: Ask) -> Iterator[Guest]:
        """QuiesceFailed, GuestStillFrozen, SourceSnapshotFailed."""
        with translated(SourceSnapshotFailed, f"the disks of {ask.vm_id} cannot be frozen at one moment"):
            root = _described(domain)
            vm_id, name = str(domain.UUIDString()), str(domain.name())
            taken = [str(one.getName()) for one in domain.listAllCheckpoints(0)]
        _refuse_passed_through(root)
        least = scratch.least_free(_capacity_bytes(domain, root))
        folder = self._ready(least)
        made = Made(
            id=uuid4(), job_id=ask.job_id, vm_id=vm_id, way="bitmap", name=new_name(ask.job_id, taken), folder=str(folder)
        )
        base = ask.base(vm_id)
        self._refuse_another(domain)
        with contextlib.ExitStack() as stack:
            keeping = stack.enter_context(Keeping(self._ledger, self, made))
            with translated(SourceSnapshotFailed, f"the disks of {name} cannot be frozen at one moment"):
                _drop_stale(domain, made, base)
                with held(self._connection.uri, domain, ask) as moment:
                    _begin(domain, made, root)
                begun = jobs.running(domain)
                tracked = jobs.has_checkpoint(domain, made.name)
                xml = definition(domain, root)
            if begun is None or begun.path is None:
                raise SourceSnapshotFailed(f"the backup job of {name} ended as soon as it had begun")
            watch = stack.enter_context(_room(folder, least, lambda: self._end(made)))

            def check_unchanged() -> None:
                watch.raise_if_full()
                # Looked up again: a daemon that was restarted meanwhile has another connection.
                there = self._domain(made)
                with translated(SourceReadFailed, f"the hypervisor does not say how {name} is"):
                    now = jobs.running(there) if there is not None and there.isActive() else None
                if now is None or now.snapshot != made.name:
                    raise SourceReadFailed(
                        f"the backup job of {name} ended while its disks were read",
                        hint="the guest was shut down, or somebody ended the job: start the run again",
                    )

            try:
                yield Guest(
                    vm_id=vm_id,
                    name=name,
                    domain_xml=xml,
                    nvram=domain_parts.nvram(root, self._tpm_folder()),
                    tpm=domain_parts.tpm(root, self._tpm_folder()),
                    disks=tuple(_disks(root, begun, made.name if tracked else None, base)),
                    check_unchanged=check_unchanged,
                    way="bitmap" if tracked else "scan",
                    consistency=moment.consistency,
                    quiesced=moment.quiesced,
                    freeze_ms=moment.freeze_ms,
                    moment=made.name,
                    base=base,
                    keep_marks=keeping.keep,
                    marks_kept=keeping.commit,
                )
            except SourceReadFailed:
                check_unchanged()  # a guest that was shut down meanwhile is the reason, and no server or firewall
                raise

    def _ready(self, least_bytes: int) -> Path:
        """Makes the folder, in which QEMU's user may write, and checks its free space."""
        folder = self._folder()
        try:
            if self._embedded:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if (user := qemu_user.of(self._connection.uri)) is not None:
                    qemu_user.open_own(folder.parent)
                    user.give(folder)
            else:
                scratch.make(self._connection.use(), str(folder))  # QEMU runs as another user there
            free = _free_bytes(folder)
        except OSError as error:
            raise SourceSnapshotFailed(f"the scratch folder {folder} cannot be made: {error.strerror}") from error
        if free < least_bytes:
            raise SourceSnapshotFailed(
                f"the scratch folder {folder} has {free} bytes free, and {least_bytes} are needed",
                hint="it holds what the guest overwrites while its disks are read: make room there",
            )
        return folder

    def _refuse_another(self, domain: Any) -> None:
        with translated(SourceSnapshotFailed, "the hypervisor does not say whether a backup job runs"):
            running = jobs.running(domain)
        if running is not None:
            raise SourceSnapshotFailed(
                f"another backup job of {domain.name()} is running ({running.snapshot or 'not one of ours'}): QEMU has one",
                hint="wait until it is over; virsh domjobinfo NAME shows it",
            )

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self, made: Made) -> None:
        """Ends the backup job, and removes its scratch files. The checkpoint stays."""
        self._end(made)
        if not self._embedded:
            scratch.clear(self._connection.use(), made.folder, made.name)
        for path in Path(made.folder).glob(f"{made.name}*"):
            with contextlib.suppress(PermissionError):  # it belongs to QEMU's user, and was handled above
                path.unlink(missing_ok=True)

    def sweep(self, made: Made) -> None:
        """Ends the backup job, and deletes the checkpoint too."""
        self.end(made)
        domain = self._domain(made)
        if domain is None:
            return
        with translated(Internal, f"the checkpoint {made.name} cannot be deleted"):
            if jobs.has_checkpoint(domain, made.name):
                delete_checkpoint(domain, made.name)

    def _domain(self, made: Made) -> Any | None:
        """None, if it is gone: nothing of ours is left then."""
        return find_domain(self._connection, "lookupByUUIDString", made.vm_id)

    def _end(self, made: Made) -> None:
        domain = self._domain(made)
        with translated(Internal, f"the backup job {made.name} does not end"):
            if domain is not None and domain.isActive():
                jobs.end(domain, lambda name: name == made.name)


def delete_checkpoint(domain: Any, name: str) -> None:
    """Deletes a checkpoint, and its bitmaps in those of the domain's images that have one. libvirtError; ProgramFailed, where
    a bitmap may still be there, as the guest was just being started: the checkpoint stays, too, and is deleted later."""
    if domain.isActive():
        jobs.delete(domain, name)
        return
    # libvirt deletes bitmaps only of running guests; the images of this one are not open.
    for _, disk in data_disks(_described(domain)):
        source = disk.find("source")
        path = None if source is None else source.get("file") or source.get("dev")
        if path is not None and disk_format(disk) == "qcow2":
            remove = ["qemu-img", "bitmap", "--remove", "-f", "qcow2", path, name]
            try:
                run(image_tool(remove, writes=[path]), timeout_s=QEMU_IMG_TIMEOUT_S, name="qemu-img")
            except ProgramFailed as failed:
                if failed.cut_off or LOCKED in failed.stderr:
                    raise
                # Else it has none of that name.
    jobs.forget(domain, name)


def _described(domain: Any) -> Any:
    return parse(domain.XMLDesc(0))


def _capacity_bytes(domain: Any, root: Any) -> int:
    with translated(SourceSnapshotFailed, "the hypervisor does not say how large the disks are"):
        return sum(int(domain.blockInfo(key)[0]) for key, _ in backed_up_disks(root))


def _refuse_passed_through(root: Any) -> None:
    """A point without one of the guest's disks would be incomplete."""
    passed = dict(data_disks(root)).keys() - dict(backed_up_disks(root)).keys()
    if passed:
        raise SourceUnsupported(f"disk {sorted(passed)[0]} is a SCSI device of the host, passed through: it cannot be frozen")


def _drop_stale(domain: Any, made: Made, base: Manifest | None) -> None:
    """Deletes the job's checkpoints that no restore point counts from: the newest must be the base's."""
    wanted = _mark_names(base)
    for one in domain.listAllCheckpoints(0):
        name = str(one.getName())
        if name.rpartition("-")[0] == made.name.rpartition("-")[0] and name not in wanted:
            jobs.delete(domain, name)


def _mark_names(base: Manifest | None) -> set[str]:
    disks = () if base is None else base.sealed.disks
    return {disk.mark.name for disk in disks if disk.mark is not None and disk.mark.kind == "checkpoint"}


def _begin(domain: Any, made: Made, root: Any) -> None:
    """Runs while the guest is frozen, so it does as little as possible."""
    track = [key for key, disk in backed_up_disks(root) if _holds_bitmaps(disk)] if domain.isPersistent() else []
    try:
        jobs.begin(domain, made.name, jobs.Server(made.folder), track=track)
    except SnapshotFailed as error:
        raise SourceSnapshotFailed(error.detail, hint=error.hint) from error


def _holds_bitmaps(disk: Any) -> bool:
    return disk_format(disk) == "qcow2" and disk.find("transient") is None and disk.find("readonly") is None


def _disks(root: Any, begun: jobs.Running, checkpoint: str | None, base: Manifest | None) -> Iterator[SourceDisk]:
    before = {} if base is None else {disk.target: disk for disk in base.sealed.disks}
    assert begun.path is not None
    for key, disk in backed_up_disks(root):
        export = begun.exports[key]
        uri = f"nbd+unix:///{quote(export.name, safe='')}?socket={quote(begun.path, safe='/')}"
        old, changes, whole_because = before.get(key), None, ""
        if old is not None and old.mark is not None and old.mark.kind == "checkpoint":
            # Each image has a bitmap of that name: another disk's, if it has this target now, counts from other bytes.
            if old.path not in _paths(disk):
                whole_because = f"its image is another one than before ({old.path})"
            elif old.mark.name != begun.since or export.bitmap is None:
                whole_because = "its checkpoint, or the bitmap of its changes, was lost"
            else:
                changes = NbdSpec(uri=uri, bitmap=f"qemu:dirty-bitmap:{export.bitmap}")
        yield SourceDisk(
            target=key,
            path=_path(disk),
            spec=NbdSpec(uri=uri),
            changes=changes,
            whole_because=whole_because,
            mark=Mark(kind="checkpoint", name=checkpoint) if checkpoint is not None and _holds_bitmaps(disk) else None,
        )


def _paths(disk: Any) -> set[str]:
    """Of its image, and of the images below it: a snapshot that was made since has put a new one on top."""
    return {_path(layer) for layer in (disk, *disk.iterfind(".//backingStore")) if layer.find("source") is not None}


def _path(disk: Any) -> str:
    source = disk.find("source")
    return next((value for name in ("file", "dev", "name", "dir", "volume") if (value := source.get(name))), "")


# ── space for what the guest overwrites ──────────────────────────────────────────────────────────────────────────────


class _Room:
    def __init__(self, folder: Path) -> None:
        self._folder, self.full, self.ended = folder, False, False

    def raise_if_full(self) -> None:
        if self.full:
            raise SourceSnapshotFailed(
                f"the scratch folder {self._folder.name} was filling up, so the backup job was ended before the guest was hurt",
                hint="it holds what the guest overwrites while its disks are read: make room there",
            )


@contextlib.contextmanager
def _room(folder: Path, least_bytes: int, end: Callable[[], None]) -> Iterator[_Room]:
    """A thread watches the free space and ends the job in time: without space, QEMU would pause the guest, or fail its writes.
    Readers then fail, and this gives the reason."""
    room = _Room(folder)

    def look() -> None:
        room.full = room.full or _free_bytes(folder) < least_bytes
        if room.full and not room.ended:
            with contextlib.suppress(Internal):  # a busy libvirt is asked again at the next look
                end()
                room.ended = True

    try:
        with repeated(look, name="backup-scratch", every_s=LOOK_EVERY_S):
            yield room
    except SourceSnapshotFailed:
        raise
    except Exception:
        room.raise_if_full()
        raise


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
