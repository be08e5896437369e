"""The rate that a wave's copies share: on all hosts, and each byte of theirs."""

from uuid import UUID, uuid4

import pytest

from synvirt.copying import copy, request_bytes
from synvirt.errors import Cancelled
from synvirt.fleet.changing import change_members
from synvirt.fleet.model import MemberState
from synvirt.fleet.records import member_of
from synvirt.fleet.sharing import rate_of
from synvirt.fleet.waves import Waves
from synvirt.jobs.copying_disks import Share
from synvirt.jobs.orders import GivenRate
from synvirt.jobs.wire import Message, Result
from synvirt.migrations.sharing import SharedRate
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode
from synvirt.model.values import now
from synvirt.sizes import KIB, MIB
from synvirt.store import Store
from tests.fakes.disks import BLOCK_BYTES, MemoryReader, MemoryWriter
from tests.fleet.made import member, plan, wave

LIMIT_BPS = 512 * KIB


def job(**fields: UUID) -> Migration:
    return Migration(id=uuid4(), name="db", plan=plan("db"), mode_effective=Mode.WARM, created_at=now(), **fields)


def test_hosts_are_given_one_piece_after_the_other(database_url: str) -> None:
    one, other = Store(database_url), Store(database_url)
    made = Waves(one.waves).create(wave(member("db")))
    begins = [rows.take_rate(made.id, 1000.0) for rows in (one.waves, other.waves, one.waves)]
    assert begins[0] == 0
    # By the database's clock, which goes on meanwhile: what is given ends 1000 s after what was given before it.
    assert 0 < begins[1] <= 1000
    assert 1000 < begins[2] <= 2000
    assert begins[2] - begins[1] <= 1000
    elsewhere = Waves(one.waves).create(wave(member("db")))
    assert other.waves.take_rate(elsewhere.id, 1.0) == 0, "another wave has a rate of its own"
    assert one.waves.take_rate(uuid4(), 1.0) == 0
    one.close()
    other.close()


def test_a_job_has_the_rate_of_the_wave_that_it_is_a_members_of(database_url: str) -> None:
    store = Store(database_url)
    limited = Waves(store.waves).create(wave(member("db"), limits={"bandwidth_bps": LIMIT_BPS}))
    free = Waves(store.waves).create(wave(member("db")))
    jobs = {made.id: job() for made in (limited, free)}
    for made in (limited, free):
        (row,), _ = store.waves.members(made.id)
        change_members(store.waves, made.id, [member_of(row)], {MemberState.WAITING}, {"job_id": jobs[made.id].id})
    rate = rate_of(store.waves, jobs[limited.id])
    assert rate is not None
    assert rate.bps == LIMIT_BPS
    assert rate.take(1000) == 0
    again = rate_of(store.waves, job(restart_of=jobs[limited.id].id))
    assert again is not None
    assert again.take(1) > 0, "a job that began anew on another host has the same rate before its wave knows of it"
    assert rate_of(store.waves, jobs[free.id]) is rate_of(store.waves, job()) is None
    store.close()


class Service:
    """It gives what it is asked for, this many times, and then wants the end."""

    def __init__(self, answers: int) -> None:
        self.wanted: list[int] = []
        self._answers = answers

    def say(self, message: Message) -> None:
        assert isinstance(message, Result)
        self.wanted.append(message.content["bytes"])

    def next_line(self) -> bytes:
        self._answers -= 1
        return GivenRate(bytes=0 if self.stop() else self.wanted[-1]).to_line()

    def stop(self) -> bool:
        return self._answers < 0


def test_a_copy_reads_no_more_than_it_was_given() -> None:
    service, blocks = Service(answers=3), "A" * 128
    reader, writer = MemoryReader(blocks), MemoryWriter(len(blocks) * BLOCK_BYTES)
    with pytest.raises(Cancelled):
        copy(reader, writer, threads=4, bandwidth_bps=MIB, shared=Share(service, 512 * KIB).take)
    # Requests of a quarter of a second; as much again as it was given, up to a piece.
    assert service.wanted == [256 * KIB, 256 * KIB, 512 * KIB, 512 * KIB]
    assert sum(length for _, length in reader.reads) <= MIB


@pytest.mark.parametrize("bps", [64 * KIB, MIB, 100 * MIB, 10_000 * MIB])
def test_a_piece_is_a_quarter_of_a_second_and_no_less_than_a_request(bps: int) -> None:
    rate = SharedRate(bps, lambda seconds: 0)
    assert rate.piece_bytes(last=False) == max(request_bytes(bps), bps // 4)
    assert rate.piece_bytes(last=True) == 4 * rate.piece_bytes(last=False)


def test_a_request_that_is_larger_than_a_piece_is_asked_for_whole() -> None:
    service, blocks = Service(answers=100), "A" * 128
    writer = MemoryWriter(len(blocks) * BLOCK_BYTES)
    copy(MemoryReader(blocks), writer, threads=2, shared=Share(service, 64 * KIB).take)
    assert sum(service.wanted) == 8 * MIB
    assert max(service.wanted) > 64 * KIB
