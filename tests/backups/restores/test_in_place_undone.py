"""How what a restore in place has made is undone, or goes forward: in which order, and what stays for a person to decide."""

import json
import stat
from collections.abc import Iterator
from contextlib import closing, nullcontext
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.backups.restores import in_place, present
from synvirt.backups.restores.domain import Place
from synvirt.backups.restores.in_place import CHECKPOINTS, FORWARD, OVERTAKEN, RESTORED, gone_forward
from synvirt.destinations.zfs_command import ZfsRefused, _refused
from synvirt.errors import BackupConflict, DiskWriteFailed, SourceUnsupported
from synvirt.jobs.ledger import Ledger, Sweep
from synvirt.kvm.connection import load
from synvirt.programs import ProgramFailed
from synvirt.store import Store
from synvirt.store.ledger import LedgerEntry
from tests.backups.restores.one_guest import Guest
from tests.fakes.restoring import XML
from tests.needs import need_libvirt

RUN = UUID(int=1)
PARTS = ("staged", "dropped", "swap", "defined")
WORDS = {"newer": "more recent snapshots or bookmarks exist", "missing": "dataset does not exist", "busy": "dataset is busy"}


def host_of(guest: Guest | None) -> Any:
    return SimpleNamespace(domain=lambda *_: guest)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(f"sqlite:///{tmp_path / 'test.db'}")) as made:
        yield made


def test_an_entry_says_that_it_goes_forward_until_nothing_is_left() -> None:
    """Whichever of them cannot be done now. Else the next start would begin it again, with disks that are no longer staged."""
    kinds = (OVERTAKEN, CHECKPOINTS, *PARTS)
    entries = [LedgerEntry(kind, kind) for kind in kinds]
    for failing in map(set, chain.from_iterable(combinations(kinds, count) for count in range(len(kinds) + 1))):
        sweep, done = Sweep(entries, in_place.ORDER), list[str]()
        for entry in sweep:
            if entry.kind in failing:
                sweep.stays(entry)
            else:
                done.append(entry.kind)
        left = set(kinds) - set(done)
        assert not left or OVERTAKEN in left, "it is the last one"
        assert left <= {OVERTAKEN} or CHECKPOINTS in left
        assert "swap" not in left or "dropped" in left, "what its volume held is nowhere else"
        assert done[-2:] == [CHECKPOINTS, OVERTAKEN] or failing


def test_the_ledger_turns_with_all_that_is_left_to_do_before_any_disk_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def swept(_run_id: UUID, *, then: tuple[LedgerEntry, ...], away_s: float) -> bool:
        assert away_s > 0
        calls.append([entry.kind for entry in then])
        return True

    ledger: Any = SimpleNamespace(replace=lambda _, entries: calls.append([entry.kind for entry in entries]), sweep=swept)
    copying: Any = SimpleNamespace(under_way=SimpleNamespace(run=SimpleNamespace(id=RUN)))
    monkeypatch.setattr(in_place, "_swap", calls.append)
    nothing: Any = None
    restored = in_place._Restored(nothing, ledger, copying, lambda: Guest(XML), resumed=False)
    # The second is for a file that is not there yet.
    swaps = [in_place.Swap("first", str(tmp_path)), in_place.Swap("second", str(tmp_path / "not there"))]
    restored._swaps, restored._snapshots = swaps, ["tank/volume@ours"]
    restored.commit("<domain/>")
    turned = ["staged", "staged", "dropped", "swap", "swap", "defined", CHECKPOINTS]
    assert calls == [turned, *swaps, [RESTORED]]


def test_one_that_was_overtaken_stays_so_even_once_what_was_staged_is_gone(tmp_path: Path, store: Store) -> None:
    need_libvirt()
    host = host_of(Guest(XML))
    ledger = Ledger(store.ledgers, "run", host="local", undo=in_place.undo(host, {}), order=in_place.ORDER)
    swap = LedgerEntry("swap", json.dumps([str(tmp_path / "gone"), str(tmp_path / "disk"), [], "x"]))
    ledger.replace(RUN, (LedgerEntry(OVERTAKEN, "x"), swap, LedgerEntry(CHECKPOINTS, "x")))
    before = ledger.of(RUN)
    assert gone_forward(host, ledger, RUN) is None
    assert ledger.of(RUN) == before


