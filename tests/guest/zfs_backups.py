"""Backups of guests whose disks are zfs volumes, on real zfs: what `zfs send` says has changed, and what a run leaves."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.backups.model import BackupJob, BackupJobRequest, BackupRepositoryRequest, BackupRun
from synvirt.backups.repositories import Repositories
from synvirt.backups.service import Backups
from synvirt.backups.sources import guest as source
from synvirt.backups.sources import zfs as source_zfs
from synvirt.backups.sources.guest import Sources
from synvirt.backups.sources.made import Made, MadeRows
from synvirt.backups.sources.zfs import OfZfs
from synvirt.backups.sources.zfs_moment import Moment
from synvirt.backups.sources.zfs_stream import changed, send
from synvirt.backups.working import Working
from synvirt.destinations.zfs_links import Links
from synvirt.disks import open_writer
from synvirt.disks.specs import BlockWriterSpec
from synvirt.jobs.process import Worker, Workers, started
from synvirt.repository.disk import PointReader
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.store import Store
from tests.fakes.backups import ended
from tests.fakes.workers import in_process
from tests.guest.zvols import POOL, content, zfs

KIB, MIB = 1 << 10, 1 << 20
SIZE = 4 * MIB
# To compare with it is quick; any() of a sector takes a third of a millisecond here.
NOTHING = bytes(512)
# Some seconds on a machine that is not emulated.
RUN_TIMEOUT_S = 400


def volume(block_bytes: int = 64 * KIB, size: int = SIZE) -> str:
    """In a folder of its own, where its clones will be: what others have left takes a moment to list."""
    name = f"{POOL}/guest-{uuid4().hex[:8]}/disk"
    zfs("create", "-p", "-s", "-V", str(size), "-o", f"volblocksize={block_bytes}", "-o", "volmode=dev", name)
    Links().device(name)
    return name


def beside(volumes: Iterable[str], kinds: str) -> list[str]:
    """The names of all of these kinds in the volumes' folders, and below them."""
    return zfs("list", "-Hp", "-o", "name", "-t", kinds, "-r", *(name.rpartition("/")[0] for name in volumes)).split()


def write(name: str, offset: int, data: bytes) -> None:
    writer = open_writer(BlockWriterSpec(path=Links().device(name), size_bytes=SIZE))
    writer.write(offset, memoryview(data))
    writer.flush()
    writer.close()


def discard(name: str, offset: int, length: int) -> None:
    subprocess.run(["blkdiscard", "-o", str(offset), "-l", str(length), Links().device(name)], check=True)


def moment(*volumes: str) -> Moment:
    made = Made(id=uuid4(), job_id=uuid4(), vm_id="x", way="zfs", name=source.new_name(uuid4()), volumes=volumes)
    found = Moment(made)
    found.take()
    return found


