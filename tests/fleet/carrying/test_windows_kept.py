"""The windows of a wave that is carried out: what begins in them, what they end, and what waits for the next one."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.errors import PersistFailed, SourceUnreachable
from synvirt.fleet.model import MEMBER_ENDS, Member, MemberState, RollBackRequest
from synvirt.migrations import advance, tidying
from synvirt.migrations.planning import left_off
from synvirt.migrations.tidying import Tidier
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import LiveVmRef, MigrationPlan
from synvirt.model.values import now
from synvirt.repeating import Pauses
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fleet.carrying.night import Night, S, W, plan_of, states, wave, window
from tests.house import give_to, live_plan
from tests.running.processes import until


def test_nothing_is_cut_over_outside_of_its_window(night: Night) -> None:
    night.vms("db")
    opens = now() + timedelta(hours=1)
    made = night.waves.create(wave({"id": "db"}, windows=(window(opens, opens + timedelta(hours=2)),)))
    night.waves.go(made.id)
    ready = night.until(made.id, lambda seen: bool(seen.members[0].waits_for) and seen.members[0].state is S.READY)
    assert "opens on" in (ready.members[0].waits_for or "")
    assert night.house.platform.vm("db")["power"] == "on"
    night.later = timedelta(hours=1, minutes=5)
    assert night.until(made.id, lambda seen: seen.state is W.COMPLETED).members[0].state is S.HEALTHY


def test_a_cut_over_that_was_asked_for_expires_with_its_window(night: Night) -> None:
    """The service was away when the window closed: the job does not begin on its own."""
    night.vms("db")
    job = night.house.intake.submit(
        wave({"id": "db"}).members[0].plan.model_copy(update={"warm": live_plan(warm={"cutover": "manual"}).warm})
    )
    night.store.request_cutover(job.id, until=now() - timedelta(seconds=1))
    assert not night.store.cutover_requested(job.id)
    night.store.request_cutover(job.id, until=now() + timedelta(seconds=60))
    assert night.store.cutover_requested(job.id)


@pytest.mark.parametrize("later", [timedelta(hours=3), timedelta(days=5)])
def test_a_window_that_closes_during_a_cut_over_gives_the_guest_back(tmp_path: Path, later: timedelta) -> None:
    night = Night(tmp_path / "house", FakeHypervisor(fail="silent"))
    try:
        night.vms("db")
        opens = now() - timedelta(minutes=1)
        made = night.waves.create(wave({"id": "db"}, windows=(window(opens, opens + timedelta(hours=2)),)))
        night.waves.go(made.id)
        night.until(made.id, lambda seen: bool((job := seen.members[0].job_id) and _is(night, job, State.STARTING)))
        assert night.house.platform.vm("db")["power"] == "off"
        night.later = later
        seen = night.until(made.id, lambda seen: seen.members[0].state is S.FAILED)
        assert "window closed" in (seen.members[0].cause or "")
        assert night.house.platform.vm("db")["power"] == "on"
        assert night.house.hypervisor.domains == {}
    finally:
        night.close()


def _is(night: Night, job_id: UUID, state: State) -> bool:
    try:
        return night.store.get(job_id).state is state
    except Exception:
        return False


@pytest.mark.parametrize("later", [timedelta(hours=3), timedelta(days=5)])
def test_a_cold_member_that_could_not_begin_in_its_window_waits_for_the_next(night: Night, later: timedelta) -> None:
    """Its source, or its host, was away until the window had closed: its guest is not shut down by day."""
    night.vms("db")
    submit, away = night.house.intake.submit, [True]

    def submit_or_away(plan: MigrationPlan, **more: Any) -> Migration:
        if away:
            raise SourceUnreachable("vcenter does not answer")
        return submit(plan, **more)

    night.house.intake.submit = submit_or_away  # type: ignore[method-assign]
    opens = now().replace(microsecond=0) - timedelta(minutes=1)
    tonight = window(opens, opens + timedelta(hours=2))
    moved = {name: at + timedelta(days=7) for name, at in (("start", tonight.start), ("end", tonight.end))}
    windows = (tonight, tonight.model_copy(update={"id": "next", **moved}))
    cold = plan_of("db").model_copy(update={"mode": Mode.COLD})
    made = night.waves.create(wave({"id": "db", "plan": cold, "outage_budget_s": 600}, windows=windows))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: "does not answer" in (seen.members[0].waits_for or ""))
    night.later = later
    away.clear()
    for _ in range(5):
        night.carrying.tick()
    (seen,) = night.waves.whole(made.id).members
    assert (seen.state, seen.job_id, seen.cut_over_at) == (S.READY, None, None)
    assert "opens on" in (seen.waits_for or "")
    assert night.house.platform.vm("db")["power"] == "on"
    assert night.store.documents(limit=10)[0] == []
    night.later = timedelta(days=7)
    done = night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    assert states(done) == {"db": S.HEALTHY}


@pytest.mark.parametrize("mode", list(Mode))
def test_windows_that_overlap_are_one_opening_for_a_member_without_a_window(night: Night, mode: Mode) -> None:
    """It fits into both together: it neither waits nor begins again and again, and goes on when the first one closes."""
    night.vms("db")
    at = now()
    first = window(at - timedelta(hours=1), at + timedelta(seconds=100))
    second = window(at + timedelta(seconds=50), at + timedelta(hours=3)).model_copy(update={"id": "second"})
    plan = plan_of("db").model_copy(update={"mode": mode})
    made = night.waves.create(wave({"id": "db", "plan": plan, "outage_budget_s": 3600}, windows=(first, second)))
    night.waves.go(made.id)
    began: list[object] = []
    rows = night.store.waves
    change = rows.change_members

    def changed(*given: Any, **more: Any) -> list[str]:
        done = change(*given, **more)
        if done and states(night.waves.whole(made.id))["db"] is S.CUTTING_OVER:
            began.append(night.waves.whole(made.id).members[0].cut_over_at)
        return done

    rows.change_members = changed  # type: ignore[method-assign]
    done = night.until(made.id, lambda seen: seen.state in (W.COMPLETED, W.HELD) or len(set(began)) > 3)
    assert (done.state, len(set(began))) == (W.COMPLETED, 1), done.members[0].cause


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While it is not empty, sources do not answer when they are powered on."""
    power_on, away = FakeAdapter.power_on, [True]

    async def power_on_or_not(adapter: FakeAdapter, vm_id: str) -> None:
        if away:
            raise SourceUnreachable("the source does not answer")
        await power_on(adapter, vm_id)

    monkeypatch.setattr(FakeAdapter, "power_on", power_on_or_not)
    monkeypatch.setattr(advance, "SWEEP_PAUSES_S", ())
    return away


