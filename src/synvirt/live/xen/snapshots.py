"""Snapshots of a XenServer VM: what stays for its deltas, and what is removed. Blocking code.

    VM.snapshot ─▶ its VDIs get the snapshot's name ─▶ read ─▶ release: with tracking, the data is removed, its metadata stays;
                                                                    with VHD, the data stays, since the next is compared with it
                                                            ─▶ cleanup: all of that name is removed

VDIs are found by name, so that after a crash between any two calls all of them can be found. A change id is `cbt:UUID` or
`vhd:UUID`, of the snapshot's VDI. Citrix' «Changed Block Tracking Developer Guide».
"""

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

import structlog

from synvirt.errors import CbtUnsupported, Internal, SnapshotFailed, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live import SnapshotRef
from synvirt.live.xen.machines import CHAIN_MAX, Machine, chain_lengths, lacking_space
from synvirt.live.xen.session import XapiFailure, XenSession, pauses
from synvirt.live.xen.ways import REFUSED, Way
from synvirt.machines.texts import is_true
from synvirt.machines.xenapi import NULL, Record, listed, table, text

SNAPSHOT_TIMEOUT_S: Final = 1800.0
# A disk of many layers is destroyed and joined meanwhile.
DESTROY_TIMEOUT_S: Final = 1800.0
# The storage manager releases a disk a little after its reader closed it.
IN_USE_PAUSES_S: Final = (0.5, 2.0, 5.0, 15.0, 30.0)
# A mark in a snapshot's VDI: the next snapshot is compared with its data.
KEPT: Final = "synvirt-kept"
# A mark in a disk: it was not tracked before we requested it.
TRACKED_BY_US: Final = "synvirt-tracked"
OURS: Final = "synvirt-"
# A note is for people.
NOTE_CHARS: Final = 200
# The id of a «snapshot» that is the VM's own disks, while it is off.
OFF: Final = "off:"
METADATA: Final = "cbt_metadata"
_CANNOT_TRACK: Final = frozenset(
    {
        "SR_OPERATION_NOT_SUPPORTED", "LICENCE_RESTRICTION", "FEATURE_RESTRICTED", "VDI_INCOMPATIBLE_TYPE", "SR_FULL",
        "VDI_ON_BOOT_MODE_INCOMPATIBLE_WITH_OPERATION", "OPERATION_NOT_ALLOWED",
    }
)  # fmt: skip
# The storage manager's own failures, with a number for their kind; one is no room for the log of changes.
_STORE_FAILED: Final = "SR_BACKEND_FAILURE"
_OLD_XAPI: Final = frozenset({"MESSAGE_PARAMETER_COUNT_MISMATCH", "FIELD_TYPE_ERROR"})

log = structlog.get_logger(__name__)


# ── tracking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def enable(session: XenSession, vm: Machine, keys: Collection[str], ways: Mapping[str, Way]) -> None:
    """Tracks the changes of these disks from now on; disks whose deltas come by VHD need nothing. Only trying shows that a disk
    cannot be tracked: then its deltas come by VHD from now on, where possible. CbtUnsupported."""
    for key in keys:
        reference, way = vm.vdis.get(key), ways.get(key)
        if reference is None or way is None:
            raise VmNotFound(f"{text(vm.record, 'name_label')} has no disk {key}")
        if way.deltas is None:
            raise CbtUnsupported(f"disk {key} has no deltas: {way.why}", hint="move the VM cold")
        if way.deltas == "cbt" and not is_true(text(vm.records.at("VDI", reference), "cbt_enabled")):
            _enable(session, reference, key, way)


def _enable(session: XenSession, reference: str, key: str, way: Way) -> None:
    # Noted first: else tracking that was begun before the note would be left behind.
    _note(session, reference, TRACKED_BY_US)
    try:
        session.asked("VDI.enable_cbt", reference)
    except XapiFailure as failure:
        refused = failure.code in _CANNOT_TRACK or failure.code.startswith(_STORE_FAILED)
        if refused and not way.instead:
            # The way of this disk in every session from now on, until our last snapshot of it is removed.
            _note(session, reference, REFUSED, failure.text[:NOTE_CHARS])
        with suppress(XapiFailure, SynvirtError):
            session.asked("VDI.remove_from_other_config", reference, TRACKED_BY_US)
        if refused and not way.instead:
            log.warning("changes of a disk are not tracked: snapshots are compared", disk=key, cause=failure.text)
            return
        if refused:
            raise CbtUnsupported(
                f"{session.host} does not track changed blocks of disk {key}: {failure.text}; "
                f"nor can its snapshots be compared: {way.instead}",
                hint="move the VM cold",
            ) from failure
        raise session.as_ours(f"track changed blocks of disk {key}", failure) from failure


