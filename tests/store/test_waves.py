"""The rows of waves, on each sort of database: who leads, who wins, and what becomes of a wave that is not there any more."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from synvirt.errors import Conflict, NotFound, PersistFailed, SynvirtError
from synvirt.fleet.model import Member, MemberState, WaveForecast, WaveRequest, WaveState
from synvirt.fleet.records import member_event, member_of
from synvirt.fleet.waves import Waves
from synvirt.model.rehearsal import Rehearsal, RehearsalRequest, RehearsalState
from synvirt.model.values import now
from synvirt.store import Store
from synvirt.store import waves as rows_of_waves
from synvirt.store.tables import rehearsals, wave_events, wave_members
from synvirt.store.tables import waves as wave_table
from synvirt.store.waves import MemberChange, NewWave
from tests.house import live_plan
from tests.jobs.migrations import migration
from tests.running.processes import until

S, W = MemberState, WaveState


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    yield store
    store.close()


@pytest.fixture
def waves(store: Store) -> Waves:
    return Waves(store.waves)


def asked(*ids: str, name: str = "night") -> WaveRequest:
    plan = live_plan().model_dump(mode="json")
    members = [
        {"id": one, "vm": one, "plan": plan | {"source_ref": plan["source_ref"] | {"vm_id": f"vm-{one}"}}} for one in ids
    ]
    return WaveRequest.model_validate({"name": name, "members": members})


def moved(member: Member, *, to: MemberState, expected: MemberState = S.WAITING, job_id: UUID | None = None) -> MemberChange:
    def change(before: Member) -> Member:
        return before.model_copy(update={"state": to, "job_id": job_id})

    return MemberChange(member.id, frozenset({expected}), Member, change)


def updated(document: Any) -> str:
    return member_event(UUID(int=1), document)


def test_of_members_that_stay_as_they_are_none_is_parsed(store: Store, waves: Waves) -> None:
    """A wave has thousands; and one that this version cannot read stops no other one's forecast."""
    made = waves.create(asked("a", "b"))
    with store._writing() as db:
        db.execute(wave_members.update().where(wave_members.c.member_id == "b").values(document="{}"))
    at = now().replace(microsecond=0)
    waves.set_forecast(made.id, WaveForecast(starts_at=at, ends_p50=at, ends_p95=at, bottleneck="x", made_at=at), {"a": at})
    assert member_of(store.waves.member(made.id, "a")).planned_at == at
    assert store.waves.member(made.id, "b").document == "{}"


def test_a_plan_is_written_to_members_that_did_not_cut_over_and_nothing_else_of_them_changes(
    store: Store, waves: Waves
) -> None:
    made = waves.create(asked("a", "b", "c"))
    known = {one.id: one for one in waves.whole(made.id).members}
    assert store.waves.change_members(made.id, [moved(known["b"], to=S.HEALTHY)], updated) == ["b"]
    last = store.waves.last_event_id()
    at = now().replace(microsecond=0)
    forecast = WaveForecast(starts_at=at, ends_p50=at, ends_p95=at, bottleneck="x", made_at=at)
    waves.set_forecast(made.id, forecast, {"a": at, "b": at})
    whole = waves.whole(made.id)
    assert [(one.state, one.planned_at) for one in whole.members] == [(S.WAITING, at), (S.HEALTHY, None), (S.WAITING, None)]
    assert whole.forecast == forecast
    assert [one.model_copy(update={"planned_at": None}) for one in whole.members][::2] == [known["a"], known["c"]]
    assert len(store.waves.events_after(last, job_id=made.id, limit=9)) == 1, "the wave's own"


def test_a_wave_is_kept_in_its_order_counted_replaced_and_removed(store: Store, waves: Waves) -> None:
    made = waves.create(asked("b", "a", "c"))
    other = waves.create(asked("x", name="other"))
    assert [one.id for one in waves.whole(made.id).members] == ["b", "a", "c"]
    rows, following = store.waves.members(made.id, limit=2)
    assert ([one.member_id for one in rows], following) == (["b", "a"], 1)
    assert [one.member_id for one in store.waves.members(made.id, limit=2, after=1)[0]] == ["c"]
    first, cursor = waves.page(limit=1, cursor=None)
    assert [one.id for one in first] == [other.id]
    assert [one.id for one in waves.page(limit=1, cursor=cursor)[0]] == [made.id]
    waves.replace(made.id, asked("z", "b"))
    assert [one.id for one in waves.whole(made.id).members] == ["z", "b"]
    assert dict(store.waves.counted(made.id).counts) == {S.WAITING: 2}
    waves.go(made.id)
    with pytest.raises(Conflict):
        waves.replace(made.id, asked("a"))
    with pytest.raises(Conflict):
        waves.remove(made.id)
    waves.remove(other.id)
    for gone in (waves.whole, store.waves.counted, waves.remove):
        with pytest.raises(NotFound):
            gone(other.id)
    with store._reading() as db:
        assert {row.wave_id for row in db.execute(wave_members.select())} == {str(made.id)}
        assert {row.wave_id for row in db.execute(wave_events.select())} <= {str(made.id), str(other.id)}
    assert store.waves.unended([W.COMPLETED], [S.HEALTHY], W.DRAFT) == [made.id]


