"""How long an outage may take: a forecast that is kept, in parts that name what is too long."""

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from synvirt.disks.changed import ChangedReader
from synvirt.disks.checking.sampling import BLOCK_BYTES, differing, would_see
from synvirt.migrations.planning.outage import Record, measured_parts, outage_forecast, record, too_long
from synvirt.model.job import BootAttempt, Migration, OutageForecast, Pass
from synvirt.model.kinds import Mode, State
from synvirt.model.rehearsal import Rehearsal, RehearsalState
from synvirt.sizes import MIB
from tests.fakes.disks import MemoryReader
from tests.house import live_plan

START = datetime(2026, 3, 1, tzinfo=UTC)


def later(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def done_job(shutdown_s: float, copy_s: float, boot_s: float) -> Migration:
    """One that completed, its guest away for these parts."""
    last = Pass(number=2, kind="final", bytes=MIB, seconds=copy_s, snapshot_at=START, finished_at=later(copy_s))
    boot = BootAttempt(disk_bus="virtio", began_at=START, ended_at=later(boot_s), sign="agent")
    return Migration(
        id=uuid4(),
        name="past",
        plan=live_plan(),
        state=State.COMPLETED,
        mode_effective=Mode.WARM,
        passes=(last.model_copy(update={"number": 1, "kind": "full"}), last),
        boot_attempts=(boot,),
        downtime_s=shutdown_s + copy_s + boot_s,
        created_at=START,
    )


def running(passes: tuple[Pass, ...], **plan: Any) -> Migration:
    return Migration(id=uuid4(), name="web", plan=live_plan(**plan), mode_effective=Mode.WARM, passes=passes, created_at=START)


def test_forecasts_are_held_against_what_came_of_them() -> None:
    def one(measured_s: float | None, p50_s: float, p95_s: float) -> Migration:
        forecast = OutageForecast(p50_s=p50_s, p95_s=p95_s, at=START)
        return done_job(1, 1, 1).model_copy(update={"downtime_s": measured_s, "outage": forecast})

    unforecast = done_job(20, 3, 45)
    assert record([unforecast, one(None, 10, 20)]) is None
    assert record([unforecast, one(12, 10, 20), one(20, 10, 20), one(30, 10, 20)]) == Record(3, 2, 10)
    # One that was shorter than its forecast is an error, too.
    assert record([one(4, 10, 20), one(13, 10, 20), one(2, 10, 20)]) == Record(3, 3, 6)


def test_parts_are_what_an_outage_was_made_of() -> None:
    assert measured_parts(done_job(20, 3, 45)) == {"shutdown": 20, "last copy": 3, "boot": 45}
    assert measured_parts(done_job(20, 3, 45).model_copy(update={"downtime_s": None})) is None
    assert measured_parts(done_job(20, 3, 45).model_copy(update={"state": State.FAILED})) is None


def test_p95_holds_in_95_of_100_runs_of_changing_loads() -> None:
    """Sites of all ages, guests whose load wanders between the last delta and the cut-over, hosts of different speed."""
    kept, ratios = 0, []
    for seed in range(100):
        chance = random.Random(seed)
        shutdown, boot = chance.uniform(5, 60), chance.uniform(15, 180)
        spread = chance.uniform(0.05, 0.35)
        speed = chance.uniform(50, 800) * MIB

        def some(middle: float, spread: float = spread, chance: random.Random = chance) -> float:
            return middle * math.exp(chance.gauss(0, spread))

        past = [done_job(some(shutdown), some(5), some(boot)) for _ in range(chance.randrange(2, 30))]
        rate = chance.uniform(0.2, 20) * MIB
        passes = [Pass(number=1, kind="full", bytes=20000 * MIB, seconds=20000 * MIB / speed, snapshot_at=START)]
        passes[0] = passes[0].model_copy(update={"finished_at": later(passes[0].seconds)})
        moment = passes[0].seconds
        before = 0.0
        for number in range(2, chance.randrange(3, 8)):
            rate *= math.exp(chance.gauss(0, 0.3))  # it wanders
            changed = int(rate * (moment - before))
            seconds = 2 + changed / some(speed, 0.1)
            at, end = later(moment), later(moment + seconds)
            one = Pass(number=number, kind="delta", bytes=changed, seconds=seconds, snapshot_at=at, finished_at=end)
            passes.append(one)
            before, moment = moment, moment + seconds
        found = outage_forecast(running(tuple(passes)), past, converts=False, starts=True, at=later(moment))
        assert found is not None
        off = some(shutdown)
        changed_last = rate * math.exp(chance.gauss(0, 0.3)) * (moment - before + off)
        really = off + 2 * some(1) + changed_last / some(speed, 0.1) + some(boot)
        kept += really <= found.p95_s
        ratios.append(found.p95_s / really)
    assert kept >= 95
    # A p95 that is kept by being huge is no use.
    assert sorted(ratios)[50] < 2


def test_it_is_there_from_the_first_pass_on() -> None:
    first = Pass(number=1, kind="full", bytes=MIB, seconds=5, snapshot_at=START)
    assert outage_forecast(running((first,)), [], converts=False, starts=True, at=START) is None
    first = first.model_copy(update={"finished_at": later(5)})
    found = outage_forecast(running((first,)), [], converts=True, starts=True, at=later(5))
    assert found is not None
    assert [(part.name, part.measured) for part in found.parts] == [
        *(("shutdown", 0), ("last copy", 0), ("conversion", 0), ("boot", 0))
    ]
    assert found.p50_s < found.p95_s
    found = outage_forecast(running((first,)), [done_job(20, 3, 45)] * 9, converts=False, starts=False, at=later(5))
    assert found is not None
    assert [(part.name, part.p50_s, part.measured) for part in found.parts] == [("shutdown", 20, 9), ("last copy", 3, 9)]
    cold = running((first,)).model_copy(update={"mode_effective": Mode.COLD})
    assert outage_forecast(cold, [], converts=False, starts=True, at=later(5)) is None


def test_what_was_rehearsed_is_what_is_expected() -> None:
    """This guest's own conversion and boot, however long those of others took; of a rehearsal that failed, nothing."""
    first = Pass(number=1, kind="full", bytes=MIB, seconds=5, snapshot_at=START, finished_at=later(5))

    def parts(*rehearsals: Rehearsal) -> dict[str, tuple[float, int]]:
        past = [done_job(20, 3, 45)] * 9
        found = outage_forecast(running((first,)), past, converts=True, starts=True, rehearsals=rehearsals, at=later(5))
        assert found is not None
        return {part.name: (part.p50_s, part.measured) for part in found.parts}

    passed = Rehearsal(
        id=uuid4(), migration_id=uuid4(), state=RehearsalState.PASSED, created_at=START, conversion_s=80, boot_s=120
    )
    failed = passed.model_copy(update={"state": RehearsalState.FAILED, "boot_s": 600.0})
    assert parts()["boot"] == (45, 9)
    assert parts(failed)["boot"] == (45, 9)
    assert parts(failed, passed)["boot"] == (120, 1)
    assert parts(failed, passed)["conversion"] == (80, 1)
    assert parts(passed)["shutdown"] == parts()["shutdown"]


def test_who_lies_is_compared_whole_while_the_guest_is_away() -> None:
    first = Pass(number=1, kind="full", bytes=MIB, seconds=500, snapshot_at=START, finished_at=later(500))
    found = outage_forecast(running((first,)), [done_job(20, 3, 45)], converts=False, starts=True, whole=True, at=later(500))
    assert found is not None
    assert found.parts[1].p50_s == pytest.approx(500)


def test_the_part_that_is_too_long_is_named() -> None:
    first = Pass(number=1, kind="full", bytes=MIB, seconds=5, snapshot_at=START, finished_at=later(5))
    job = running((first,), outage_budget_s=60)
    past = [done_job(20, 3, 45)] * 9
    found = outage_forecast(job, past, converts=False, starts=True, at=later(5))
    assert found is not None
    reported = too_long(found)
    assert reported is not None
    assert "60 s are allowed" in reported
    assert "the longest is boot" in reported
    assert too_long(found.model_copy(update={"budget_s": 600.0})) is None
    # What fits half of the time does not fit.
    assert too_long(found.model_copy(update={"budget_s": found.p95_s})) is None
    assert too_long(found.model_copy(update={"budget_s": (found.p50_s + found.p95_s) / 2})) is not None
    assert too_long(found.model_copy(update={"budget_s": None})) is None


@pytest.mark.parametrize("fields", [{"mode": "Cold"}, {"outage_budget_s": 0}])
def test_a_budget_is_for_warm_jobs(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"outage_budget_s|greater than 0"):
        live_plan(**{"mode": "Warm", "outage_budget_s": 60, **fields})


# Half of it has data.
HALVES = "A" * 128 + "-" * 128


class Lost(ChangedReader):
    """A disk whose source reports no changes, although these blocks have changed."""

    def __init__(self, over: MemoryReader, wrong: range) -> None:
        super().__init__(over, [])
        self._wrong = wrong

    def read_into(self, offset: int, buffer: memoryview) -> None:
        super().read_into(offset, buffer)
        if offset // BLOCK_BYTES in self._wrong:
            buffer[0] ^= 1


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("where", ["data", "holes", "all"])
def test_what_a_sample_would_see_it_sees(where: str, confidence: float) -> None:
    """How often a source is found out that loses this share of a disk, wherever it loses it, by the blocks that are read."""
    copy = MemoryReader(HALVES)
    blocks = copy.size // BLOCK_BYTES
    share = would_see(64 * BLOCK_BYTES, confidence)
    lost = math.ceil(share * blocks)
    found, chance = 0, random.Random(where)
    for seed in range(200):
        first, last = {"data": (0, blocks // 2), "holes": (blocks // 2, blocks), "all": (0, blocks)}[where]
        at = chance.randrange(first, last - lost + 1)
        offset, checked = differing(Lost(copy, range(at, at + lost)), copy, f"{seed}", 64)
        assert offset is not None or checked == 64 * BLOCK_BYTES
        found += offset is not None
    # Four standard deviations of 200 tries.
    assert found >= 200 * confidence - 4 * math.sqrt(200 * confidence * (1 - confidence))


def test_a_larger_sample_would_see_less() -> None:
    assert would_see(0) == 1.0
    assert would_see(4096 * BLOCK_BYTES) < would_see(64 * BLOCK_BYTES) < 0.1
    for blocks in (64, 512):
        assert (1 - would_see(blocks * BLOCK_BYTES)) ** (blocks / 2) == pytest.approx(0.05)