def _note(session: XenSession, vdi_ref: str, key: str, value: str = "true") -> None:
    try:
        session.asked("VDI.add_to_other_config", vdi_ref, key, value)
    except XapiFailure as failure:
        if failure.code != "MAP_DUPLICATE_KEY":
            raise session.as_ours("leave a note on a disk", failure) from failure


# ── take ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def take(session: XenSession, vm: Machine, name: str, keys: Collection[str] | None, ways: Mapping[str, Way]) -> SnapshotRef:
    """The snapshot of this name, made if there is none. For a VM that is off and cannot be snapshot: its disks themselves."""
    made = _snapshot_of(session, vm, name)
    if made is None and _awaited(session, vm.reference):
        made = _snapshot_of(session, vm, name)
    if made is None:
        try:
            made = _made(session, vm, name, keys)
        except SnapshotFailed:
            if text(vm.record, "power_state") != "Halted":
                raise
            log.info("no snapshot: the disks of a VM that is off are read as they are", vm=vm.reference)
            return SnapshotRef(id=OFF + name)
    change_ids: dict[str, str] = {}
    for reference, vdi in _disks_of(session, made).items():
        key = text(_record(session, "VDI", text(vdi, "snapshot_of")), "uuid")
        if keys is not None and key not in keys:
            # In a pool without `ignore_vdis`. It is named, too, so that it is removed with the others.
            session.call("name a snapshot's disk", "VDI.set_name_label", reference, name)
            continue
        way = ways.get(key)
        deltas = way.deltas if way is not None else None
        if deltas == "vhd":
            _note(session, reference, KEPT)
        session.call("name a snapshot's disk", "VDI.set_name_label", reference, name)
        if deltas == "vhd" or (deltas == "cbt" and is_true(text(vdi, "cbt_enabled"))):
            change_ids[key] = f"{deltas}:{text(vdi, 'uuid')}"
    return SnapshotRef(id=name, change_ids=change_ids)


def _awaited(session: XenSession, vm_ref: str) -> bool:
    """Waits for a snapshot of the VM that is being made; True, if there was one. A snapshot of a session that has ended is
    still completed: so a search and a cleanup must wait for it. SourceUnreachable."""
    until, waited = time.monotonic() + SNAPSHOT_TIMEOUT_S, False
    for pause_s in pauses():
        try:
            doing: Record = session.asked("VM.get_current_operations", vm_ref)
        except XapiFailure as failure:
            if failure.code == "HANDLE_INVALID":
                return waited
            raise session.as_ours("see what is done to a VM", failure) from failure
        if "snapshot" not in doing.values():
            return waited
        if time.monotonic() > until:
            raise SourceUnreachable(f"{session.host} has not finished a snapshot for {SNAPSHOT_TIMEOUT_S:.0f} s")
        waited = True
        time.sleep(pause_s)
    raise AssertionError("pauses have no end")


def _snapshot_of(session: XenSession, vm: Machine, name: str) -> str | None:
    for reference in session.call("look for its snapshots", "VM.get_by_name_label", name):
        found = _record(session, "VM", reference)
        if is_true(text(found, "is_a_snapshot")) and text(found, "snapshot_of") == vm.reference:
            return str(reference)
    return None


