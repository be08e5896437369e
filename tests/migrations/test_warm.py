"""The warm engine's laws, in a house of fakes: a source that lies, forgets, grows or wakes."""

import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from synvirt.blocks import Extent
from synvirt.disks.changed import ChangedReader
from synvirt.disks.checking.block_hashes import digest_of
from synvirt.disks.checking.ledger import BLOCK_BYTES as LEDGER_BYTES
from synvirt.disks.checking.sampling import BLOCK_BYTES, LEAST_BLOCKS, MOST_BLOCKS, SHARE, blocks_to_check, differing, would_see
from synvirt.disks.checking.unchanged import all_unchanged
from synvirt.errors import OutageTooLong, SourceUnreachable, SynvirtError
from synvirt.jobs.process import started
from synvirt.jobs.slots import Resource, source, source_host
from synvirt.jobs.stop import Stop
from synvirt.live import SnapshotRef
from synvirt.migrations.job import Job
from synvirt.migrations.memory import PassMemory
from synvirt.migrations.patience import Patience
from synvirt.migrations.planning.forecast import forecast
from synvirt.migrations.warm import deciding, holding
from synvirt.model.job import Forecast, Migration, Pass
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import Shutdown
from synvirt.sizes import KIB, MIB
from synvirt.store.tables import memory
from tests.cases import cases
from tests.fakes.disks import BLOCK_BYTES as DISK_BLOCK_BYTES
from tests.fakes.disks import MemoryReader, MemoryWriter
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, VM, House, live_plan, states
from tests.jobs.migrations import migration
from tests.migrations.test_outage import done_job
from tests.patience import no_patience, quick_tries

DISK = "disk-0"


class Bytes:
    """A disk that is all data, and knows what was read of it."""

    max_readers = 4

    def __init__(self, content: bytes) -> None:
        self.content, self.size = content, len(content)
        self.reads: list[tuple[int, int]] = []

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads.append((offset, len(buffer)))
        buffer[:] = self.content[offset : offset + len(buffer)]

    def close(self) -> None:
        """Memory."""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    yield house
    house.close()


def content(size: int = 3 * MIB, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def source_bytes(house: House, key: str = DISK) -> bytes:
    return house.platform.disk_path(VM, key).read_bytes()


def once(house: House, job: Migration, happened: Callable[[Migration], bool], do: Callable[[], object]) -> None:
    """Do it at the first commit that finds the job so."""

    def committed() -> None:
        house.store.on_commit = lambda: None
        if happened(house.store.get(job.id)):
            do()
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed


def in_state(state: State) -> Callable[[Migration], bool]:
    return lambda job: job.state == state


def error(job: Migration) -> tuple[str, bool] | None:
    return (job.last_error.code, job.last_error.fatal) if job.last_error else None


def failed_as_it_was(house: House, job: Migration, code: str) -> None:
    assert (job.state, error(job)) == (State.FAILED, (code, True))
    assert house.leftovers(VM) == []
    assert house.platform.vm(VM)["power"] == "on"


# ── a source that lies ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_source_that_lies_is_found_out_and_compared_whole(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan())

    def lie() -> None:
        for offset in range(0, 4 * MIB, 256 * KIB):
            house.platform.guest_writes(VM, DISK, offset, content(128 * KIB, offset), tracked=False)

    once(house, job, in_state(State.DELTA_SYNCING), lie)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert error(ended) == ("E_MIG_CBT_RESET", False)
    assert ended.last_error is not None
    assert "whole disks are compared" in ended.last_error.message
    # Where it lied, as far as it goes from the block that the sample found.
    assert ended.distrusted is not None
    assert (reported := re.search(r"the source called (\d+) bytes at offset (\d+) unchanged", ended.distrusted)) is not None
    assert int(reported[1]) >= 128 * KIB, "all of a write, of which the sample saw one block"
    # What it says is not believed again, least of all by the last pass.
    assert [(one.kind, one.whole) for one in ended.passes] == [("full", False), ("delta", True), ("final", True)]
    assert all(one.bytes == 4 * MIB for one in ended.passes)


def test_a_source_that_lies_in_the_last_moment_is_found_out_too(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan())
    once(
        house,
        job,
        in_state(State.CUTTING_OVER),
        lambda: house.platform.guest_writes(VM, DISK, MIB, content(3 * MIB, 7), tracked=False),
    )
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_one_lie_that_a_sample_would_miss_is_found_where_all_is_compared(house: House) -> None:
    """One block of 8 MiB; then it is compared whole from there on."""
    house.platform.add_vm(VM, {DISK: content(8 * MIB)})
    job = house.intake.submit(live_plan(warm={"verify": "full"}))

    def lie() -> None:
        house.platform.guest_writes(VM, DISK, 5 * MIB + 512, b"x" * 512, tracked=False)

    once(house, job, lambda job: len(job.passes) == 2 and job.passes[1].finished_at is not None, lie)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert [(one.kind, one.verify, one.whole) for one in ended.passes] == [
        ("full", False, False),
        ("delta", False, False),
        ("delta", True, True),
        ("delta", False, True),
        ("final", False, True),
    ]
    assert ended.last_error is not None
    assert ended.last_error.message.startswith(
        f"disk {DISK}: the source called 1 blocks of 4096 bytes unchanged that have changed: {5 * MIB}+4096; "
    )
    assert ended.distrusted is not None
    assert ended.last_error.message.startswith(ended.distrusted)


def test_a_source_with_right_changes_is_compared_once_before_the_cut_over(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content(8 * MIB)})
    job = house.intake.submit(live_plan(warm={"verify": "full"}))
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.guest_writes(VM, DISK, MIB, content(MIB, 7)))
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert [one.verify for one in ended.passes] == [False, False, True, False, False]
    compared = ended.passes[2]
    assert compared.bytes_checked == 8 * MIB - compared.bytes
    assert all(one.bytes_checked <= LEAST_BLOCKS * BLOCK_BYTES for one in ended.passes if not one.verify)


