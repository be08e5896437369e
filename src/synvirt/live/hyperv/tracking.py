"""Recovery snapshots, the reference points that they become, and the changes since one. Blocking code.

    take ─▶ recovery snapshot: the VM writes to new files, those before it are frozen and read
    release ─▶ ConvertToReferencePoint: the new files are merged, RCT ids stay
    areas ─▶ GetVirtualDiskChanges(the frozen file of the next snapshot, the RCT id of the one before)

The cycle is that of Microsoft's sample xHyper-VBackup. The journal in the VM's notes lists which of these objects are ours.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from synvirt.disks.changed import AREAS_MAX, coarser
from synvirt.errors import AuthFailed, CbtReset, Internal, SnapshotFailed, SourceUnreachable, SynvirtError
from synvirt.live import SnapshotRef
from synvirt.live.hyperv import journal as journals
from synvirt.live.hyperv import machines
from synvirt.live.hyperv.journal import Entry, Journal
from synvirt.live.hyperv.session import HyperVRefused
from synvirt.sizes import GIB

log = structlog.get_logger(__name__)

# The snapshot id of a VM that is off: its files are read directly, without a snapshot.
OFF: Final = "off"
# How much of a disk one request covers, and how many answers for one disk may cover less than requested.
QUESTION_BYTES: Final = 64 * GIB
QUESTIONS_MAX: Final = 100_000
# Merging a snapshot's files goes on after its conversion, also if the VM is off by then.
MERGE_TIMEOUT_S: Final = 3600.0
MERGE_PAUSE_S: Final = 2.0
# How often notes are read and written anew, where somebody else writes to them at the same time.
NOTES_TRIES: Final = 4
_MERGING: Final = frozenset(
    {"MergingDisks", "DeletingSnapshot", "CreatingSnapshot", "BackingUpVirtualMachine", "ApplyingSnapshot"}
)
_RCT: Final = 2
_APPLICATION, _CRASH = 1, 2
_GONE: Final = 404
# Hyper-V's return codes for conditions that pass: timeout, in use, not available, out of memory.
_PASSING: Final = frozenset({32772, 32774, 32777, 32778})
_DENIED: Final = 32769

State = Mapping[str, Any]


class Runs(Protocol):
    """Runs this package's scripts on the host that has a VM."""

    def run(self, name: str, **parameters: object) -> Any: ...

    def remove_export(self, path: str) -> None:
        """Removes the folder that a snapshot's disks were exported to; does nothing where it does not exist."""


def state_of(host: Runs, vm_id: str) -> State:
    """The state of a VM, from the answer of state.ps1. VmNotFound."""
    found: State = host.run("state", VmId=vm_id)
    return found


# ── taking a snapshot ────────────────────────────────────────────────────────────────────────────────────────────────


def take(host: Runs, vm_id: str, name: str, in_place: Callable[[State], bool] = lambda _: True) -> SnapshotRef:
    """The snapshot of this name, made if there is none. A VM that is off needs none if its files are read in place, as nothing
    changes them."""
    state = state_of(host, vm_id)
    if machines.power_of(state["state"]) == "off":
        if in_place(state):
            _converted(host, vm_id, name)
            _merged(host, vm_id, state_of(host, vm_id))
            return SnapshotRef(id=OFF)
        _merged(host, vm_id, state)
    journal = journals.read(state["notes"])
    present = _found(state, name, journal.get(name))
    if present is not None:
        if journal[name].s != present:
            write(host, vm_id, state, journal | {name: journal[name].model_copy(update={"s": present})})
        return _reference(state, name, present)
    if name in journal:
        cleanup(host, vm_id, name)  # the leftovers of a snapshot that was removed or released: it is made again
    for other in [one for one in journal if one != name and journals.same_job(one, name)]:
        release(host, vm_id, other)
    state = state_of(host, vm_id)
    journal = journals.read(state["notes"])
    before = tuple(str(one["id"]) for one in state["snapshots"])
    write(host, vm_id, state, journal | {name: Entry(b=before)})
    _make(host, vm_id)
    state = state_of(host, vm_id)
    journal = journals.read(state["notes"])
    made = _found(state, name, journal.get(name) or Entry(b=before))
    if made is None:
        raise SnapshotFailed(
            f"Hyper-V made a recovery snapshot of {vm_id}, and it is not known which of {len(state['snapshots'])} it is",
            hint="another program backs this VM up at the same time: try when it has ended",
        )
    write(host, vm_id, state, journal | {name: Entry(s=made, b=before)})
    return _reference(state, name, made)


