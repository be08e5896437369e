"""A wave carried out against the fake platform: real store, real engine steps, real copies; the night is a moment."""

import random
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
import structlog
from sqlalchemy import update

from synvirt import destinations
from synvirt.copying import request_bytes
from synvirt.destinations import DestinationAway
from synvirt.errors import AuthFailed, InvalidPlan, SourceUnreachable
from synvirt.fleet.changing import change_members, roll_back
from synvirt.fleet.facts import Estimate
from synvirt.fleet.host_side import HostSide
from synvirt.fleet.job_facts import AROUND_COPY, outage_of
from synvirt.fleet.model import (
    ApprovalRequest,
    Member,
    MemberState,
    RollBackRequest,
)
from synvirt.migrations.hosts.taking_over import TakingOver
from synvirt.migrations.intake import check_plan
from synvirt.model.job import Forecast, Migration, OutageForecast
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.times import Schedule
from synvirt.model.values import now
from synvirt.repeating import Pauses
from synvirt.sizes import KIB
from synvirt.store.tables import migrations, wave_members
from tests.fleet.carrying.night import SICK, Night, S, W, plan_of, states, wave, window


def test_a_member_leaves_its_beginning_to_the_wave(night: Night) -> None:
    made = wave({"id": "db"})
    schedule = Schedule(start_at=now())
    plan = made.members[0].plan.model_copy(update={"schedule": schedule})
    with pytest.raises(InvalidPlan, match=r"members\[0\].plan.schedule"):
        night.waves.create(made.model_copy(update={"members": (made.members[0].model_copy(update={"plan": plan}),)}))


@pytest.mark.parametrize("gate", ["success", "approval"])
def test_a_canary_that_fails_holds_the_wave_before_anything_else_has_begun(night: Night, gate: str) -> None:
    night.vms("canary", "db", "web")
    made = night.waves.create(
        wave({"id": "db"}, {"id": "canary", "priority": 1, "checks": [SICK]}, {"id": "web"}, canary={"count": 1, "gate": gate})
    )
    night.waves.go(made.id)
    held = night.until(made.id, lambda seen: seen.state is W.HELD)
    night.carrying.tick()
    assert "canary failed: It booted, but false ended with 1" in (held.reason or "")
    others = [one for one in night.waves.whole(made.id).members if one.id != "canary"]
    assert {(one.state, one.job_id) for one in others} == {(S.WAITING, None)}
    night.house.hypervisor.run_in_guest = lambda *_: 0  # type: ignore[method-assign]
    night.waves.retry(made.id, "canary")
    night.waves.go(made.id)
    if gate == "approval":
        waits = night.until(made.id, lambda seen: "approval" in (seen.members[0].waits_for or ""))
        assert states(waits) == {"canary": S.HEALTHY, "db": S.WAITING, "web": S.WAITING}
        night.waves.approve(made.id, ApprovalRequest(canary=True))
    done = night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    assert set(states(done).values()) == {S.HEALTHY}


def test_what_begins_in_a_tick_is_noted_in_one_transaction_and_so_is_what_is_rolled_back(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}, {"id": "dns"}))
    night.waves.go(made.id)
    rows, noted = night.store.waves, list[list[str]]()
    change = rows.change_members

    def changed(*given: Any, **more: Any) -> list[str]:
        noted.append(change(*given, **more))
        return noted[-1]

    monkeypatch.setattr(rows, "change_members", changed)
    night.carrying.tick()
    assert noted[0] == ["db", "web", "dns"]
    noted.clear()
    roll_back(rows, made.id, night.waves.whole(made.id).members, "They go back.")
    assert noted == [["db", "web", "dns"]]