def test_a_job_that_holds_compares_all_once_a_day(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(warm={"verify": "full", "cutover": "manual", "interval_s": 0.01}))

    def next_day() -> None:
        done = [one.verify for one in house.store.get(job.id).passes if one.finished_at is not None]
        if len(done) == 3:
            monkeypatch.setattr(deciding, "VERIFIED_FOR_S", 0.0)
        elif done.count(True) == 2:
            house.store.on_commit = lambda: None
            house.intake.cutover(job.id)

    house.store.on_commit = next_day
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert [one.verify for one in ended.passes[:3]] == [False, True, False]
    assert sum(one.verify for one in ended.passes) == 2


@pytest.mark.parametrize(("share", "verified"), [pytest.param(1e9, 1, id="time"), pytest.param(0.0, 0, id="none")])
def test_a_job_that_waits_long_enough_compares_all_by_itself(
    house: House, monkeypatch: pytest.MonkeyPatch, share: float, verified: int
) -> None:
    """Not in its first delta, which says how long the pauses are; and once a week."""
    monkeypatch.setattr(deciding, "AUTO_PAUSE_LEAST_S", 0.0)
    monkeypatch.setattr(deciding, "AUTO_SHARE", share)
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 0.01, "confidence": 0.99}))

    def asked() -> None:
        if sum(one.finished_at is not None for one in house.store.get(job.id).passes) == 4:
            house.store.on_commit = lambda: None
            house.intake.cutover(job.id)

    house.store.on_commit = asked
    ended = house.run(job.id)
    assert (ended.state, ended.last_error, ended.distrusted) == (State.COMPLETED, None, None)
    assert [one.verify for one in ended.passes[:4]] == [False, False, bool(verified), False]
    assert sum(one.verify for one in ended.passes) == verified
    assert ended.passes[1].would_see == would_see(ended.passes[1].bytes_checked, 0.99)
    assert house.rooms.receipts is not None
    reported = house.rooms.receipts.said(ended.id)
    assert reported is not None
    assert reported.statement["tracking"] == {"confidence": 0.99, "distrusted": None}


def test_a_pause_that_is_too_short_for_it_is_left_to_the_deltas(house: House) -> None:
    """A minute at the least: 0.01 s between two deltas are none."""
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(warm={"interval_s": 0.01}))
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.guest_writes(VM, DISK, MIB, content(MIB, 7)))
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert [one for one in ended.passes if one.verify] == []


BUDGETS = [
    pytest.param({}, {}, True, id="it fits"),
    pytest.param({"outage_budget_s": None}, {}, False, id="none to keep"),
    pytest.param({"warm": {"verify": "sample"}}, {}, False, id="not wanted"),
    pytest.param({"warm": {"max_passes": 3}}, {}, False, id="no passes left"),
    pytest.param({}, {"AT_ONCE_MOST_S": 0.0}, False, id="it takes too long"),
]