def test_all_waves_of_a_sheet_are_made_or_none(store: Store, waves: Waves) -> None:
    made = waves.create(asked("a"))
    one = NewWave(uuid4(), "one", W.DRAFT, made, [], "{}")
    with pytest.raises((IntegrityError, SynvirtError)):
        store.waves.add_all([one, NewWave(made.id, "again", W.DRAFT, made, [], "{}")])
    assert [found.id for found in waves.page(limit=9, cursor=None)[0]] == [made.id]


def test_one_host_leads_at_a_time(store: Store, database_url: str) -> None:
    other = Store(database_url)
    one_host = database_url.startswith("sqlite")
    with store.waves.leading() as here:
        assert here
        with other.waves.leading() as there:
            assert there is one_host
    with other.waves.leading() as there:
        assert there
    other.close()


def test_a_leader_that_hangs_gives_the_lead_up(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_of_waves, "LEADER_IDLE_S", 1)
    first, other = Store(postgresql_url), Store(postgresql_url)

    def led_by_the_other() -> bool:
        with other.waves.leading() as there:
            return there

    def led_for_too_long() -> None:
        with first.waves.leading() as here:
            assert here
            until(led_by_the_other)

    with pytest.raises(PersistFailed, match="idle-in-transaction"):
        led_for_too_long()
    assert first.waves.last_event_id() == 0, "the connection that the server closed is not used again"
    first.close()
    other.close()


def test_the_time_of_a_leader_begins_anew_with_each_sign_of_it(postgresql_url: str) -> None:
    """The server counts from the end of the leader's last statement: asked here, as a test that waits would depend on time."""
    idle_since = text(
        "SELECT activity.state_change FROM pg_stat_activity AS activity JOIN pg_locks AS locks USING (pid)"
        " WHERE locks.locktype = 'advisory' AND locks.granted AND activity.datname = current_database()"
    )
    store, other = Store(postgresql_url), Store(postgresql_url)
    with store.waves.leading() as leads:
        assert leads
        seen = []
        for _ in range(3):
            with other.waves._reading() as db:
                seen.append(db.execute(idle_since).scalar_one())
            store.waves.keep_lead()
    assert len(set(seen)) == 3
    assert seen == sorted(seen)
    store.close()
    other.close()


_LEADER = """
import sys, time
from synvirt.errors import PersistFailed
from synvirt.store import Store, waves
waves.LEADER_IDLE_S = 1
rows = Store(sys.argv[1]).waves
try:
    with rows.leading() as leads:
        assert leads
        print("leads", flush=True)
        while True:
            rows.keep_lead()
            time.sleep(0.1)
except PersistFailed as error:
    print(error.detail, flush=True)
"""


def test_a_leader_that_was_frozen_has_lost_the_lead_when_it_goes_on(postgresql_url: str) -> None:
    other = Store(postgresql_url)

    def led_by_the_other() -> bool:
        with other.waves.leading() as there:
            return there

    argv = [sys.executable, "-c", _LEADER, postgresql_url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as leader:
        try:
            assert leader.stdout is not None
            assert leader.stdout.readline() == "leads\n"
            leader.send_signal(signal.SIGSTOP)
            until(led_by_the_other)
            with other.waves.leading() as there:
                assert there
                leader.send_signal(signal.SIGCONT)
                assert "does not lead the waves any more" in leader.stdout.readline()
        finally:
            leader.kill()
    other.close()


def test_of_two_hosts_that_move_a_member_one_wins(store: Store, waves: Waves, database_url: str) -> None:
    """A roll-back and a scheduler that both saw it wait: each member is moved once, and has one event of it."""
    made = waves.create(asked(*(f"m{number}" for number in range(20))))
    members = waves.whole(made.id).members
    other, together, before = Store(database_url), threading.Barrier(2), store.waves.last_event_id()

    def move(rows: Store, to: MemberState) -> list[str]:
        together.wait()
        return [done for member in members for done in rows.waves.change_members(made.id, [moved(member, to=to)], updated)]

    with ThreadPoolExecutor(2) as pool:
        skipped, ready = pool.map(move, (store, other), (S.SKIPPED, S.READY))
    assert sorted(skipped + ready) == sorted(one.id for one in members)
    found = {member.id: member.state for member in waves.whole(made.id).members}
    assert found == dict.fromkeys(skipped, S.SKIPPED) | dict.fromkeys(ready, S.READY)
    assert len(store.waves.events_after(before, job_id=made.id, limit=100)) == len(members)
    other.close()


def test_of_two_hosts_that_change_a_wave_no_change_is_lost(store: Store, waves: Waves, database_url: str) -> None:
    made = waves.create(asked("a"))
    other, together = Store(database_url), threading.Barrier(2)

    def count(rows: Store) -> None:
        together.wait()
        for _ in range(20):
            rows.waves.change(
                made.id,
                frozenset({W.DRAFT}),
                lambda before: before.model_copy(update={"reason": f"{int(before.reason or 0) + 1}"}),
                type(made),
                lambda after: after.model_dump_json(),
            )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(count, (store, other)))
    assert waves.whole(made.id).reason == "40"
    other.close()