# ── what has changed ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("block_bytes", [8 * KIB, 64 * KIB])
def test_every_block_that_changed_is_in_the_list(block_bytes: int) -> None:
    """Overwritten, written again, discarded, and all of that in blocks that were holes. Nobody writes but this test, so the
    volume is what its newest snapshot is."""
    name, random = volume(block_bytes), Random(block_bytes)
    write(name, 0, random.randbytes(SIZE // 2))
    old = moment(name)
    before, guid = content(Links().device(name)), old.mark(name)
    for _ in range(3):
        for _ in range(4):
            write(name, random.randrange(SIZE - 40_000), random.randbytes(random.choice([1, 512, 5000, 40_000])))
        write(name, random.randrange(SIZE - 70_000), bytes(70_000))
        at = random.randrange(SIZE // 4096 - 64) * 4096
        discard(name, at, random.choice([4096, 65536, 200 * KIB]))
        new = moment(name)
        after = content(Links().device(name))
        listed, zeros = bytearray(SIZE), bytearray(SIZE)
        for one in changed(send(new.changed(name, old.name, guid, SIZE))):
            listed[one.start : one.end] = b"\1" * one.length
            # What is said to be zeros is, unless more is said of it.
            zeros[one.start : one.end] = bytes([one.zero]) * one.length
        assert [at for at in range(0, SIZE, 512) if zeros[at] and after[at : at + 512] != NOTHING] == []
        wrong = [at for at in range(0, SIZE, 512) if before[at : at + 512] != after[at : at + 512] and not listed[at]]
        assert wrong == []
        assert before != after
        assert listed.count(1) < SIZE  # it is a list of changes, and not of everything
        old.forget()
        old, before, guid = new, after, new.mark(name)
    old.forget()


def test_nothing_has_changed_is_an_empty_list_and_one_snapshot_is_of_one_moment() -> None:
    names = [volume(), volume()]
    old = moment(*names)
    guids = [old.mark(name) for name in names]
    new = moment(*names)
    for name, guid in zip(names, guids, strict=True):
        assert list(changed(send(new.changed(name, old.name, guid, SIZE)))) == []
    txgs = {zfs("get", "-Hp", "-o", "value", "createtxg", f"{name}@{new.name}") for name in names}
    assert len(txgs) == 1
    for one in (old, new):
        one.forget()
    assert zfs("list", "-Hp", "-o", "name", "-t", "snapshot,bookmark", "-r", *names) == ""


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Domain:
    """What a run asks of libvirt, which the lab has not."""

    def __init__(self, *volumes: str) -> None:
        self.volumes = volumes
        self.uuid = str(uuid4())

    def listAllSnapshots(self, _flags: int) -> list[Any]:  # noqa: N802
        return []

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        disks = "".join(
            f"<disk type='block'><driver type='raw'/><source dev='/dev/zvol/{name}'/><target dev='vd{letter}'/></disk>"
            for name, letter in zip(self.volumes, "abc", strict=False)
        )
        return f"<domain><uuid>{self.uuid}</uuid><name>guest</name><devices>{disks}</devices></domain>"

    def UUIDString(self) -> str:  # noqa: N802
        return self.uuid

    def name(self) -> str:
        return "guest"

    def isActive(self) -> bool:  # noqa: N802
        return True


class Connection:
    def __init__(self, domain: Domain) -> None:
        self.domain = domain

    def use(self) -> "Connection":
        return self


class House:
    """`workers`: what its next runs read with. A process takes half a minute here to begin, so one run has them."""

    def __init__(self, folder: Path, domain: Domain, workers: Workers = in_process) -> None:
        self.workers = workers
        for name in ("keyring", "repository"):
            (folder / name).mkdir(exist_ok=True)
        self.domain, self.store = domain, Store(f"sqlite:///{folder / 'test.db'}")
        self.ledger = MadeRows(self.store.backups.ledger, host="local")
        way = OfZfs("qemu:///system", self.ledger, tpm_folder=lambda: folder)
        connection: Any = Connection(domain)
        self.sources = Sources(connection, self.ledger, (way,))
        self.sources.start()
        self.sources.close()
        repositories = Repositories(self.store.backups, host="local", keyring=folder / "keyring")
        self.backups = Backups(
            self.store.backups,
            repositories,
            host="local",
            open_guest=self.sources.open,
            exports=folder / "exports",
            working=Working(self._worker),
        )
        self.backups.start()
        self._folder = folder

    def _worker(self) -> contextlib.AbstractAsyncContextManager[Worker]:
        return self.workers()

    def job(self) -> BackupJob:
        known, _ = self.backups.jobs(limit=1, cursor=None)
        if known:
            return known[0]
        request = BackupRepositoryRequest(name="here", kind="local", path=str(self._folder / "repository"))
        repository = self.backups.add_repository(request)
        return self.backups.add_job(
            BackupJobRequest(name="nightly", vm_ids=("guest",), repository_id=repository.id, quiesce="off")
        )

    def run(self) -> BackupRun:
        return self.ended(self.backups.run_job(self.job().id).id)

    def gone_on(self) -> BackupRun:
        """The newest run, which a service before this one left undone."""
        (newest,), _ = self.backups.runs.page(limit=1, cursor=None)
        return self.ended(newest.id)

    def ended(self, run_id: UUID) -> BackupRun:
        run = ended(self.backups, run_id, within_s=RUN_TIMEOUT_S)
        assert (run.status, run.error) == ("completed", None)
        return run

    def restored(self, point_id: UUID) -> list[bytes]:
        repository = self.backups.repositories.opened(self.job().repository_id)
        found = []
        for disk in repository.manifest(point_id).shown.disks:
            whole = bytearray(disk.size_bytes)
            PointReader(repository, disk).read_into(0, memoryview(whole))
            found.append(bytes(whole))
        return found

    def left(self) -> list[str]:
        """Beside the volumes themselves: names without their volumes."""
        return [name for name in beside(self.domain.volumes, "volume,snapshot,bookmark") if "synvirt-" in name]

    def close(self) -> None:
        self.backups.close()
        self.store.close()


def without_libvirt() -> None:
    """For this module alone: the lab has none, and what is called on a domain is answered by `Domain`."""
    setattr(source, "found", lambda connection, _: connection.domain)  # noqa: B010
    for module in (source, source_zfs):
        setattr(module, "translated", lambda *_: contextlib.nullcontext())  # noqa: B010
    setattr(source_zfs, "definition", lambda domain, _: domain.XMLDesc(0))  # noqa: B010


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    without_libvirt()
    made = House(tmp_path, Domain(volume(), volume()), in_process)
    yield made
    made.close()


def test_runs_read_what_changed_and_leave_bookmarks_alone(house: House, tmp_path: Path) -> None:
    """And in doubt they read everything; and one that is killed goes on, and leaves no more than any other."""
    first_volume, second_volume = house.domain.volumes
    random = Random(7)
    write(first_volume, 0, random.randbytes(3 * MIB))
    write(second_volume, MIB, random.randbytes(MIB))
    wanted = [content(Links().device(name)) for name in house.domain.volumes]
    with meanwhile(lambda: write(first_volume, 2 * MIB + 7, b"too late for this one")):
        first = house.run()
    assert (first.guests[0].way, first.warnings) == ("zfs", ())
    assert house.restored(first.restore_point_ids[0]) == wanted
    assert sorted(name.partition("#")[0] for name in house.left()) == sorted(house.domain.volumes)

    house.workers = started  # a process in its cage: zfs says before it what has changed
    discard(second_volume, MIB, 512 * KIB)
    wanted = [content(Links().device(name)) for name in house.domain.volumes]
    second = house.run()
    assert second.warnings == ()
    assert [disk.changes_only for disk in second.guests[0].disks] == [True, True]
    assert [disk.read_bytes for disk in second.guests[0].disks] == [CHUNK_BYTES, CHUNK_BYTES]  # not the holes too
    assert house.restored(second.restore_point_ids[0]) == wanted
    kept = house.left()
    assert len(kept) == 2

    house.close()
    killed(tmp_path, house.domain)
    assert len(house.left()) > len(kept)
    again = House(tmp_path, house.domain)
    assert again.gone_on().restore_point_ids != ()
    assert len(again.left()) == len(kept)
    assert [made.state for made in again.ledger.all()] == ["lasting"]
    check_doubts(again)
    again.close()


@contextlib.contextmanager
def meanwhile(happens: Callable[[], object]) -> Iterator[None]:
    """Before a guest's disks are read."""
    carry_out = Working.carry_out

    def opened(self: Working, *arguments: Any, **named: Any) -> None:
        happens()
        carry_out(self, *arguments, **named)

    Working.carry_out = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        Working.carry_out = carry_out  # type: ignore[method-assign]


def killed(folder: Path, domain: Domain) -> None:
    """A service that dies when it is about to read."""
    child = os.fork()  # a new Python would take a minute here to begin
    if child == 0:
        with meanwhile(lambda: os.kill(os.getpid(), signal.SIGKILL)):
            try:
                House(folder, domain).run()
            finally:
                os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def check_doubts(house: House) -> None:
    """Another bookmark of the same name, a disk that was resized: each is read as a whole, with a warning."""
    first_volume, second_volume = house.domain.volumes
    bookmark = next(name for name in house.left() if name.startswith(first_volume))
    zfs("destroy", bookmark)
    write(first_volume, 0, b"changed before the bookmark, which would not tell")
    zfs("snapshot", f"{first_volume}@theirs")
    zfs("bookmark", f"{first_volume}@theirs", bookmark)
    zfs("set", f"volsize={SIZE + MIB}", second_volume)
    run = house.run()
    assert [warning.code for warning in run.warnings] == ["E_BAK_DELTA_FALLBACK"] * 2
    assert "not the same as before" in run.warnings[0].message
    assert "resized" in run.warnings[1].message
    first, second = house.restored(run.restore_point_ids[0])
    assert first.startswith(b"changed before the bookmark")
    assert len(second) == SIZE + MIB
    assert zfs("list", "-Hp", "-o", "name", "-t", "snapshot", first_volume).split() == [f"{first_volume}@theirs"]