@pytest.mark.parametrize(("plan", "limits", "compares"), BUDGETS)
def test_a_job_that_cuts_over_at_once_compares_all_before_it_where_its_budget_allows(
    house: House, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], limits: dict[str, float], compares: bool
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(deciding, name, value)
    house.platform.add_vm(VM, {DISK: content(12 * MIB)})
    job = house.intake.submit(live_plan(**{"outage_budget_s": 36000, **plan}))
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.guest_writes(VM, DISK, MIB, content(MIB, 7)))
    ended = house.run(job.id)
    assert (ended.state, ended.last_error, ended.distrusted) == (State.COMPLETED, None, None)
    verified = [one.verify for one in ended.passes]
    assert verified == ([False, False, True, False, False] if compares else [False, False, False])
    assert [one.kind for one in ended.passes][-1] == "final"
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_one_lie_is_named_before_the_shutdown_of_a_job_that_cuts_over_at_once(house: House) -> None:
    """One block of 8 MiB, which a sample would all but never see."""
    house.platform.add_vm(VM, {DISK: content(8 * MIB)})
    job = house.intake.submit(live_plan(outage_budget_s=36000))

    def lie() -> None:
        house.platform.guest_writes(VM, DISK, 5 * MIB + 512, b"x" * 512, tracked=False)

    once(house, job, lambda job: len(job.passes) == 2 and job.passes[1].finished_at is not None, lie)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert ended.distrusted is not None
    assert f"{5 * MIB}+4096" in ended.distrusted
    assert house.rooms.receipts is not None
    reported = house.rooms.receipts.said(ended.id)
    assert reported is not None
    assert reported.statement["tracking"] == {"confidence": 0.95, "distrusted": ended.distrusted}


LEDGER_BLOCKS, TAIL = 3, 70000