@pytest.fixture
def off(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Night, UUID]]:
    """A wave whose member `db` is off at its source. The parameter: what its guest does here, and the mode of its plan."""
    fault, _, mode = request.param.partition(" ")
    night = Night(tmp_path / "house", FakeHypervisor(fail=fault))
    night.vms("db")
    opens = now() - timedelta(minutes=1)
    member = {"id": "db", "plan": plan_of("db", mode=mode or "Warm"), "outage_budget_s": 3600}
    made = night.waves.create(wave(member, windows=(window(opens, opens + timedelta(hours=2)),)))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: night.house.platform.vm("db")["power"] == "off")
    yield night, made.id
    night.close()


@pytest.mark.parametrize("off", ["start"], indirect=True)
def test_a_member_is_rolled_back_once_the_source_of_its_failed_job_is_on(away: list[bool], off: tuple[Night, UUID]) -> None:
    night, wave_id = off
    night.until(wave_id, lambda seen: seen.members[0].state is S.FAILED)
    night.waves.roll_back(wave_id, RollBackRequest())
    seen = night.until(wave_id, lambda seen: seen.members[0].waits_for is not None or seen.state is W.ROLLED_BACK)
    assert "not powered on yet" in (seen.members[0].waits_for or "")
    assert night.house.platform.vm("db")["power"] == "off"
    away.clear()
    Tidier(night.house.rooms, host="local").look()
    night.until(wave_id, lambda seen: seen.state is W.ROLLED_BACK)
    assert night.house.platform.vm("db")["power"] == "on"


@pytest.mark.parametrize("off", ["silent"], indirect=True)
def test_a_member_of_a_cancelled_wave_is_rolled_back_once_its_source_is_on(away: list[bool], off: tuple[Night, UUID]) -> None:
    night, wave_id = off
    night.waves.cancel(wave_id)
    seen = night.until(wave_id, lambda seen: bool(seen.members[0].waits_for) or seen.members[0].state in MEMBER_ENDS)
    assert "not powered on yet" in (seen.members[0].waits_for or "")
    assert night.house.platform.vm("db")["power"] == "off"
    away.clear()
    Tidier(night.house.rooms, host="local").look()
    back = night.until(wave_id, lambda seen: seen.members[0].state in MEMBER_ENDS)
    assert (back.members[0].state, back.members[0].cause) == (S.ROLLED_BACK, "The wave was cancelled.")
    assert night.house.platform.vm("db")["power"] == "on"


