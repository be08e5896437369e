"""Exports: raw and qcow2, where they may go, and what is left of those that fail."""

import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

import pytest
from pydantic import ValidationError

from synvirt.backups.authors import Authors
from synvirt.backups.model import BackupRun, RestoreRequest, Status
from synvirt.backups.restores import boot_test, new_domain, restoring
from synvirt.backups.restores.new_files import file_writer
from synvirt.backups.under_way import UnderWay
from synvirt.copying import Bucket
from synvirt.errors import BackupBadRequest, BackupConflict, Cancelled, DiskWriteFailed
from synvirt.jobs.slots import Turns
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.manifest import Manifest
from synvirt.repository.repository import Repository
from synvirt.sizes import MIB
from tests.backups.house import House, disk_content
from tests.needs import need
from tests.running.processes import until


@pytest.fixture
def house(house: House) -> House:
    house.image("web", disk_content())
    return house


def test_a_qcow2_export_is_whole_and_has_no_room_for_zeros(house: House) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    run = house.ended(house.backups.restore(point, RestoreRequest(target="export", format="qcow2", name="out")))
    assert (run.status, run.error) == ("completed", None)
    assert run.progress.bytes_done > 2 * CHUNK_BYTES
    path = house.folder / "exports/out/0-vda.qcow2"
    subprocess.run([need("qemu-img", "qemu-utils"), "check", "-q", "-f", "qcow2", path], check=True)
    compare = ["qemu-img", "compare", "-q", "-f", "qcow2", "-F", "raw", str(path), str(house.folder / "images/web")]
    subprocess.run(compare, check=True)
    assert path.stat().st_size < 2 * CHUNK_BYTES + CHUNK_BYTES // 2, "of the 5 MiB, 3 are zeros"
    assert {one.name for one in path.parent.iterdir()} == {"0-vda.qcow2", "domain.xml"}


@pytest.mark.parametrize("format_", ["raw", "qcow2"])
def test_an_exports_limit_reaches_its_worker(
    house: House, monkeypatch: pytest.MonkeyPatch, format_: Literal["raw", "qcow2"]
) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    passed: list[int] = []
    monkeypatch.setattr(Bucket, "take", lambda bucket, amount, *_: passed.append(amount))
    request = RestoreRequest(target="export", format=format_, name="out", bandwidth_bps=64 * MIB)
    run = house.ended(house.backups.restore(point, request))
    assert (run.status, sum(passed)) == ("completed", run.progress.bytes_done)


def test_damage_leaves_no_half_of_a_qcow2(house: House) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    (pack,) = (house.folder / "repository/packs").rglob("*.pack")
    content = bytearray(pack.read_bytes())
    content[100] ^= 1
    pack.write_bytes(content)
    run = house.ended(house.backups.restore(point, RestoreRequest(target="export", format="qcow2", name="out")))
    assert run.error is not None
    assert run.error.code == "E_BAK_DAMAGED"
    assert list((house.folder / "exports").iterdir()) == []


def test_an_export_goes_to_a_folder_that_a_setting_allows_and_to_no_other(house: House, tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "inner").mkdir(parents=True)
    other.mkdir()
    (allowed / "way-out").symlink_to(other)
    (allowed / "file").touch()
    house.backups._restoring._roots += (allowed,)
    (point,) = house.run(house.job("web")).restore_point_ids
    for path in (other, allowed / "way-out", allowed / "..", allowed / "missing", allowed / "file", tmp_path / "allowed-too"):
        with pytest.raises(BackupBadRequest, match="path"):
            house.backups.restore(point, RestoreRequest(target="export", path=str(path), name="out"))
    assert list(other.iterdir()) == []
    for folder in (allowed, allowed / "inner"):
        run = house.ended(house.backups.restore(point, RestoreRequest(target="export", path=str(folder), name="out")))
        assert (run.status, run.path) == ("completed", str(folder / "out"))
        assert [(folder / "out/0-vda.raw").read_bytes() == disk_content()] == [True]
        with pytest.raises(BackupConflict, match="out"):
            house.backups.restore(point, RestoreRequest(target="export", path=str(folder), name="out"))


