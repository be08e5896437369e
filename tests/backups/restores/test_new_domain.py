"""A new guest of a point: what it brings besides its disks, and what is undone of it."""

import base64
import contextlib
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from synvirt.backups.model import Status
from synvirt.backups.restores.domain import foreign
from synvirt.backups.restores.new_domain import NewDomain, put_firmware, put_tpm, undo
from synvirt.backups.working import Copying
from synvirt.errors import BackupConflict, Conflict, HostLacks
from synvirt.jobs.orders import DiskOrder
from tests.backups.restores.place import Place
from tests.fakes.backups import ended
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of
from tests.kinds.runs import rows_left
from tests.store.test_store import a_job

RUN = UUID(int=7)
TPM_XML = XML.replace("<devices>", "<devices><tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>")


def test_of_a_tpm_only_files_of_its_own_folder_are_made_and_given_to_swtpm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names come from the manifest."""
    given, noted = list[str](), list[tuple[str, bool]]()
    monkeypatch.setattr("synvirt.kvm.handing.give", lambda uri, path, *_: given.append(Path(path).name))
    names = ("tpm2-00.permall", "../../evil", "/evil", "a/b", ".hidden", "..")
    state = {name: base64.b64encode(b"state").decode() for name in names}
    manifest = cast("Any", SimpleNamespace(sealed=SimpleNamespace(tpm=state, domain_xml=TPM_XML)))
    folder = tmp_path / "tpm" / str(RUN)
    ledger = cast("Any", SimpleNamespace(record=lambda _, kind, name: noted.append((kind, folder.exists()))))
    put_tpm(restore_host_of(tmp_path, FakeHypervisor()), ledger, RUN, manifest)
    assert noted == [("tpm", False)], "it is noted before it is made"
    assert [one.relative_to(tmp_path).as_posix() for one in tmp_path.rglob("*") if one.is_file()] == [
        f"tpm/{RUN}/tpm2/tpm2-00.permall"
    ]
    assert given == [str(RUN), "tpm2", "tpm2-00.permall"]


def test_only_what_a_run_has_made_is_undone(tmp_path: Path) -> None:
    host = restore_host_of(tmp_path, FakeHypervisor())
    undone = undo(host)
    theirs, own = tmp_path / "tpm/theirs", tmp_path / "tpm" / str(RUN)
    for folder in (theirs, own):
        folder.mkdir(parents=True)
        undone["tpm"](RUN, str(folder))
    assert (theirs.exists(), own.exists()) == (True, False)
    name, destination = host.default()
    volume = destination.volume_name(RUN, "vda")
    destination.create(volume, 4096)
    undone["volume"](RUN, f"{name} {volume}")
    assert not destination.is_there(volume)


def test_a_firmware_of_this_host_is_named_where_it_is_another_than_the_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = restore_host_of(tmp_path, FakeHypervisor())
    builds: list[tuple[str, str] | None] = [("/here/OVMF_CODE.fd", "/here/V"), ("/here/OTHER.fd", "/here/V"), None]
    monkeypatch.setattr(host.hypervisor, "firmware", lambda *_, **__: builds.pop(0), raising=False)
    xml = "<domain><os><type>hvm</type><loader type='pflash'>/there/OVMF_CODE.fd</loader></os></domain>"
    for wanted in ([], ["its firmware is this host's own OTHER.fd, not OVMF_CODE.fd"]):
        domain = foreign(xml)
        before = list(domain.differences)
        put_firmware(host, RUN, domain)
        assert domain.differences[len(before) :] == wanted
    with pytest.raises(HostLacks, match=r"OVMF_CODE\.fd"):
        put_firmware(host, RUN, foreign(xml))


def test_of_two_restores_to_one_name_the_second_is_refused_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its end, by the guest of the first. By default it has the name of the point's guest."""
    (destination,) = place.restore_host.destinations.values()
    monkeypatch.setattr(destination, "why_away", lambda: "nothing is mounted")
    first = place.restore(name=None, instant=False)
    for name in (None, "web"):
        with pytest.raises(BackupConflict, match=f"run {first.id}.* web"):
            place.restore(name=name, instant=False)
    others = [place.restore(instant=False), place.restore(name="web", target="export", instant=False, start=False)]
    for one in (first, *others):
        if one.run.finished_at is None:
            place.backups.runs.cancel(one.id)
        ended(place.backups, one.id)
    again = place.restore(name="web", instant=False)
    place.backups.runs.cancel(again.id)
    ended(place.backups, again.id)


@pytest.mark.parametrize("instant_", [False, True])
def test_a_restore_and_a_migration_to_one_name_are_not_both_begun(
    place: Place, monkeypatch: pytest.MonkeyPatch, instant_: bool
) -> None:
    """The slower one failed when all of it was copied."""
    job, late = (a_job() for _ in range(2))
    for one in (job, late):
        place.store.add(one, host="local")
    place.store.claim(job.id, ["name web"], hint="")
    with pytest.raises(BackupConflict, match=f"migration {job.id}, which has not ended, has the name web"):
        place.restore(name="web", instant=instant_)
    claimed: list[str] = []

    def claim_too(copying: Copying, order: DiskOrder) -> None:
        with pytest.raises(Conflict) as caught:
            place.store.claim(late.id, ["name again"], hint="")
        claimed.append(caught.value.detail)
        copy(copying, order)

    copy = Copying.copy
    monkeypatch.setattr(Copying, "copy", claim_too)
    restored = place.restore(instant=instant_)
    run = ended(place.backups, restored.id)
    assert (run.status, run.error) == (Status.COMPLETED, None)
    assert claimed == [f"run {run.id}, which has not ended, has the name again too"]
    place.store.claim(late.id, ["name again"], hint="")


@pytest.mark.parametrize("instant_", [False, True])
def test_a_store_put_back_from_before_its_guest_leaves_the_guest_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, instant_: bool
) -> None:
    """Else the guest would be stopped, and its disks copied over."""
    now, old = place.folder / "test.db", place.folder / "old.db"

    def copied(of: Path, to: Path) -> None:
        with contextlib.closing(sqlite3.connect(of)) as store, contextlib.closing(sqlite3.connect(to)) as copy:
            store.backup(copy)

    def made(self: NewDomain, *arguments: Any) -> Any:
        if not old.exists():
            copied(now, old)
        return volumes(self, *arguments)

    volumes = NewDomain._volumes
    monkeypatch.setattr(NewDomain, "_volumes", made)
    restored = place.restore(instant=instant_)
    assert ended(place.backups, restored.id).status is Status.COMPLETED
    (volume,) = (place.folder / "volumes").rglob("*.raw")
    with volume.open("r+b") as disk:
        disk.write(b"what the guest has written")
    written = volume.read_bytes()
    place.close()
    copied(old, now)
    place.begin()
    run = ended(place.backups, restored.id)
    assert run.status is Status.FAILED
    assert run.error is not None
    assert "older than the guest" in run.error.message
    assert restored.guest.running
    assert volume.read_bytes() == written
    assert str(volume) in restored.guest.domain.xml
    assert rows_left(place.store) == []