def test_who_follows_the_events_misses_none_of_several_hosts(store: Store, waves: Waves, database_url: str) -> None:
    """Ids are given at the insert and seen at the commit: one that is skipped over would never be seen."""
    first, second = waves.create(asked("a")), waves.create(asked("b", name="other"))
    other, before = Store(database_url), store.waves.last_event_id()
    together = threading.Barrier(3)

    def write(rows: Store, wave_id: UUID) -> None:
        (member,) = [member_of(one) for one in rows.waves.members(wave_id)[0]]
        together.wait()
        for number in range(30):
            to, expected = (S.READY, S.WAITING) if number % 2 == 0 else (S.WAITING, S.READY)
            assert rows.waves.change_members(wave_id, [moved(member, to=to, expected=expected)], updated)

    def follow(until: Callable[[], bool]) -> list[int]:
        seen: list[int] = []
        together.wait()
        while True:
            last = until()
            seen += [one.id for one in store.waves.events_after(seen[-1] if seen else before, job_id=None, limit=7)]
            if last and not store.waves.events_after(seen[-1], job_id=None, limit=1):
                return seen

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, *one) for one in ((store, first.id), (other, second.id))]
        followed = pool.submit(follow, lambda: all(one.done() for one in writers))
    assert [one.result() for one in writers] == [None, None]
    seen = followed.result()
    assert len(seen) == len(set(seen)) == 60
    assert seen == sorted(seen)
    other.close()


def test_the_jobs_of_members_are_found_with_their_hosts(store: Store, waves: Waves) -> None:
    made = waves.create(asked("a", "b", "c"))
    jobs = {one.id: migration(id=uuid4(), plan=one.plan) for one in made_members(waves, made.id)}
    for member in made_members(waves, made.id):
        store.add(jobs[member.id], host=f"kvm-{member.id}")
        state = S.HEALTHY if member.id == "c" else S.READY
        assert store.waves.change_members(made.id, [moved(member, to=state, job_id=jobs[member.id].id)], updated) == [member.id]
    found = store.waves.jobs(made.id, [S.HEALTHY])
    assert {id_: host for id_, (host, _, _) in found.items()} == {jobs[one].id: f"kvm-{one}" for one in "ab"}
    store.waves.put_reasons(made.id, {"a": "b is not healthy yet", "b": None})
    assert store.waves.member(made.id, "a").waits_for == "b is not healthy yet"
    with pytest.raises(NotFound):
        store.waves.member(made.id, "d")


def made_members(waves: Waves, wave_id: UUID) -> tuple[Member, ...]:
    return waves.whole(wave_id).members


@pytest.mark.parametrize("damage", [{"document": "{"}, {"document": "{}"}, {"version": "2.0"}], ids=["cut", "empty", "later"])
def test_a_wave_that_cannot_be_read_leaves_the_others_listed(store: Store, waves: Waves, damage: dict[str, str]) -> None:
    good, bad = waves.create(asked("a")), waves.create(asked("b"))
    with store._writing() as db:
        db.execute(wave_table.update().where(wave_table.c.id == str(bad.id)).values(**damage))
    assert [one.id for one in waves.page(limit=9, cursor=None)[0]] == [good.id]


def test_a_rehearsal_in_a_state_of_a_later_version_stops_no_list_of_jobs(store: Store) -> None:
    store.add(job := migration(), host="h")
    asked_for = RehearsalRequest()
    made = Rehearsal(
        id=uuid4(), migration_id=job.id, state=RehearsalState.PASSED, asked=asked_for, submitted_by=None, created_at=now()
    )
    store.rehearsals.add([made])
    assert store.rehearsals.states_of([job.id]) == {job.id: RehearsalState.PASSED}
    with store._writing() as db:
        db.execute(rehearsals.update().values(state="Judged"))
    assert store.rehearsals.states_of([job.id]) == {}