@pytest.mark.parametrize("off", ["silent"], indirect=True)
def test_a_window_that_closes_says_where_the_source_is_not_on_again(away: list[bool], off: tuple[Night, UUID]) -> None:
    night, wave_id = off
    night.later = timedelta(hours=3)
    seen = night.until(wave_id, lambda seen: seen.members[0].state is S.FAILED)
    assert away
    assert night.house.platform.vm("db")["power"] == "off"
    assert seen.members[0].cause == (
        "Its window closed before it was done; its source may be off: its job tries to power it on for a day."
    )


def tried_again(night: Night, wave_id: UUID, away: list[bool]) -> None:
    """The member's second job completes, now that nothing fails any more."""
    night.until(wave_id, lambda seen: seen.state is W.FAILED)
    night.house.hypervisor.fail = None
    away.clear()
    night.waves.retry(wave_id, "db")
    night.until(wave_id, lambda seen: seen.state is W.COMPLETED)


@pytest.mark.parametrize("off", ["start Warm", "start Cold"], indirect=True)
def test_a_member_that_was_tried_again_while_its_source_was_off_is_rolled_back_to_one_that_is_on(
    away: list[bool], off: tuple[Night, UUID]
) -> None:
    """Its first job has shut the source down, and could not power it on again; the second finds it off."""
    night, wave_id = off
    tried_again(night, wave_id, away)
    assert night.house.platform.vm("db")["power"] == "off"
    night.waves.roll_back(wave_id, RollBackRequest())
    night.until(wave_id, lambda seen: seen.state is W.ROLLED_BACK)
    assert night.house.hypervisor.domains == {}
    assert night.house.platform.vm("db")["power"] == "on"


@pytest.mark.parametrize("off", ["start"], indirect=True)
def test_a_member_that_is_tried_again_while_its_source_is_off_waits_for_its_window_with_that_on(
    away: list[bool], off: tuple[Night, UUID]
) -> None:
    night, wave_id = off
    night.until(wave_id, lambda seen: seen.state is W.FAILED)
    away.clear()
    night.later = timedelta(days=1)
    night.waves.retry(wave_id, "db")
    night.until(wave_id, lambda seen: seen.members[0].state is S.READY)
    assert night.house.platform.vm("db")["power"] == "on"


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
@pytest.mark.parametrize("off", ["start"], indirect=True)
def test_a_source_whose_guest_runs_here_by_now_is_not_powered_on_for_an_earlier_job(
    away: list[bool], off: tuple[Night, UUID], mode: str
) -> None:
    """The first job owes it power, the second has moved it since, and the third, a copy next to it, fails."""
    night, wave_id = off
    tried_again(night, wave_id, away)
    powered = list(night.house.platform.vm("db")["powered"])
    night.house.hypervisor.fail = "start"
    third = night.house.intake.submit(plan_of("db", mode=mode, target={"name": "again", "identity": "new"}))
    until(lambda: night.store.get(third.id).ended)
    assert night.store.get(third.id).state is State.FAILED
    assert night.house.platform.vm("db")["powered"] == powered
    assert night.house.platform.vm("db")["power"] == "off"


