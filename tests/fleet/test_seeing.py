"""A wave is seen as it is, though only what has changed since the last look is parsed."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.errors import NotFound
from synvirt.fleet.model import MemberState
from synvirt.fleet.seeing import Seeing
from synvirt.fleet.waves import Waves, change_members
from synvirt.model.kinds import State
from tests.fleet.made import member, plan, wave
from tests.house import House

S = MemberState


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "house")
    yield made
    made.close()


def test_each_look_is_that_of_a_service_that_has_just_begun(house: House) -> None:
    rows, waves = house.store.waves, Waves(house.store.waves)
    seeing, job_id = Seeing(rows), uuid4()
    wave_id = waves.create(wave(member("a"), member("b", "a"), member("c"))).id
    first = seeing.seen(wave_id)

    def as_anew() -> bool:
        return seeing.seen(wave_id) == Seeing(rows).seen(wave_id)

    assert as_anew()
    waves.go(wave_id)
    assert as_anew()
    change_members(rows, wave_id, [first.wave.members[0]], {S.WAITING}, {"state": S.SYNCING, "job_id": job_id})
    assert as_anew()
    house.intake.submit(plan("a"), job_id=job_id)
    assert as_anew()
    assert seeing.seen(wave_id).job_of(seeing.seen(wave_id).wave.members[0]) == house.store.get(job_id)
    house.store.change(job_id, State.QUEUED, lambda job: job.model_copy(update={"state": State.COPYING_FULL}))
    assert as_anew()
    rows.put_reasons(wave_id, {"b": "a is not there yet"})
    assert seeing.seen(wave_id).rows["b"].waits_for == "a is not there yet"
    waves.skip(wave_id, "c")
    assert as_anew()
    waves.cancel(wave_id)
    assert as_anew()
    waves.remove(wave_id)
    with pytest.raises(NotFound):
        seeing.seen(wave_id)


def test_what_has_not_changed_is_the_same_object(house: House) -> None:
    waves, seeing = Waves(house.store.waves), Seeing(house.store.waves)
    wave_id = waves.create(wave(member("a"), member("b", "a"))).id
    before = seeing.seen(wave_id)
    waves.skip(wave_id, "a")
    after = seeing.seen(wave_id)
    assert after.wave.members[1] is before.wave.members[1]
    assert after.wave.members[0] is not before.wave.members[0]
    assert seeing.order_of(after.wave) is seeing.order_of(before.wave)
    assert seeing.again(after) is after
    seeing.forget()
    assert seeing.seen(wave_id) == after


def test_a_draft_of_other_members_has_another_order(house: House) -> None:
    waves, seeing = Waves(house.store.waves), Seeing(house.store.waves)
    wave_id = waves.create(wave(member("a"), member("b", "a"))).id
    assert seeing.order_of(seeing.seen(wave_id).wave).sequence == ("a", "b")
    waves.replace(wave_id, wave(member("a", "c"), member("c")))
    assert seeing.order_of(seeing.seen(wave_id).wave).sequence == ("c", "a")
