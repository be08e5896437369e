"""A wave is seen as it is, though only what has changed since the last look is parsed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.errors import NotFound
from synvirt.fleet import seeing as seeing_module
from synvirt.fleet.changing import change_members
from synvirt.fleet.model import MemberState, WaveState
from synvirt.fleet.seeing import Seeing, Seen
from synvirt.fleet.waves import Waves
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


def test_a_second_look_in_a_tick_reads_what_has_events(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, waves = house.store.waves, Waves(house.store.waves)
    seeing, read, whole = Seeing(rows), list[object](), rows.whole
    wave_id = waves.create(wave(member("a"), member("b", "a"), member("c"))).id
    other_id = waves.create(wave(member("d"))).id
    seen = seeing.seen(wave_id)

    def noted(of_wave: UUID, ids: Sequence[str] | None = None) -> Any:
        read.append("all" if ids is None else ids)
        return whole(of_wave, ids)

    monkeypatch.setattr(rows, "whole", noted)

    def again() -> Seen:
        """As a service sees it that has just begun. What has been read for it is in `read`."""
        nonlocal seen
        read.clear()
        seen = seeing.again(seen)
        by_it = [*read]
        assert seen == Seeing(rows).seen(wave_id)
        read[:] = by_it
        return seen

    assert again().wave.members[0].state is S.WAITING
    assert read == []
    change_members(rows, wave_id, seen.wave.members[:1], {S.WAITING}, {"state": S.SYNCING, "job_id": uuid4()})
    waves.skip(wave_id, "c")
    assert [one.state for one in again().wave.members] == [S.SYNCING, S.WAITING, S.SKIPPED]
    assert read == [["a", "c"]]
    waves.skip(other_id, "d")
    again()
    assert read == [[]]
    waves.go(wave_id)
    assert again().wave.state is WaveState.RUNNING
    assert read == ["all"]
    monkeypatch.setattr(seeing_module, "CHANGED_MOST", 0)
    waves.skip(wave_id, "b")
    assert again().wave.members[1].state is S.SKIPPED
    assert read == ["all"]


def test_a_draft_with_other_members_is_read_whole(house: House) -> None:
    waves, seeing = Waves(house.store.waves), Seeing(house.store.waves)
    wave_id = waves.create(wave(member("a"), member("b"))).id
    seen = seeing.seen(wave_id)
    waves.replace(wave_id, wave(member("b"), member("c")))
    assert [one.id for one in seeing.again(seen).wave.members] == ["b", "c"]


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