def test_an_export_is_its_owners_alone_and_survives_a_power_cut(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its path only what lies in the default folder is shown. Its files are durable before they have their name."""
    (point,) = house.run(house.job("web")).restore_point_ids
    out, synced = house.folder / "exports/out", list[tuple[str, bool]]()
    monkeypatch.setattr(restoring, "sync_folder", lambda folder: synced.append((folder.name, out.exists())))
    run = house.ended(house.backups.restore(point, RestoreRequest(target="export", name="out")))
    assert (run.status, run.path) == ("completed", "exports/out")
    assert synced == [(f".{run.id}.partial", False), ("exports", True)]
    assert [stat.S_IMODE(one.stat().st_mode) & 0o027 for one in (out, out / "0-vda.raw")] == [0o000, 0o000]


def test_a_link_that_leads_nowhere_is_no_free_name(house: House) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    (house.folder / "exports").mkdir(exist_ok=True)
    (house.folder / "exports/out").symlink_to("nowhere")
    with pytest.raises(BackupConflict, match="already exists"):
        house.backups.restore(point, RestoreRequest(target="export", name="out"))


def test_a_target_of_a_hostile_definition_names_no_file_elsewhere(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    parsed = Repository.parsed

    def hostile(self: Repository, unread: Any) -> Manifest:
        found = parsed(self, unread)
        (disk,) = found.sealed.disks
        disks = (disk.model_copy(update={"target": "/../../" + "vd" * 200}),)
        return found.model_copy(update={"sealed": found.sealed.model_copy(update={"disks": disks})})

    monkeypatch.setattr(Repository, "parsed", hostile)
    assert house.ended(house.backups.restore(point, RestoreRequest(target="export", name="out"))).status == "completed"
    assert {one.name for one in (house.folder / "exports/out").iterdir()} == {f"0-{'vd' * 8}.raw", "domain.xml"}


def test_a_file_of_an_export_is_made_where_no_link_leads_and_its_owner_alone_reads_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        file_writer(tmp_path / "link", 4096, "raw")
    file_writer(tmp_path / "disk", 4096, "raw")
    assert (stat.S_IMODE((tmp_path / "disk").stat().st_mode), (tmp_path / "disk").stat().st_size) == (0o600, 4096)


def test_two_exports_of_one_name_are_never_under_way(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one copied everything, and failed as it was to get its name."""
    (point,) = house.run(house.job("web")).restore_point_ids
    read, go = Repository.read_chunk, threading.Event()

    def waits(self: Repository, name: bytes, into: memoryview) -> None:
        assert go.wait(60)
        read(self, name, into)

    monkeypatch.setattr(Repository, "read_chunk", waits)
    first = house.backups.restore(point, RestoreRequest(target="export", name="out"))
    try:
        with pytest.raises(BackupConflict, match=str(first.id)):
            house.backups.restore(point, RestoreRequest(target="export", name="out"))
        beside = house.backups.restore(point, RestoreRequest(target="export", name="beside"))
    finally:
        go.set()
    assert [house.ended(run).status for run in (first, beside)] == ["completed"] * 2


@pytest.mark.parametrize("format_", ["raw", "qcow2"])
def test_an_export_that_is_cancelled_leaves_nothing(house: House, monkeypatch: pytest.MonkeyPatch, format_: str) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    read = Repository.read_chunk
    cancelled: list[UUID] = []
    once = threading.Lock()

    def cancels(self: Repository, name: bytes, into: memoryview) -> None:
        if once.acquire(blocking=False):
            (newest,), _ = house.backups.runs.page(limit=1, cursor=None)
            cancelled.append(newest.id)
            house.backups.runs.cancel(newest.id)
        read(self, name, into)

    monkeypatch.setattr(Repository, "read_chunk", cancels)
    run = house.ended(house.backups.restore(point, RestoreRequest.model_validate({"target": "export", "format": format_})))
    assert (run.status, cancelled) == ("cancelled", [run.id])
    assert list((house.folder / "exports").iterdir()) == []


def test_what_a_killed_export_left_is_gone_at_the_next_start(house: House) -> None:
    run_id = uuid4()
    left = house.folder / "exports" / f".{run_id}.partial"
    house.backups._restoring.ledger.record(run_id, "folder", str(left))
    left.mkdir(parents=True)
    (left / "0-vda.raw").write_bytes(b"half")
    (house.folder / "exports/theirs").mkdir()
    house.close()
    again = House(house.folder)
    assert [one.name for one in (house.folder / "exports").iterdir()] == ["theirs"]
    again.close()


def test_what_a_service_before_made_goes_where_a_restore_is_cancelled_while_it_waits(house: House) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    house.backups.runs._urgent = Turns(0)
    run = house.backups.restore(point, RestoreRequest(target="export", name="out"))
    left = house.folder / "exports" / f".{run.id}.partial"
    house.backups._restoring.ledger.record(run.id, "folder", str(left))
    left.mkdir(parents=True)
    assert house.backups.runs.cancel(run.id).status == "cancelled"
    assert list((house.folder / "exports").iterdir()) == []
    assert house.store.ledgers.owned("run", host="local") == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"target": "export", "start": True}, "start has no meaning"),
        ({"target": "export", "instant": True, "start": True}, "start has no meaning"),
        ({"target": "new_domain", "format": "qcow2"}, "format has no meaning"),
        ({"target": "new_domain", "path": "/srv"}, "path has no meaning"),
        ({"target": "in_place", "format": "qcow2"}, "format has no meaning"),
        ({"target": "in_place", "name": "web"}, "name has no meaning"),
        ({"target": "export", "disks": ["vdz"]}, "no disk vdz"),
        ({"target": "in_place"}, "no hypervisor"),
    ],
)
def test_what_says_nothing_to_a_target_is_refused(house: House, fields: dict[str, object], named: str) -> None:
    (point,) = house.run(house.job("web")).restore_point_ids
    with pytest.raises(BackupBadRequest, match=named):
        house.backups.restore(point, RestoreRequest.model_validate(fields))


