"""A repair by a job's id: what differs from its receipt is named, and repaired from the source; nothing else is ever written.
Kills and cancels: tests/kinds."""

import fcntl
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import xxhash

from synvirt.destinations.zfs import ZfsDestination
from synvirt.destinations.zfs_command import Zfs
from synvirt.disks.checking.ledger import BLOCK_BYTES
from synvirt.disks.raw.files import RawReader
from synvirt.errors import Conflict, SynvirtError
from synvirt.migrations.removing import Removal
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.repair import SPANS_LISTED, Span, listed
from synvirt.proof.keeping import Receipts
from synvirt.sizes import MIB
from tests.drawn import shared_in_a_file
from tests.fakes.workers import in_process
from tests.fakes.zfs import FakeZfs
from tests.house import VM, House, live_plan, offline_plan
from tests.needs import need, need_root

DISK = "disk-0"
DISK_BYTES = 5 * BLOCK_BYTES + 70_001


@shared_in_a_file
def content() -> bytes:
    """A constant would lie in each worker's memory as long as the suite runs."""
    return random.Random(41).randbytes(2 * BLOCK_BYTES) + bytes(3 * BLOCK_BYTES) + random.Random(42).randbytes(70_001)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path, workers=in_process)
    yield made
    made.close()


def source_of(house: House) -> Path:
    return house.imports / "appliance" / f"{DISK}.raw"


def plan(house: House, *, start: bool = False, **fields: Any) -> MigrationPlan:
    folder = house.imports / "appliance"
    folder.mkdir(exist_ok=True)
    source_of(house).write_bytes(content())
    return offline_plan(folder, target={"start": start}, **fields)


def moved(house: House, wanted: MigrationPlan | None = None) -> Migration:
    job = house.run(house.intake.submit(wanted or plan(house)).id)
    assert job.state is State.COMPLETED, job.last_error
    assert job.receipt is not None
    return job


