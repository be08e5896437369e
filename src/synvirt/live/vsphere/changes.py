"""Snapshots of a vSphere VM, and the changes between two of them. Blocking code.

    enable tracking ─▶ stun (a snapshot made and removed: only then does the host track) ─▶ snapshot ─▶ change ids, areas

VMware's «Virtual Disk Development Kit Programming Guide», chapter on changed block tracking. A change id is `<uuid>/<number>`:
another uuid means that the host began its tracking again, and its answers about older ids cannot be trusted. Neither can those
about an id whose number is not lower than the snapshot's own: each snapshot results in a new id, so the disk has gone back.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import structlog

from synvirt.disks.changed import AREAS_MAX, coarser
from synvirt.errors import (
    AuthFailed,
    CbtReset,
    CbtUnsupported,
    Internal,
    SnapshotFailed,
    SourceUnreachable,
    SynvirtError,
    VmNotFound,
)
from synvirt.live import SnapshotRef
from synvirt.live.vsphere.disks import capacity_of, label, not_tracked, virtual_disks
from synvirt.live.vsphere.session import VimSession, busy_faults, library
from synvirt.machines.texts import whole_number

# A quiesced snapshot of a busy database takes minutes, a removal that consolidates a grown delta hours.
SNAPSHOT_TIMEOUT_S: Final = 1800.0
REMOVAL_TIMEOUT_S: Final = 6 * 3600.0
# Ours, made and removed in one call: one that is found was left by a crash.
STUN: Final = "synvirt-tracking"
# The first makes the host track; the second's snapshot shows whether it does, whatever the VM's own configuration says.
STUNS: Final = 2
_TRACKED: Final = "config.changeTrackingEnabled"
# Parts of the names of tasks that make, remove or consolidate a VM's snapshots: createSnapshot, removeSnapshot,
# consolidateDisks.
_SNAPSHOT_TASKS: Final = ("napshot", "onsolidate")
# A host's answer has at most 2,000 areas; a disk of 64 TiB in 64 KiB blocks, every second one changed, has 2^29.
QUESTIONS_MAX: Final = 1 << 20
ALLOCATED: Final = "*"

log = structlog.get_logger(__name__)


def enable(session: VimSession, vm_id: str, keys: Collection[str]) -> None:
    """Tracks the changes of these disks from now on. CbtUnsupported, when the platform accepts the request and does not follow
    it.

    A tracked disk has a change id. The VM's setting shows less: a disk may have been added later, and the setting takes effect
    only with the next stun (power on, a snapshot made or removed)."""
    if not _untracked(session, vm_id, keys):
        return
    remove(session, vm_id, (STUN,))
    for number in range(STUNS):
        # Set already and yet not tracked: it is set once more, for disks that were added later.
        if number or not session.properties(session.machine(vm_id), (_TRACKED,), what=f"look at {vm_id}").get(_TRACKED):
            _set_tracked(session, vm_id)
        stunned = change_ids(disks_of(session, _create(session, vm_id, STUN, quiesce=False)))
        remove(session, vm_id, (STUN,))
        # A host may not list change ids for the VM itself: then the second snapshot does.
        untracked = _untracked(session, vm_id, [key for key in keys if key not in stunned])
        if not untracked:
            return
    raise CbtUnsupported(
        f"{session.host} does not track the changes of {vm_id} though asked to: {'; '.join(untracked)}",
        hint="check that no configuration parameter of the VM switches it off, and submit again; or move it cold",
    )


def _set_tracked(session: VimSession, vm_id: str, *, tracked: bool = True) -> None:
    what = "track changes" if tracked else "end the tracking of changes"
    spec = library().vim.vm.ConfigSpec(changeTrackingEnabled=tracked)
    task = session.call(what, lambda _: session.machine(vm_id).ReconfigVM_Task(spec))
    session.wait(task, what=what, timeout_s=SNAPSHOT_TIMEOUT_S)


def is_tracked(session: VimSession, vm_id: str) -> bool:
    return bool(_found(session, vm_id, _TRACKED))


def disable(session: VimSession, vm_id: str) -> None:
    """Switches the setting off. The stun after it makes the host end its tracking and remove the `-ctk.vmdk` files. It is made
    each time, as a crash may have come between the two."""
    with suppress(VmNotFound):
        if is_tracked(session, vm_id):
            _set_tracked(session, vm_id, tracked=False)
        remove(session, vm_id, (STUN,))
        _create(session, vm_id, STUN, quiesce=False)
        remove(session, vm_id, (STUN,))


def _found(session: VimSession, vm_id: str, path: str) -> Any:
    found = session.properties(session.machine(vm_id), ("name", path), what=f"look at {vm_id}")
    if not found:
        raise VmNotFound(f"{session.host} has no VM {vm_id}")
    return found.get(path)


def _untracked(session: VimSession, vm_id: str, keys: Collection[str]) -> list[str]:
    """The VM's disks without a change id now, and the setting that may be the cause, for people."""
    paths = (_TRACKED, "config.hardware.device", "config.extraConfig")
    found = session.properties(session.machine(vm_id), paths, what=f"look at {vm_id}")
    devices, settings = found.get("config.hardware.device") or (), found.get("config.extraConfig") or ()
    disks = {str(disk.key): disk for disk in virtual_disks(devices) if str(disk.key) in keys}
    known = {} if not found.get(_TRACKED) else change_ids(disks)
    missing = [disk for key, disk in disks.items() if key not in known]
    return [": ".join(filter(None, (label(disk), not_tracked(disk, devices, settings)))) for disk in missing]


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────────