def _make(host: Runs, vm_id: str) -> None:
    """With a quiet guest where possible; else as after a power failure, which the log says."""
    try:
        host.run("take", VmId=vm_id, Level=_APPLICATION)
    except HyperVRefused as error:
        log.warning("the guest could not be quiesced; its snapshot is as after a crash", vm=vm_id, cause=error.detail)
        first = error
    else:
        return
    try:
        host.run("take", VmId=vm_id, Level=_CRASH)
    except HyperVRefused as error:
        raise _passing(error) or SnapshotFailed(
            f"{error.detail}; and before, with a quiet guest: {first.text or first.value}",
            hint="are checkpoints enabled for the VM (CheckpointType), is another backup running, is the host's disk full?",
        ) from error


def _found(state: State, name: str, entry: Entry | None) -> str | None:
    """The id of the VM's recovery snapshot of this name: the noted one. If a crash came before the note: the one whose own
    notes, copied by Hyper-V from the VM's, have this entry of the journal; or the only one that came since."""
    ids = [str(one["id"]) for one in state["snapshots"]]
    if entry is None:
        return None
    if entry.s:
        return entry.s if entry.s in ids else None
    if entry.p:
        return None
    named = [str(one["id"]) for one in state["snapshots"] if name in journals.read(str(one.get("notes") or ""))]
    new = [one for one in named if one not in entry.b]
    return new[0] if len(new) == 1 else journals.only_new(ids, entry.b)


def _reference(state: State, name: str, snapshot_id: str) -> SnapshotRef:
    """A change id is the snapshot's name, and the disk's identifier: what Hyper-V has for it is known once it was converted."""
    drives = _drives_of(state, snapshot_id)
    if machines.untracked(state) is not None:
        return SnapshotRef(id=snapshot_id)
    tracked = [drive for drive in drives if machines.untracked_disk(drive) is None]
    return SnapshotRef(
        id=snapshot_id, change_ids={machines.key_of(drive): f"{name} {_identifier(drive)}".strip() for drive in tracked}
    )


def _identifier(drive: Mapping[str, Any]) -> str:
    """The disk's own, which it keeps in another place, too; empty, where none is known."""
    return str(drive["chain"][0].get("id") or "").strip("{}").lower()


def _converted(host: Runs, vm_id: str, name: str) -> None:
    """Converts the earlier snapshots of the job, as the changes since one are known only then: its release may have failed, and
    the guest is off now. If that is refused, the whole disk is compared."""
    try:
        for other in journals.read(state_of(host, vm_id)["notes"]):
            if other != name and journals.same_job(other, name):
                release(host, vm_id, other)
    except HyperVRefused as error:
        log.warning("an earlier snapshot stays as it is", vm=vm_id, cause=error.detail)


def _merged(host: Runs, vm_id: str, state: State) -> None:
    """Waits until Hyper-V has merged the files of converted snapshots, as it writes to them meanwhile."""
    deadline = time.monotonic() + MERGE_TIMEOUT_S
    while str(state["status"]) in _MERGING:
        if time.monotonic() > deadline:
            raise SourceUnreachable(
                f"{vm_id} is off, and Hyper-V still reports its status as {state['status']}",
                hint="look at its status on the host",
            )
        time.sleep(MERGE_PAUSE_S)
        state = state_of(host, vm_id)


# ── reading its changes ──────────────────────────────────────────────────────────────────────────────────────────────


def drive_in(host: Runs, vm_id: str, snapshot: SnapshotRef, key: str) -> tuple[State, Mapping[str, Any]]:
    """The VM, and its disk in the snapshot. SnapshotFailed, where one of them is gone."""
    state = state_of(host, vm_id)
    if snapshot.id == OFF:
        if machines.power_of(state["state"]) != "off":
            raise SnapshotFailed(f"{vm_id} was started since it was to be read", hint="it is shut down again, and read again")
        drives = state["drives"]
    else:
        drives = _drives_of(state, snapshot.id)
    drive = next((one for one in drives if machines.key_of(one) == key), None)
    if drive is None or not drive["chain"]:
        raise SnapshotFailed(f"snapshot {snapshot.id} of {vm_id} has no disk {key}")
    found: Mapping[str, Any] = drive
    return state, found