def digest(path: Path, length: int | None = None) -> bytes:
    """Of the file, or of so many bytes at its start: by a hash that takes a tenth of SHA-256's time, since nobody lies here."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        left = path.stat().st_size if length is None else length
        while piece := file.read(min(left, MIB)):
            found.update(piece)
            left -= len(piece)
    return found.digest()


def digest_of(content: bytes) -> bytes:
    return xxhash.xxh3_128(content).digest()


def flip(path: Path, places: list[int]) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x40]))


def repaired(house: House, job: Migration, *, check_only: bool = False) -> Migration:
    return house.run(house.intake.repair(job.id, check_only=check_only).id)


def found(job: Migration, what: str = "differs") -> set[int]:
    """The numbers of the blocks."""
    assert job.repair is not None
    (disk,) = job.repair.disks
    spans: tuple[Span, ...] = getattr(disk, what)
    return {
        number for span in spans for number in range(span.start // BLOCK_BYTES, -(-(span.start + span.length) // BLOCK_BYTES))
    }


@pytest.mark.parametrize("seed", range(6))
def test_seeded_damage_is_named_and_repaired(seed: int, house: House) -> None:
    job, chance = moved(house), random.Random(seed)
    volume = house.volume(job)
    places = chance.sample(range(DISK_BYTES), chance.choice([1, 3, 9]))
    flip(volume, places)
    blocks, damaged = {place // BLOCK_BYTES for place in places}, digest(volume)
    seen = repaired(house, job, check_only=True)
    assert (seen.state, found(seen), digest(volume) == damaged) == (State.COMPLETED, blocks, True)
    mended = repaired(house, job)
    assert (mended.state, found(mended), found(mended, "left")) == (State.COMPLETED, blocks, set()), mended.last_error
    assert digest(volume) == digest_of(content())
    assert [visit.state for visit in mended.history] == [State.QUEUED, State.COPYING_FULL, State.COMPLETED]
    assert mended.progress.bytes_done == mended.progress.bytes_total == DISK_BYTES
    assert found(repaired(house, job)) == set()
    house.prove(job)


def test_the_source_is_read_where_the_volume_differs_and_nowhere_else(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    job = moved(house)
    flip(house.volume(job), [BLOCK_BYTES + 3])
    read: list[tuple[str, int, int]] = []
    read_into = RawReader.read_into

    def counted(self: RawReader, offset: int, buffer: memoryview) -> None:
        read.append((str(Path(f"/proc/self/fd/{self.descriptor}").readlink()), offset, len(buffer)))
        read_into(self, offset, buffer)

    monkeypatch.setattr(RawReader, "read_into", counted)
    assert repaired(house, job).state is State.COMPLETED
    assert [one[1:] for one in read if one[0] == str(source_of(house))] == [(BLOCK_BYTES, BLOCK_BYTES)]


def test_a_source_that_has_changed_is_named_and_never_written(house: House) -> None:
    job = moved(house)
    volume = house.volume(job)
    flip(volume, [7, BLOCK_BYTES + 7])
    flip(source_of(house), [100])
    ended = repaired(house, job)
    assert ended.last_error is not None
    assert (ended.state, ended.last_error.code) == (State.FAILED, "E_MIG_DISK_READ_FAILED")
    assert f"disk {DISK}: {BLOCK_BYTES} bytes at 0" in ended.last_error.message
    assert (found(ended), found(ended, "left")) == ({0, 1}, {0})
    # All but the first block is right again.
    flip(volume, [7])
    assert digest(volume) == digest_of(content())
    with pytest.raises(Conflict, match="is a repair"):
        house.intake.retry(ended.id, {})


def test_hashes_that_are_not_as_they_were_signed_repair_nothing(house: House) -> None:
    job = moved(house)
    flip(house.volume(job), [7])
    damaged = digest(house.volume(job))
    assert house.rooms.receipts is not None
    tar = house.rooms.receipts.path_of(job.id)
    content = tar.read_bytes()
    at = content.index(b"  0\n") - 1
    tar.write_bytes(content[:at] + (b"0" if content[at : at + 1] != b"0" else b"1") + content[at + 1 :])
    ended = repaired(house, job)
    assert ended.state is State.FAILED
    assert "its SHA-256 differs" in str(ended.last_error)
    assert digest(house.volume(job)) == damaged


def test_a_block_device_is_repaired_too(tmp_path: Path) -> None:
    need_root("losetup")
    need("losetup", "mount")
    with closing(FakeZfs(tmp_path / "zfs")) as fake:
        zfs = ZfsDestination("tank", "synvirt", zfs=Zfs(fake.program), devices=fake.devices, name_of=fake.name_of)
        with closing(House(tmp_path / "house", destination=zfs, workers=in_process)) as house:
            job = moved(house)
            places = [5, 3 * BLOCK_BYTES + 9, DISK_BYTES - 1]
            flip(house.volume(job), places)
            mended = repaired(house, job)
            assert (mended.state, found(mended)) == (State.COMPLETED, {0, 3, 5}), mended.last_error
            assert digest(house.volume(job), DISK_BYTES) == digest_of(content())


# ── when it may be ───────────────────────────────────────────────────────────────────────────────────────────────────


def _starts(house: House, job: Migration) -> UUID:
    assert job.domain is not None
    house.hypervisor.start(UUID(job.domain.uuid))
    return UUID(job.domain.uuid)


def ran(house: House, job: Migration) -> None:
    house.hypervisor.power_off(_starts(house, job))


def runs(house: House, job: Migration) -> None:
    _starts(house, job)


def domain_gone(house: House, job: Migration) -> None:
    house.hypervisor.domains.clear()


def receipt_lost(house: House, job: Migration) -> None:
    assert house.rooms.receipts is not None
    house.rooms.receipts.path_of(job.id).unlink()


def receipt_forged(house: House, job: Migration) -> None:
    assert house.rooms.receipts is not None
    tar = house.rooms.receipts.path_of(job.id)
    content = tar.read_bytes()
    assert content.count(b'"mode": "Cold"') > 0
    tar.write_bytes(content.replace(b'"mode": "Cold"', b'"mode": "Colt"'))


def volume_gone(house: House, job: Migration) -> None:
    house.volume(job).unlink()


def source_gone(house: House, job: Migration) -> None:
    source_of(house).unlink()


def source_grown(house: House, job: Migration) -> None:
    source_of(house).write_bytes(content() + bytes(512))


def under_way(house: House, job: Migration) -> None:
    house.intake.repair(job.id, check_only=True)


# What happened since, the message that refuses a repair, and whether a comparison alone is refused too.
CHANGES: list[tuple[Callable[[House, Migration], None], str, bool]] = [
    (ran, "started since", False),
    (runs, "runs: its volumes change", True),
    (domain_gone, "whether a guest wrote to the volumes since cannot be seen", False),
    (receipt_lost, "is not on this host any more", True),
    (receipt_forged, "is not as it was signed", True),
    (volume_gone, "cannot be read", True),
    (source_gone, "is not there any more: appliance holds no disk", False),
    (source_grown, f"no disk {DISK} of {DISK_BYTES} bytes any more", False),
    (under_way, "has not ended", True),
]


@pytest.mark.parametrize(("change", "why", "looks_too"), CHANGES, ids=lambda one: getattr(one, "__name__", None))
def test_what_may_not_be_repaired_is_refused_at_once(
    change: Callable[[House, Migration], None], why: str, looks_too: bool, house: House
) -> None:
    job = moved(house)
    change(house, job)
    jobs = len(house.store.documents(limit=10)[0])
    with pytest.raises(SynvirtError, match=why) as refused:
        house.intake.repair(job.id, check_only=False)
    assert refused.value.status == 409
    assert refused.value.hint
    if looks_too:
        with pytest.raises(Conflict, match=why):
            house.intake.repair(job.id, check_only=True)
        assert len(house.store.documents(limit=10)[0]) == jobs
    else:
        assert repaired(house, job, check_only=True).state is State.COMPLETED


def test_a_guest_that_its_job_has_started_is_looked_at_and_not_repaired(house: House) -> None:
    job = moved(house, plan(house, start=True))
    with pytest.raises(Conflict, match="runs: its volumes change"):
        house.intake.repair(job.id, check_only=True)
    assert job.domain is not None
    house.hypervisor.power_off(UUID(job.domain.uuid))
    flip(house.volume(job), [3 * BLOCK_BYTES])
    with pytest.raises(Conflict, match="has started guest"):
        house.intake.repair(job.id, check_only=False)
    assert found(repaired(house, job, check_only=True)) == {3}


def test_drivers_that_were_put_in_are_not_taken_out_again(house: House) -> None:
    job = moved(house, plan(house, conversion="always"))
    with pytest.raises(Conflict, match="drivers were put into"):
        house.intake.repair(job.id, check_only=False)
    assert found(repaired(house, job, check_only=True)) == {0}


def test_a_guest_that_is_started_while_the_repair_waits_is_left_alone(house: House) -> None:
    job = moved(house)
    flip(house.volume(job), [7])
    damaged = digest(house.volume(job))
    waiting = house.intake.repair(job.id, check_only=False)
    ran(house, job)
    ended = house.run(waiting.id)
    assert (ended.state, "started since" in str(ended.last_error)) == (State.FAILED, True)
    assert digest(house.volume(job)) == damaged


def test_a_volume_that_qemu_has_open_is_left_alone(house: House) -> None:
    """Whatever the hypervisor says: by the locks of QEMU itself."""
    job = moved(house)
    flip(house.volume(job), [7])
    damaged = digest(house.volume(job))
    descriptor = os.open(house.volume(job), os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 100, 1, 0))
        ended = repaired(house, job)
    finally:
        os.close(descriptor)
    assert (ended.state, "is in use by a guest" in str(ended.last_error)) == (State.FAILED, True)
    assert digest(house.volume(job)) == damaged


def test_only_a_completed_job_is_repaired_and_no_repair(house: House) -> None:
    queued = house.intake.submit(plan(house))
    with pytest.raises(Conflict, match="only the volumes of a completed job"):
        house.intake.repair(queued.id, check_only=False)
    job = house.run(queued.id)
    with pytest.raises(Conflict, match="is a repair itself") as refused:
        house.intake.repair(repaired(house, job).id, check_only=False)
    assert str(job.id) in str(refused.value.hint)


def test_the_job_of_another_host_is_repaired_there(tmp_path: Path, house: House) -> None:
    job = moved(house)
    other = House(tmp_path / "other", store_url=f"sqlite:///{tmp_path / 'store.db'}", host="kvm2", workers=in_process)
    try:
        with pytest.raises(Conflict, match="on host local"):
            other.intake.repair(job.id, check_only=False)
    finally:
        other.close()


def test_what_is_repaired_is_not_removed_meanwhile(house: House) -> None:
    job = moved(house)
    removal = Removal(house.store, here="local", destroy=lambda _: None, forget=lambda _: None)
    waiting = house.intake.repair(job.id, check_only=True)
    with pytest.raises(Conflict, match="a repair of job"):
        removal.remove(job.id, None)
    house.run(waiting.id)
    removal.remove(waiting.id, "keep")
    assert house.volume(job).exists()
    removal.remove(job.id, None)


def test_a_vm_that_is_on_again_is_not_what_was_copied(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = moved(house, live_plan("Cold", target={"start": False}))
    flip(house.volume(job), [7])
    with house.platform._state() as state:
        state["vms"][VM]["power"] = "on"
    with pytest.raises(Conflict, match="is on: it is no longer what was copied"):
        house.intake.repair(job.id, check_only=False)
    assert found(repaired(house, job, check_only=True)) == {0}
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_vm_that_was_reconfigured_since_is_repaired_from(house: House) -> None:
    """The guest here keeps its hardware, and its name is no reason against the repair."""
    house.platform.add_vm(VM, {DISK: content()})
    job = moved(house, live_plan("Cold", target={"start": False}))
    flip(house.volume(job), [7])
    house.platform.reconfigure(VM, cpu_count=4)
    ended = repaired(house, job)
    assert (ended.state, found(ended), ended.manifest) == (State.COMPLETED, {0}, job.manifest), ended.last_error


def test_a_host_without_receipts_says_so(house: House) -> None:
    job = moved(house)
    receipts: Receipts | None = house.rooms.receipts
    object.__setattr__(house.rooms, "receipts", None)
    with pytest.raises(Conflict, match="keeps no receipts"):
        house.intake.repair(job.id, check_only=True)
    object.__setattr__(house.rooms, "receipts", receipts)


# ── what is listed ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_spans_are_joined_and_what_is_found_again_changes_nothing() -> None:
    chance = random.Random(3)
    for _ in range(50):
        units = chance.sample(range(60), chance.randrange(1, 40))
        first, _ = listed((), [(unit * 4, 4) for unit in units])
        again, more = listed(first, [(unit * 4, 4) for unit in chance.sample(units, len(units) // 2)])
        assert (again, more) == (first, False)
        assert sorted(units) == [number for span in first for number in range(span.start // 4, (span.start + span.length) // 4)]
        assert all(one.start + one.length < other.start for one, other in pairwise(first))
    many, more = listed((), [(8 * unit, 4) for unit in range(SPANS_LISTED + 1)])
    assert (len(many), more) == (SPANS_LISTED, True)