@pytest.mark.parametrize("is_first", [True, False], ids=["asked within the day", "asked after it"])
@pytest.mark.parametrize("off", ["start"], indirect=True)
def test_a_source_that_was_off_for_a_day_is_powered_on_for_who_rolls_its_member_back(
    away: list[bool], off: tuple[Night, UUID], monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    night, wave_id = off
    monkeypatch.setattr(left_off, "POWER_ON_WITHIN", timedelta(0))
    monkeypatch.setattr(tidying, "LATE_FOR_S", 0.0)
    night.until(wave_id, lambda seen: seen.state is W.FAILED)
    tidier = Tidier(night.house.rooms, host="local")
    if not is_first:
        tidier.look()
        assert night.store.untidied(host="local") == []
    night.waves.roll_back(wave_id, RollBackRequest())
    if is_first:
        tidier.look()
    seen = night.until(wave_id, lambda seen: seen.members[0].waits_for is not None or seen.state is W.ROLLED_BACK)
    assert "not powered on yet" in (seen.members[0].waits_for or "")
    assert night.house.platform.vm("db")["power"] == "off"
    away.clear()
    Tidier(night.house.rooms, host="local").look()
    night.until(wave_id, lambda seen: seen.state is W.ROLLED_BACK)
    assert night.house.platform.vm("db")["power"] == "on"


def test_a_guest_runs_on_here_while_its_source_cannot_be_powered_on(night: Night) -> None:
    """Of a wave that is rolled back while its vCenter is away all guests would be off, here and there."""
    night.vms("db", "web")
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    guests = list(night.house.hypervisor.domains.values())
    night.house.platform.lose_vm("web")
    night.house.platform.fault("unreachable", 1_000_000)
    night.side._pauses = Pauses(0.01, 0.01)
    night.waves.roll_back(made.id, RollBackRequest())
    seen = night.until(made.id, lambda seen: all(one.waits_for is not None for one in seen.members))
    assert all("not powered on yet" in (one.waits_for or "") for one in seen.members)
    assert list(night.house.hypervisor.domains.values()) == guests
    assert [guest.running for guest in guests] == [True, True]
    night.house.platform.fault("unreachable", 0)
    night.until(made.id, lambda seen: states(seen)["db"] is S.ROLLED_BACK)
    assert night.house.platform.vm("db")["power"] == "on"
    (left,) = night.house.hypervisor.domains.values()
    assert (left.domain.name, left.running) == ("web", True), "its source is gone, and can never be powered on"


def test_a_source_that_hangs_holds_up_no_other_wave(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a minute for each VM, and the lead, which PostgreSQL ends after half of that: a window would pass meanwhile."""
    night.vms("db", "web")
    hangs, other = (night.waves.create(wave({"id": name})) for name in ("db", "web"))
    for one in (hangs, other):
        night.store.waves.rewrite_members(
            one.id, [S.WAITING], Member, lambda before: before.model_copy(update={"host": "local", "destination": "chosen"})
        )
        night.waves.go(one.id)
    submit, met = night.house.intake.submit, list[MemberState]()

    def submit_or_hang(plan: MigrationPlan, **more: Any) -> Migration:
        if isinstance(plan.source_ref, LiveVmRef) and plan.source_ref.vm_id == "db":
            met.append(night.waves.whole(other.id).members[0].state)
            raise SourceUnreachable("vcenter does not answer")
        return submit(plan, **more)

    def keep_lead() -> None:
        if met:
            raise PersistFailed("this host does not lead the waves any more: it was paused for too long")

    night.house.intake.submit = submit_or_hang  # type: ignore[method-assign]
    monkeypatch.setattr(night.store.waves, "keep_lead", keep_lead)
    night.carrying.tick()
    assert met == [S.SYNCING], "what it does next is decided before"
    (row,), _ = night.store.waves.members(other.id)
    assert row.submitted


def test_a_member_whose_guest_is_on_a_lost_host_says_why_it_is_not_rolled_back(night: Night) -> None:
    night.vms("db")
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    moved = night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    assert moved.members[0].job_id is not None
    give_to(night.store, moved.members[0].job_id, "kvm2")
    night.waves.roll_back(made.id, RollBackRequest())
    seen = night.until(made.id, lambda seen: seen.members[0].waits_for is not None)
    assert "Its host kvm2 is lost, and its guest may run there" in (seen.members[0].waits_for or "")
    night.store.hosts.begin("kvm2", ttl_s=1000, document="{}")
    night.until(made.id, lambda seen: seen.members[0].waits_for is None)
    assert seen.members[0].state is S.HEALTHY
    assert night.house.platform.vm("db")["power"] == "off"


def test_a_member_is_not_rolled_back_to_another_machine_that_has_its_id(night: Night) -> None:
    """The VM was removed since, and its number given to a new one: the guest runs on here."""
    night.vms("db", uuid=UUID(int=1))
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    night.house.platform.remove_vm("db")
    night.vms("db", uuid=UUID(int=2))
    night.waves.roll_back(made.id, RollBackRequest())
    seen = night.until(made.id, lambda seen: seen.members[0].waits_for is not None or seen.state is W.ROLLED_BACK)
    assert "another machine" in (seen.members[0].waits_for or "")
    assert len(night.house.hypervisor.domains) == 1
