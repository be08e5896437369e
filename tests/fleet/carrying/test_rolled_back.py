"""Members of a wave that are rolled back, or tried again, against the fake platform."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, update

from synvirt.accounts import Role
from synvirt.acting import Act, acting
from synvirt.errors import BadRequest, Conflict
from synvirt.fleet import host_side
from synvirt.fleet.carrying import Carrying, carried
from synvirt.fleet.changing import change_members, failed, roll_back
from synvirt.fleet.host_side import HostSide
from synvirt.fleet.model import (
    MEMBER_ENDS,
    ApprovalRequest,
    RollBackRequest,
    WaveRetryRequest,
)
from synvirt.fleet.records import member_of
from synvirt.fleet.seeing import Seen
from synvirt.migrations.removing import Removal, volumes_of
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.values import now
from synvirt.repeating import Pauses
from synvirt.sizes import KIB
from synvirt.store.tables import migrations
from tests.fleet.carrying.night import CONTENT, SICK, Night, S, W, plan_of, states, wave
from tests.house import House


def test_a_member_that_is_not_healthy_holds_the_wave_and_all_of_it_is_rolled_back(night: Night) -> None:
    night.vms("db", "web")
    sick = {"kind": "command", "argv": ["false"], "within_s": 0.1}
    made = night.waves.create(wave({"id": "db"}, {"id": "web", "after": ["db"], "checks": [sick]}))
    night.waves.go(made.id)
    seen = night.until(made.id, lambda seen: states(seen)["web"] is S.FAILED)
    assert (seen.state, states(seen)["db"]) in ((W.HELD, S.HEALTHY), (W.FAILED, S.HEALTHY))
    assert "false ended with 1" in (seen.reason or "")
    assert len(night.house.hypervisor.domains) == 2, "what runs here runs on, until somebody decides"
    night.waves.roll_back(made.id, RollBackRequest())
    back = night.until(made.id, lambda seen: seen.state is W.ROLLED_BACK)
    assert states(back)["db"] is S.ROLLED_BACK
    assert night.house.platform.vm("db")["power"] == "on"
    assert states(back)["web"] is S.ROLLED_BACK
    assert night.house.hypervisor.domains == {}
    job = night.store.get(back.members[0].job_id or UUID(int=0))
    assert night.house.volume(job).exists(), "the copies are kept"


def test_a_guest_that_cannot_be_stopped_here_holds_up_no_other_that_is_rolled_back(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    night.vms("db", "web")
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}))
    night.waves.go(made.id)
    moved = night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    undefine, broken = night.house.hypervisor.undefine, [moved.members[0].job_id]

    def undefine_or_break(uuid: UUID, job_id: UUID) -> None:
        if job_id in broken:
            raise OSError(5, "Input/output error")
        undefine(uuid, job_id)

    monkeypatch.setattr(night.house.hypervisor, "undefine", undefine_or_break)
    night.side._pauses = Pauses(0.01, 0.01)
    night.waves.roll_back(made.id, RollBackRequest())
    seen = night.until(made.id, lambda seen: states(seen)["web"] is S.ROLLED_BACK)
    assert (states(seen)["db"], night.house.platform.vm("db")["power"]) == (S.HEALTHY, "off")
    assert "Input/output error" in (seen.members[0].waits_for or "")
    broken.clear()
    night.until(made.id, lambda seen: seen.state is W.ROLLED_BACK)
    assert night.house.platform.vm("db")["power"] == "on"


def test_where_a_failure_gives_its_group_back_the_rest_goes_on(night: Night) -> None:
    """Of the group one is healthy, one fails, one is ready, and one has not begun."""
    night.vms("db", "app", "web", "log", "mail")
    made = night.waves.create(
        wave(
            {"id": "db", "group": "shop"},
            {"id": "app", "group": "shop", "after": ["db"], "checks": [SICK]},
            {"id": "web", "group": "shop", "after": ["app"]},
            {"id": "log", "group": "shop", "after": ["app"], "plan": plan_of("log", mode="Cold")},
            {"id": "mail", "priority": 5},
            groups=[{"name": "shop", "rule": "apart"}],
            on_failure="roll_back",
        )
    )
    night.waves.go(made.id)
    ended = night.until(made.id, lambda seen: seen.finished_at is not None)
    back = dict.fromkeys(("db", "app", "web"), S.ROLLED_BACK)
    assert states(ended) == {**back, "log": S.SKIPPED, "mail": S.HEALTHY}
    assert ended.state is W.FAILED
    causes = {one.id: one.cause for one in ended.members}
    assert causes["db"] == causes["web"] == causes["log"] == "app of its group failed."
    power = {name: night.house.platform.vm(name)["power"] for name in states(ended)}
    assert power == {"db": "on", "app": "on", "web": "on", "log": "on", "mail": "off"}
    assert [one.domain.name for one in night.house.hypervisor.domains.values()] == ["mail"]
    kept = {one.id: night.store.get(one.job_id) for one in ended.members if one.job_id is not None}
    assert [night.house.volume(kept[name]).read_bytes() == CONTENT for name in ("db", "app")] == [True, True]
    assert night.house.platform.vm("web")["powered"] == []


def test_a_group_is_rolled_back_wherever_its_members_have_come_meanwhile(night: Night) -> None:
    """The host that sees one fail knows the others as they were."""
    names = ("db", "web", "log", "old")
    made = night.waves.create(
        wave(*({"id": name, "group": "shop"} for name in names), groups=[{"name": "shop"}], on_failure="roll_back")
    )
    rows = night.store.waves
    for name, state, job_id in (("db", S.CUTTING_OVER, uuid4()), ("web", S.READY, uuid4()), ("old", S.ROLLED_BACK, uuid4())):
        change_members(rows, made.id, [member_of(rows.member(made.id, name))], {S.WAITING}, {"state": state, "job_id": job_id})
    old = night.waves.whole(made.id)
    change_members(rows, made.id, [old.members[1]], {S.READY}, {"state": S.CUTTING_OVER})
    failed(rows, old, old.members[0], "It did not boot.")
    seen = {row.member_id: (row.state, row.rolling_back) for row in rows.members(made.id)[0]}
    assert seen == {
        "db": (S.FAILED, True),
        "web": (S.CUTTING_OVER, True),
        "log": (S.SKIPPED, False),
        "old": (S.ROLLED_BACK, False),
    }


def test_what_one_says_of_a_member_while_another_moves_it_is_not_lost(night: Night) -> None:
    made = night.waves.create(wave({"id": "db", "approvers": ["owner", "team"]}))
    rows = night.store.waves
    (known,) = night.waves.whole(made.id).members
    # The host that leads has read it by now.
    for approver in ("owner", "team", "owner"):
        night.waves.approve(made.id, ApprovalRequest(approver=approver))
    assert change_members(rows, made.id, [known], {S.WAITING}, {"state": S.SYNCING, "job_id": uuid4()}) == ["db"]
    (seen,) = night.waves.whole(made.id).members
    assert (seen.state, [one.approver for one in seen.approvals]) == (S.SYNCING, ["owner", "team"])
    # And who knows it with no job, or with another, says nothing of it.
    assert change_members(rows, made.id, [known], {S.SYNCING}, {"state": S.FAILED}) == []


def test_a_member_that_another_host_moves_on_at_that_moment_is_rolled_back_nevertheless(night: Night) -> None:
    made = night.waves.create(wave({"id": "db"}))
    rows, job_id = night.store.waves, uuid4()
    (known,) = night.waves.whole(made.id).members
    change_members(rows, made.id, [known], {S.WAITING}, {"state": S.READY, "job_id": job_id})
    (known,) = night.waves.whole(made.id).members
    change_members(rows, made.id, [known], {S.READY}, {"state": S.CUTTING_OVER})
    roll_back(rows, made.id, [known], "It was rolled back.")
    row = rows.member(made.id, "db")
    assert (row.state, row.rolling_back) == (S.CUTTING_OVER, True)


@pytest.fixture
def begun_meanwhile(night: Night, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], UUID]:
    """Makes a wave whose member `db` is begun by the host that leads, each time right after it was first read by this."""
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}))
    rows, fields = night.store.waves, {"state": S.SYNCING, "job_id": uuid4()}

    def of(query: str) -> UUID:
        read = getattr(rows, query)

        def found(*given: Any) -> Any:
            monkeypatch.undo()
            known = read(*given)
            change_members(rows, made.id, [member_of(rows.member(made.id, "db"))], {S.WAITING}, fields)
            return known

        monkeypatch.setattr(rows, query, found)
        return made.id

    night.waves.go(made.id)
    return of


def test_a_member_that_is_begun_at_that_moment_is_skipped_nevertheless(
    night: Night, begun_meanwhile: Callable[[str], UUID]
) -> None:
    wave_id = begun_meanwhile("member")
    night.waves.skip(wave_id, "db")
    row = night.store.waves.member(wave_id, "db")
    assert (row.state, row.rolling_back) == (S.SYNCING, True)


def test_members_that_are_begun_at_that_moment_are_rolled_back_nevertheless(
    night: Night, begun_meanwhile: Callable[[str], UUID]
) -> None:
    wave_id = begun_meanwhile("whole")
    night.waves.roll_back(wave_id, RollBackRequest(members=("db", "web")))
    seen = {row.member_id: (row.state, row.rolling_back) for row in night.store.waves.members(wave_id)[0]}
    assert seen == {"db": (S.SYNCING, True), "web": (S.SKIPPED, False)}


def test_who_approved_a_canary_first_has_approved_it(night: Night) -> None:
    made = night.waves.create(wave({"id": "db"}, {"id": "web"}, canary={"count": 1, "gate": "approval"}))
    for account in ("ann", "ben"):
        with acting(Act(account, Role.OPERATOR)):
            approved = night.waves.approve(made.id, ApprovalRequest(canary=True))
    assert approved.canary_approval is not None
    assert approved.canary_approval.account == "ann"


def test_a_guest_that_was_not_healthy_is_looked_at_again_when_it_is_retried(night: Night) -> None:
    """It booted here, and somebody fixed what its check found: nothing is moved a second time."""
    night.vms("db", "web")
    sick = {"kind": "command", "argv": ["false"], "within_s": 0.1}
    made = night.waves.create(wave({"id": "db", "checks": [sick]}, {"id": "web", "after": ["db"]}))
    night.waves.go(made.id)
    held = night.until(made.id, lambda seen: seen.state is W.HELD)
    assert "false ended with 1" in (held.reason or "")
    night.house.hypervisor.run_in_guest = lambda *_: 0  # type: ignore[method-assign]
    night.waves.retry(made.id, "db")
    night.waves.go(made.id)
    done = night.until(made.id, lambda seen: seen.finished_at is not None)
    assert (done.state, states(done)) == (W.COMPLETED, {"db": S.HEALTHY, "web": S.HEALTHY})
    assert done.members[0].job_id == held.members[0].job_id
    assert done.members[0].cause is None
    assert len(night.store.documents(limit=10)[0]) == 2


def test_a_member_of_a_group_that_was_rolled_back_starts_over_when_it_is_retried(night: Night) -> None:
    night.vms("db")
    made = night.waves.create(wave({"id": "db", "checks": [SICK]}, on_failure="roll_back"))
    night.waves.go(made.id)
    back = night.until(made.id, lambda seen: seen.state is W.FAILED)
    assert states(back) == {"db": S.ROLLED_BACK}
    night.house.hypervisor.run_in_guest = lambda *_: 0  # type: ignore[method-assign]
    night.waves.retry(made.id, "db")
    done = night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    assert done.members[0].job_id != back.members[0].job_id
    assert night.house.platform.vm("db")["power"] == "off"


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_a_member_whose_job_failed_goes_on_with_its_volumes(night: Night, mode: str) -> None:
    """Its source was switched on again, and has written since."""
    night.vms("db")
    night.house.hypervisor.fail = "boot"
    made = night.waves.create(wave({"id": "db", "plan": plan_of("db", mode=mode)}))
    night.waves.go(made.id)
    (failed_,) = night.until(made.id, lambda seen: seen.state is W.FAILED).members
    night.house.hypervisor.fail = None
    night.house.platform.guest_writes("db", "disk-0", 4 * KIB, b"since then")
    retried = night.waves.retry(made.id, "db")
    assert (retried.state, retried.job_id, retried.retry_of) == (S.WAITING, None, failed_.job_id)
    (done,) = night.until(made.id, lambda seen: seen.state is W.COMPLETED).members
    assert (failed_.job_id, done.job_id) != (None, None)
    before, job = (night.store.get(one.job_id) for one in (failed_, done) if one.job_id is not None)
    assert (job.retry_of, before.retried_by, job.disks[0].volume) == (before.id, job.id, before.disks[0].volume)
    assert night.house.volume(job).read_bytes() == night.house.platform.disk_path("db", "disk-0").read_bytes() != CONTENT


def _destroyed(house: House, job: Migration) -> None:
    for volume in volumes_of(job):
        house.destination.destroy(volume)


def test_a_member_whose_failed_job_was_removed_starts_over(night: Night) -> None:
    night.vms("db")
    night.house.hypervisor.fail = "boot"
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    (failed_,) = night.until(made.id, lambda seen: seen.state is W.FAILED).members
    night.house.hypervisor.fail = None
    night.waves.skip(made.id, "db")
    assert night.waves.retry(made.id, "db").retry_of == failed_.job_id, "one that was skipped goes on with them, too"
    assert failed_.job_id is not None
    house = night.house
    volume = house.volume(night.store.get(failed_.job_id))
    destroy = partial(_destroyed, house)
    Removal(night.store, here="local", destroy=destroy, forget=lambda job: None).remove(failed_.job_id, "destroy")
    assert not volume.exists()
    (done,) = night.until(made.id, lambda seen: seen.state is W.COMPLETED).members
    assert done.job_id is not None
    assert night.store.get(done.job_id).retry_of is None


def test_a_retry_is_written_with_its_wave_or_not_at_all(night: Night) -> None:
    """Nobody looks at a wave that has ended: a member that waited in one would wait forever."""
    night.vms("db")
    night.house.hypervisor.fail = "boot"
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is W.FAILED)
    seen = []
    night.store.on_commit = lambda: seen.append(night.waves.whole(made.id))
    night.waves.retry(made.id, "db")
    assert [(one.state, states(one)) for one in seen] == [(W.RUNNING, {"db": S.WAITING})]


def test_a_wave_does_not_end_while_a_member_of_it_is_tried_again(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader has seen all of them at their ends, when an operator tries one again."""
    night.vms("db")
    night.house.hypervisor.fail = "boot"
    made = night.waves.create(wave({"id": "db"}, on_failure="continue"))
    night.waves.go(made.id)
    finish = night.carrying._finish

    def interrupted(seen: Seen) -> None:
        if [one.state for one in seen.wave.members] == [S.FAILED]:
            night.house.hypervisor.fail = None
            night.waves.retry(made.id, "db")
        finish(seen)

    monkeypatch.setattr(night.carrying, "_finish", interrupted)
    done = night.until(made.id, lambda seen: seen.finished_at is not None)
    assert (done.state, states(done)) == (W.COMPLETED, {"db": S.HEALTHY})


