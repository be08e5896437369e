"""The second way to a disk's bytes: Hyper-V writes them to a share, whole or what changed since a reference point. Blocking.

    recovery snapshot ─▶ ExportSystemDefinition(the snapshot, a reference point as its base) ─▶ EXPORT_TO\\NAME\\whole | since-N
                                                                  whole: a VHDX      since-N: a differencing VHDX, read alone

For VMs whose files may not be read, or are on no share. It takes longer: all is written before it is read. It needs a snapshot
also of a VM that is off. An export is noted in the VM's journal before it is made, and removed with its snapshot.
"""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any, Final

import structlog

from synvirt.disks.specs import ImageFormat, ImageSpec, RawSpec
from synvirt.errors import CbtReset, Internal, SnapshotFailed, SourceUnreachable, SynvirtError, UnsupportedFormat
from synvirt.live import SnapshotRef
from synvirt.live.hyperv import journal as journals
from synvirt.live.hyperv import tracking
from synvirt.live.hyperv.journal import Entry
from synvirt.live.hyperv.places import Shares
from synvirt.live.hyperv.session import HyperVRefused
from synvirt.live.hyperv.tracking import Runs, State
from synvirt.model.machine import Disk
from synvirt.remote import Remote, smb_shares

log = structlog.get_logger(__name__)

POLL_S: Final = 2.0
# The journal's value for a complete export; before that it is the id of Hyper-V's job.
DONE: Final = "done"
_COMPLETED, _FORGOTTEN = 7, 0
# Win32's ERROR_DISK_FULL and ERROR_HANDLE_DISK_FULL, in the form of Hyper-V's jobs.
_DISK_FULL: Final = re.compile(r"0x800700(?:70|27)", re.IGNORECASE)
_FULL_CODES: Final = frozenset({0x80070070, 0x80070027, 0x70, 0x27})
_ENDINGS: Final[Mapping[str, ImageFormat]] = {".vhdx": "vhdx", ".avhdx": "vhdx", ".vhd": "vhd", ".avhd": "vhd"}
# All types of files in an export: disks, change tracking, configurations, states. Nothing else is removed from a share.
_WRITTEN: Final = frozenset({*_ENDINGS, ".rct", ".mrt", ".vmcx", ".vmrs", ".vmgs", ".xml", ".bin", ".vsv", ".hrl"})
_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,128}")


@dataclass(frozen=True, slots=True)
class Exports:
    """Where exports go, and when: `always`, or only for VMs that cannot be read in place."""

    shares: Shares
    to: str
    always: bool

    def why(self, drives: Sequence[Mapping[str, Any]]) -> str | None:
        """Why this VM's disks are exported; None: they are read in place."""
        if self.always:
            return "as options.read_by says"
        for drive in drives:
            if drive["chain"] and not drive["physical"]:
                try:
                    self.shares.reader(drive["chain"])
                except UnsupportedFormat as error:
                    return f"since they cannot be read in place: {error.detail}"
        return None

    def path(self, name: str) -> str:
        """The folder of a snapshot's exports, in Windows' spelling."""
        if not _NAME.fullmatch(name):
            raise Internal(f"{name[:100]!r} is not a name of a SynVirt snapshot")
        return f"{self.to.rstrip(chr(92))}\\{name}"

    def remote(self, path: str) -> tuple[Remote, str]:
        """The share of a folder, and the folder's name in it."""
        place = self.shares.place(path)
        return self.shares.remote(place, named=True), place.name


def remove(exports: Exports, path: str) -> None:
    """Removes a folder of ours, and nothing else: its name is a snapshot's."""
    if _NAME.fullmatch(PureWindowsPath(path).name) is None:
        raise Internal(f"{path[:300]!r} is not a folder of a SynVirt export")
    remote, name = exports.remote(path)
    smb_shares.remove_folder(remote, name, _WRITTEN)