def _drives_of(state: State, snapshot_id: str) -> Sequence[Mapping[str, Any]]:
    for one in state["snapshots"]:
        if str(one["id"]) == snapshot_id:
            drives: Sequence[Mapping[str, Any]] = one["drives"]
            return drives
    raise SnapshotFailed(f"recovery snapshot {snapshot_id} no longer exists", hint="someone removed it: it is taken again")


def snapshot_of(vm_id: str, drive: Mapping[str, Any], since: str) -> str:
    """The name of the snapshot in a change id. CbtReset: another disk was in this place then."""
    name, _, before = since.partition(" ")
    now = _identifier(drive)
    if before and now and before != now:
        raise CbtReset(
            f"disk {machines.key_of(drive)} of {vm_id}: another had its place when {name} was made, {before} instead of {now}",
            hint="the whole disk is compared once",
        )
    return name


def areas(host: Runs, vm_id: str, state: State, drive: Mapping[str, Any], since: str) -> tuple[tuple[int, int], ...]:
    """What changed on the disk since the snapshot of that name: (start, length) each. CbtReset: this is not known any more."""
    key = machines.key_of(drive)
    limit = _tracking_id(vm_id, state, drive, since)
    top = drive["chain"][0]
    if top.get("size") is None:
        raise CbtReset(f"disk {key} of {vm_id}: Hyper-V does not say its size", hint="the whole disk is compared once")
    size, start, found = int(top["size"]), 0, list[tuple[int, int]]()
    for _ in range(QUESTIONS_MAX):
        if start >= size:
            return coarser(found, AREAS_MAX)
        asked = min(QUESTION_BYTES, size - start)
        processed, changes = _asked(host, key, Path=str(top["path"]), LimitId=limit, Offset=start, Length=asked)
        if not 0 < processed <= asked:
            break
        found += [(at, min(length, size - at)) for at, length in changes if 0 <= at < size and length > 0]
        if len(found) > 2 * AREAS_MAX:
            found = list(coarser(found, AREAS_MAX))
        start += processed
    raise CbtReset(f"disk {key} of {vm_id}: Hyper-V does not finish the list of what changed, after {start} of {size} bytes")


def _asked(host: Runs, key: str, **question: object) -> tuple[int, list[tuple[int, int]]]:
    """How many bytes Hyper-V looked at, and the changes in them."""
    try:
        answer: Mapping[str, Any] = host.run("changes", **question)
    except HyperVRefused as error:
        if error.value == _DENIED:
            raise AuthFailed(error.detail, hint="the user must be in Hyper-V Administrators") from error
        raise _passing(error) or CbtReset(
            f"disk {key}: Hyper-V does not know what changed since {question['LimitId']}: {error.detail}",
            hint="the whole disk is compared once; an edit while the VM was off, or a lost .rct file, does this",
        ) from error
    # Without any change both are one null.
    offsets, lengths = ([one for one in answer[name] or () if one is not None] for name in ("offsets", "lengths"))
    if len(offsets) != len(lengths):
        raise Internal(f"disk {key}: Hyper-V lists {len(offsets)} changes with {len(lengths)} lengths")
    return int(answer["processed"] or 0), list(zip(offsets, lengths, strict=True))


def point_of(vm_id: str, state: State, key: str, since: str) -> Mapping[str, Any]:
    """The reference point that the snapshot `since` became; CbtReset, where there is none, or it is not certain which it is."""
    entry = journals.read(state["notes"]).get(since)
    point = None if entry is None else next((one for one in state["points"] if one["id"] == entry.p), None)
    if entry is None or point is None or not entry.sure:
        raise CbtReset(
            f"disk {key} of {vm_id}: the reference point of {since} no longer exists",
            hint="somebody removed it, or its line in the VM's notes: the whole disk is compared once",
        )
    found: Mapping[str, Any] = point
    return found


def _tracking_id(vm_id: str, state: State, drive: Mapping[str, Any], since: str) -> str:
    """The RCT id of this disk in the reference point that the snapshot `since` became. A disk is found by its own identifier;
    only without one by its place in the list."""
    key = machines.key_of(drive)
    point = point_of(vm_id, state, key, since)
    disks = [str(one or "") for one in point["disks"] or ()]
    trackings = [str(one or "") for one in point["trackings"] or ()]
    identifier = _identifier(drive)
    places = [number for number, one in enumerate(disks) if identifier and identifier in one.lower()]
    if not places and len(trackings) == 1 and sum(machines.untracked_disk(one) is None for one in state["drives"]) == 1:
        places = [0]
    found = [trackings[number] for number in places if number < len(trackings) and trackings[number]]
    if len(found) != 1:
        raise CbtReset(
            f"disk {key} of {vm_id}: the reference point of {since} has {len(found)} change tracking ids for it",
            hint="the whole disk is compared once",
        )
    return found[0]