@pytest.mark.parametrize("fails", [False, True])
def test_one_of_which_a_part_is_left_is_not_restored_yet(store: Store, fails: bool) -> None:
    need_libvirt()
    host = host_of(Guest(XML))

    def staged(_run_id: UUID, _name: str) -> None:
        if fails:
            raise DiskWriteFailed("it cannot be removed")

    undo = in_place.undo(host, {}) | {"staged": staged}
    ledger = Ledger(store.ledgers, "run", host="local", undo=undo, order=in_place.ORDER)
    ledger.replace(RUN, (LedgerEntry("staged", "x.before"), LedgerEntry(CHECKPOINTS, "x")))
    found = gone_forward(host, ledger, RUN)
    assert (found is None) == fails
    left = {entry.kind for entry in ledger.of(RUN)}
    assert left == ({"staged", CHECKPOINTS} if fails else {RESTORED})
    assert left & FORWARD


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("refusal", ["", "newer", "missing", "busy"])
def test_a_volume_goes_back_unless_that_takes_what_others_did(
    monkeypatch: pytest.MonkeyPatch, runs: bool, refusal: str
) -> None:
    """Its snapshot goes once it has, and stays for a person to decide where it has not."""
    commands: list[str] = []

    def zfs(command: str, snapshot: str) -> None:
        commands.append(command)
        if command == "rollback" and refusal:
            raise _refused(ProgramFailed("zfs", 1, f"cannot rollback '{snapshot}': {WORDS[refusal]}"))

    monkeypatch.setattr(in_place, "Zfs", lambda: zfs)
    guest = Guest(XML)
    guest.runs_at = range(1, 100) if runs else range(0)
    is_raised = refusal == "busy" and not runs
    with pytest.raises(ZfsRefused) if is_raised else nullcontext():
        in_place.undo(host_of(guest), {})["snapshot"](RUN, '["tank/volume@ours", "x"]')
    gone = [] if runs or refusal in ("newer", "busy") else ["destroy"]
    assert commands == [*([] if runs else ["rollback"]), *gone]


@pytest.mark.parametrize("runs", [False, True])
def test_checkpoints_go_also_those_of_a_guest_that_was_started_on_its_new_disks(runs: bool) -> None:
    """libvirt itself removes the bitmaps of a guest that runs."""
    libvirt = need_libvirt()
    deleted: list[tuple[str, int]] = []

    def checkpoint(name: str) -> Any:
        return SimpleNamespace(getName=lambda: name, delete=lambda flags: deleted.append((name, flags)))

    guest: Any = Guest(XML)
    guest.runs_at = range(1, 100) if runs else range(0)
    guest.listAllCheckpoints = lambda _: [checkpoint("first"), checkpoint("second")]
    guest.checkpointLookupByName = checkpoint
    in_place.undo(host_of(guest), {})[CHECKPOINTS](RUN, "x")
    flags = 0 if runs else libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY
    assert deleted == [("first", flags), ("second", flags)]
    in_place.undo(host_of(None), {})[CHECKPOINTS](RUN, "x")


@pytest.mark.parametrize(
    ("size", "format_", "error"),
    [(99, "raw", None), (100, "raw", None), (101, "raw", BackupConflict), (100, "qcow2", SourceUnsupported)],
)
def test_a_device_must_hold_the_disk_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, format_: str, error: type[Exception] | None
) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(100))
    monkeypatch.setattr(stat, "S_ISBLK", lambda _: True)
    with nullcontext() if error is None else pytest.raises(error):
        present.check_place("vda", Place(str(device), "block", format_), size)


def test_a_definition_is_that_of_the_next_start_with_its_secrets() -> None:
    """It is defined again as it was."""
    need_libvirt()
    libvirt, asked = load(), list[int]()

    def described(flags: int) -> str:
        asked.append(flags)
        return "<domain/>"

    assert present.xml_of(SimpleNamespace(XMLDesc=described)) == "<domain/>"
    assert asked == [libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE]