def take(session: VimSession, vm_id: str, name: str) -> SnapshotRef:
    """The snapshot of this name, made if there is none: with a quiet file system where the guest's tools can, else without."""
    _let_tasks_end(session, vm_id)
    ids = _named(session, vm_id, (name,))
    snapshot_id = ids[0] if ids else _made(session, vm_id, name)
    return SnapshotRef(id=snapshot_id, change_ids=change_ids(disks_of(session, snapshot_id)))


def _made(session: VimSession, vm_id: str, name: str) -> str:
    wanted = ("guest.toolsRunningStatus", "runtime.powerState")
    found = session.properties(session.machine(vm_id), wanted, what=f"look at {vm_id}")
    if found.get("runtime.powerState") == "poweredOn" and found.get("guest.toolsRunningStatus") == "guestToolsRunning":
        try:
            return _create(session, vm_id, name, quiesce=True)
        except (SnapshotFailed, Internal, SourceUnreachable) as error:
            # A guest may need longer to quiesce than the platform waits; other passing errors are tried again.
            if isinstance(error, SourceUnreachable) and not isinstance(error.__cause__, library().vim.fault.Timedout):
                raise
            log.warning("the guest could not be quiesced; its snapshot is as after a crash", vm=vm_id, cause=error.detail)
            remove(session, vm_id, (name,))
    return _create(session, vm_id, name, quiesce=False)


def _create(session: VimSession, vm_id: str, name: str, *, quiesce: bool) -> str:
    what = f"snapshot {vm_id}"
    try:
        task = session.call(
            what,
            lambda _: session.machine(vm_id).CreateSnapshot_Task(
                name=name, description="SynVirt reads this VM's disks", memory=False, quiesce=quiesce
            ),
        )
        return str(session.wait(task, what=what, timeout_s=SNAPSHOT_TIMEOUT_S)._moId)  # noqa: SLF001
    except Internal as error:
        raise SnapshotFailed(error.detail, hint=error.hint) from error


def remove(session: VimSession, vm_id: str, names: Sequence[str]) -> None:
    """Removes all snapshots of these names; then each disk is one file again. Does nothing, where the VM is gone."""
    try:
        _let_tasks_end(session, vm_id)
        for snapshot_id in _named(session, vm_id, names):
            task = session.call(
                "remove a snapshot",
                lambda _: session.snapshot(snapshot_id).RemoveSnapshot_Task(removeChildren=False, consolidate=True),  # noqa: B023
            )
            session.wait(task, what="remove a snapshot", timeout_s=REMOVAL_TIMEOUT_S)
        _consolidate(session, vm_id)
    except VmNotFound:
        if _named_or_gone(session, vm_id, names):
            raise