@pytest.mark.parametrize(
    "fields", [{}, {"target": "tape"}, {"target": "export", "name": "../x"}, {"target": "export", "path": "x"}]
)
def test_what_cannot_be_meant_is_no_request(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RestoreRequest.model_validate(fields)


def _cut_off(house: House, monkeypatch: pytest.MonkeyPatch, held: tuple[object, str], is_due: Callable[..., bool]) -> BackupRun:
    """An export that its service's end cuts off in that call."""
    (point,) = house.run(house.job("web")).restore_point_ids
    reached = threading.Event()
    really = getattr(*held)

    def call(*arguments: Any, **named: Any) -> object:
        if not is_due(*arguments):
            return really(*arguments, **named)
        reached.set()
        until(lambda: all(stop.is_set() for stop in list(house.backups.runs._stops.values())))
        raise Cancelled

    with monkeypatch.context() as patched:
        patched.setattr(*held, call)
        run = house.backups.restore(point, RestoreRequest(target="export", name="out"))
        assert reached.wait(60)
        house.close()
    return run


def test_a_folder_of_another_is_not_taken_for_an_export_that_was_cut_off(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it had made its own; of the same name, as nothing of that name was there when it was asked for."""
    run = _cut_off(house, monkeypatch, (Authors, "checked"), lambda *_: True)
    theirs = house.folder / "exports/out/theirs"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    again = House(house.folder)
    found = again.ended(run)
    assert (found.status, found.error and found.error.code) == ("failed", "E_BAK_DISK_WRITE_FAILED")
    assert [one.name for one in theirs.parent.iterdir()] == ["theirs"]
    again.close()


def test_a_folder_of_another_is_not_taken_for_an_export_whose_files_are_complete(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is copied, and has not got its name yet, which another has taken since."""
    run = _cut_off(house, monkeypatch, (UnderWay, "move"), lambda _, status, **__: status is Status.COMMITTING)
    theirs = house.folder / "exports/out/theirs"
    theirs.parent.mkdir()
    theirs.touch()
    again = House(house.folder)
    assert again.ended(run).status == "failed"
    assert [one.name for one in theirs.parent.iterdir()] == ["theirs"]
    again.close()


def test_a_file_that_is_gone_is_copied_again_though_it_had_been_copied(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _cut_off(house, monkeypatch, (UnderWay, "move"), lambda _, status, **__: status is Status.COMMITTING)
    (house.folder / f"exports/.{run.id}.partial/0-vda.raw").unlink()
    again = House(house.folder)
    assert again.ended(run).status == "completed"
    assert [(house.folder / "exports/out/0-vda.raw").read_bytes() == disk_content()] == [True]
    again.close()


@pytest.mark.parametrize(
    ("room", "kind", "name"), [(boot_test, "scratch", "{}"), (new_domain, "tpm", "{}"), (None, "folder", ".{}.partial")]
)
def test_a_folder_that_cannot_be_removed_stays_noted(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: Any, kind: str, name: str
) -> None:
    """With a guest's TPM in it, for example."""
    run_id = uuid4()
    undo = house.backups._restoring.ledger._undo if room is None else room.undo(None)
    folder = tmp_path / name.format(run_id)
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(DiskWriteFailed, match="cannot be removed"):
            undo[kind](run_id, str(folder))
    for _ in range(2):
        undo[kind](run_id, str(folder))
    assert not folder.exists()
