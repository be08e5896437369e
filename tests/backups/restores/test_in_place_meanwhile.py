"""Restores in place of a guest in memory: what others have, or do, while they are under way."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.backups import runs, trouble
from synvirt.backups.model import RestoreRequest, Status
from synvirt.backups.restores import in_place, present
from synvirt.backups.restores.in_place import Swap
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import Copying
from synvirt.destinations.zfs_command import _refused
from synvirt.errors import Cancelled, DiskWriteFailed
from synvirt.jobs.orders import DiskOrder
from synvirt.model.job import Domain
from synvirt.programs import ProgramFailed
from synvirt.store.store import StoreAway
from tests.backups.restores.one_guest import NOW, THEN, OneGuest
from tests.fakes.hypervisor import FakeDomain, FakeHypervisor
from tests.fakes.restoring import XML, as_a_volume
from tests.kinds.runs import rows_left
from tests.needs import need_libvirt
from tests.running.processes import until


@pytest.mark.parametrize("moment", ["before", "during", "of the guest itself", "of single disks"])
def test_a_guest_gets_no_address_back_that_another_one_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Neither would have a network. It may have been given away while its disks are copied. Its own are no hindrance."""
    need_libvirt()
    card = "<interface type='network'><mac address='{}'/><source network='default'/></interface></devices>"
    then, now = (card.format(f"52:54:00:00:00:0{number}") for number in (1, 2))
    with closing(OneGuest(tmp_path, XML.replace("</devices>", then))) as house:
        hypervisor, copy, copied = house.host.hypervisor, Copying.copy, list[str]()
        assert isinstance(hypervisor, FakeHypervisor)
        other = XML.replace(">web<", ">other<").replace("6b3f", "6b40").replace("</devices>", then)

        def taken() -> None:
            hypervisor.domains[UUID(int=9)] = FakeDomain(Domain(name="other", uuid=str(UUID(int=9)), xml=other))

        def copying_it(copying: Copying, order: DiskOrder) -> None:
            copied.append(order.key)
            copy(copying, order)
            if moment == "during":
                taken()

        monkeypatch.setattr(Copying, "copy", copying_it)
        house.image("web", NOW)
        if moment != "of the guest itself":
            house.guest.xml = house.guest.xml.replace(then, now)
        if moment != "during":
            taken()
        before = house.guest.xml
        run = house.restored(*(["vda"] if moment == "of single disks" else []))
        assert run is not None
        if moment.startswith("of"):
            assert (run.status, house.disk.read_bytes() == THEN) == (Status.COMPLETED, True)
            return
        assert (run.status, run.error and run.error.code) == (Status.FAILED, "E_BAK_CONFLICT")
        assert run.error is not None
        assert "52:54:00:00:00:01" in run.error.message
        assert (house.disk.read_bytes() == NOW, house.guest.xml) == (True, before)
        assert (copied, rows_left(house.store)) == (["vda"] if moment == "during" else [], [])


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneGuest]:
    """With another disk than in its point; it waits for nothing long."""
    need_libvirt()
    monkeypatch.setattr(trouble, "AWAY_PAUSES_S", (0.02,))
    monkeypatch.setattr("synvirt.jobs.ledger.LOOK_AGAIN_S", 0.02)
    with closing(OneGuest(tmp_path)) as made:
        made.image("web", NOW)
        yield made


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The disks that were copied."""
    copy, found = Copying.copy, list[str]()

    def copying_it(copying: Copying, order: DiskOrder) -> None:
        found.append(order.key)
        copy(copying, order)

    monkeypatch.setattr(Copying, "copy", copying_it)
    return found


@pytest.mark.parametrize("disks", [(), ("vda",)])
@pytest.mark.parametrize("looks", [1, 5])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_libvirtd_that_goes_away_when_the_disk_is_replaced_lets_it_be_finished(
    house: OneGuest, copied: list[str], monkeypatch: pytest.MonkeyPatch, looks: int, disks: tuple[str, ...], is_cancelled: bool
) -> None:
    """It is not copied again, and a cancel is too late."""
    swap = in_place._swap

    def away(one: Swap) -> None:
        swap(one)
        house.guest.away = looks
        (run,) = house.backups.runs.not_ended()
        if is_cancelled:
            house.backups.runs.cancel(run.id)

    monkeypatch.setattr(in_place, "_swap", away)
    run = house.restored(*disks)
    assert run is not None
    assert (run.status, run.error, run.domain and run.domain.name) == (Status.COMPLETED, None, "web")
    assert (copied, house.disk.read_bytes() == THEN, house.guest.away) == (["vda"], True, 0)
    assert ([one.name for one in (house.folder / "images").iterdir()], rows_left(house.store)) == (["web"], [])


def test_a_store_that_goes_away_when_the_guest_has_all_of_it_does_not_let_it_be_copied_again(
    house: OneGuest, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guest may have been started and shut down since."""
    note, failed = UnderWay.note, list[bool]()

    def away(under_way: UnderWay, **changes: Any) -> None:
        if changes.get("domain") is not None and not failed:
            failed.append(True)
            house.disk.write_bytes(b"since")
            raise StoreAway("the database does not answer")
        note(under_way, **changes)

    monkeypatch.setattr(UnderWay, "note", away)
    run = house.restored()
    assert run is not None
    assert (run.status, run.error, run.domain and run.domain.name) == (Status.COMPLETED, None, "web")
    assert (copied, house.disk.read_bytes(), rows_left(house.store)) == (["vda"], b"since", [])