def _consolidate(session: VimSession, vm_id: str) -> None:
    """Where the platform reports that it is needed. A failure is only reported: something else (a backup tool) may hold the
    files for hours, which harms no copy. It is tried again with the next snapshot, and the platform warns until then."""
    needed = "runtime.consolidationNeeded"
    if not session.properties(session.machine(vm_id), (needed,), what=f"look at {vm_id}").get(needed):
        return
    try:
        task = session.call("consolidate disks", lambda _: session.machine(vm_id).ConsolidateVMDisks_Task())
        session.wait(task, what="consolidate disks", timeout_s=REMOVAL_TIMEOUT_S)
    except (Internal, SnapshotFailed, SourceUnreachable) as error:
        log.warning("disks could not be consolidated", vm=vm_id, cause=error.detail)


def _named_or_gone(session: VimSession, vm_id: str, names: Sequence[str]) -> list[str]:
    """Somebody else may have removed the snapshot, or the VM, at the same time: then all is done."""
    try:
        return _named(session, vm_id, names)
    except VmNotFound:
        return []


def _let_tasks_end(session: VimSession, vm_id: str) -> None:
    """An abandoned call (after a cancel or a crash) may still be running: its result must exist before we look."""
    for task in session.properties(session.machine(vm_id), ("recentTask",), what=f"look at {vm_id}").get("recentTask") or ():
        try:
            found = session.properties(task, ("info.descriptionId", "info.state"), what="look at a task")
        except VmNotFound:
            continue  # the platform has forgotten it
        of_snapshots = any(part in str(found.get("info.descriptionId")) for part in _SNAPSHOT_TASKS)
        if of_snapshots and found.get("info.state") in ("queued", "running"):
            try:
                session.wait(task, what="end a snapshot's task", timeout_s=SNAPSHOT_TIMEOUT_S)
            except AuthFailed:
                raise
            except SynvirtError as error:
                log.info("an earlier task of SynVirt has failed", vm=vm_id, cause=error.detail)


def _named(session: VimSession, vm_id: str, names: Sequence[str]) -> list[str]:
    """The snapshots' ids, parents first."""
    found = session.properties(session.machine(vm_id), ("name", "snapshot.rootSnapshotList"), what=f"look at {vm_id}")
    if not found:
        raise VmNotFound(f"{session.host} has no VM {vm_id}")
    ids: list[str] = []
    trees = list(found.get("snapshot.rootSnapshotList") or ())
    while trees:
        tree = trees.pop(0)
        ids += [tree.snapshot._moId] if tree.name in names else []  # noqa: SLF001
        trees += tree.childSnapshotList or ()
    return ids


# ── what changed ─────────────────────────────────────────────────────────────────────────────────────────────────────


def devices_of(session: VimSession, snapshot_id: str) -> Sequence[Any]:
    """The VM's devices in the snapshot. SnapshotFailed, when the snapshot is gone."""
    try:
        found: Mapping[str, Any] = session.properties(
            session.snapshot(snapshot_id), ("config.hardware.device",), what="look at a snapshot"
        )
    except VmNotFound as error:
        raise SnapshotFailed(
            f"snapshot {snapshot_id} no longer exists", hint="someone removed it: it is taken again"
        ) from error
    return found.get("config.hardware.device") or ()


def disks_of(session: VimSession, snapshot_id: str) -> dict[str, Any]:
    """The snapshot's disks by their keys. SnapshotFailed when the snapshot is gone."""
    return {str(disk.key): disk for disk in virtual_disks(devices_of(session, snapshot_id))}


def change_ids(disks: Mapping[str, Any]) -> dict[str, str]:
    """A disk without one is not tracked yet."""
    ids = {key: getattr(disk.backing, "changeId", None) for key, disk in disks.items()}
    return {key: str(change_id) for key, change_id in ids.items() if change_id}


