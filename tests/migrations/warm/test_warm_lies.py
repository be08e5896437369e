"""The warm engine over a source that lies about what changed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import Extent
from synvirt.disks.changed import ChangedReader
from synvirt.disks.checking.block_hashes import digest_of
from synvirt.disks.checking.ledger import BLOCK_BYTES as LEDGER_BYTES
from synvirt.disks.checking.sampling import BLOCK_BYTES, LEAST_BLOCKS, MOST_BLOCKS, SHARE, blocks_to_check, differing, would_see
from synvirt.disks.checking.unchanged import all_unchanged
from synvirt.migrations.warm import deciding
from synvirt.model.kinds import State
from synvirt.sizes import KIB, MIB
from tests.cases import cases
from tests.drawn import shared_in_a_file
from tests.fakes.disks import BLOCK_BYTES as DISK_BLOCK_BYTES
from tests.fakes.disks import MemoryReader, MemoryWriter
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan
from tests.migrations.warm.warm_house import DISK, content, error, in_state, once, source_bytes


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


def test_a_comparison_is_remembered_for_longer_than_its_pass_is_listed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held job makes dozens of deltas a day."""
    monkeypatch.setattr("synvirt.migrations.passes.PASSES_KEPT", 2)
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(warm={"verify": "full", "cutover": "manual", "interval_s": 0.01}))
    compared = set[int]()

    def looked() -> None:
        passes = house.store.get(job.id).passes
        compared.update(one.number for one in passes if one.verify)
        if passes and passes[-1].number == 8:
            house.store.on_commit = lambda: None
            house.intake.cutover(job.id)

    house.store.on_commit = looked
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert compared == {2}
    assert [one.number for one in ended.passes[:2]] == [1, 2]
    assert len(ended.passes) == 4


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
    reported = house.rooms.receipts.content(ended.id)
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
    reported = house.rooms.receipts.content(ended.id)
    assert reported is not None
    assert reported.statement["tracking"] == {"confidence": 0.95, "distrusted": ended.distrusted}


LEDGER_BLOCKS, TAIL = 3, 70000


@shared_in_a_file
def _copied() -> tuple[bytes, list[bytes]]:
    """Blocks of the ledger, of which the first is of zeros and the last a part; and their hashes."""
    blocks = [bytes(LEDGER_BYTES), *(content(LEDGER_BYTES, 3 + block) for block in range(1, LEDGER_BLOCKS)), content(TAIL, 3)]
    return b"".join(blocks), [digest_of(memoryview(bytearray(block))) for block in blocks]


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
    size, (copied, digests) = LEDGER_BLOCKS * LEDGER_BYTES + TAIL, _copied()
    now_there = bytearray(copied)
    starts = [block * LEDGER_BYTES for block in range(LEDGER_BLOCKS + 1)]
    area = (starts[changed], 4096)
    wrong = [starts[block] + place // BLOCK_BYTES * BLOCK_BYTES for block, reported in enumerate(truth) if not reported]
    wrong = [at for at in wrong if at >= sum(area) or at < area[0]]
    for at in wrong:
        now_there[at] ^= 1
    source, volume = Bytes(bytes(now_there)), Bytes(copied)

    def digest(block: int) -> bytes | None:
        return digests[block] if known[block] else None

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


def test_looking_for_lies_reads_little(house: House, tmp_path: Path) -> None:
    large = tmp_path / "large.raw"
    with large.open("wb") as file:
        for number in range(40):
            file.write(content(MIB, number))
    house.platform.add_vm(VM, {DISK: large})
    job = house.intake.submit(live_plan())

    def write() -> None:
        for number in range(1, 31):
            house.platform.guest_writes(VM, DISK, number * MIB, content(MIB, 100 + number))

    once(house, job, in_state(State.DELTA_SYNCING), write)
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
