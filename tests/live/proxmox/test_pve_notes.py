"""What this host notes of a VM of Proxmox VE: before anything is made or stopped there, and whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.live.proxmox.farewell import Notes, Stopped

FIRST, SECOND = "synvirt-job-1", "synvirt-job-2"
AREAS = {f"{FIRST}.scsi0": [(0, 65536), (1 << 30, 512)], f"{FIRST}.scsi1": [], f"{SECOND}.scsi0": [(4096, 4096)]}


def test_changes_are_known_until_the_guest_is_started(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    assert notes.since("100", "a start", f"{FIRST}.scsi0") is None
    notes.put("100", "a start", AREAS)
    again = Notes(tmp_path / "notes")
    assert again.since("100", "a start", f"{FIRST}.scsi0") == ((0, 65536), (1 << 30, 512))
    assert again.since("100", "a start", f"{FIRST}.scsi1") == (), "nothing changed there, which is known"
    assert again.since("100", "a start", f"{FIRST}.scsi2") is None
    assert again.since("100", "a later start", f"{FIRST}.scsi0") is None
    assert again.since("101", "a start", f"{FIRST}.scsi0") is None


def test_the_changes_of_a_snapshot_go_with_it_and_those_of_another_stay(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.put("100", "a start", AREAS)
    notes.forget("100", FIRST)
    assert notes.since("100", "a start", f"{FIRST}.scsi0") is None
    assert notes.since("100", "a start", f"{SECOND}.scsi0") == ((4096, 4096),)
    notes.forget("100", SECOND)
    notes.forget("100", SECOND)
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_guest_is_noted_until_it_is_off_or_runs_on(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.stop("100", "a start", "UPID:1")
    notes.stop("101", "a start", None)
    found = Notes(tmp_path)
    assert [found.stopped(vm_id) for vm_id in ("100", "101", "102")] == [
        Stopped("a start", "UPID:1"),
        Stopped("a start", None),
        None,
    ]
    notes.forget_stop("100")
    assert found.stopped("100") is None


def test_a_note_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose name is lost keeps the files of its snapshot for ever."""
    notes = Notes(tmp_path)
    notes.held_on(FIRST, "node-a")
    notes.put("100", "a start", AREAS)
    notes.stop("100", "a start", None)

    def fail(_: int) -> None:
        raise OSError("no space left")

    writes: tuple[Callable[[], object], ...] = (
        lambda: notes.held_on(FIRST, "node-b"),
        lambda: notes.put("100", "a later start", {}),
        lambda: notes.stop("100", "a later start", None),
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        for write in writes:
            with pytest.raises(OSError, match="no space"):
                write()
    assert notes.held_on(FIRST, None) == "node-a"
    assert notes.since("100", "a start", f"{SECOND}.scsi0") == ((4096, 4096),)
    assert notes.stopped("100") == Stopped("a start", None)
    notes.let_go(FIRST)
    assert notes.held_on(FIRST, None) is None