def test_what_a_cancel_skips_is_noted_in_one_transaction(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each of 5,000 members took half a minute, in which no other wave went on."""
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}, {"id": "dns"}))
    rows, noted = night.store.waves, list[list[str]]()
    change = rows.change_members

    def changed(*given: Any, **more: Any) -> list[str]:
        noted.append(change(*given, **more))
        return noted[-1]

    monkeypatch.setattr(rows, "change_members", changed)
    night.waves.cancel(made.id)
    night.carrying.tick()
    assert noted == [["db", "web", "dns"]]
    assert {(one.state, one.cause) for one in night.waves.whole(made.id).members} == {(S.SKIPPED, "The wave was cancelled.")}


def test_members_move_in_their_order_and_the_wave_completes(night: Night) -> None:
    night.vms("db", "web")
    made = night.waves.create(
        wave({"id": "web", "after": ["db"]}, {"id": "db", "checks": [{"kind": "command", "argv": ["true"]}]})
    )
    night.carrying.tick()
    assert states(night.waves.whole(made.id)) == {"web": S.WAITING, "db": S.WAITING}, "a draft moves nothing"
    night.waves.go(made.id)
    done = night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    assert states(done) == {"web": S.HEALTHY, "db": S.HEALTHY}
    web, db = done.members
    assert web.cut_over_at
    assert db.healthy_at
    assert web.cut_over_at >= db.healthy_at
    assert all(one.outage_s is not None and one.waits_for is None for one in done.members)
    jobs = [night.store.get(one.job_id) for one in done.members if one.job_id]
    assert [job.state for job in jobs] == [State.COMPLETED, State.COMPLETED]
    assert len(night.store.documents(limit=10)[0]) == 2


def test_an_outage_is_what_this_site_measured_where_its_job_says_that() -> None:
    (member,) = wave({"id": "a"}).members
    job = Migration(id=UUID(int=1), name="a", plan=member.plan, mode_effective=Mode.WARM, created_at=now())
    assert outage_of(member, None) is outage_of(member, job) is None, "no delta has said yet how much is left"
    expected = Forecast(
        change_rate_bps=1, throughput_bps=1, expected_delta_bytes=1, expected_downtime_s=10, converges=True, at=now()
    )
    guessed = job.model_copy(update={"forecast": expected})
    assert outage_of(member, guessed) == Estimate(10 + AROUND_COPY.p50, 20 + AROUND_COPY.p95)
    measured = guessed.model_copy(update={"outage": OutageForecast(p50_s=31, p95_s=44, at=now())})
    assert outage_of(member, measured) == Estimate(31, 44)


def test_the_copies_of_a_wave_together_keep_to_its_limit(night: Night) -> None:
    """Three at once: as fast as one would be alone."""
    limit_bps = disk_bytes = 512 * KIB
    names, content = ("a", "b", "c"), random.Random(6).randbytes(disk_bytes)
    for name in names:
        night.house.platform.add_vm(name, {"disk-0": content})
    given: list[float] = []
    rows, take_rate = night.store.waves, night.store.waves.take_rate

    def take(wave_id: UUID, seconds: float) -> float:
        given.append(seconds)
        return take_rate(wave_id, seconds)

    rows.take_rate = take  # type: ignore[method-assign]
    made = night.waves.create(wave(*({"id": name} for name in names), limits={"bandwidth_bps": limit_bps}))
    night.waves.go(made.id)
    began = time.monotonic()
    done = night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    took_s = time.monotonic() - began
    jobs = [night.store.get(one.job_id) for one in done.members if one.job_id is not None]
    copied = sum(one.bytes for job in jobs for one in job.passes)
    assert copied >= len(names) * disk_bytes
    assert sum(given) * limit_bps >= copied, "not a byte that was not given"
    # Only a machine that is slow makes it longer.
    assert took_s >= (copied - len(names) * request_bytes(limit_bps)) / limit_bps
    assert [night.house.volume(job).read_bytes() for job in jobs] == [content] * len(names)


def test_where_a_failure_stops_nothing_the_others_go_on_and_those_that_need_it_wait(night: Night) -> None:
    night.vms("db", "web", "mail", "news")
    made = night.waves.create(
        wave(
            {"id": "db", "checks": [SICK], "priority": 1},
            {"id": "web", "after": ["db"]},
            {"id": "mail"},
            {"id": "news", "after": ["mail"]},
            on_failure="continue",
            limits={"wave": 1},
        )
    )
    night.waves.go(made.id)
    seen = night.until(
        made.id, lambda seen: states(seen)["news"] is S.HEALTHY and "failed" in (seen.members[1].waits_for or "")
    )
    assert seen.state is W.RUNNING
    assert states(seen) == {"db": S.FAILED, "web": S.READY, "mail": S.HEALTHY, "news": S.HEALTHY}
    assert seen.members[1].waits_for == "It waits for db, which has failed."
    assert night.house.platform.vm("web")["powered"] == [], "it never was cut over"
    assert [one.domain.name for one in night.house.hypervisor.domains.values()] == ["db", "mail", "news"]
    night.waves.hold(made.id)  # that it was held is no reason of its end
    night.waves.skip(made.id, "web")
    ended = night.until(made.id, lambda seen: seen.finished_at is not None)
    cause = next(one.cause for one in ended.members if one.id == "db")
    assert (ended.state, ended.reason) == (W.FAILED, f"1 of 4 failed, 1 was rolled back. db failed: {cause}")
    assert night.house.platform.vm("db")["power"] == "off", "what failed is the operator's to judge"


def test_a_member_that_failed_and_was_skipped_is_rolled_back_with_the_others(night: Night) -> None:
    """Its guest runs here, and its source is off: to skip it changed neither."""
    night.vms("db", "web")
    made = night.waves.create(wave({"id": "db", "checks": [SICK]}, {"id": "web", "checks": [SICK]}, on_failure="continue"))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: set(states(seen).values()) == {S.FAILED})
    for name in ("db", "web"):
        night.waves.skip(made.id, name)
    night.waves.roll_back(made.id, RollBackRequest(members=("db",)))
    night.until(made.id, lambda seen: states(seen) == {"db": S.ROLLED_BACK, "web": S.SKIPPED})
    assert [night.house.platform.vm(name)["power"] for name in ("db", "web")] == ["on", "off"]
    night.waves.roll_back(made.id, RollBackRequest())
    back = night.until(made.id, lambda seen: seen.state is W.ROLLED_BACK)
    assert states(back) == dict.fromkeys(("db", "web"), S.ROLLED_BACK)
    assert night.house.platform.vm("web")["power"] == "on"
    assert night.house.hypervisor.domains == {}


def test_a_wave_that_cannot_be_read_is_named_once_and_the_others_go_on(night: Night) -> None:
    """A tick comes every two seconds, and the row may stay as it is for days."""
    night.vms("db", "web")
    bad, good = night.waves.create(wave({"id": "db"})), night.waves.create(wave({"id": "web"}))
    night.waves.go(bad.id)
    night.waves.go(good.id)
    with night.store._writing() as db:
        of_bad = wave_members.c.wave_id == str(bad.id)
        before = db.execute(wave_members.select().where(of_bad)).one().document
        db.execute(wave_members.update().where(of_bad).values(document="{"))
    with structlog.testing.capture_logs() as logs:
        night.until(good.id, lambda seen: seen.state is W.COMPLETED)
        for _ in range(3):
            night.carrying.tick()
    assert [(one["wave"], "not JSON" in one["cause"]) for one in logs if one["event"] == "a wave cannot go on now"] == [
        (str(bad.id), True)
    ]
    with night.store._writing() as db:
        db.execute(wave_members.update().where(of_bad).values(document=before))
    night.until(bad.id, lambda seen: seen.state is W.COMPLETED)


@pytest.mark.parametrize("state", [S.SYNCING, S.READY, S.CUTTING_OVER])
def test_a_member_whose_host_is_lost_says_so_until_that_is_back(
    night: Night, monkeypatch: pytest.MonkeyPatch, state: MemberState
) -> None:
    night.vms("db")
    opens = now() + timedelta(hours=1)
    made = night.waves.create(wave({"id": "db"}, windows=(window(opens, opens + timedelta(hours=2)),)))
    night.waves.go(made.id)
    ready = night.until(made.id, lambda seen: bool(seen.members[0].waits_for) and seen.members[0].state is S.READY)
    job_id = ready.members[0].job_id
    assert job_id is not None
    # From here on its host does nothing, and what its job does is not seen.
    monkeypatch.setattr(night.carrying, "_observe", lambda _seen, _at: None)
    monkeypatch.setattr(night.carrying, "_follow_orders", lambda seen, **_: seen)
    change_members(night.store.waves, made.id, ready.members, {S.READY}, {"state": state})
    with monkeypatch.context() as lost:
        lost.setattr(night.house.intake, "standing", lambda: frozenset({job_id}))
        night.carrying.tick()
        (seen,) = night.waves.whole(made.id).members
    assert (seen.state, seen.waits_for) == (
        state,
        "Its host local is lost: the job goes on once that host is back, or after a take-over.",
    )
    night.carrying.tick()
    assert "is lost" not in (night.waves.whole(made.id).members[0].waits_for or "")


def test_a_member_whose_job_another_host_submits_at_that_moment_has_not_failed(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came to this host while the one before waited for the source's answer: the VM is taken, by the member's own job."""
    night.vms("db")
    submit = night.house.intake.submit

    def twice(plan: MigrationPlan, **more: Any) -> Migration:
        submit(plan, **more)
        return submit(plan, **more)

    monkeypatch.setattr(night.house.intake, "submit", twice)
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    done = night.until(made.id, lambda seen: seen.state not in {W.DRAFT, W.RUNNING})
    assert (done.state, states(done)) == (W.COMPLETED, {"db": S.HEALTHY}), done.reason


@pytest.mark.parametrize("is_back", [False, True])
def test_a_member_that_is_rolled_back_while_its_job_begins_anew_on_another_host_ends_that_job(
    night: Night, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """The lost host ended nothing, and the other one knows no wave. `is_back`: the lost host looks before the leader does."""
    night.vms("db")
    made = night.waves.create(wave({"id": "db", "plan": plan_of("db", mode="Cold")}))
    monkeypatch.setattr(night.house.intake, "_begin", lambda job_id: None)
    night.waves.go(made.id)
    (before,) = night.until(made.id, lambda seen: bool(night.store.unended())).members
    assert before.job_id is not None
    with night.store._writing() as db:
        db.execute(update(migrations).values(host="lost"))
    night.store.hosts.begin("lost", ttl_s=1000, document="{}")
    night.store.hosts.fence("lost")
    night.waves.roll_back(made.id, RollBackRequest(members=("db",)))
    night.carrying.tick()
    other = TakingOver(
        night.house.rooms, begin=lambda job_id: None, held_for_s=lambda: 1000, opens_source=lambda source_id: None
    )
    again = other.take_over(before.job_id, restart=True)
    if is_back:
        lost = HostSide(night.house.rooms, night.side._checker, cancel=night.house.intake.cancel, failed=night.side._failed)
        lost.host = "lost"
        lost.look(night.carrying._seeing.seen(made.id), leads=False)
        lost.close()
    for _ in range(2):
        night.carrying.tick()
    (seen,) = night.waves.whole(made.id).members
    assert (seen.state, seen.job_id) == (S.CUTTING_OVER, again.id)
    assert night.store.cancel_requested(again.id)


def test_a_guest_that_cannot_be_checked_holds_up_itself_alone(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    night.vms("db", "web")
    checked, broken = night.side._checked, ["db"]

    def checked_or_broken(member: Member, job: Migration) -> str | None:
        if member.id in broken:
            raise KeyError("uuid")
        return checked(member, job)

    monkeypatch.setattr(night.side, "_checked", checked_or_broken)
    night.side._pauses = Pauses(3600, 3600)  # tried once, and its reason is shown all the while
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}))
    night.waves.go(made.id)
    with structlog.testing.capture_logs() as logs:
        seen = night.until(made.id, lambda seen: states(seen)["web"] is S.HEALTHY)
        for _ in range(10):
            night.carrying.tick()
        seen = night.until(made.id, lambda seen: seen.members[0].waits_for is not None)
    assert (states(seen)["db"], seen.members[0].waits_for) == (S.CUTTING_OVER, "Its guest is not checked yet: KeyError: 'uuid'")
    assert [one["member"] for one in logs if one["event"] == "a guest cannot be checked now"] == ["db"]
    broken.clear()
    night.side._pauses = Pauses(0.01, 0.01)
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)