@given(
    truth=st.lists(st.booleans(), min_size=LEDGER_BLOCKS + 1, max_size=LEDGER_BLOCKS + 1),
    known=st.lists(st.booleans(), min_size=LEDGER_BLOCKS + 1, max_size=LEDGER_BLOCKS + 1),
    changed=st.integers(0, LEDGER_BLOCKS),
    place=st.integers(0, TAIL - 1),
)
@cases(40)
def test_a_block_whose_hash_is_the_ledgers_is_not_read_from_the_copy(
    truth: list[bool], known: list[bool], changed: int, place: int
) -> None:
    """The source tells of some bytes of one block, which were copied; of others it lies."""
    size = LEDGER_BLOCKS * LEDGER_BYTES + TAIL
    copied = bytes(LEDGER_BYTES) + content(size - LEDGER_BYTES, 3)
    now_there = bytearray(copied)
    starts = [block * LEDGER_BYTES for block in range(LEDGER_BLOCKS + 1)]
    area = (starts[changed], 4096)
    wrong = [starts[block] + place // BLOCK_BYTES * BLOCK_BYTES for block, reported in enumerate(truth) if not reported]
    wrong = [at for at in wrong if at >= sum(area) or at < area[0]]
    for at in wrong:
        now_there[at] ^= 1
    source, volume = Bytes(bytes(now_there)), Bytes(copied)

    def digest(block: int) -> bytes | None:
        return digest_of(memoryview(bytearray(copied[starts[block] : starts[block] + LEDGER_BYTES]))) if known[block] else None

    found = all_unchanged(ChangedReader(source, [area]), volume, known=digest)
    assert found.checked_bytes == size - area[1]
    assert [at for one in found.extents for at in range(one.start, one.end, BLOCK_BYTES)] == wrong
    assert found.blocks == len(wrong)
    read = {offset // LEDGER_BYTES for offset, _ in volume.reads}
    unread = {block for block in range(LEDGER_BLOCKS + 1) if known[block]} - {at // LEDGER_BYTES for at in wrong}
    assert not read & unread
    assert read == set(range(LEDGER_BLOCKS + 1)) - unread


@given(changed=st.lists(st.booleans(), min_size=1, max_size=12), data=st.data())
@cases(200)
def test_every_block_that_is_left_out_and_differs_is_counted(changed: list[bool], data: st.DataObject) -> None:
    letters = st.text("AB0", min_size=len(changed), max_size=len(changed))
    there, here = data.draw(letters), data.draw(letters)
    areas = [(at * DISK_BLOCK_BYTES, DISK_BLOCK_BYTES) for at, one in enumerate(changed) if one]
    found = all_unchanged(ChangedReader(MemoryReader(there), areas), MemoryReader(here))
    wrong = [at for at, one in enumerate(changed) if not one and there[at] != here[at]]
    places = [at * DISK_BLOCK_BYTES + within for at in wrong for within in range(0, DISK_BLOCK_BYTES, BLOCK_BYTES)]
    assert found.checked_bytes == changed.count(False) * DISK_BLOCK_BYTES
    assert found.blocks == len(places)
    named = [at for extent in found.extents for at in range(extent.start, extent.end, BLOCK_BYTES)]
    assert named == places
    assert (found.missed_by_sample(0) < 1) == bool(wrong)


def test_looking_for_lies_reads_little(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content(40 * MIB)})
    job = house.intake.submit(live_plan())
    once(
        house,
        job,
        in_state(State.DELTA_SYNCING),
        lambda: house.platform.guest_writes(VM, DISK, MIB, content(30 * MIB, 7)),
    )
    delta = house.run(job.id).passes[1]
    assert delta.bytes == 30 * MIB
    assert 0 < delta.bytes_checked <= 0.02 * delta.bytes


BLOCKS = st.text("AB0-.", min_size=1, max_size=12)


@given(disk=BLOCKS, seed=st.text(max_size=8))
@cases(200)
def test_what_is_the_same_is_never_doubted(disk: str, seed: str) -> None:
    source = MemoryReader(disk)
    copy = MemoryReader(disk.replace(".", "-"))
    offset, checked = differing(source, copy, seed, LEAST_BLOCKS)
    assert offset is None
    assert checked <= disk.count(".") * DISK_BLOCK_BYTES
    assert all(disk[start // DISK_BLOCK_BYTES] == "." for start, _ in source.reads)


@given(disk=st.text("A.", min_size=1, max_size=8), at=st.integers(0, 7))
@cases(100)
def test_a_small_disk_is_looked_at_as_a_whole(disk: str, at: int) -> None:
    """As many blocks as are looked at anyway: then one byte is enough to be found."""
    at %= len(disk)
    volume = MemoryWriter(bytes(b"A" * DISK_BLOCK_BYTES) * len(disk))
    source = MemoryReader("A" * len(disk))
    source._extents = MemoryReader(disk)._extents
    copy = MemoryReader("A" * len(disk))
    changed = bytearray(volume.content)
    changed[at * DISK_BLOCK_BYTES + 5000] ^= 1
    copy.content = bytes(changed)
    offset, _ = differing(source, copy, "seed", len(disk) * DISK_BLOCK_BYTES // BLOCK_BYTES)
    assert (offset is not None) == (disk[at] == ".")


def test_the_sample_is_a_share_of_a_large_delta() -> None:
    assert blocks_to_check(0) == LEAST_BLOCKS
    assert blocks_to_check(1 << 30) * BLOCK_BYTES == pytest.approx(SHARE * (1 << 30), rel=0.01)
    assert blocks_to_check(1 << 40) == MOST_BLOCKS  # read one by one, at the end while the guest is off


# ── a source that forgets ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", [State.COPYING_FULL, State.DELTA_SYNCING, State.CUTTING_OVER])
def test_a_snapshot_that_is_gone_is_taken_again(house: House, state: State) -> None:
    """The source's host was restarted in the middle of a pass, and its guest went on writing; the worker ends with it."""
    house.rooms = replace(house.rooms, workers=started)
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(limits={"bandwidth_bps": 16 * MIB}))

    def under_way(now: Migration) -> bool:
        return now.state == state and any(house.store.watermarks(job.id, number) for number in _open_passes(now))

    def restart() -> None:
        house.platform.lose_snapshots(VM)
        for offset in (0, MIB, 3 * MIB):
            house.platform.guest_writes(VM, DISK, offset, content(100 * KIB, offset))
        _kill_workers()

    if state is not State.COPYING_FULL:
        once(house, job, in_state(state), lambda: _write_and_then(house, job, under_way, restart))
    else:
        once(house, job, under_way, restart)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["snapshots"] == {}


def _open_passes(job: Migration) -> list[int]:
    return [one.number for one in job.passes if one.finished_at is None]


def _write_and_then(house: House, job: Migration, happened: Callable[[Migration], bool], do: Callable[[], None]) -> None:
    house.platform.guest_writes(VM, DISK, 0, content(3 * MIB, 99))
    once(house, job, happened, do)


def _kill_workers() -> None:
    import os
    import signal

    from tests.processes import workers

    for pid in workers():
        os.kill(pid, signal.SIGKILL)


def test_change_ids_are_noted_before_the_older_snapshot_goes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    seen: list[bool] = []
    cleanup = FakeAdapter.cleanup

    async def watched(adapter: FakeAdapter, vm_id: str, name: str) -> None:
        number = int(name.rpartition("-")[2])
        passes = house.store.get(job.id).passes
        if passes and number < passes[-1].number:
            seen.append(house.store.memory.get(job.id, PassMemory, number + 1).snapshot is not None)
        await cleanup(adapter, vm_id, name)

    monkeypatch.setattr(FakeAdapter, "cleanup", watched)
    assert house.run(job.id).state == State.COMPLETED
    assert seen
    assert all(seen)


def test_it_shows_by_trying_that_changes_cannot_be_tracked(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("cannot_track", 1)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert states(ended) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    assert ended.mode_effective == Mode.COLD
    assert error(ended) == ("E_MIG_CBT_UNSUPPORTED", False)
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_job_with_a_budget_does_not_go_cold(house: House) -> None:
    """Its guest would be away for the whole copy."""
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("cannot_track", 1)
    ended = house.run(house.intake.submit(live_plan(outage_budget_s=3600)).id)
    failed_as_it_was(house, ended, "E_MIG_OUTAGE_TOO_LONG")
    assert "3600 s are allowed" in (ended.last_error.message if ended.last_error else "")
    assert ended.passes == ()


# ── a source that grows ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "new", "reported"),
    [
        ("disk-9", bytes(MIB), "disk disk-9 of 1048576 bytes was added"),
        (DISK, content(4 * MIB), "disk disk-0 was resized from 3145728 to 4194304 bytes"),
        ("disk-1", None, "disk disk-1 was removed"),
    ],
)
def test_other_disks_than_it_began_with_are_found(house: House, key: str, new: bytes | None, reported: str) -> None:
    house.platform.add_vm(VM, {DISK: content(), "disk-1": bytes(64 * KIB)})
    job = house.intake.submit(live_plan())
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.resize(VM, key, new))
    ended = house.run(job.id)
    failed_as_it_was(house, ended, "E_MIG_CONFLICT")
    assert ended.last_error is not None
    assert reported in ended.last_error.message


def test_a_skipped_disk_may_grow_and_is_never_held_still(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Collection[str] | None] = []
    snapshot = FakeAdapter.snapshot

    async def watched(adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        held.append(disks)
        return await snapshot(adapter, vm_id, name, disks)

    monkeypatch.setattr(FakeAdapter, "snapshot", watched)
    house.platform.add_vm(VM, {DISK: content(), "disk-1": bytes(64 * KIB)})
    job = house.intake.submit(live_plan(skip_disks=["disk-1"]))
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.resize(VM, "disk-1", bytes(MIB)))
    assert house.run(job.id).state == State.COMPLETED
    assert len(held) > 1
    assert all(disks == [DISK] for disks in held)


# ── a source that wakes ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_two_of_one_guest_never_run(house: House, mode: str) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(mode))
    once(house, job, in_state(State.STARTING), lambda: house.platform.power(VM, "on"))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.hypervisor.domains == {}
    assert house.volume(ended).exists()
    assert house.platform.vm(VM)["power"] == "on"


def test_two_of_one_guest_never_run_while_it_climbs_from_bus_to_bus(tmp_path: Path) -> None:
    house = House(tmp_path, hypervisor=FakeHypervisor(boots_from=("sata",)))
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    once(house, job, lambda now: len(now.boot_attempts) == 2, lambda: house.platform.power(VM, "on"))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert len(ended.boot_attempts) == 2
    assert house.hypervisor.domains == {}
    assert house.platform.vm(VM)["power"] == "on"
    house.close()


def test_a_domain_that_is_not_started_minds_no_living_source(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan("Cold", target={"start": False}))
    once(house, job, in_state(State.STARTING), lambda: house.platform.power(VM, "on"))
    assert house.run(job.id).state == State.COMPLETED


def test_a_guest_that_runs_here_is_not_undone_by_a_source_that_cannot_be_tidied(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_patience(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("cannot_mark", 99)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert (ended.state, error(ended)) == (State.COMPLETED, ("E_MIG_SOURCE_UNREACHABLE", False))
    assert len(house.hypervisor.domains) == 1
    # What is owed stays in the ledger.
    assert ("mark", VM) in [(entry.kind, entry.name) for entry in house.store.ledger(ended.id)]
    assert house.platform.vm(VM)["marks"] == []


def test_a_source_that_is_away_for_a_moment_costs_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    once(house, job, in_state(State.CUTTING_OVER), lambda: house.platform.fault("unreachable", 3))
    assert house.run(job.id).state == State.COMPLETED


def test_a_guest_that_is_given_back_runs_before_its_snapshots_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some platforms take hours for that."""
    house = House(tmp_path, hypervisor=FakeHypervisor(fail="boot"))
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    power: list[str] = []
    cleanup = FakeAdapter.cleanup

    async def seen(adapter: FakeAdapter, vm_id: str, name: str) -> None:
        if house.store.get(job.id).state is State.STARTING:
            power.append(house.platform.vm(vm_id)["power"])
        await cleanup(adapter, vm_id, name)

    monkeypatch.setattr(FakeAdapter, "cleanup", seen)
    ended = house.run(job.id)
    assert ended.state is State.FAILED
    assert set(power) == {"on"}
    assert house.platform.vm(VM)["snapshots"] == {}
    assert house.platform.vm(VM)["power"] == "on"
    house.close()


def by_hand(house: House, seed: int) -> None:
    """Somebody powers the guest on; it writes, and goes off again."""
    house.platform.power(VM, "on")
    house.platform.guest_writes(VM, DISK, 0, content(64 * KIB, seed))
    house.platform.power(VM, "off")


def test_a_snapshot_whose_answer_was_lost_is_taken_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name it would be found, as the guest was then."""
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    snapshot, wait = FakeAdapter.snapshot, Patience.wait
    lost: list[str] = []

    async def losing(adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        made = await snapshot(adapter, vm_id, name, disks)
        if house.platform.vm(VM)["power"] == "off" and not lost:
            lost.append(name)
            raise SourceUnreachable("the answer is lost")
        return made

    async def meanwhile(self: Patience, trouble: SynvirtError) -> None:
        by_hand(house, 7)
        await wait(self, trouble)

    monkeypatch.setattr(FakeAdapter, "snapshot", losing)
    monkeypatch.setattr(Patience, "wait", meanwhile)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert lost
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.volume(ended).read_bytes() == source_bytes(house)


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_no_last_snapshot_is_taken_of_a_guest_that_is_on(house: House, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody powered it on before; it is shut down once more."""
    house.platform.add_vm(VM, {DISK: content()})
    snapshot = FakeAdapter.snapshot
    woken: list[str] = []

    async def waking(adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        off = house.platform.vm(VM)["power"] == "off"
        if off and not woken:
            woken.append(name)
            house.platform.power(VM, "on")
        made = await snapshot(adapter, vm_id, name, disks)
        house.platform.guest_writes(VM, DISK, 0, content(64 * KIB, len(woken)))
        return made

    monkeypatch.setattr(FakeAdapter, "snapshot", waking)
    ended = house.run(house.intake.submit(live_plan(mode)).id)
    assert woken
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_a_guest_that_starts_again_and_again_is_given_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    shutdown = FakeAdapter.shutdown

    async def restarted(adapter: FakeAdapter, vm_id: str, manner: Shutdown, timeout_s: float | None) -> None:
        await shutdown(adapter, vm_id, manner, timeout_s)
        house.platform.power(vm_id, "on")

    monkeypatch.setattr(FakeAdapter, "shutdown", restarted)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.platform.vm(VM)["power"] == "on"
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_guest_that_was_on_by_hand_is_copied_once_more(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())

    def last_begun(now: Migration) -> bool:
        return bool(now.passes) and now.passes[-1].kind == "final"

    once(house, job, last_begun, lambda: by_hand(house, 8))
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert [one.kind for one in ended.passes].count("final") == 2
    assert house.volume(ended).read_bytes() == source_bytes(house)


@pytest.mark.parametrize(("mode", "state"), [("Warm", State.STARTING), ("Cold", State.STARTING), ("Cold", State.COPYING_FULL)])
def test_a_copy_that_lacks_what_its_source_wrote_by_hand_is_not_started(house: House, mode: str, state: State) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(mode))
    once(house, job, lambda now: now.state is state and bool(now.passes), lambda: by_hand(house, 9))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.hypervisor.domains == {}
    assert house.platform.vm(VM)["power"] == "on"
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_suspended_guest_loses_nothing(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    once(house, job, in_state(State.CUTTING_OVER), lambda: house.platform.power(VM, "suspended"))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.platform.vm(VM)["power"] == "suspended"
    assert house.platform.vm(VM)["snapshots"] == {}


# ── how long it takes ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_downtime_is_measured(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    ended = house.run(house.intake.submit(live_plan()).id)
    off = next(visit.at for visit in ended.history if visit.state == State.CUTTING_OVER)
    assert ended.downtime_s is not None
    assert ended.finished_at is not None
    assert 0 < ended.downtime_s <= (ended.finished_at - off).total_seconds()


def test_a_guest_that_was_off_has_no_downtime(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.power(VM, "off")
    ended = house.run(house.intake.submit(live_plan("Cold")).id)
    assert (ended.state, ended.downtime_s) == (State.COMPLETED, None)


def test_a_job_that_cannot_converge_says_why(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(warm={"max_passes": 2, "delta_threshold_bytes": 0}))

    def writes_at_every_commit() -> None:
        house.store.on_commit = lambda: None
        house.platform.guest_writes(VM, DISK, 0, content(2 * MIB, time.monotonic_ns()))
        house.store.on_commit = writes_at_every_commit

    house.store.on_commit = writes_at_every_commit
    ended = house.run(job.id)
    house.store.on_commit = lambda: None
    failed_as_it_was(house, ended, "E_MIG_DELTA_TOO_LARGE")
    assert ended.last_error is not None
    assert "its last deltas had 2.0, 2.0 MiB" in ended.last_error.message
    assert "MiB/s are copied" in ended.last_error.message
    assert ended.forecast is not None
    assert ended.forecast.change_rate_bps > 0


BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def passes(*sizes: int, every_s: float = 10, bps: float = 100 * MIB) -> list[Pass]:
    """The first is the full one; a snapshot every so often; copied at a steady rate."""
    return [
        Pass(
            number=number,
            kind="full" if number == 1 else "delta",
            bytes=size,
            seconds=size / bps,
            snapshot_at=BEGAN + timedelta(seconds=every_s * number),
            finished_at=BEGAN + timedelta(seconds=every_s * number + size / bps),
        )
        for number, size in enumerate(sizes, 1)
    ]


def test_there_is_no_forecast_before_the_first_delta() -> None:
    assert forecast([], at=BEGAN) is None
    assert forecast(passes(100 * MIB), at=BEGAN) is None


@given(
    rate_mib=st.floats(0.1, 1000),
    bps_mib=st.floats(1, 1000),
    count=st.integers(1, 5),
    wait_s=st.floats(0, 600),
)
@cases(200)
def test_a_steady_guest_is_foreseen_exactly(rate_mib: float, bps_mib: float, count: int, wait_s: float) -> None:
    done = passes(100_000 * MIB, *([int(rate_mib * MIB * 10)] * count), every_s=10, bps=bps_mib * MIB)
    at = BEGAN + timedelta(seconds=10 * len(done) + wait_s)
    seen = forecast(done, at=at)
    assert seen is not None
    assert seen.change_rate_bps == pytest.approx(rate_mib * MIB, rel=0.01)
    assert seen.throughput_bps == pytest.approx(bps_mib * MIB, rel=0.01)
    assert seen.expected_delta_bytes == pytest.approx(rate_mib * MIB * wait_s, rel=0.01, abs=64 * KIB)
    assert seen.expected_downtime_s == pytest.approx(rate_mib * wait_s / bps_mib, rel=0.02, abs=0.1)
    assert seen.converges == (seen.change_rate_bps < seen.throughput_bps)


# ── the operator's moment ────────────────────────────────────────────────────────────────────────────────────────────


def test_an_old_snapshot_is_followed_by_one_more_before_the_guest_goes_down(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked after days of holding: what has changed meanwhile is not copied while the guest is off."""
    monkeypatch.setattr(deciding, "FRESH_S", 0.0)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 600}))

    def holds(now: Migration) -> bool:
        return now.state == State.DELTA_SYNCING and now.forecast is not None and len(now.passes) == 2

    def ask() -> None:
        house.platform.guest_writes(VM, DISK, 0, content(2 * MIB, 8))
        house.intake.cutover(job.id)

    once(house, job, holds, ask)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert [(one.kind, one.bytes) for one in ended.passes[1:]] == [("delta", 0), ("delta", 2 * MIB), ("final", 0)]
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_nobody_is_shut_down_for_longer_than_the_budget_allows(house: House) -> None:
    """It holds, copies on, and says which part is too long; once there is reason to believe that it fits, it cuts over."""
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(outage_budget_s=20, warm={"interval_s": 0.01}))
    powers: list[str] = []

    def holds(now: Migration) -> bool:
        return now.last_error is not None and now.last_error.code == OutageTooLong.code and len(now.passes) > 3

    def faster_now() -> None:
        """Jobs that completed here meanwhile took a second each."""
        held = house.store.get(job.id)
        assert held.last_error is not None
        assert "20 s are allowed" in held.last_error.message
        assert held.outage is not None
        assert held.outage.p95_s > 20
        powers.append(house.platform.vm(VM)["power"])
        for _ in range(9):
            house.store.add(done_job(1, 1, 1), host="local")

    once(house, job, holds, faster_now)
    ended = house.run(job.id)
    assert powers == ["on"]
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert ended.outage is not None
    assert ended.outage.p95_s < 20
    assert [part.measured for part in ended.outage.parts if part.name != "last copy"] == [9, 9]
    assert ended.downtime_s is not None


def test_a_job_that_is_held_for_weeks_keeps_the_passes_that_matter(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.migrations.passes.PASSES_KEPT", 2)
    for name in ("HOLD_LEAST_S", "HOLD_MOST_S", "HOLD_UNKNOWN_S"):
        monkeypatch.setattr(holding, name, 0.01)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 0}))

    def often(now: Migration) -> bool:
        if now.state is State.DELTA_SYNCING:
            house.platform.guest_writes(VM, DISK, 0, content(64 * KIB, len(now.passes)))
        return bool(now.passes) and now.passes[-1].number == 6

    once(house, job, often, lambda: house.intake.cutover(job.id))
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED
    assert [one.kind for one in ended.passes] == ["full", "delta", "final"]
    assert ended.passes[-1].number >= 7
    marks = [house.store.watermarks(job.id, number).values() for number in range(ended.passes[-1].number + 1)]
    # The first, the last two, and one for all between.
    assert len([one for one in marks if one]) <= 4
    with house.store._reading() as db:
        rows = db.execute(select(memory.c.kind, memory.c.number).where(memory.c.migration_id == str(job.id))).all()
    # The first pass, the last two, the job and its course.
    assert len([row for row in rows if row.kind == "pass"]) <= 3
    assert {row.kind for row in rows if row.number == 0} <= {"job", "course"}
    assert ended.progress.bytes_done == sum(mark.bytes_done for one in marks for mark in one)
    assert ended.progress.bytes_done == sum(disk.bytes_done for disk in ended.disks)
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_the_more_a_held_guest_changes_the_sooner_its_next_delta(house: House) -> None:
    plan = live_plan(warm={"cutover": "manual", "delta_threshold_bytes": 60 * MIB})

    def pause_s(change_rate_bps: float | None) -> float:
        fields = {"expected_delta_bytes": 0, "expected_downtime_s": 0.0, "converges": True, "at": datetime.now(UTC)}
        rate = {"change_rate_bps": change_rate_bps, "throughput_bps": 1.0}
        found = None if change_rate_bps is None else Forecast.model_validate(fields | rate)
        job = migration(plan=plan, forecast=found)
        return holding.held_pause_s(Job(job, house.rooms, Stop()))

    rates = [None, 0.0, 1.0, MIB / 20, 100 * MIB]
    assert [pause_s(rate) for rate in rates] == [600, 3600, 3600, 1200, 300]


# ── many jobs, one source ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_guest_is_not_shut_down_before_it_may_be_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan("Cold"))
    power: list[str] = []

    def none_is_free(*_: object, **__: object) -> bool:
        power.append(house.platform.vm(VM)["power"])
        house.intake.cancel(job.id)
        return False

    monkeypatch.setattr(house.store.slots, "take", none_is_free)
    assert house.run(job.id).state is State.CANCELLED
    assert set(power) == {"on"}


@pytest.mark.parametrize("taken", [source_host(SOURCE_ID, "", most=4), source(SOURCE_ID, most=16)], ids=("host", "source"))
def test_a_job_that_waits_for_its_source_can_be_cancelled(house: House, taken: Resource) -> None:
    """For a host of it, or for the vCenter in front of them all."""
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    for _ in range(taken.most):
        assert house.store.slots.take(uuid4(), {taken.key: taken.most}, host="another")
    canceller = threading.Timer(0.5, lambda: house.intake.cancel(job.id))
    canceller.start()
    ended = house.run(job.id)
    canceller.join()
    assert ended.state == State.CANCELLED
    assert house.leftovers(VM) == []
    assert house.store.slots.count(taken.key) == (taken.most, 0)


def test_a_guest_that_stays_on_keeps_no_other_from_being_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may install updates for hours: a slot is for a pass, not for a wait."""
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("stays_on", 2)
    job = house.intake.submit(live_plan("Cold", shutdown="hold"))
    esxi, held = source_host(SOURCE_ID, "", most=4), list[tuple[int, int]]()
    shutdown, slept = FakeAdapter.shutdown, Stop.sleep_or_wake

    async def shutting_down(
        adapter: FakeAdapter, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None
    ) -> None:
        held.append(house.store.slots.count(esxi.key))
        await shutdown(adapter, vm_id, manner, timeout_s)

    async def sleeping(stop: Stop, seconds: float) -> None:
        held.append(house.store.slots.count(esxi.key))
        await slept(stop, min(seconds, 0.01))

    monkeypatch.setattr(FakeAdapter, "shutdown", shutting_down)
    monkeypatch.setattr(Stop, "sleep_or_wake", sleeping)
    assert house.run(job.id).state is State.COMPLETED
    assert held == [(1, 0), (0, 0), (1, 0), (0, 0), (1, 0)]
    assert house.store.slots.count(esxi.key) == (0, 0)