@dataclass(frozen=True, slots=True)
class Exporting:
    """The export of one disk. `closed`: the session is ending, and does not wait for the export any more."""

    host: Runs
    exports: Exports
    vm_id: str
    closed: threading.Event

    def opened(self, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ImageSpec:
        """CbtReset: changes since that one are unknown. SnapshotFailed: the snapshot is gone, or its share is full."""
        state, drive = tracking.drive_in(self.host, self.vm_id, snapshot, disk.key)
        name = self._name_of(state, snapshot)
        base = "" if since is None else str(tracking.point_of(self.vm_id, state, disk.key, since)["id"])
        part = "whole" if since is None else f"since-{since.rpartition('-')[2]}"
        folder = f"{self.exports.path(name)}\\{part}"
        if journals.read(state["notes"])[name].e.get(part) != DONE:
            self._exported(snapshot, name, part, base)
        remote, inner = self.exports.remote(folder)
        file = _file_of(drive, smb_shares.files_beneath(remote, inner), folder)
        form = _ENDINGS[PureWindowsPath(file).suffix.lower()]
        raw = RawSpec(path=file, remote=remote)
        if since is None:
            return ImageSpec(format=form, over=raw, root=remote, name=file)
        return ImageSpec(format=form, over=raw, name=file, alone=True)

    def _name_of(self, state: State, snapshot: SnapshotRef) -> str:
        name = next((name for name, one in journals.read(state["notes"]).items() if one.s == snapshot.id), None)
        if name is None:
            raise SnapshotFailed(
                f"snapshot {snapshot.id} of {self.vm_id} is not in the VM's notes any more",
                hint="someone removed SynVirt's line: the snapshot is taken again",
            )
        return name

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _exported(self, snapshot: SnapshotRef, name: str, part: str, base: str) -> None:
        """Goes on with an export that was begun before a crash, if Hyper-V still knows its job."""
        for _ in range(2):
            job = self._entry(name).e.get(part, "")
            job = job or self._begun(snapshot, name, part, base)
            if self._ends(job, base):
                self._note(name, part, DONE)
                return
            log.warning("Hyper-V has forgotten an export, which is started over", vm=self.vm_id, folder=part)
            self._note(name, part, "")
        raise SourceUnreachable(f"{self.vm_id}: Hyper-V forgets its exports", hint="did its management service restart?")

    def _begun(self, snapshot: SnapshotRef, name: str, part: str, base: str) -> str:
        folder = f"{self.exports.path(name)}\\{part}"
        self._note(name, part, "")
        remote, inner = self.exports.remote(folder)
        # The leftovers of an interrupted export.
        smb_shares.remove_folder(remote, inner, _WRITTEN)
        smb_shares.make_folder(remote, inner)
        try:
            answer = self.host.run("export", VmId=self.vm_id, SnapshotId=snapshot.id, PointId=base, Folder=folder)
        except HyperVRefused as error:
            raise self._refused(error.value, error.detail, base) from error
        job = str(answer["job"] or "") or DONE
        self._note(name, part, job)
        return job

    def _ends(self, job: str, base: str) -> bool:
        """True, once the export is complete. False: Hyper-V does not know the job."""
        logged = -1
        while job != DONE:
            found = self.host.run("job", JobId=job)
            state, percent = int(found["state"] or 0), int(found["percent"] or 0)
            if state == _FORGOTTEN:
                return False
            if state == _COMPLETED:
                return True
            if state > _COMPLETED:
                text = " ".join(str(found["text"] or "").split())[:300]
                raise self._refused(int(found["code"] or 0), f"the export failed with {found['code']} ({text})", base)
            if percent // 10 != logged:
                logged = percent // 10
                log.info("Hyper-V exports the disks", vm=self.vm_id, percent=percent)
            if self.closed.wait(POLL_S):
                raise SourceUnreachable(f"{self.vm_id}: the session was closed while Hyper-V exported its disks")
        return True

    def _refused(self, code: int, detail: str, base: str) -> SynvirtError:
        if code & 0xFFFFFFFF in _FULL_CODES or _DISK_FULL.search(detail):
            return SnapshotFailed(
                f"{detail}: there is no space in {self.exports.to}",
                hint="free some: an export is as large as the disks' data, the first time",
            )
        if (passing := tracking.passing(code, detail)) is not None:
            return passing
        if base:
            return CbtReset(
                f"{self.vm_id}: Hyper-V cannot export what changed since {base}: {detail}",
                hint="the whole disk is exported and compared once",
            )
        return SnapshotFailed(
            f"{self.vm_id}: {detail}",
            hint=f"may the computer accounts of the Hyper-V hosts write to {self.exports.to}? Its event log has the details",
        )

    def _entry(self, name: str) -> Entry:
        entry = journals.read(tracking.state_of(self.host, self.vm_id)["notes"]).get(name)
        if entry is None:
            raise SnapshotFailed(f"{self.vm_id}: {name} is not in the VM's notes any more", hint="it is taken again")
        return entry

    def _note(self, name: str, part: str, job: str) -> None:
        state = tracking.state_of(self.host, self.vm_id)
        journal = journals.read(state["notes"])
        entry = journal.get(name) or Entry()
        noted = entry.model_copy(update={"x": self.exports.path(name), "e": {**entry.e, part: job}})
        tracking.write(self.host, self.vm_id, state, journal | {name: noted})


def _file_of(drive: Mapping[str, Any], files: Sequence[str], folder: str) -> str:
    """The disk's file among all written files: it keeps its name, perhaps with another ending."""
    wanted = PureWindowsPath(str(drive["chain"][0]["path"]))
    disks = [one for one in files if PureWindowsPath(one).suffix.lower() in _ENDINGS]
    for same in (
        [one for one in disks if PureWindowsPath(one).name.lower() == wanted.name.lower()],
        [one for one in disks if PureWindowsPath(one).stem.lower() == wanted.stem.lower()],
    ):
        if len(same) == 1:
            return same[0]
    raise Internal(
        f"the export in {folder} has no file of {wanted.name}, but {', '.join(PureWindowsPath(one).name for one in disks[:8])}",
        hint="options.read_by=in_place reads the disks where they lie; please send us this line",
    )