def test_an_error_that_nobody_expected_holds_up_its_own_member_only(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    night.vms("db", "web")
    submit, broken = night.house.intake.submit, ["db"]

    def submit_or_break(plan: MigrationPlan, **more: Any) -> Migration:
        if plan.source_ref.kind == "live_vm" and plan.source_ref.vm_id in broken:
            raise KeyError("disk")
        return submit(plan, **more)

    monkeypatch.setattr(night.house.intake, "submit", submit_or_break)
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}))
    night.waves.go(made.id)
    with structlog.testing.capture_logs() as logs:
        seen = night.until(made.id, lambda seen: states(seen)["web"] is S.HEALTHY)
    assert (states(seen)["db"], seen.members[0].waits_for) == (S.SYNCING, "Its job cannot be submitted now: KeyError: 'disk'")
    assert [one["cause"] for one in logs if one["event"] == "a wave cannot go on now"] == ["'disk'"]
    broken.clear()
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)


def checks_plans(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the service does."""
    rooms = replace(night.house.rooms, check_source=lambda kind, source_id: None)
    monkeypatch.setattr(night.house.intake, "_check", partial(check_plan, rooms))


def test_a_libvirtd_that_is_restarted_fails_no_member_that_is_submitted(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member that fails would hold the whole wave, or give its group back."""
    night.vms("db")
    checks_plans(night, monkeypatch)
    hypervisor = night.house.hypervisor
    hypervisor.away = 4
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    seen = night.until(made.id, lambda seen: states(seen)["db"] in (S.HEALTHY, S.FAILED))
    assert (states(seen)["db"], hypervisor.away) == (S.HEALTHY, 0), seen.members[0].cause


def test_a_libvirtd_that_is_away_says_nothing_of_the_guests_health(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks have a tenth of a second. To give a guest back that is well would lose what it wrote."""
    night.vms("db")
    hypervisor, away = night.house.hypervisor, [True]
    run_in_guest = hypervisor.run_in_guest

    def run_or_away(uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        hypervisor.away = len(away)
        return run_in_guest(uuid, argv, timeout_s)

    monkeypatch.setattr(hypervisor, "run_in_guest", run_or_away)
    night.side._pauses = Pauses(0.01, 0.01)
    made = night.waves.create(wave({"id": "db", "checks": [{"kind": "command", "argv": ["true"], "within_s": 0.1}]}))
    night.waves.go(made.id)
    seen = night.until(made.id, lambda seen: "not checked" in (seen.members[0].waits_for or "") or seen.state is W.HELD)
    assert states(seen) == {"db": S.CUTTING_OVER}, seen.members[0].cause
    assert seen.members[0].waits_for == "Its guest is not checked yet: client socket is closed"
    away.clear()
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_member_waits_for_a_destination_that_is_away(night: Night, monkeypatch: pytest.MonkeyPatch, *, hangs: bool) -> None:
    """One that hangs must not hold the tick, which is that of all waves."""
    night.vms("db")
    destination, back = night.house.rooms.destination_named("chosen"), threading.Event()
    free_bytes = destination.free_bytes

    def free_or_away() -> int:
        if not (back.wait(60) if hangs else back.is_set()):
            raise DestinationAway("/srv/vms is not mounted")
        return free_bytes()

    monkeypatch.setattr(destination, "free_bytes", free_or_away)
    monkeypatch.setattr(destinations, "ANSWERS_S", 0.05 if hangs else 30)
    checks_plans(night, monkeypatch)
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    seen = night.until(made.id, lambda seen: bool(seen.members[0].waits_for) or seen.state is W.HELD)
    assert states(seen)["db"] is not S.FAILED, seen.members[0].cause
    why = "the destination did not answer for 0.05 s" if hangs else "/srv/vms is not mounted"
    assert seen.members[0].waits_for == f"Its destination is away: {why}"
    back.set()
    monkeypatch.setattr(destinations, "ANSWERS_S", 30)
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_wave_that_a_failure_holds_submits_none_of_those_that_were_noted_with_it(night: Night, mode: Mode) -> None:
    night.vms("db", "web", "dns")
    submit, broken = night.house.intake.submit, [True]

    def submit_or_fail(plan: MigrationPlan, **more: Any) -> Migration:
        if broken:
            raise AuthFailed("the source refuses our password")
        return submit(plan, **more)

    night.house.intake.submit = submit_or_fail  # type: ignore[method-assign]
    names = ("db", "web", "dns")
    made = night.waves.create(wave(*({"id": one, "plan": plan_of(one).model_copy(update={"mode": mode})} for one in names)))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is W.HELD)
    for _ in range(2):
        night.carrying.tick()
    begun = S.WAITING if mode is Mode.WARM else S.READY
    seen = night.waves.whole(made.id)
    assert states(seen) == {"db": S.FAILED, "web": begun, "dns": begun}
    assert {(one.job_id, one.waits_for) for one in seen.members[1:]} == {(None, "db failed: the source refuses our password")}
    broken.clear()
    night.waves.retry(made.id, "db")
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)


def test_a_held_wave_submits_nothing_once_its_source_answers_again(night: Night) -> None:
    night.vms("db")
    submit, away = night.house.intake.submit, [True]

    def submit_or_away(plan: MigrationPlan, **more: Any) -> Migration:
        if away:
            raise SourceUnreachable("vcenter does not answer")
        return submit(plan, **more)

    night.house.intake.submit = submit_or_away  # type: ignore[method-assign]
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: "does not answer" in (seen.members[0].waits_for or ""))
    night.waves.hold(made.id)
    away.clear()
    for _ in range(3):
        night.carrying.tick()
    (seen,) = night.waves.whole(made.id).members
    assert (seen.state, seen.job_id, seen.waits_for) == (S.WAITING, None, "It was held.")
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)