def changed(session: VimSession, vm_id: str, snapshot_id: str, disk: Any, since: str) -> tuple[tuple[int, int], ...]:
    """What changed from `since`, a change id, to the snapshot: (start, length) each. If the whole disk must be compared:
    CbtReset (`since` is invalid now, or the host does not know the changes since then), CbtUnsupported (it never can)."""
    present = str(getattr(disk.backing, "changeId", None) or "")
    if present.partition("/")[0] != since.partition("/")[0]:
        raise CbtReset(
            f"disk {disk.key} of {vm_id}: the host restarted its change tracking since {since}",
            hint="the whole disk is compared once; a host that crashed, or a snapshot that was reverted, does this",
        )
    if _number(present) <= _number(since):
        raise CbtReset(
            f"disk {disk.key} of {vm_id}: its change tracking has gone back from {since} to {present}",
            hint="the whole disk is compared once; a VM that was reverted to a snapshot does this",
        )
    try:
        return _areas(session, vm_id, snapshot_id, disk, since)
    except Internal as error:
        hint = "the whole disk is compared, which takes longer and loses nothing"
        if isinstance(error.__cause__, library().vmodl.fault.NotSupported):
            raise CbtUnsupported(error.detail, hint=hint) from error
        raise CbtReset(f"disk {disk.key} of {vm_id}: {error.detail}", hint=hint) from error


def _number(change_id: str) -> int:
    """It grows with each snapshot. A revert takes it back with the disk's bytes, and lists none of these as changed."""
    return whole_number(change_id.rpartition("/")[2]) or 0


def allocated(session: VimSession, vm_id: str, snapshot_id: str, disk: Any) -> tuple[tuple[int, int], ...] | None:
    """What was ever written; None, where the host does not know, and the whole disk must be read."""
    if not getattr(disk.backing, "changeId", None):
        return None
    try:
        return _areas(session, vm_id, snapshot_id, disk, ALLOCATED)
    except (CbtReset, Internal) as error:  # the list of written parts helps, but is not required
        log.warning("the host does not say what is allocated: the whole disk is read", vm=vm_id, cause=error.detail)
        return None


def _areas(session: VimSession, vm_id: str, snapshot_id: str, disk: Any, since: str) -> tuple[tuple[int, int], ...]:
    vmware = library()
    areas: list[tuple[int, int]] = []
    size, start = capacity_of(disk), 0
    refused = (vmware.vim.fault.FileFault, vmware.vim.fault.NotFound, vmware.vmodl.fault.InvalidArgument)

    def ask(_: Any) -> Any:
        try:
            return session.machine(vm_id).QueryChangedDiskAreas(
                snapshot=session.snapshot(snapshot_id), deviceKey=disk.key, startOffset=start, changeId=since
            )
        except busy_faults():
            raise  # a locked file is also reported as a file's fault, and means nothing for the change id
        except refused as error:
            raise CbtReset(
                f"disk {disk.key} of {vm_id}: {session.host} does not know the change id {since}: {type(error).__name__}",
                hint="the whole disk is compared once",
            ) from error

    for _ in range(QUESTIONS_MAX):
        if start >= size:
            return coarser(areas, AREAS_MAX)
        answer = session.call("say what changed", ask)
        listed = [(int(area.start), int(area.length)) for area in answer.changedArea or ()]
        if (first := min((at for at, _ in listed), default=0)) < 0:
            raise CbtReset(f"disk {disk.key} of {vm_id}: {session.host} lists a changed part at byte {first}")
        # Tracked in steps that may exceed the disk's end.
        areas += [(at, min(length, size - at)) for at, length in listed if at < size and length > 0]
        if (described := min(int(answer.startOffset), size)) > start:  # nothing is said of what is between: it is read
            areas.append((start, described - start))
        if len(areas) > 2 * AREAS_MAX:  # a large disk with writes everywhere has half a billion of them
            areas = list(coarser(areas, AREAS_MAX))
        end = int(answer.startOffset) + int(answer.length)
        if end <= start:
            break
        start = end
    raise CbtReset(f"disk {disk.key} of {vm_id}: {session.host} does not finish the list of what changed")