class Interrupted:
    """A Placing in whose first look, of a wave that was read before, an operator tries a member again."""

    def __init__(self, interrupt: Callable[[], object]) -> None:
        self._interrupt, self.looks = interrupt, 0

    def release(self, *_: object) -> bool:
        return False

    def look(self, *_: object, **__: object) -> tuple[dict[str, str], bool]:
        self.looks += 1
        if self.looks == 1:
            self._interrupt()
        return {}, self.looks == 1

    def where(self, host: str, destination: str) -> str:
        return f"{host}/{destination}"


def test_a_member_that_is_tried_again_while_others_are_placed_waits_for_its_place(night: Night) -> None:
    """It lost its place with the retry: where it began all the same, no host's reason would stand with it."""
    night.vms("web", "app")
    made = night.waves.create(wave({"id": "web"}, {"id": "app", "after": ["web"]}, on_failure="continue"))
    night.waves.go(made.id)
    whole = night.waves.whole(made.id)
    (web,) = [one for one in whole.members if one.id == "web"]
    change_members(night.store.waves, made.id, [web], {S.WAITING}, {"state": S.ROLLED_BACK})
    placing = Interrupted(lambda: night.waves.retry(made.id, "web"))
    night.carrying = Carrying(night.house.intake, night.side, placing, clock=now)  # type: ignore[arg-type]
    night.carrying.tick()
    assert placing.looks == 1
    (web,) = [one for one in night.waves.whole(made.id).members if one.id == "web"]
    assert (web.state, web.job_id, web.waits_for) == (S.WAITING, None, "A host for it is chosen next.")