def _made(session: XenSession, vm: Machine, name: str, keys: Collection[str] | None) -> str:
    """SnapshotFailed, before anything is made, where the storage has no room for it or would refuse it."""
    wanted = {key: reference for key, reference in vm.vdis.items() if keys is None or key in keys}
    for sr_ref in {text(vm.records.at("VDI", one), "SR") for one in wanted.values()}:
        if (lacking := lacking_space(vm, sr_ref, wanted)) is not None:
            raise SnapshotFailed(
                f"the storage {text(vm.records.at('SR', sr_ref), 'name_label')} {lacking}", hint="make room there first"
            )
    longest = max(chain_lengths(session, vm).values(), default=0)
    if longest >= CHAIN_MAX - 1:
        raise SnapshotFailed(
            f"a disk of {text(vm.record, 'name_label')} lies on {longest} layers; XenServer takes {CHAIN_MAX} at most",
            hint="remove snapshots that are not needed, and rescan the storage: it joins its layers; then try again",
        )
    what = f"snapshot {text(vm.record, 'name_label')}"
    ignored = [reference for key, reference in vm.vdis.items() if key not in wanted]
    try:
        try:
            return str(
                session.awaited(
                    what, "VM.snapshot", vm.reference, name, *([ignored] if ignored else []), timeout_s=SNAPSHOT_TIMEOUT_S
                )
            )
        except XapiFailure as failure:
            if not ignored or failure.code not in _OLD_XAPI:
                raise
            return str(session.awaited(what, "VM.snapshot", vm.reference, name, timeout_s=SNAPSHOT_TIMEOUT_S))
    except XapiFailure as failure:
        error = session.as_ours(what, failure)
        if isinstance(error, Internal):
            raise SnapshotFailed(error.detail, hint=error.hint) from failure
        raise error from failure


def _disks_of(session: XenSession, snapshot_ref: str) -> dict[str, Record]:
    """The VDIs of a VM's snapshot, by reference."""
    found: dict[str, Record] = {}
    for one in listed(_record(session, "VM", snapshot_ref), "VBDs"):
        vbd = _record(session, "VBD", one)
        reference = text(vbd, "VDI")
        if text(vbd, "type") != "CD" and reference:
            found[reference] = _record(session, "VDI", reference)
    return found


def _record(session: XenSession, kind: str, reference: str) -> Record:
    """Empty, where it is gone."""
    if not reference or reference == NULL:
        return {}
    try:
        found: Record = session.asked(f"{kind}.get_record", reference)
    except XapiFailure as failure:
        if failure.code == "HANDLE_INVALID":
            return {}
        raise session.as_ours("look at a snapshot", failure) from failure
    return found


# ── find, release, remove ────────────────────────────────────────────────────────────────────────────────────────────


def disk_in(session: XenSession, vm: Machine, snapshot_id: str, key: str) -> tuple[str, Record]:
    """The VDI of disk `key` in the snapshot: reference and record. SnapshotFailed, when there is none."""
    live = vm.vdis.get(key)
    if live is None:
        raise SnapshotFailed(f"{text(vm.record, 'name_label')} has no disk {key} any more")
    if snapshot_id.startswith(OFF):
        if text(vm.record, "power_state") != "Halted":
            raise SnapshotFailed(f"{text(vm.record, 'name_label')} was started, and its disks cannot be frozen")
        return live, vm.records.at("VDI", live)
    for reference, vdi in _named(session, snapshot_id).items():
        if text(vdi, "snapshot_of") == live and text(vdi, "type") != METADATA:
            return reference, vdi
    raise SnapshotFailed(f"snapshot {snapshot_id} has no disk {key}", hint="someone removed it: it is taken again")


def _named(session: XenSession, name: str) -> dict[str, Record]:
    """The snapshot's VDIs, by its name. Only we use such names, as they contain the job's id; but a disk of a VM that somebody
    made from our snapshot has the name of what it is a clone of, and so have the snapshots of that disk."""
    references = session.call("look for a snapshot's disks", "VDI.get_by_name_label", name)
    found = {reference: vdi for reference in references if (vdi := _record(session, "VDI", reference))}
    theirs = {reference for reference, vdi in found.items() if not is_true(text(vdi, "is_a_snapshot"))}
    return {
        reference: vdi for reference, vdi in found.items() if reference not in theirs and text(vdi, "snapshot_of") not in theirs
    }


def release(session: XenSession, name: str) -> None:
    """Removes the snapshot's data, where tracking needs only its metadata."""
    _forget_vm(session, name)
    for reference, vdi in _named(session, name).items():
        if KEPT in table(vdi, "other_config") or text(vdi, "type") == METADATA:
            continue
        if is_true(text(vdi, "cbt_enabled")):
            _until_free(session, reference, "free a snapshot's data", "VDI.data_destroy")
        else:
            _destroy(session, reference)