@pytest.mark.parametrize("when", ["at its end", "at the next start", "as its guest was started"])
def test_a_volume_that_is_not_rolled_back_is_named_in_the_run_with_what_it_held(
    house: OneGuest, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Tools like sanoid take snapshots while it is written. The guest has a part of the point on it: nobody may miss that."""
    commands: list[str] = []

    def zfs(command: str, snapshot: str) -> None:
        commands.append(command)
        if command == "rollback":
            is_newer = when != "at the next start" or commands.count("rollback") > 1
            reason = "more recent snapshots or bookmarks exist" if is_newer else "pool I/O is currently suspended"
            raise _refused(ProgramFailed("zfs", 1, f"cannot rollback to '{snapshot}': {reason}"))

    def failed(*_: object) -> None:
        if when == "as its guest was started":
            house.guest.runs_at = range(house.guest.looks + 1, house.guest.looks + 100)
        raise DiskWriteFailed("the pool has no room")

    def check_place(*_: object) -> None:
        return None

    put, ended = house.store.backups.put_all, list[bool]()

    def away_once(*arguments: Any, **named: Any) -> None:
        if named.get("gone") and not ended:
            ended.append(True)
            raise StoreAway("the database does not answer")
        put(*arguments, **named)

    monkeypatch.setattr(house.store.backups, "put_all", away_once)
    monkeypatch.setattr(runs, "STORE_PAUSE_S", 0.02)
    as_a_volume(monkeypatch, zfs)
    monkeypatch.setattr(present, "check_place", check_place)
    monkeypatch.setattr(present, "size_of", lambda _: 0)
    monkeypatch.setattr(Copying, "copy", failed)
    house.guest.xml = house.guest.xml.replace("<disk type='file'", "<disk type='block'").replace("file=", "dev=")
    run = house.restored()
    assert run is not None
    assert (run.status, run.error and run.error.code) == (Status.FAILED, "E_BAK_DISK_WRITE_FAILED")
    if when == "at the next start":
        assert run.warnings == ()
        house.backups.close()
        house.begin()
        run = house.backups.runs.get(run.id)
    (warning,) = run.warnings
    assert warning.code == in_place.NO_WAY_BACK
    assert f"tank/volume@synvirt-restore-{run.id}" in warning.message
    assert ("its guest was started" in warning.message) == (when == "as its guest was started")
    assert warning.vm_id == str(UUID(int=7))
    assert (run.status, rows_left(house.store), "destroy" in commands) == (Status.FAILED, [], False)
    assert ended == [True]


def test_a_snapshot_that_stays_as_the_guest_was_started_before_the_next_service_is_named_in_the_run(
    house: OneGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its other disk, which has the point already. Only the log did."""
    reached = threading.Event()

    def cut_off(_swap: Swap) -> None:
        (run,) = house.backups.runs.not_ended()
        house.backups._restoring.ledger.record(run.id, "dropped", "tank/volume@ours")
        reached.set()
        until(house.backups.runs._stops[run.id].is_set)
        raise Cancelled

    commands: list[str] = []
    monkeypatch.setattr(in_place, "Zfs", lambda: lambda *arguments: commands.append(" ".join(arguments)))
    with monkeypatch.context() as patched:
        patched.setattr(in_place, "_swap", cut_off)
        run = house.backups.restore(house.point, RestoreRequest(target="in_place"))
        assert reached.wait(60)
        house.backups.close()
    house.guest.runs_at = range(house.guest.looks + 1, house.guest.looks + 1000)
    house.begin()
    ended = house.backups.runs.get(run.id)
    assert (ended.status, ended.error and ended.error.code) == (Status.FAILED, "E_BAK_INTERRUPTED")
    (warning,) = ended.warnings
    assert (warning.code, warning.vm_id) == (in_place.NO_WAY_BACK, str(UUID(int=7)))
    assert "tank/volume@ours has what" in warning.message
    assert (commands, house.disk.read_bytes() == NOW, rows_left(house.store)) == ([], True, [])