def test_a_job_that_another_host_submits_when_its_wave_is_cancelled_is_cancelled(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader sees no job yet, and that host does not see yet that the wave is cancelled."""
    night.vms("db")
    made = night.waves.create(wave({"id": "db"}))
    night.waves.go(made.id)
    (db,) = night.waves.whole(made.id).members
    change_members(night.store.waves, made.id, [db], {S.WAITING}, {"host": "b"})
    night.until(made.id, lambda seen: seen.members[0].job_id is not None)
    side = HostSide(night.house.rooms, night.side._checker, cancel=night.house.intake.cancel, failed=night.side._failed)
    side.host = "b"
    other, submit = Carrying(night.house.intake, side), night.house.intake.submit
    leaders = iter((False, True))  # the other host does not lead, this one does

    def late(*plan: Any, **more: Any) -> Migration:
        night.waves.cancel(made.id)
        night.carrying.tick()
        return submit(*plan, **more)

    monkeypatch.setattr(night.house.intake, "submit", late)
    monkeypatch.setattr(night.store.waves, "leading", lambda: nullcontext(next(leaders)))
    other.tick()
    monkeypatch.undo()
    (job,) = night.store.unended()
    night.until(made.id, lambda seen: night.store.get(job.id).ended)
    assert night.store.get(job.id).state is State.CANCELLED
    night.until(made.id, lambda seen: states(seen) == {"db": S.ROLLED_BACK})
    side.close()


def test_a_member_of_a_cancelled_wave_goes_back_and_has_not_failed(night: Night) -> None:
    night.vms("db", "web")
    cold = plan_of("web").model_copy(update={"mode": Mode.COLD})
    made = night.waves.create(wave({"id": "db", "approvers": ["owner"]}, {"id": "web", "after": ["db"], "plan": cold}))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: states(seen)["db"] is S.READY)
    night.waves.cancel(made.id)
    ended = night.until(made.id, lambda seen: set(states(seen).values()) <= MEMBER_ENDS)
    assert {one.id: (one.state, one.cause) for one in ended.members} == {
        "db": (S.ROLLED_BACK, "The wave was cancelled."),
        "web": (S.SKIPPED, "The wave was cancelled."),
    }
    assert ended.state is W.CANCELLED


def test_all_that_failed_are_retried_at_once(night: Night) -> None:
    night.vms("db", "web", "app")
    made = night.waves.create(wave(*({"id": name, "approvers": ["owner"]} for name in ("db", "web", "app"))))
    night.waves.go(made.id)
    with pytest.raises(Conflict, match="no member"):
        night.waves.retry_all(made.id, WaveRetryRequest())
    whole = night.waves.whole(made.id)
    change_members(night.store.waves, made.id, whole.members[:2], {S.WAITING}, {"state": S.FAILED, "cause": "its disk is full"})
    change_members(night.store.waves, made.id, whole.members[2:], {S.WAITING}, {"state": S.SKIPPED})
    with pytest.raises(BadRequest, match="nobody"):
        night.waves.retry_all(made.id, WaveRetryRequest(members=("db", "nobody")))
    night.waves.retry_all(made.id, WaveRetryRequest())
    with pytest.raises(Conflict, match="web is waiting"):
        night.waves.retry_all(made.id, WaveRetryRequest(members=("app", "web")))
    assert states(night.waves.whole(made.id)) == {"db": S.WAITING, "web": S.WAITING, "app": S.SKIPPED}
    night.waves.retry_all(made.id, WaveRetryRequest(members=("app",)))
    assert states(night.waves.whole(made.id))["app"] is S.WAITING


def test_a_member_whose_job_cannot_be_read_is_left_alone(night: Night) -> None:
    """A later version on another host may have written it: it was not removed, and nothing may run twice."""
    night.vms("db")
    made = night.waves.create(wave({"id": "db", "approvers": ["owner"]}, on_failure="roll_back"))
    night.waves.go(made.id)
    (before,) = night.until(made.id, lambda seen: states(seen) == {"db": S.READY}).members
    assert before.job_id is not None
    for change in (
        lambda: None,
        lambda: night.waves.roll_back(made.id, RollBackRequest()),
        lambda: night.waves.cancel(made.id),
    ):
        change()
        with version_of_job(night, before.job_id, "999.0"):
            night.side.close()
            night.begin_anew()
            for _ in range(3):
                night.carrying.tick()
            (seen,) = night.waves.whole(made.id).members
            assert (seen.state, seen.job_id) == (S.READY, before.job_id)
    night.until(made.id, lambda seen: states(seen) == {"db": S.ROLLED_BACK})
    assert night.store.get(before.job_id).state is State.CANCELLED


@contextmanager
def version_of_job(night: Night, job_id: UUID, version: str) -> Iterator[None]:
    with night.store._writing() as db:
        chosen = migrations.c.id == str(job_id)
        before = db.execute(select(migrations.c.version).where(chosen)).scalar_one()
        db.execute(update(migrations).where(chosen).values(version=version))
    yield
    with night.store._writing() as db:
        db.execute(update(migrations).where(chosen).values(version=before))


def test_sources_that_answer_slowly_hold_no_tick_for_each_vm_that_is_rolled_back(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("app", "db", "web")
    night.vms(*names)
    made = night.waves.create(wave(*({"id": name} for name in names)))
    night.waves.go(made.id)
    night.until(made.id, lambda seen: seen.state is W.COMPLETED)
    night.waves.roll_back(made.id, RollBackRequest())
    clock, asked = [1000.0], list[str]()

    def slow(job: Migration) -> None:
        asked.append(job.plan.source_ref.vm_id)  # type: ignore[union-attr]
        clock[0] += host_side.POWER_ON_S
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: clock[0])
        patched.setattr(night.side, "_move_back", slow)
        for count in (1, 2, 3):
            night.carrying.tick()
            assert len(asked) == count
    assert set(asked) == set(names), "one that fails is not tried before the others"
    night.until(made.id, lambda seen: seen.state is W.ROLLED_BACK)


def test_after_a_tick_that_waited_the_next_comes_in_time() -> None:
    """Only what a tick takes of the processor makes it rarer."""
    rests, rested = list[float](), threading.Event()

    class Waiting:
        def tick(self) -> None:
            time.sleep(0.3)

        def rest(self, for_s: float) -> None:
            rests.append(for_s)
            rested.set()

        def wake(self) -> None:
            pass

    with carried(Waiting(), every_s=0.1):  # type: ignore[arg-type]
        assert rested.wait(60)
    assert max(rests) < 3