def cleanup(session: XenSession, vm_id: str, name: str) -> None:
    """Ends tracking that we began, where nothing else of ours is left on the disk; removes all of that name."""
    with suppress(XapiFailure):  # a VM that is gone has none being made
        _awaited(session, str(session.asked("VM.get_by_uuid", vm_id)))
    _forget_vm(session, name)
    named = _named(session, name)
    # First: a disk that was taken out of the VM since is known by its snapshot alone.
    with suppress(VmNotFound):
        _untrack(session, vm_id, name, {text(vdi, "snapshot_of") for vdi in named.values()})
    for reference in named:
        _destroy(session, reference)


def _forget_vm(session: XenSession, name: str) -> None:
    """Removes the snapshot's VM, while its VDIs stay: as long as it exists, they are in use."""
    for reference in session.call("look for a snapshot", "VM.get_by_name_label", name):
        disks = _disks_of(session, reference)
        if not is_true(text(_record(session, "VM", reference), "is_a_snapshot")):
            continue
        # After a crash before they were named, only their VM leads to them, and it is about to be removed.
        for vdi in disks:
            _quietly(session, "name a snapshot's disk", "VDI.set_name_label", vdi, name)
        _quietly(session, "remove a snapshot", "VM.destroy", reference)


def _untrack(session: XenSession, vm_id: str, name: str, disks: Collection[str]) -> None:
    """Of the VM's disks, and of `disks`; `name`: a snapshot that is about to be removed."""
    vm: Record = {}
    with suppress(XapiFailure):  # a VM that is gone has no disks
        vm = session.asked("VM.get_record", session.asked("VM.get_by_uuid", vm_id))
    for reference in dict.fromkeys((*(text(_record(session, "VBD", one), "VDI") for one in listed(vm, "VBDs")), *disks)):
        vdi = _record(session, "VDI", reference)
        notes = {TRACKED_BY_US, REFUSED} & table(vdi, "other_config").keys()
        if not notes:
            continue
        snapshots = (text(_record(session, "VDI", each), "name_label") for each in listed(vdi, "snapshots"))
        if any(one.startswith(OURS) and one != name for one in snapshots):
            continue
        if TRACKED_BY_US in notes:
            _quietly(session, "end tracking", "VDI.disable_cbt", reference)
        for note in sorted(notes):
            _quietly(session, "take a note away", "VDI.remove_from_other_config", reference, note)


def _quietly(session: XenSession, what: str, method: str, *parameters: Any) -> None:
    """Makes the call; no error, if its object is gone."""
    try:
        session.asked(method, *parameters)
    except XapiFailure as failure:
        if failure.code != "HANDLE_INVALID":
            raise session.as_ours(what, failure) from failure


def _destroy(session: XenSession, vdi_ref: str) -> None:
    _until_free(session, vdi_ref, "remove a snapshot's disk", "VDI.destroy")


def _until_free(session: XenSession, vdi_ref: str, what: str, method: str) -> None:
    """A disk that was just read is released a little later. If a failed export left it attached to a host's own domain, we
    detach it."""
    for pause_s in (*IN_USE_PAUSES_S, None):
        try:
            session.awaited(what, method, vdi_ref, timeout_s=DESTROY_TIMEOUT_S)
        except XapiFailure as failure:
            if failure.code == "HANDLE_INVALID":
                return
            if failure.code not in ("VDI_IN_USE", "OTHER_OPERATION_IN_PROGRESS") or pause_s is None:
                raise session.as_ours(what, failure) from failure
            if not _detached(session, vdi_ref):
                time.sleep(pause_s)
        else:
            return
    raise SourceUnreachable(f"{session.host} cannot {what}: it is in use")


def _detached(session: XenSession, vdi_ref: str) -> bool:
    """Whether a host's own domain had it attached, as after a failed export, and it is free now."""
    freed = False
    for one in listed(_record(session, "VDI", vdi_ref), "VBDs"):
        vbd = _record(session, "VBD", one)
        if not is_true(text(_record(session, "VM", text(vbd, "VM")), "is_control_domain")):
            continue
        with suppress(XapiFailure):  # already detached, or still busy: destroying it will show
            session.asked("VBD.unplug", one)
        with suppress(XapiFailure):
            session.asked("VBD.destroy", one)
            freed = True
    return freed