# ── releasing it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def release(host: Runs, vm_id: str, name: str) -> None:
    """Converts the snapshot to a reference point, if it is not yet one."""
    state = state_of(host, vm_id)
    journal = journals.read(state["notes"])
    entry = journal.get(name)
    if entry is not None and entry.x:
        host.remove_export(entry.x)
        entry = entry.model_copy(update={"x": "", "e": {}})
        write(host, vm_id, state, journal | {name: entry})
        state = state_of(host, vm_id)
        journal = journals.read(state["notes"])
    if entry is None or entry.p:
        return
    snapshot = _found(state, name, entry)
    if snapshot is None:
        _adopt(host, vm_id, state, name)
        return
    points = tuple(str(one["id"]) for one in state["points"])
    entry = entry.model_copy(update={"s": snapshot, "q": points})
    write(host, vm_id, state, journal | {name: entry})
    made = _done(lambda: host.run("convert", VmId=vm_id, SnapshotId=snapshot))
    state = state_of(host, vm_id)
    journal = journals.read(state["notes"])
    answered = [str(one) for one in (made or {}).get("points") or () if one]
    if len(answered) == 1:
        write(host, vm_id, state, journal | {name: entry.model_copy(update={"p": answered[0]})})
    else:
        _adopt(host, vm_id, state, name)


def _adopt(host: Runs, vm_id: str, state: State, name: str) -> None:
    """A crash came between the conversion and our note of it: we may remove what came since, but do not rely on it."""
    journal = journals.read(state["notes"])
    entry = journal.get(name)
    if entry is None or entry.q is None:
        return
    found = journals.only_new((str(one["id"]) for one in state["points"] if one["type"] == _RCT), entry.q)
    if found is not None:
        write(host, vm_id, state, journal | {name: entry.model_copy(update={"p": found, "sure": False})})


def cleanup(host: Runs, vm_id: str, name: str) -> None:
    """Removes all of that snapshot, with its entry in the journal. VmNotFound: the VM is gone, and our objects with it."""
    state = state_of(host, vm_id)
    entry = journals.read(state["notes"]).get(name)
    if entry is None:
        return
    if entry.x:
        host.remove_export(entry.x)
    if (snapshot := _found(state, name, entry)) is not None:
        _done(lambda: host.run("destroy", VmId=vm_id, SnapshotId=snapshot, PointId=""))
    elif not entry.p:
        _adopt(host, vm_id, state, name)
        state = state_of(host, vm_id)
        entry = journals.read(state["notes"]).get(name, entry)
    if entry.p:
        _done(lambda: host.run("destroy", VmId=vm_id, SnapshotId="", PointId=entry.p))
    state = state_of(host, vm_id)
    left = {one: kept for one, kept in journals.read(state["notes"]).items() if one != name}
    write(host, vm_id, state, left)


def _done(ask: Any) -> Any:
    """A refusal that may pass is the source's error; an object that is gone counts as removed."""
    try:
        return ask()
    except HyperVRefused as error:
        if error.value == _GONE:
            return None
        raise _passing(error) or error from error


def _passing(error: HyperVRefused) -> SynvirtError | None:
    return passing(error.value, error.detail)


def passing(code: int, detail: str) -> SynvirtError | None:
    """The error for a job's code that passes by itself; None: it does not pass."""
    if code in _PASSING:
        return SourceUnreachable(f"{detail}: the VM is busy", hint="it is tried again; another backup may be running")
    return None


def write(host: Runs, vm_id: str, state: State, journal: Journal) -> None:
    put_notes(host, vm_id, str(state["notes"]), lambda notes: journals.written(notes, journal))


def put_notes(host: Runs, vm_id: str, before: str, edited: Callable[[str], str]) -> None:
    """Writes the VM's notes anew, which were read `before`. What somebody else has written to them meanwhile stays."""
    for number in range(NOTES_TRIES):
        # A text may come out of a host in another form than it went in: at last they are written as ever.
        checked = int(number + 1 < NOTES_TRIES)
        answer = host.run("notes", VmId=vm_id, Checked=checked, Before=before, Notes=edited(before))
        if answer["written"]:
            return
        before = str(answer["notes"])
